// What the host hands to one backward launch: sizes, tensors as pointers with strides, options. Plain data without
// torch and CUDA; filled in by bindings/backward.cpp, read by backward/launch.cu. What no asked-for gradient reads may
// be null.
#pragma once

#include <cstdint>

#include "moe/forward/arguments.h"
#include "moe/plan/tasks.h"

namespace moe {

// Gradient of a weight, contiguous.
struct WeightGradView {
  void* data;        // [L, rows, columns]; null: not asked for
  bool accumulates;  // fp32, added to in place; else bf16
};

struct BackwardArguments {
  Problem problem;
  PeerGroup group;
  std::int64_t tokens;  // T
  GradNeeds needs;
  const void* dy;  // bf16 [T, H], rows contiguous and 16-byte aligned
  std::int64_t dy_token_stride;
  const void* x;  // likewise
  std::int64_t x_token_stride;
  TopkIds topk_idx;
  TopkWeights topk_weights;            // of a group contiguous
  WeightView w_gate_up;                // [L, 2I (or I), H]
  WeightView w_down;                   // [L, H, I]
  const void* bias_gate_up;            // bf16 [L, 2I (or I)] contiguous, or null
  const void* bias_down;               // bf16 [L, H] contiguous, or null
  const void* h;                       // bf16 [T * K or row_capacity, 2I (or I)] contiguous; null: computed again
  const std::int32_t* expert_offsets;  // [L + 1], as the forward left it; -1 first: the step was refused
  const std::int32_t* row_route;       // [T * K or row_capacity], likewise
  Activation activation;
  float alpha;
  float limit;  // infinity: no clamp
  // outputs; null where they are not asked for
  void* dx;                   // bf16 [T, H] contiguous
  float* dtopk_weights;       // [T, K] contiguous
  WeightGradView dw_gate_up;  // [L, 2I (or I), H]
  WeightGradView dw_down;     // [L, H, I]
  void* dbias_gate_up;        // bf16 [L, 2I (or I)] contiguous
  void* dbias_down;           // bf16 [L, H] contiguous
  LaunchOptions options;
};

}  // namespace moe
