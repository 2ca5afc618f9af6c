// What the backward's kernels read beside stage/layer_params.h: made by backward/launch.cu from the host's arguments.
//
// Row buffers hold whole row tiles: row r of tile i is row 128 i + r, and the rows of one expert follow each other.
// Rows behind a tile's last are zero where weight gradients read them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moe/stage/launch_end.h"
#include "moe/stage/layer_params.h"

namespace moe {

// A weight's gradient [L, rows, columns], contiguous.
struct WeightGrad {
  void* data;                // bf16, or fp32 where it accumulates; null: not asked for
  std::int32_t accumulates;  // 1: added to in place
  std::int32_t rows;
  std::int32_t columns;
};

struct BackwardParams : LayerParams {
  static constexpr Direction kDirection = Direction::kBackward;

  // TMA descriptors with boxes of 64 x 64, aligned by their type as the hardware asks. R' = 128 * row tiles.
  CUtensorMap dy_rows;           // [R', H]
  CUtensorMap x_rows;            // [R', H]
  CUtensorMap dh_rows;           // [R', 2I]
  CUtensorMap h_rows;            // [T * K, 2I]; empty where h is recomputed
  CUtensorMap x_columns;         // the same as [1, 1, R', H]
  CUtensorMap scaled_a;          // [1, 1, R', I]
  CUtensorMap w_gate_up;         // [L, 1, 2I, H]
  CUtensorMap w_gate_up_halves;  // [L, 2, I, H] (not gated: [L, 1, I, H])
  CUtensorMap w_down;            // [L, 1, H, I]

  std::int32_t gate_up_tiles;  // column tiles: of gate_up, where h is computed again
  std::int32_t dgrad_tiles;    // of down dgrad
  std::int32_t hidden_tiles;   // of gate_up dgrad
  std::int32_t h_columns;      // 2I or I
  bool recomputes;             // h is not kept: it is written to dh first, in row tiles

  const std::uint16_t* h;             // bf16 [T * K, 2I], or where it is recomputed [R', 2I], the memory of dh
  std::uint16_t* dh;                  // bf16 [R', 2I]
  std::uint16_t* scaled;              // bf16 [R', I] s * a
  float* partials;                    // [R', ceil(I / 128)] dS of each row by groups of 128 columns
  const std::uint16_t* dy_tiles;      // bf16 [R', H], what the pulling warps have stored
  std::uint16_t* dx_rows;             // bf16 [T * K, H] by route
  float* route_grads;                 // [T * K] dS by route
  TopkWeights topk_weights;           // [T, K]
  const std::uint16_t* bias_gate_up;  // bf16 [L, 2I] or null; read where h is recomputed
  const std::uint16_t* bias_down;     // bf16 [L, H] or null; read for dS
  WeightGrad dw_gate_up;              // [L, 2I, H]
  WeightGrad dw_down;                 // [L, H, I]
  std::uint16_t* dbias_gate_up;       // bf16 [L, 2I] or null
  std::uint16_t* dbias_down;          // bf16 [L, H] or null
};

#if defined(__CUDACC__)
// The routing weight of a row: of a group's from where the plan task has gathered them.
__device__ __forceinline__ float row_weight(const BackwardParams& params, std::int64_t row, std::int32_t row_route) {
  const float* gathered = params.counters.plan.row_weights;
  if (gathered != nullptr) return __ldg(gathered + row);
  const auto top_k = static_cast<std::uint32_t>(params.problem.top_k);
  const auto route = static_cast<std::uint32_t>(row_route);
  const std::uint32_t t = route / top_k;
  const TopkWeights& w = params.topk_weights;
  return __ldg(w.weights + t * w.token_stride + (route - t * top_k) * w.slot_stride);
}

__device__ inline void poison_outputs(const BackwardParams& params) {
  const std::int64_t experts = params.problem.local_experts();
  poison_combined(params);
  for (const WeightGrad* grad : {&params.dw_gate_up, &params.dw_down}) {
    const std::int64_t size = experts * grad->rows * grad->columns;
    if (grad->accumulates != 0) {
      fill_nan(static_cast<float*>(grad->data), size);
    } else {
      fill_nan(static_cast<std::uint16_t*>(grad->data), size);
    }
  }
  fill_nan(params.dbias_gate_up, experts * params.h_columns);
  fill_nan(params.dbias_down, experts * params.problem.hidden);
}
#endif

}  // namespace moe
