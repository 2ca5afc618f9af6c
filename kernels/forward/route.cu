// The route kernel: the stages of plan/parallel.h by one cluster, then what the layer's kernel and the host are told.
// Owns the order of those last writes. Bounded: nothing here waits for anything outside the cluster.
#include <cuda/atomic>

#include "cluster_team.h"
#include "layer/shared_memory.h"
#include "moe/plan/parallel.h"
#include "moe/sync/report.h"
#include "route_kernel.h"

namespace moe {
namespace {

// 4 warps for each of a block's 8 residues.
constexpr std::int32_t kRouteWarps = 32;
constexpr int kRouteThreads = kRouteWarps * kLanes;
constexpr int kRouteSharedBytes = static_cast<int>(kPlanSharedWords * sizeof(std::int32_t));

// What the last thread tells others.
struct RouteEnd {
  LaunchState* launch;
  StepStatus* status;  // or null
  LaunchLog log;
};

__device__ ClusterTeam<kRouteWarps> this_team() {
  return {{static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(threadIdx.x)}};
}

__device__ void write_log(const RouteEnd& end, LogEvent event, Counter counter, std::int64_t value) {
  write_record(end.log, {0, static_cast<std::int32_t>(Role::kPlan), static_cast<std::int32_t>(event), -1,
                         static_cast<std::int32_t>(counter), 0, value, 0});
}

// This launch's, which it leaves for the layer's kernel to advance: read early, for the end not to wait for it.
__device__ std::int64_t generation_of(const RouteEnd& end) {
  return end.launch == nullptr || blockIdx.x != 0 || threadIdx.x != 0 ? 0 : end.launch->generation + 1;
}

// With one rank this rank's "ready" is all there is to wait for. The release is cumulative: behind the cluster's last
// barrier it covers what all of its blocks have written.
__device__ void raise_plan_ready(const RouteEnd& end, std::int64_t generation) {
  if (end.launch == nullptr) return;
  write_log(end, LogEvent::kRaise, Counter::kPeerReady, generation);
  write_log(end, LogEvent::kWait, Counter::kPeerReady, generation);
  write_log(end, LogEvent::kRaise, Counter::kPlanReady, generation);
  cuda::atomic_ref<std::int64_t, cuda::thread_scope_device>(end.launch->plan_ready)
      .store(generation, cuda::std::memory_order_release);
}

template <typename Id>
__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kRouteThreads, 1)
    route_kernel(const __grid_constant__ SortJob<Id> sort, const __grid_constant__ PlanJob plan,
                 const __grid_constant__ RouteEnd end) {
  ClusterTeam<kRouteWarps> team = this_team();
  const std::int64_t generation = generation_of(end);
  plan_own_routes(team, sort, plan);
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const std::int32_t bad = *shared_parts(team.block.shared(), lasting_words(plan), sort.num_experts).all_first_bad;
  if (bad != kNoBadId && end.status != nullptr) {
    const std::int64_t id = sort.ids.at(bad / sort.ids.top_k, bad % sort.ids.top_k);
    report_status(*end.status, StatusCode::kBadId, {bad, id, sort.ids.top_k, std::int64_t{sort.num_experts}});
  }
  raise_plan_ready(end, generation);
}

__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kRouteThreads, 1)
    plan_kernel(const __grid_constant__ RankRoutes routes, const __grid_constant__ PlanJob plan,
                const __grid_constant__ RouteEnd end) {
  ClusterTeam<kRouteWarps> team = this_team();
  const std::int64_t generation = generation_of(end);
  plan_all_routes(team, routes, plan);
  if (blockIdx.x == 0 && threadIdx.x == 0) raise_plan_ready(end, generation);
}

PlanJob plan_job(const RouteArguments& arguments, std::int64_t num_parts) {
  const Problem& p = arguments.problem;
  const PlanMemory& memory = arguments.memory;
  PlanJob job{};
  job.shape = plan_shape(p, arguments.tiling, arguments.schedule);
  job.scratch = plan_scratch(memory.scratch, p);
  job.num_parts = static_cast<std::int32_t>(num_parts);
  job.expert_offsets = memory.expert_offsets;
  job.saved_expert_offsets = arguments.saved_expert_offsets;
  job.tables = memory.tables;
  job.tasks = memory.tasks;
  job.sizes = memory.sizes;
  job.sources = memory.sources;
  job.counters = memory.counters;
  job.num_counters = counter_offset(static_cast<Counter>(kNumCounters), p);
  job.tickets = memory.tickets;
  job.num_tickets = kNumTickets * kTicketStride;
  return job;
}

RouteEnd route_end(const RouteArguments& arguments) {
  return {arguments.memory.launch, arguments.status, arguments.log};
}

template <auto kKernel, typename... Arguments>
cudaError_t launch(cudaStream_t stream, const Arguments&... arguments) {
  static SharedMemoryPermission permission;
  const cudaError_t error = permission.ask(kKernel, kRouteSharedBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(kPlanBlocks), kRouteThreads, kRouteSharedBytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <typename Id>
cudaError_t launch_ids(const RouteArguments& arguments, cudaStream_t stream) {
  const TopkIds& ids = arguments.topk_idx;
  const PlanJob plan = plan_job(arguments, 0);
  SortJob<Id> sort{};
  sort.ids = {static_cast<const Id*>(ids.ids), arguments.tokens, arguments.problem.top_k, ids.token_stride,
              ids.slot_stride};
  sort.num_experts = static_cast<std::int32_t>(arguments.problem.num_experts);
  sort.experts_at_once = static_cast<std::int32_t>(kRoundExperts);
  sort.route_order = arguments.memory.route_order;
  sort.class_counts = arguments.memory.class_counts;
  sort.first_bad = arguments.first_bad;
  set_walks(sort, static_cast<std::int32_t>(kPlanBlocks), kRouteWarps, kLanes);
  return launch<route_kernel<Id>>(stream, sort, plan, route_end(arguments));
}

}  // namespace

cudaError_t launch_route(const RouteArguments& arguments, cudaStream_t stream) {
  return arguments.topk_idx.wide ? launch_ids<std::int64_t>(arguments, stream)
                                 : launch_ids<std::int32_t>(arguments, stream);
}

cudaError_t launch_plan(const RouteArguments& arguments, const std::int32_t* class_counts,
                        const std::int64_t* token_starts, cudaStream_t stream) {
  const Problem& p = arguments.problem;
  const RankRoutes routes{class_counts, token_starts, p.num_ranks, p.num_experts};
  return launch<plan_kernel>(stream, routes, plan_job(arguments, p.num_ranks), route_end(arguments));
}

}  // namespace moe
