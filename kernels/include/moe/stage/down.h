// Epilogue of the down GEMM: bias, rounding, and every row to the place of its route, o[t * K + k], from where the
// combine takes it. Rows of dx go the same way.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

struct DownTile {
  std::int32_t expert;
  std::int32_t column;     // first column of o
  std::int32_t routes[2];  // row_route of this thread's two rows, or -1
};

// The routes of a thread's rows. Asked for before the K loop, so that the answer is there after it.
__device__ inline void read_routes(const LayerParams& params, std::int32_t row_begin, std::int32_t rows,
                                   std::int32_t (&routes)[2]) {
  const TilePlace place = TilePlace::of_thread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t row = place.row + 8 * half;
    routes[half] = row < rows ? params.counters.plan.row_route[row_begin + row] : -1;
  }
}

// One row of a thread, from `column` on, to its home: the place of its route in `rows` [T * K, hidden].
template <int kHalf, typename Accumulators>
__device__ inline void store_routed_row(const Accumulators& acc, const PeerMemory& peers, std::uint16_t* rows,
                                        std::int64_t hidden, std::int32_t column, std::int32_t route, int quad) {
  const RowWriter row{route < 0 ? nullptr : home_row(peers, rows, peers.rows, hidden, route) + column,
                      route >= 0 ? static_cast<std::int32_t>(hidden) - column : 0};
#pragma unroll
  for (int block = 0; block < 32; block += 4) {
    row.store<false>(8 * block, gather_columns<kHalf>(acc, block, quad));
  }
}

// A thread's part of a tile whose first column is `column`.
template <typename Accumulators>
__device__ inline void store_routed_rows(const Accumulators& acc, const PeerMemory& peers, std::uint16_t* rows,
                                         std::int64_t hidden, std::int32_t column, const std::int32_t (&routes)[2]) {
  const int quad = TilePlace::of_thread().quad;
  store_routed_row<0>(acc, peers, rows, hidden, column + 8 * quad, routes[0], quad);
  store_routed_row<1>(acc, peers, rows, hidden, column + 8 * quad, routes[1], quad);
}

template <typename Accumulators>
__device__ inline void down_epilogue(Accumulators& acc, const ForwardParams& params, const DownTile& tile) {
  if (params.bias_down != nullptr) {
    const int quad = TilePlace::of_thread().quad;
    const std::int64_t hidden = params.problem.hidden;
    add_bias<0, 32>(acc, params.bias_down + tile.expert * hidden + tile.column,
                    static_cast<std::int32_t>(hidden) - tile.column, quad);
  }
  store_routed_rows(acc, params.counters.peers, params.o_rows, params.problem.hidden, tile.column, tile.routes);
}

}  // namespace moe::sm90
