// Epilogue of the gate_up GEMM: bias, rounding, activation; h leaves for backward (where it is kept) in compact rows, a
// for the ring that the down GEMM reads. A thread holds gate and up of the same columns, because the weight tile is
// half gate rows and half up rows.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/backward/kernel_params.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/activation.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

struct GateUpTile {
  std::int32_t expert;
  std::int32_t column;     // first column of a
  std::int32_t row_begin;  // in compact rows
  std::int32_t rows;
  std::int32_t ring_row;  // first row in the ring of a; backward: in the row buffers
};

// Where one row of a thread goes.
struct ActRow {
  RowWriter gate;  // of h; no columns where h is not kept
  RowWriter up;
  RowWriter act;
};

__device__ inline ActRow act_row(const ForwardParams& params, const GateUpTile& tile, std::int32_t row, int quad) {
  const std::int64_t width = params.problem.width;
  const std::int64_t h_columns = params.problem.gated != 0 ? 2 * width : width;
  const std::int32_t column = tile.column + 8 * quad;
  const std::int32_t left = row < tile.rows ? static_cast<std::int32_t>(width) - column : 0;
  std::uint16_t* gate = params.h + (std::int64_t{tile.row_begin} + row) * h_columns + column;
  std::uint16_t* act = params.a_rows + (std::int64_t{tile.ring_row} + row) * width + column;
  const std::int32_t kept = params.h != nullptr ? left : 0;
  return {{gate, kept}, {gate + width, kept}, {act, left}};
}

// 32 columns of one row of a thread, from block kBlock on; the up columns stand kUp blocks further.
template <ActivationForm kForm, int kBlock, int kUp, int kHalf, typename Accumulators>
__device__ inline void store_columns(const Accumulators& acc, const ActivationParams& p, const ActRow& row, int quad) {
  std::uint32_t gate[4];
  std::uint32_t up[4];
  std::uint32_t act[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int g = 4 * (kBlock + i) + 2 * kHalf;
    const int u = 4 * (kBlock + kUp + i) + 2 * kHalf;
    gate[i] = pack_bf16(acc(g), acc(g + 1));
    up[i] = kUp > 0 ? pack_bf16(acc(u), acc(u + 1)) : 0;
    act[i] = pack_bf16(activate<kForm>(p, first_of(gate[i]), first_of(up[i])),
                       activate<kForm>(p, second_of(gate[i]), second_of(up[i])));
  }
  row.act.store<true>(8 * kBlock, gather_block(act, quad));
  row.gate.store<false>(8 * kBlock, gather_block(gate, quad));
  if constexpr (kUp > 0) row.up.store<false>(8 * kBlock, gather_block(up, quad));
}

template <ActivationForm kForm, int kHalf, typename Accumulators>
__device__ inline void store_act_row(const Accumulators& acc, const ForwardParams& params, const GateUpTile& tile,
                                     const TilePlace& place) {
  const ActRow row = act_row(params, tile, place.row + 8 * kHalf, place.quad);
  const ActivationParams& p = params.activation;
  constexpr int kUp = kForm == ActivationForm::kRelu2 ? 0 : 16;
  store_columns<kForm, 0, kUp, kHalf>(acc, p, row, place.quad);
  store_columns<kForm, 4, kUp, kHalf>(acc, p, row, place.quad);
  store_columns<kForm, 8, kUp, kHalf>(acc, p, row, place.quad);
  store_columns<kForm, 12, kUp, kHalf>(acc, p, row, place.quad);
  if constexpr (kUp == 0) {
    store_columns<kForm, 16, kUp, kHalf>(acc, p, row, place.quad);
    store_columns<kForm, 20, kUp, kHalf>(acc, p, row, place.quad);
    store_columns<kForm, 24, kUp, kHalf>(acc, p, row, place.quad);
    store_columns<kForm, 28, kUp, kHalf>(acc, p, row, place.quad);
  }
}

// Of both directions.
template <typename Accumulators, typename Params>
__device__ inline void add_gate_up_bias(Accumulators& acc, const Params& params, const GateUpTile& tile, int quad) {
  const std::int64_t width = params.problem.width;
  const auto left = static_cast<std::int32_t>(width) - tile.column;
  if (params.problem.gated != 0) {
    const std::uint16_t* bias = params.bias_gate_up + tile.expert * 2 * width + tile.column;
    add_bias<0, 16>(acc, bias, left, quad);
    add_bias<64, 16>(acc, bias + width, left, quad);
  } else {
    add_bias<0, 32>(acc, params.bias_gate_up + tile.expert * width + tile.column, left, quad);
  }
}

template <ActivationForm kForm, typename Accumulators>
__device__ inline void store_act_tile(const Accumulators& acc, const ForwardParams& params, const GateUpTile& tile,
                                      const TilePlace& place) {
  store_act_row<kForm, 0>(acc, params, tile, place);
  store_act_row<kForm, 1>(acc, params, tile, place);
}

template <typename Accumulators>
__device__ inline void gate_up_epilogue(Accumulators& acc, const ForwardParams& params, const GateUpTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  if (params.bias_gate_up != nullptr) add_gate_up_bias(acc, params, tile, place.quad);
  switch (params.activation.form) {
    case ActivationForm::kSilu:
      return store_act_tile<ActivationForm::kSilu>(acc, params, tile, place);
    case ActivationForm::kSigmoid:
      return store_act_tile<ActivationForm::kSigmoid>(acc, params, tile, place);
    case ActivationForm::kErf:
      return store_act_tile<ActivationForm::kErf>(acc, params, tile, place);
    case ActivationForm::kRelu2:
      return store_act_tile<ActivationForm::kRelu2>(acc, params, tile, place);
  }
}

// Where the backward computes h again: bias and rounding alone, in row tiles where dh will stand.
template <int kUp, int kHalf, typename Accumulators>
__device__ inline void store_h_row(const Accumulators& acc, const BackwardParams& params, const GateUpTile& tile,
                                   const TilePlace& place) {
  const std::int32_t row = place.row + 8 * kHalf;
  const auto width = static_cast<std::int32_t>(params.problem.width);
  const std::int32_t column = tile.column + 8 * place.quad;
  std::uint16_t* gate = params.dh + (std::int64_t{tile.ring_row} + row) * params.h_columns + column;
  const std::int32_t left = row < tile.rows ? width - column : 0;
#pragma unroll
  for (int block = 0; block < 32; block += 4) {
    const bool up = kUp > 0 && block >= kUp;
    const RowWriter writer{up ? gate + width : gate, left};
    writer.store<true>(8 * (up ? block - kUp : block), gather_columns<kHalf>(acc, block, place.quad));
  }
}

template <typename Accumulators>
__device__ inline void recompute_epilogue(Accumulators& acc, const BackwardParams& params, const GateUpTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  if (params.bias_gate_up != nullptr) add_gate_up_bias(acc, params, tile, place.quad);
  if (params.problem.gated != 0) {
    store_h_row<16, 0>(acc, params, tile, place);
    store_h_row<16, 1>(acc, params, tile, place);
  } else {
    store_h_row<0, 0>(acc, params, tile, place);
    store_h_row<0, 1>(acc, params, tile, place);
  }
}

}  // namespace moe::sm90
