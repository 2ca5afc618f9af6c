// What the forward's kernels read beside stage/layer_params.h: made by forward/launch.cu from the host's arguments.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moe/stage/launch_end.h"
#include "moe/stage/layer_params.h"

namespace moe {

struct ForwardParams : LayerParams {
  static constexpr Direction kDirection = Direction::kForward;

  // TMA descriptors, aligned by their type as the hardware asks.
  CUtensorMap x_ring;     // [x_slots * 128, H], boxes of 64 x 64
  CUtensorMap a_ring;     // [a_slots * 128, I]
  CUtensorMap w_gate_up;  // [L, 2, I, H] (not gated: [L, 1, I, H]), boxes of 128 x 64
  CUtensorMap w_down;     // [L, 1, H, I]

  std::int32_t act_tiles;  // column tiles of gate_up
  std::int32_t hidden_tiles;
  std::int32_t gate_up_steps;  // stages of the K loop
  std::int32_t down_steps;

  const std::uint16_t* bias_gate_up;   // bf16 [L, 2I] or null
  const std::uint16_t* bias_down;      // bf16 [L, H] or null
  std::uint16_t* a_rows;               // bf16 [a_slots, 128, I]
  std::uint16_t* o_rows;               // bf16 [T * K, H]
  std::uint16_t* h;                    // bf16 [T * K, 2I] or null
  std::int32_t* saved_expert_offsets;  // [L + 1]
};

#if defined(__CUDACC__)
// By all threads of a block, after a wait has run out of time.
__device__ inline void poison_outputs(const ForwardParams& params) {
  poison_combined(params);
  for (std::int64_t i = threadIdx.x; i <= params.problem.local_experts(); i += blockDim.x) {
    params.saved_expert_offsets[i] = -1;
  }
}
#endif

}  // namespace moe
