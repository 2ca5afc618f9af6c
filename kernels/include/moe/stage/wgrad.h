// Epilogue of both weight gradients: a tile of dW of one expert, rounded once, or added unrounded to an fp32 gradient
// in place. An expert without rows has no products; its tile is zeros. A refused step's is NaN.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/backward/kernel_params.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

struct WgradTile {
  std::int32_t expert;
  std::int32_t row;  // of the weight
  std::int32_t column;
};

__device__ inline std::int64_t wgrad_offset(const WeightGrad& grad, const WgradTile& tile, std::int32_t row) {
  return (std::int64_t{tile.expert} * grad.rows + tile.row + row) * grad.columns + tile.column;
}

template <int kHalf, typename Accumulators>
__device__ __forceinline__ void store_wgrad_row(const Accumulators& acc, const WeightGrad& grad, const WgradTile& tile,
                                                const TilePlace& place) {
  const std::int32_t row = place.row + 8 * kHalf;
  const std::int32_t column = 8 * place.quad;
  const std::int32_t left = tile.row + row < grad.rows ? grad.columns - tile.column - column : 0;
  const RowWriter writer{static_cast<std::uint16_t*>(grad.data) + wgrad_offset(grad, tile, row) + column, left};
#pragma unroll
  for (int block = 0; block < 32; block += 4) {
    writer.store<false>(8 * block, gather_columns<kHalf>(acc, block, place.quad));
  }
}

// Neighbouring lanes hold neighbouring pairs of columns: whole sectors of 32 bytes are read and written.
template <int kHalf, typename Accumulators>
__device__ __forceinline__ void add_wgrad_row(const Accumulators& acc, const WeightGrad& grad, const WgradTile& tile,
                                              const TilePlace& place) {
  const std::int32_t row = place.row + 8 * kHalf;
  if (tile.row + row >= grad.rows) return;
  const std::int32_t left = grad.columns - tile.column - 2 * place.quad;
  auto* to = reinterpret_cast<float2*>(static_cast<float*>(grad.data) + wgrad_offset(grad, tile, row) + 2 * place.quad);
  constexpr int kBatch = 8;
#pragma unroll
  for (int block = 0; block < 32; block += kBatch) {
    float2 sums[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (8 * (block + i) < left) sums[i] = to[4 * (block + i)];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = 4 * (block + i) + 2 * kHalf;
      if (8 * (block + i) < left) to[4 * (block + i)] = make_float2(sums[i].x + acc(at), sums[i].y + acc(at + 1));
    }
  }
}

template <typename Accumulators>
__device__ __forceinline__ void wgrad_epilogue(const Accumulators& acc, const WeightGrad& grad, const WgradTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  if (grad.accumulates != 0) {
    add_wgrad_row<0>(acc, grad, tile, place);
    add_wgrad_row<1>(acc, grad, tile, place);
  } else {
    store_wgrad_row<0>(acc, grad, tile, place);
    store_wgrad_row<1>(acc, grad, tile, place);
  }
}

// A warpgroup's rows of a tile without products.
__device__ __forceinline__ void fill_wgrad_tile(const WeightGrad& grad, const WgradTile& tile, bool refused) {
  if (grad.accumulates != 0 && !refused) return;
  const TilePlace place = TilePlace::of_thread();
  for (std::int32_t row = place.row; row < place.row + 16; row += 8) {
    if (tile.row + row >= grad.rows) continue;
    const std::int64_t begin = wgrad_offset(grad, tile, row);
    const std::int32_t end = grad.columns - tile.column < 256 ? grad.columns - tile.column : 256;
    for (std::int32_t column = 8 * place.quad; column < end; column += 32) {
      if (grad.accumulates != 0) {
        const float nan = __int_as_float(0x7fc00000);
        for (int i = 0; i < 8; ++i) static_cast<float*>(grad.data)[begin + column + i] = nan;
      } else {
        const std::uint32_t value = refused ? 0x7fc07fc0u : 0u;
        store_streaming(static_cast<std::uint16_t*>(grad.data) + begin + column,
                        make_uint4(value, value, value, value));
      }
    }
  }
}

}  // namespace moe::sm90
