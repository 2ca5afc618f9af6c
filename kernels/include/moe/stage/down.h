// Epilogue of the down GEMM: bias, rounding, and every row to the place of its route, o[t * K + k], from where the combine
// takes it.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

struct DownTile {
  std::int32_t expert;
  std::int32_t column;  // first column of o
  std::int32_t routes[2];  // of this thread's two rows, or -1
};

// The routes of a thread's rows. Asked for before the K loop, so that the answer is there after it.
__device__ inline void read_routes(const ForwardParams& params, std::int32_t row_begin, std::int32_t rows,
                                   std::int32_t (&routes)[2]) {
  const TilePlace place = TilePlace::of_thread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t row = place.row + 8 * half;
    routes[half] = row < rows ? params.counters.plan.route_order[row_begin + row] : -1;
  }
}

template <typename Accumulators>
__device__ inline void down_epilogue(const Accumulators& acc, const ForwardParams& params, const DownTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  const std::int64_t hidden = params.problem.hidden;
  const std::uint16_t* bias = params.bias_down == nullptr ? nullptr : params.bias_down + tile.expert * hidden;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint16_t* row = params.o_rows + std::int64_t{tile.routes[half]} * hidden;
#pragma unroll
    for (int base = 0; base < 32; base += 4) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const int at = 4 * (base + block) + 2 * half;
        const std::uint32_t add = bias_pair(bias, tile.column + 8 * (base + block) + 2 * place.quad, hidden);
        pairs[block] = pack_bf16(acc(at) + first_of(add), acc(at + 1) + second_of(add));
      }
      const uint4 gathered = gather_block(pairs, place.quad);
      const std::int64_t column = tile.column + 8 * (base + place.quad);
      if (tile.routes[half] >= 0 && column < hidden) store_streaming(row + column, gathered);
    }
  }
}

}  // namespace moe::sm90
