// Launches the plan kernel, the first launch of a layer's backward: it builds the tables of the step from the expert
// offsets that the forward has saved, and raises "plan ready". One cluster, so that all of its blocks run together and
// may wait for each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "moe/forward/plan_memory.h"
#include "moe/forward/status.h"
#include "moe/peer/memory.h"
#include "moe/plan/log.h"
#include "moe/plan/problem.h"
#include "moe/plan/tasks.h"

namespace moe {

struct BackwardPlanArguments {
  Problem problem;
  Tiling tiling;
  Schedule schedule;
  GradNeeds needs;
  const std::int32_t* expert_offsets;  // device [L + 1], as the forward has saved them; -1 if it has refused the step
  PeerMemory peers;                    // of a group
  RankHeader header;                   // of a group: what this rank says of the step
  StepStatus* status;                  // of a group
  std::int64_t timeout_ns;             // of a group: how long a rank is waited for
  PlanMemory memory;                   // written: expert_offsets, tables, tasks and sizes; zeroed: counters and tickets
  LaunchLog log;
};

// Requires at most kMaxRouteExperts local experts, and rows within row_capacity. Never synchronises.
cudaError_t launch_backward_plan(const BackwardPlanArguments& arguments, cudaStream_t stream);

}  // namespace moe
