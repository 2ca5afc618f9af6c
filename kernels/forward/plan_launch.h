// What the kernels that build a plan share: the cluster's size, the job from the memory of a plan, and the raise of
// "plan ready" behind the last table. Included by forward/route.cu and backward/plan.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/atomic>

#include "forward/cluster_team.h"
#include "layer/shared_memory.h"
#include "moe/forward/plan_memory.h"
#include "moe/plan/edges.h"
#include "moe/plan/log.h"
#include "moe/plan/parallel_plan.h"
#include "moe/sync/report.h"

namespace moe {

// 4 warps for each of a block's 8 residues.
inline constexpr std::int32_t kPlanWarps = 32;
inline constexpr int kPlanThreads = kPlanWarps * kLanes;
inline constexpr int kPlanSharedBytes = static_cast<int>(kPlanSharedWords * sizeof(std::int32_t));

// What the last thread tells the roles that wait for the plan.
struct PlanEnd {
  LaunchState* launch;
  bool met;  // by forward/meeting.h
  LaunchLog log;
};

__device__ inline ClusterTeam<kPlanWarps> this_team() {
  return {{static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(threadIdx.x)}};
}

__device__ inline void write_log(const PlanEnd& end, LogEvent event, Counter counter, std::int64_t value) {
  write_record(end.log, {0, static_cast<std::int32_t>(Role::kPlan), static_cast<std::int32_t>(event), -1,
                         static_cast<std::int32_t>(counter), 0, value, 0});
}

// This launch's, which it leaves for the layer's kernel to advance: read early, for the end not to wait for it.
__device__ inline std::int64_t generation_of(const PlanEnd& end) {
  return end.launch == nullptr || blockIdx.x != 0 || threadIdx.x != 0 ? 0 : end.launch->generation + 1;
}

// With one rank this rank's "ready" is all there is to wait for; the ranks of a group have met before. The release is
// cumulative: behind the cluster's last barrier it covers what all of its blocks have written.
__device__ inline void raise_plan_ready(const PlanEnd& end, std::int64_t generation) {
  if (end.launch == nullptr) return;
  if (!end.met) {
    write_log(end, LogEvent::kRaise, Counter::kPeerReady, generation);
    write_log(end, LogEvent::kWait, Counter::kPeerReady, generation);
  }
  write_log(end, LogEvent::kRaise, Counter::kPlanReady, generation);
  cuda::atomic_ref<std::int64_t, cuda::thread_scope_device>(end.launch->plan_ready)
      .store(generation, cuda::std::memory_order_release);
}

// Without parts, and without a copy of the offsets for the op.
inline PlanJob plan_job(const Problem& p, const Tiling& t, const Schedule& s, const PlanMemory& memory) {
  PlanJob job{};
  job.shape = plan_shape(p, t, s);
  job.scratch = plan_scratch(memory.scratch, p);
  job.expert_offsets = memory.expert_offsets;
  job.tables = memory.tables;
  job.tasks = memory.tasks;
  job.sizes = memory.sizes;
  job.sources = memory.sources;
  job.row_route = nullptr;
  job.meeting = nullptr;
  job.counters = memory.counters;
  job.num_counters = counter_offset(static_cast<Counter>(kNumCounters), p);
  job.tickets = memory.tickets;
  job.num_tickets = kNumTickets * kTicketStride;
  return job;
}

// One cluster of kPlanThreads threads a block.
template <auto kKernel, typename... Arguments>
cudaError_t launch_plan_kernel(cudaStream_t stream, const Arguments&... arguments) {
  static SharedMemoryPermission permission;
  const cudaError_t error = permission.ask(kKernel, kPlanSharedBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(kPlanBlocks), kPlanThreads, kPlanSharedBytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace moe
