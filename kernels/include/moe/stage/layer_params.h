// What the roles of the layer's kernels read in either direction: sizes, plan, counters, the rows that are pulled and
// the rows that are combined. The parameters of a direction (forward/kernel_params.h, backward/kernel_params.h) begin
// with it. Filled in by launchers, passed by value as a grid constant; device pointers carry their shapes.
#pragma once

#include <cstdint>

#include "moe/forward/arguments.h"
#include "moe/peer/memory.h"
#include "moe/plan/dependencies.h"
#include "moe/sync/counters.h"

namespace moe {

// Which stages a launch runs. All of a direction is the one-launch ("mega") backend.
enum StageMask : std::int32_t {
  kStageDispatch = 1,
  kStageGateUp = 2,  // backward: h again, where it was not kept
  kStageDown = 4,
  kStageDownDgrad = 8,
  kStageGateUpDgrad = 16,  // and the gradients of the routing weights
  kStageWgrad = 32,        // and the gradients of the biases
  kStageCombine = 64,
  kStageForward = kStageDispatch | kStageGateUp | kStageDown | kStageCombine,
  kStageBackward = kStageDispatch | kStageGateUp | kStageDownDgrad | kStageGateUpDgrad | kStageWgrad | kStageCombine,
  kStageTasks = kStageGateUp | kStageDown | kStageDownDgrad | kStageGateUpDgrad | kStageWgrad,
};

// act(gate, up) = g * sigmoid(z) * (u + up_offset) with -z log2(e) = g * (linear + cubic * g * g), g and u clamped by
// limit; kSilu is that without clamp, cubic and up_offset; the others are no sigmoid. See stage/activation.h.
enum class ActivationForm : std::int32_t { kSilu, kSigmoid, kErf, kRelu2 };
struct ActivationParams {
  ActivationForm form;
  float linear;
  float cubic;
  float up_offset;
  float limit;
};

// Rows of tokens, and where the pulling warps put those of each row tile.
struct PullSource {
  const unsigned char* rows;  // bf16 [T, H]; of a group they lie in shared memory, at PeerMemory::tokens
  std::int64_t token_bytes;   // from one token's row to the next
  unsigned char* tiles;       // bf16 [slots, 128, H]: tile i at i mod slots
  std::int64_t slots;
};

// sums[t] = sum over k of weight[t, k] * rows[t, k], and in backward what becomes of dS.
struct CombineParams {
  const std::uint16_t* rows;  // bf16 [T * K, H] o or dx, or null: nothing is summed
  std::uint16_t* sums;        // bf16 [T, H] y or dx
  TopkIds topk_idx;           // [T, K]; -1 drops a route
  TopkWeights topk_weights;   // [T, K]; null: 1 each
  const float* route_grads;   // [T * K] dS of valid routes
  float* dtopk_weights;       // [T, K], or null: not asked for
};

struct LayerParams {
  Problem problem;
  Tiling tiling;
  Schedule schedule;
  Direction direction;
  GradNeeds needs;      // backward
  std::int64_t tokens;  // T
  CounterMemory counters;
  ActivationParams activation;
  std::int32_t stages;    // StageMask
  PullSource sources[2];  // by PullTicket::source
  CombineParams combine;
};

// Where a row of `own` [T * K, width], at `offset` of a group's memory, lies on the home rank of its token.
template <typename T>
MOE_HOST_DEVICE inline T* home_row(const PeerMemory& peers, T* own, std::int64_t offset, std::int64_t width,
                                   std::int32_t row_route) {
  if (!peers.shared()) return own + row_route * width;
  return peers.at<T>(peers.home(row_route), offset) + peers.route(row_route) * width;
}

// Call behind the wait for kPlanReady.
MOE_HOST_DEVICE inline Plan plan_of_launch(const LayerParams& p, std::int64_t generation) {
  return plan_in_memory(p.counters.plan, p.problem, p.tiling, p.schedule, p.tokens, generation, p.direction, p.needs);
}

}  // namespace moe
