// See staged_kernels.h.
#include "layer/staged_kernels.h"

#include "layer/shared_memory.h"
#include "moe/stage/combine.h"
#include "moe/stage/dispatch.h"
#include "moe/stage/launch_end.h"

namespace moe::sm90 {
namespace {

constexpr int kPullWarps = 6;
constexpr int kHalfBytes = 16384;
constexpr int kCombineThreads = 256;
constexpr int kCombineBlocksPerSm = 4;

// What the roles take from the block they run in.
struct BlockState {
  Plan plan;
  std::int32_t counter_offsets[kNumCounters];
  std::int32_t is_last;
};

__device__ inline std::int64_t start_block(const LayerParams& params, BlockState& state, Role role) {
  const std::int64_t generation = params.counters.plan.launch->generation + 1;
  if (threadIdx.x == 0) {
    for (int c = 0; c < kNumCounters; ++c) {
      state.counter_offsets[c] = static_cast<std::int32_t>(counter_offset(static_cast<Counter>(c), params.problem));
    }
    const Counters counters(params.counters, state.counter_offsets, params.problem, generation);
    counters.wait_start({static_cast<std::int32_t>(blockIdx.x), role, TaskKind::kPlan, -1});
    state.plan = plan_of_launch(params, generation);
  }
  __syncthreads();
  return generation;
}

struct DispatchState {
  alignas(128) unsigned char staging[kPullWarps][2][kHalfBytes];
  Barrier loaded[kPullWarps][2];
  BlockState block;
};

template <Direction kDirection>
__global__ void __launch_bounds__(32 * kPullWarps) dispatch_kernel(const __grid_constant__ LayerParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& state = *reinterpret_cast<DispatchState*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (auto& pair : state.loaded) {
      for (Barrier& barrier : pair) barrier.init(1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const std::int64_t generation = start_block(params, state.block, Role::kPull);
  fence_proxy_async();
  const Counters counters(params.counters, state.block.counter_offsets, params.problem, generation);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const PullMemory memory{{state.staging[warp][0], state.staging[warp][1]}, state.loaded[warp], kHalfBytes};
  PullRole<kDirection>(params, state.block.plan, counters, memory, static_cast<std::int32_t>(blockIdx.x)).run();
  __syncwarp();
  leave_launch(params, state.block.is_last, false);
}

template <typename Params>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Params params) {
  __shared__ BlockState state;
  const std::int64_t generation = start_block(params, state, Role::kPull);
  const Counters counters(params.counters, state.counter_offsets, params.problem, generation);
  CombineRole(params, state.plan, counters, static_cast<std::int32_t>(blockIdx.x)).run();
  __syncwarp();
  if (leave_launch(params, state.is_last, true)) poison_outputs(params);
}

template <typename Params>
cudaError_t launch_dispatch_kernel(const Params& params, int blocks, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(DispatchState));
  static SharedMemoryPermission permission;
  const auto kernel = dispatch_kernel<Params::kDirection>;
  const cudaError_t error = permission.ask(kernel, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, 32 * kPullWarps, kBytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Params>
cudaError_t launch_combine_kernel(const Params& params, int blocks, cudaStream_t stream) {
  combine_kernel<<<blocks * kCombineBlocksPerSm, kCombineThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_dispatch(const ForwardParams& params, int blocks, cudaStream_t stream) {
  return launch_dispatch_kernel(params, blocks, stream);
}
cudaError_t launch_dispatch(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_dispatch_kernel(params, blocks, stream);
}
cudaError_t launch_combine(const ForwardParams& params, int blocks, cudaStream_t stream) {
  return launch_combine_kernel(params, blocks, stream);
}
cudaError_t launch_combine(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_combine_kernel(params, blocks, stream);
}

}  // namespace moe::sm90
