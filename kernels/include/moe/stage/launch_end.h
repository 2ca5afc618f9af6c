// What a block does when it leaves a launch, and how outputs become NaN where a wait ran out of time. The last block to
// leave prepares the memory for the next launch.
#pragma once

#include "moe/peer/abort.h"
#include "moe/stage/layer_params.h"

namespace moe {

// By all threads of the block, with everything done. `is_last` is shared memory; `ends_step` says that no launch of
// this step follows, so that the generation advances. True in the last block of a step that was aborted: it must poison
// the outputs.
__device__ inline bool leave_launch(const LayerParams& params, std::int32_t& is_last, bool ends_step) {
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
      const PeerMemory& peers = params.counters.peers;
      if (memory.sizes->aborted != 0 && peers.shared()) abort_peers(peers, memory.sizes->aborted - 1);
    }
  }
  __syncthreads();
  return is_last != 0 && ends_step && memory.sizes->aborted != 0;
}

// By all threads of a block.
__device__ inline void fill_nan(std::uint16_t* values, std::int64_t size) {
  for (std::int64_t i = threadIdx.x; values != nullptr && i < size; i += blockDim.x) values[i] = 0x7fc0;
}
__device__ inline void fill_nan(float* values, std::int64_t size) {
  for (std::int64_t i = threadIdx.x; values != nullptr && i < size; i += blockDim.x) {
    values[i] = __int_as_float(0x7fc00000);
  }
}

// What every direction sums and combines.
__device__ inline void poison_combined(const LayerParams& params) {
  fill_nan(params.combine.sums, params.tokens * params.problem.hidden);
  fill_nan(params.combine.dtopk_weights, params.tokens * params.problem.top_k);
}

}  // namespace moe
