// The route kernel: the stages of plan/parallel.h by one cluster, then what the layer's kernel and the host are told.
// Owns the order of those last writes. Bounded: with one
// rank nothing here waits for anything outside the cluster, with several the ranks wait for each other (meeting.h).
#include "forward/meeting.h"
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
    report_status(*end.status, StatusCode::kBadId, {bad, id, sort.ids.top_k, std::int64_t{sort.num_experts}, -1});
  }
  raise_plan_ready(end.plan, generation);
}

// What all ranks have counted, into memory of this one.
__device__ void copy_counts(const Thread& me, const PeerMemory& peers, std::int64_t num_experts, std::int32_t* counts) {
  const auto each = static_cast<std::int32_t>(num_experts * kTokenResidues / 4);
  for (std::int64_t peer = 0; peer < peers.num_ranks; ++peer) {
    const auto* from = peers.at<const int4>(peer, peers.class_counts);
    auto* to = reinterpret_cast<int4*>(counts) + peer * each;
    me.each_of_cluster(each, [&](std::int32_t i) { to[i] = __ldcg(from + i); });
  }
}

// Of a group: this rank's routes are sorted where all ranks can read them, the ranks meet, and each plans its own rows.
template <typename Id>
__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kPlanThreads, 1)
    group_route_kernel(const __grid_constant__ SortJob<Id> sort, const __grid_constant__ PlanJob plan,
                       const __grid_constant__ Meeting meeting, const __grid_constant__ RouteEnd end,
                       std::int32_t* all_class_counts, std::int64_t row_capacity) {
  ClusterTeam<kPlanWarps> team = this_team();
  const std::int64_t generation = generation_of(end.plan);
  PlanJob only_sorts{};
  plan_own_routes(team, sort, only_sorts);
  team.stage([&](auto& block) {
    if (block.index != 0) return;
    RankHeader header = meeting.header;
    const std::int32_t bad = *shared_parts(block.shared(), 0, sort.num_experts).all_first_bad;
    header.bad_route = bad == kNoBadId ? -1 : bad;
    header.bad_id = bad == kNoBadId ? 0 : std::int64_t{sort.ids.at(bad / sort.ids.top_k, bad % sort.ids.top_k)};
    meet(meeting, header);
  });
  const bool refused = meeting.result->refused != 0;
  team.stage([&](auto& block) {
    if (refused) return;
    block.phase([&](const Thread& me) { copy_counts(me, meeting.peers, sort.num_experts, all_class_counts); });
  });
  const RankRoutes routes{all_class_counts, meeting.token_starts, meeting.peers.num_ranks, sort.num_experts};
  plan_all_routes(team, routes, plan, row_capacity);
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  end_meeting(meeting, *plan.sizes, row_capacity);
  raise_plan_ready(end.plan, generation);
}

__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ RankRoutes routes, const __grid_constant__ PlanJob plan,
                const __grid_constant__ RouteEnd end) {
  ClusterTeam<kPlanWarps> team = this_team();
  const std::int64_t generation = generation_of(end.plan);
  plan_all_routes(team, routes, plan, 0);
  if (blockIdx.x == 0 && threadIdx.x == 0) raise_plan_ready(end.plan, generation);
}

