// The layer's kernel, forward or backward by the type of its parameters: all stages of a direction by warp roles of one
// persistent launch, or some of them where StageMask says so. Its body only hands out roles; each of them walks the
// plan that the route kernel (backward: the plan kernel) has built.
//
//   warp 0   load      TMA of the operands into shared memory                 (stage/load.h)
//   warp 1   pull      routed rows of x, or of dy and x                       (stage/dispatch.h)
//   warp 2   schedule  claims tasks for the cluster, waits of the load warp   (stage/task_queue.h)
//   warp 3   signal    waits and raises of the computing warps                (stage/signal.h)
//   warps 4-11         tensor cores and epilogues, then the combine           (stage/compute.h or stage/gradients.h,
//                                                                              stage/combine.h)
//
// Included by the instances behind the headers of their direction.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "moe/stage/combine.h"
#include "moe/stage/dispatch.h"
#include "moe/stage/launch_end.h"
#include "moe/stage/load.h"
#include "moe/stage/signal.h"
#include "moe/stage/task_queue.h"

namespace moe::sm90 {

template <int kConfig>
__device__ void init_barriers(SharedStorage<kConfig>& storage) {
  for (int i = 0; i < kTaskSlots; ++i) {
    storage.slot_full[i].init(1);
    storage.slot_empty[i].init(2 * kSlotReaders);
    storage.may_load[i].init(1);
    storage.may_store[i].init(1);
    storage.stored[i].init(kComputeThreads / 32);
  }
  for (Barrier& barrier : storage.staged) barrier.init(1);
  cutlass::arch::fence_barrier_init();
}

template <int kConfig>
__device__ typename GemmTraits<kConfig>::Pipeline make_pipeline(SharedStorage<kConfig>& storage, bool computes) {
  using Traits = GemmTraits<kConfig>;
  using Category = typename Traits::Pipeline::ThreadCategory;
  typename Traits::Pipeline::Params params;
  params.transaction_bytes = Traits::kStageBytes;
  params.role = computes ? Category::Consumer : Category::Producer;
  params.is_leader = threadIdx.x == 0 ? 1 : 0;
  params.num_consumers = kComputeThreads;
  return {storage.pipeline, params, typename Traits::Cluster{}};
}

template <int kConfig, typename Params>
__global__ void __launch_bounds__(kThreads, 1) layer_kernel(const __grid_constant__ Params params) {
  using Traits = GemmTraits<kConfig>;
  extern __shared__ unsigned char shared_bytes[];
  auto& storage = *reinterpret_cast<SharedStorage<kConfig>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const bool leads = threadIdx.x % 32 == 0;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const auto blocks = static_cast<std::int32_t>(gridDim.x);

  auto pipeline = make_pipeline<kConfig>(storage, warp >= static_cast<int>(Warp::kCompute));
  const std::int64_t generation = params.counters.plan.launch->generation + 1;
  if (threadIdx.x == 0) {
    init_barriers<kConfig>(storage);
    for (int c = 0; c < kNumCounters; ++c) {
      storage.counter_offsets[c] = static_cast<std::int32_t>(counter_offset(static_cast<Counter>(c), params.problem));
    }
  }
  const Counters counters(params.counters, storage.counter_offsets, params.problem, generation);
  // Every role waits for the plan; the first of them reads it for all.
  if (leads && warp <= static_cast<int>(Warp::kCompute) && warp != static_cast<int>(Warp::kSchedule) &&
      warp != static_cast<int>(Warp::kSignal)) {
    const Role role = warp == 0 ? Role::kLoad : warp == 1 ? Role::kPull : Role::kCompute;
    counters.wait_start({block, role, TaskKind::kPlan, -1});
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    storage.plan = plan_of_launch(params, generation);
  }
  cluster_sync();

  const bool has_tasks = (params.stages & kStageTasks) != 0;
  if (warp < static_cast<int>(Warp::kCompute)) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kShape.producer_registers>();
    if (warp == static_cast<int>(Warp::kLoad) && leads && has_tasks) {
      LoadRole<kConfig, Params>(params, storage, pipeline).run();
    } else if (warp == static_cast<int>(Warp::kPull) && (params.stages & kStageDispatch) != 0) {
      const PullMemory memory{{storage.staging[0], storage.staging[1]}, storage.staged, Traits::kShape.staging_bytes};
      PullRole<Params::kDirection>(params, storage.plan, counters, memory, block).run();
    } else if (warp == static_cast<int>(Warp::kSchedule) && leads && has_tasks) {
      schedule_tasks<kConfig, Params::kDirection>(params, storage, counters, block);
    } else if (warp == static_cast<int>(Warp::kSignal) && leads && has_tasks) {
      signal_tasks<kConfig, Params::kDirection>(storage, counters, block);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kShape.consumer_registers>();
    if (has_tasks) compute_tasks<kConfig>(params, storage, pipeline);
    if ((params.stages & kStageCombine) != 0) {
      const int worker = warp - static_cast<int>(Warp::kCompute) + 1;
      CombineRole(params, storage.plan, counters, blocks * worker + block).run();
    }
  }
  __syncwarp();
  cluster_sync();  // neither block may leave while the other can still reach its shared memory
  if (leave_launch(params, storage.is_last, (params.stages & kStageCombine) != 0)) poison_outputs(params);
}

}  // namespace moe::sm90
