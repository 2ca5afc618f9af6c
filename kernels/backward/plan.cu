// The plan kernel of the backward: plan/parallel_backward.h by one cluster, then "plan ready", as forward/route.cu does
// for the forward. Bounded: nothing here waits for anything outside the cluster.
#include "backward/plan_kernel.h"

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

}  // namespace

cudaError_t launch_backward_plan(const BackwardPlanArguments& arguments, cudaStream_t stream) {
  const Problem& p = arguments.problem;
  BackwardJob job{plan_job(p, arguments.tiling, arguments.schedule, arguments.memory),
                  backward_shape(p, arguments.tiling, arguments.schedule, arguments.needs)};
  job.plan.sources = nullptr;
  const PlanEnd end{arguments.memory.launch, arguments.log};
  return launch_plan_kernel<backward_plan_kernel>(stream, arguments.expert_offsets, job, end);
}

}  // namespace moe
