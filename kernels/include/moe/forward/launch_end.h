// What a block does when it leaves a launch. The last one to leave prepares the memory for the next launch and, if a
// wait ran out of time, turns the step's outputs into NaN.
#pragma once

#include "moe/forward/kernel_params.h"

namespace moe {

// By all threads of the block, with everything done. `is_last` is shared memory; `ends_step` says that no launch of
// this step follows, so that the generation advances.
__device__ inline void leave_launch(const ForwardParams& params, std::int32_t& is_last, bool ends_step) {
  const PlanMemory& memory = params.counters.plan;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    auto* left = reinterpret_cast<unsigned long long*>(&memory.launch->blocks_left);
    is_last = atomicAdd(left, 1ULL) + 1 == gridDim.x ? 1 : 0;
    if (is_last != 0) {
      __threadfence();
      memory.launch->blocks_left = 0;
      for (std::int64_t stream = 0; stream <= kCombineTickets; ++stream) memory.tickets[stream * kTicketStride] = 0;
      if (ends_step) memory.launch->generation += 1;
    }
  }
  __syncthreads();
  if (is_last == 0 || !ends_step || memory.sizes->aborted == 0) return;
  const std::int64_t elements = params.tokens * params.problem.hidden;
  for (std::int64_t i = threadIdx.x; i < elements; i += blockDim.x) params.y[i] = 0x7fc0;
  for (std::int64_t i = threadIdx.x; i <= params.problem.local_experts(); i += blockDim.x) {
    params.saved_expert_offsets[i] = -1;
  }
}

}  // namespace moe
