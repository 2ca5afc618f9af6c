// The plan of one launch as it lies in device memory: where the route kernel writes it and where every role of the layer's
// kernel reads it. Owns no memory; filled in by forward/launch.cu from the offsets of plan/layout.h.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/dependencies.h"
#include "moe/plan/layout.h"
#include "moe/plan/rows.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

// What the route kernel found out about sizes, which the host does not know. A refused step (a bad id) has no tiles and
// no tile tasks; its combine stores NaN.
struct PlanSizes {
  TileCounts counts;
  std::int64_t num_tasks;
  std::int64_t num_gate_up;  // of them, where stages are separate: the first ones
  std::int64_t refused;  // 1: outputs are NaN
  std::int64_t aborted;  // set by a wait that has run out of time: from then on no wait of this launch waits
};

struct PlanMemory {
  LaunchState* launch;
  PlanSizes* sizes;
  std::int32_t* tickets;       // counters of claims, kTicketStride apart; zero between launches
  std::int32_t* counters;      // see counter_offset
  std::int32_t* class_counts;  // [W, E, 64], of all ranks
  std::int32_t* route_order;   // [T * K] of this rank: valid routes in row order, then -1
  std::int64_t* expert_offsets;  // [L + 1]
  RowSource* sources;            // [row_capacity], null where W = 1: there row i is position i of route_order
  TileTables tables;
  Task* tasks;
};
// Tickets lie in cache lines of their own. Both ends of the pull stream have a counter: pieces, and the combine's tokens
// behind them, which other warps claim.
inline constexpr std::int64_t kTicketStride = kRegionAlignment / 4;
inline constexpr std::int64_t kComputeTickets = 0;
inline constexpr std::int64_t kDispatchTickets = 1;
inline constexpr std::int64_t kCombineTickets = 2;

// The plan as dependencies.h takes it. Call after the wait for kPlanReady.
MOE_HOST_DEVICE inline Plan plan_in_memory(const PlanMemory& memory, const Problem& problem, const Tiling& tiling,
                                           const Schedule& schedule, std::int64_t tokens, std::int64_t generation) {
  Plan plan{};
  plan.problem = problem;
  plan.tiling = tiling;
  plan.schedule = schedule;
  plan.direction = Direction::kForward;
  plan.tables = memory.tables;
  plan.counts = memory.sizes->counts;
  plan.tasks = memory.tasks;
  plan.num_tasks = memory.sizes->num_tasks;
  plan.tokens = tokens;
  plan.generation = generation;
  return plan;
}

}  // namespace moe
