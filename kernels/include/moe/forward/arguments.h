// What the host hands to one forward launch: sizes, tensors as pointers with strides, options. Plain data without torch
// and CUDA; filled in by bindings/forward.cpp, read by forward/launch.cu.
#pragma once

#include <cstdint>

#include "moe/forward/status.h"
#include "moe/peer/memory.h"
#include "moe/plan/log.h"
#include "moe/plan/problem.h"

namespace moe {

// Numbers as in moe_megakernel.hopper.
enum class Activation : std::int32_t { kSwiglu = 0, kSwigluOai = 1, kGegluTanh = 2, kGegluErf = 3, kRelu2 = 4 };

// topk_idx [T, K], int32 or int64, as it lies in memory.
struct TopkIds {
  const void* ids;
  std::int64_t token_stride;  // in elements
  std::int64_t slot_stride;
  bool wide;  // int64
};

// topk_weights [T, K] float32.
struct TopkWeights {
  const float* weights;
  std::int64_t token_stride;
  std::int64_t slot_stride;
};

// bf16 weights [L, rows, columns] with contiguous columns.
struct WeightView {
  const void* data;
  std::int64_t expert_stride;  // in elements, a multiple of 8, at least a row
  std::int64_t row_stride;     // likewise
};

// Memory and options of a launch, of either direction.
struct LaunchOptions {
  void* workspace;          // device memory of as many bytes as the direction's launch.h says
  StepStatus* status;       // host memory that the device can write
  bool staged;              // one launch per stage
  std::int64_t num_sms;     // blocks at most; even
  std::int64_t timeout_ns;  // of any wait
  // tests
  std::int32_t skip_counter;  // a counter (of enum Counter) whose raises of element skip_index are left out, or -1
  std::int64_t skip_index;
  LaunchLog log;
};

struct ForwardArguments {
  Problem problem;
  PeerGroup group;
  std::int64_t tokens;  // T
  const void* x;        // bf16 [T, H], rows contiguous and 16-byte aligned
  std::int64_t x_token_stride;
  TopkIds topk_idx;
  TopkWeights topk_weights;
  WeightView w_gate_up;      // [L, 2I (or I), H]
  WeightView w_down;         // [L, H, I]
  const void* bias_gate_up;  // bf16 [L, 2I (or I)] contiguous, or null
  const void* bias_down;     // bf16 [L, H] contiguous, or null
  Activation activation;
  float alpha;
  float limit;  // infinity: no clamp
  // outputs
  void* y;                             // bf16 [T, H] contiguous
  void* h;                             // bf16 [T * K or row_capacity, 2I (or I)] contiguous, or null: not kept
  std::int32_t* saved_expert_offsets;  // [L + 1], all -1 if the step was refused
  std::int32_t* row_route;             // [T * K], of a group [row_capacity]; see route_bits
  LaunchOptions options;
};

}  // namespace moe
