// The plan kernel of the backward: plan/parallel_backward.h by one cluster, then "plan ready", as forward/route.cu does
// for the forward. Bounded: with one rank nothing here waits for
// anything outside the cluster, with several the ranks wait for each other (forward/meeting.h).
#include "backward/plan_kernel.h"

#include "forward/meeting.h"
#include "forward/plan_launch.h"
#include "moe/plan/parallel_backward.h"

namespace moe {
namespace {

__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kPlanThreads, 1)
    backward_plan_kernel(const std::int32_t* expert_offsets, const __grid_constant__ BackwardJob job,
                         const __grid_constant__ PlanEnd end) {
  ClusterTeam<kPlanWarps> team = this_team();
  const std::int64_t generation = generation_of(end);
  plan_saved_offsets(team, expert_offsets, job);
  if (blockIdx.x == 0 && threadIdx.x == 0) raise_plan_ready(end, generation);
}

// Of a group: the ranks meet first, and behind the tables the routing weight of every row is fetched from its home
// rank.
__global__ void __cluster_dims__(kPlanBlocks, 1, 1) __launch_bounds__(kPlanThreads, 1)
    group_backward_plan_kernel(const std::int32_t* expert_offsets, const __grid_constant__ BackwardJob job,
                               const __grid_constant__ Meeting meeting, const __grid_constant__ PlanEnd end,
                               const std::int32_t* row_route, float* row_weights) {
  ClusterTeam<kPlanWarps> team = this_team();
  const std::int64_t generation = generation_of(end);
  team.stage([&](auto& block) {
    if (block.index == 0) meet(meeting, meeting.header);
  });
  plan_saved_offsets(team, expert_offsets, job);
  team.stage([&](auto& block) {
    const PeerMemory& peers = meeting.peers;
    const auto rows = static_cast<std::int32_t>(job.plan.expert_offsets[job.plan.shape.local_experts]);
    block.phase([&](const Thread& me) {
      me.each_of_cluster(rows, [&](std::int32_t row) {
        const std::int32_t route = row_route[row];
        row_weights[row] = __ldcg(peers.at<float>(peers.home(route), peers.route_weights) + peers.route(route));
      });
    });
  });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  end_meeting(meeting, *job.plan.sizes, 0);
  raise_plan_ready(end, generation);
}

}  // namespace

cudaError_t launch_backward_plan(const BackwardPlanArguments& arguments, cudaStream_t stream) {
  const Problem& p = arguments.problem;
  BackwardJob job{plan_job(p, arguments.tiling, arguments.schedule, arguments.memory),
                  backward_shape(p, arguments.tiling, arguments.schedule, arguments.needs)};
  job.plan.sources = nullptr;
  const PlanMemory& memory = arguments.memory;
  const PlanEnd end{memory.launch, arguments.peers.shared(), arguments.log};
  if (arguments.peers.shared()) {
    job.plan.meeting = memory.meeting;
    const Meeting meeting{arguments.peers, arguments.header, memory.meeting,       memory.token_starts,
                          memory.launch,   arguments.status, arguments.timeout_ns, arguments.log};
    return launch_plan_kernel<group_backward_plan_kernel>(stream, arguments.expert_offsets, job, meeting, end,
                                                          memory.row_route, memory.row_weights);
  }
  return launch_plan_kernel<backward_plan_kernel>(stream, arguments.expert_offsets, job, end);
}

}  // namespace moe
