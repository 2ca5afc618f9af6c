// Everything that the forward's kernels read besides the plan's tables: made by forward/launch.cu from the host's
// arguments, passed by value as a grid constant. Device pointers carry their shapes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moe/forward/arguments.h"
#include "moe/sync/counters.h"

namespace moe {

// Which stages a launch runs. All of them is the one-launch ("mega") backend.
enum StageMask : std::int32_t {
  kStageDispatch = 1,
  kStageGateUp = 2,
  kStageDown = 4,
  kStageCombine = 8,
  kStageAll = 15,
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

struct ForwardParams {
  // TMA descriptors, aligned by their type as the hardware asks.
  CUtensorMap x_ring;     // [x_slots * 128, H], boxes of 64 x 64
  CUtensorMap a_ring;     // [a_slots * 128, I]
  CUtensorMap w_gate_up;  // [L, 2, I, H] (not gated: [L, 1, I, H]), boxes of 128 x 64
  CUtensorMap w_down;     // [L, 1, H, I]

  Problem problem;
  Tiling tiling;
  Schedule schedule;
  std::int32_t act_tiles;  // column tiles of gate_up
  std::int32_t hidden_tiles;
  std::int32_t gate_up_steps;  // stages of the K loop
  std::int32_t down_steps;
  std::int64_t tokens;  // T
  CounterMemory counters;
  ActivationParams activation;
  std::int32_t stages;  // StageMask

  const unsigned char* x;              // bf16 [T, H]
  std::int64_t x_token_bytes;          // from one token's row to the next
  TopkIds topk_idx;                    // [T, K]
  TopkWeights topk_weights;            // [T, K]
  const std::uint16_t* bias_gate_up;   // bf16 [L, 2I] or null
  const std::uint16_t* bias_down;      // bf16 [L, H] or null
  unsigned char* x_rows;               // bf16 [x_slots, 128, H]
  std::uint16_t* a_rows;               // bf16 [a_slots, 128, I]
  std::uint16_t* o_rows;               // bf16 [T * K, H]
  std::uint16_t* h;                    // bf16 [T * K, 2I] or null
  std::uint16_t* y;                    // bf16 [T, H]
  std::int32_t* saved_expert_offsets;  // [L + 1]
};

}  // namespace moe
