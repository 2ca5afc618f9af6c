// What the host hands to the route kernel, which sorts this rank's routes and builds the plan of the layer's kernel.
#pragma once

#include <cstdint>

#include "moe/forward/arguments.h"
#include "moe/forward/plan_memory.h"
#include "moe/plan/log.h"

namespace moe {

struct RouteArguments {
  Problem problem;
  Tiling tiling;
  Schedule schedule;
  std::int64_t tokens;  // T
  TopkIds topk_idx;
  PlanMemory memory;
  std::int32_t* own_class_counts;      // [E, 64], written: of this rank
  PeerMemory peers;                    // of a group
  RankHeader header;                   // of a group: what this rank says of the step, without its bad id
  std::int64_t timeout_ns;             // of a group: how long a rank is waited for
  std::int32_t* saved_expert_offsets;  // [L + 1] output of the op, all -1 if the step is refused; or null
  std::int64_t* first_bad;             // [1] position t * K + k of the first bad id, or -1; or null
  StepStatus* status;                  // or null: a bad id is not reported to the host
  LaunchLog log;
};

// Of a step that a rank of a group refuses before it has looked at its routes.
struct RefusalArguments {
  PeerMemory peers;
  LaunchState* launch;
  StepStatus* status;
  std::int64_t timeout_ns;
};

}  // namespace moe
