// Epilogue of the gate_up GEMM: bias, rounding, activation; h leaves for backward (where it is kept) in compact rows, a
// for the ring that the down GEMM reads. A thread holds gate and up of the same columns, because the weight tile is half
// gate rows and half up rows.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/activation.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

struct GateUpTile {
  std::int32_t expert;
  std::int32_t column;     // first column of a
  std::int32_t row_begin;  // in compact rows
  std::int32_t rows;
  std::int32_t ring_row;  // first row in the ring of a
};

// 32 columns of one row of a thread: `kBase` is the first block of gate, `kUp` blocks further stand the up columns.
template <ActivationForm kForm, int kBase, int kUp, int kHalf, typename Accumulators>
__device__ inline void store_columns(const Accumulators& acc, const ForwardParams& params, const GateUpTile& tile,
                                     const TilePlace& place) {
  constexpr bool kGated = kForm != ActivationForm::kRelu2;
  const std::int64_t width = params.problem.width;
  const std::int64_t h_columns = kGated ? 2 * width : width;
  const std::uint16_t* bias =
      params.bias_gate_up == nullptr ? nullptr : params.bias_gate_up + tile.expert * h_columns;
  std::uint32_t gate[4];
  std::uint32_t up[4];
  std::uint32_t act[4];
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    constexpr int kRow = 2 * kHalf;
    const int g = 4 * (kBase + block) + kRow;
    const std::int64_t column = tile.column + 8 * (kBase + block) + 2 * place.quad;
    const std::uint32_t gate_bias = bias_pair(bias, column, width);
    gate[block] = pack_bf16(acc(g) + first_of(gate_bias), acc(g + 1) + second_of(gate_bias));
    if constexpr (kGated) {
      const int u = 4 * (kBase + kUp + block) + kRow;
      const std::uint32_t up_bias = bias_pair(bias == nullptr ? nullptr : bias + width, column, width);
      up[block] = pack_bf16(acc(u) + first_of(up_bias), acc(u + 1) + second_of(up_bias));
    } else {
      up[block] = 0;
    }
    const ActivationParams& p = params.activation;
    act[block] = pack_bf16(activate<kForm>(p, first_of(gate[block]), first_of(up[block])),
                           activate<kForm>(p, second_of(gate[block]), second_of(up[block])));
  }
  const uint4 gate_block = gather_block(gate, place.quad);
  const uint4 up_block = kGated ? gather_block(up, place.quad) : uint4{};
  const uint4 act_block = gather_block(act, place.quad);
  const std::int32_t row = place.row + 8 * kHalf;
  const std::int64_t column = tile.column + 8 * (kBase + place.quad);
  if (row >= tile.rows || column >= width) return;
  store_kept(params.a_rows + (std::int64_t{tile.ring_row} + row) * width + column, act_block);
  if (params.h == nullptr) return;
  std::uint16_t* h = params.h + (std::int64_t{tile.row_begin} + row) * h_columns + column;
  store_streaming(h, gate_block);
  if (kGated) store_streaming(h + width, up_block);
}

template <ActivationForm kForm, typename Accumulators>
__device__ inline void store_act_tile(const Accumulators& acc, const ForwardParams& params, const GateUpTile& tile,
                                      const TilePlace& place) {
  constexpr int kUp = kForm == ActivationForm::kRelu2 ? 0 : 16;
  const auto rows = [&](auto half) {
    constexpr int kHalf = decltype(half)::value;
    store_columns<kForm, 0, kUp, kHalf>(acc, params, tile, place);
    store_columns<kForm, 4, kUp, kHalf>(acc, params, tile, place);
    store_columns<kForm, 8, kUp, kHalf>(acc, params, tile, place);
    store_columns<kForm, 12, kUp, kHalf>(acc, params, tile, place);
    if constexpr (kForm == ActivationForm::kRelu2) {
      store_columns<kForm, 16, kUp, kHalf>(acc, params, tile, place);
      store_columns<kForm, 20, kUp, kHalf>(acc, params, tile, place);
      store_columns<kForm, 24, kUp, kHalf>(acc, params, tile, place);
      store_columns<kForm, 28, kUp, kHalf>(acc, params, tile, place);
    }
  };
  rows(cute::Int<0>{});
  rows(cute::Int<1>{});
}

template <typename Accumulators>
__device__ inline void gate_up_epilogue(const Accumulators& acc, const ForwardParams& params, const GateUpTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  switch (params.activation.form) {
    case ActivationForm::kSigmoid:
      return store_act_tile<ActivationForm::kSigmoid>(acc, params, tile, place);
    case ActivationForm::kErf:
      return store_act_tile<ActivationForm::kErf>(acc, params, tile, place);
    case ActivationForm::kRelu2:
      return store_act_tile<ActivationForm::kRelu2>(acc, params, tile, place);
  }
}

}  // namespace moe::sm90