// A step that this rank refuses: it meets the others, so that they refuse it too, and is done at once. One block.
__global__ void __launch_bounds__(kLanes) refuse_kernel(const __grid_constant__ Meeting meeting) {
  __shared__ MeetingResult result;
  __shared__ int late;  // a rank that has not come to an end, or W
  Meeting m = meeting;
  m.result = &result;
  meet(m, m.header);
  __syncthreads();
  const PeerMemory& peers = m.peers;
  const std::int64_t generation = m.launch->generation + 1;
  const std::int64_t* word = peers.at<std::int64_t>(peers.rank, peers.abort);
  const std::int64_t begin = global_ns();
  if (threadIdx.x == 0) late = static_cast<int>(peers.num_ranks);
  __syncthreads();
  if (result.aborted == 0) {
    for (std::int64_t peer = threadIdx.x; peer < peers.num_ranks; peer += blockDim.x) {
      store_release_system(peers.at<std::int64_t>(peer, peers.flag_done) + peers.rank, generation);
    }
    for (std::int64_t peer = threadIdx.x; peer < peers.num_ranks; peer += blockDim.x) {
      const std::int64_t* flag = peers.at<std::int64_t>(peers.rank, peers.flag_done) + peer;
      while (load_acquire_system(flag) < generation && load_relaxed_system(word) == 0) {
        __nanosleep(100);
        if (global_ns() - begin <= m.timeout_ns) continue;
        atomicMin(&late, static_cast<int>(peer));
        break;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const std::int64_t culprit = load_relaxed_system(word);
  if (result.aborted == 0 && culprit != 0) {
    report_status(*m.status, StatusCode::kPeerAborted, {culprit - 1});
  } else if (result.aborted == 0 && late < peers.num_ranks) {
    abort_peers(peers, late);
    const std::int64_t seen = load_relaxed_system(peers.at<std::int64_t>(peers.rank, peers.flag_done) + late);
    report_late(m, Counter::kPeerDone, late, generation, seen);
  }
  m.launch->generation = generation;
}

PlanJob plan_job(const RouteArguments& arguments, std::int64_t num_parts) {
  PlanJob job = plan_job(arguments.problem, arguments.tiling, arguments.schedule, arguments.memory);
  job.num_parts = static_cast<std::int32_t>(num_parts);
  job.saved_expert_offsets = arguments.saved_expert_offsets;
  return job;
}

RouteEnd route_end(const RouteArguments& arguments) {
  return {{arguments.memory.launch, arguments.peers.shared(), arguments.log}, arguments.status};
}

Meeting meeting_of(const RouteArguments& a) {
  return {a.peers, a.header, a.memory.meeting, a.memory.token_starts, a.memory.launch, a.status, a.timeout_ns, a.log};
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
  sort.class_counts = arguments.own_class_counts;
  sort.first_bad = arguments.first_bad;
  set_walks(sort, static_cast<std::int32_t>(kPlanBlocks), kPlanWarps, kLanes);
  if (!arguments.peers.shared()) return launch_plan_kernel<route_kernel<Id>>(stream, sort, plan, route_end(arguments));
  PlanJob of_group = plan_job(arguments, arguments.problem.num_ranks);
  of_group.sources = nullptr;
  of_group.row_route = arguments.memory.row_route;
  of_group.peer_routes = {arguments.peers.bases, arguments.peers.route_order, arguments.peers.route_bits};
  of_group.meeting = arguments.memory.meeting;
  return launch_plan_kernel<group_route_kernel<Id>>(stream, sort, of_group, meeting_of(arguments), route_end(arguments),
                                                    arguments.memory.class_counts, arguments.problem.row_capacity);
}

}  // namespace

cudaError_t launch_route(const RouteArguments& arguments, cudaStream_t stream) {
  return arguments.topk_idx.wide ? launch_ids<std::int64_t>(arguments, stream)
                                 : launch_ids<std::int32_t>(arguments, stream);
}

cudaError_t launch_refusal(const RefusalArguments& a, cudaStream_t stream) {
  Meeting meeting{};
  meeting.peers = a.peers;
  meeting.header.refuses = 1;
  meeting.header.bad_route = -1;
  meeting.launch = a.launch;
  meeting.status = a.status;
  meeting.timeout_ns = a.timeout_ns;
  refuse_kernel<<<1, kLanes, 0, stream>>>(meeting);
  return cudaGetLastError();
}

cudaError_t launch_plan(const RouteArguments& arguments, const std::int32_t* class_counts,
                        const std::int64_t* token_starts, cudaStream_t stream) {
  const Problem& p = arguments.problem;
  const RankRoutes routes{class_counts, token_starts, p.num_ranks, p.num_experts};
  return launch_plan_kernel<plan_kernel>(stream, routes, plan_job(arguments, p.num_ranks), route_end(arguments));
}

}  // namespace moe
