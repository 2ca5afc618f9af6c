// The route kernel: the stages of plan/parallel.h by one cluster, then what the layer's kernel and the host are told.
// Owns the order of those last writes. Bounded: nothing here waits for anything outside the cluster.
#include "forward/plan_launch.h"
#include "moe/plan/parallel.h"
#include "moe/sync/report.h"
#include "route_kernel.h"

namespace moe {
namespace {

// What the last thread tells others.
struct RouteEnd {
  PlanEnd plan;
  StepStatus* status;  // or null
};

template <typename Id>
__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kPlanThreads, 1)
    route_kernel(const __grid_constant__ SortJob<Id> sort, const __grid_constant__ PlanJob plan,
                 const __grid_constant__ RouteEnd end) {
  ClusterTeam<kPlanWarps> team = this_team();
  const std::int64_t generation = generation_of(end.plan);
  plan_own_routes(team, sort, plan);
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const std::int32_t bad = *shared_parts(team.block.shared(), lasting_words(plan), sort.num_experts).all_first_bad;
  if (bad != kNoBadId && end.status != nullptr) {
    const std::int64_t id = sort.ids.at(bad / sort.ids.top_k, bad % sort.ids.top_k);
    report_status(*end.status, StatusCode::kBadId, {bad, id, sort.ids.top_k, std::int64_t{sort.num_experts}});
  }
  raise_plan_ready(end.plan, generation);
}

__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ RankRoutes routes, const __grid_constant__ PlanJob plan,
                const __grid_constant__ RouteEnd end) {
  ClusterTeam<kPlanWarps> team = this_team();
  const std::int64_t generation = generation_of(end.plan);
  plan_all_routes(team, routes, plan);
  if (blockIdx.x == 0 && threadIdx.x == 0) raise_plan_ready(end.plan, generation);
}

PlanJob plan_job(const RouteArguments& arguments, std::int64_t num_parts) {
  PlanJob job = plan_job(arguments.problem, arguments.tiling, arguments.schedule, arguments.memory);
  job.num_parts = static_cast<std::int32_t>(num_parts);
  job.saved_expert_offsets = arguments.saved_expert_offsets;
  return job;
}

RouteEnd route_end(const RouteArguments& arguments) {
  return {{arguments.memory.launch, arguments.log}, arguments.status};
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
  set_walks(sort, static_cast<std::int32_t>(kPlanBlocks), kPlanWarps, kLanes);
  return launch_plan_kernel<route_kernel<Id>>(stream, sort, plan, route_end(arguments));
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
  return launch_plan_kernel<plan_kernel>(stream, routes, plan_job(arguments, p.num_ranks), route_end(arguments));
}

}  // namespace moe
