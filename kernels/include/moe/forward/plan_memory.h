// The plan of one launch as it lies in device memory: where the route kernel writes it and where every role of the
// layer's kernel reads it. Owns no memory; filled in by forward/launch.cu from the offsets of plan/layout.h.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/dependencies.h"
#include "moe/plan/layout.h"
#include "moe/plan/rows.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

struct PlanMemory {
  LaunchState* launch;
  PlanSizes* sizes;
  std::int32_t* tickets;         // counters of claims, kTicketStride apart; zero between launches
  std::int32_t* counters;        // see counter_offset
  std::int32_t* class_counts;    // [W, E, 64], of all ranks
  std::int32_t* route_order;     // [T * K] of this rank: valid routes in row order, then -1
  std::int32_t* row_route;       // of every row, see route_bits; with one rank the same memory
  float* row_weights;            // backward, W > 1: [row_capacity] routing weight of every row
  MeetingResult* meeting;        // W > 1
  std::int64_t* token_starts;    // W > 1: [W]
  std::int64_t* expert_offsets;  // [L + 1]
  RowSource* sources;            // [row_capacity], W > 1, for tests; row_route says more
  TileTables tables;
  Task* tasks;
  std::int32_t* scratch;  // see plan_scratch.h
};
// Tickets lie in cache lines of their own. Both ends of the pull stream have a counter: pieces, and the combine's
// tokens behind them, which other warps claim.
inline constexpr std::int64_t kTicketStride = kRegionAlignment / 4;
inline constexpr std::int64_t kComputeTickets = 0;
inline constexpr std::int64_t kDispatchTickets = 1;
inline constexpr std::int64_t kCombineTickets = 2;
inline constexpr std::int64_t kNumTickets = 3;

// The local regions of a plan in memory that begins at `local`, and so all of it but route_order and row_route. They
// end where the rings begin, and do not depend on those nor on the type of activations.
inline PlanMemory local_plan_memory(void* local, const Problem& problem, const Tiling& tiling,
                                    const Schedule& schedule) {
  const auto at = [&](Region region) {
    return static_cast<void*>(static_cast<char*>(local) + region_offset(region, problem, tiling, schedule, 1));
  };
  const auto words = [&](Region region) { return static_cast<std::int32_t*>(at(region)); };
  PlanMemory memory{};
  memory.launch = static_cast<LaunchState*>(at(Region::kLaunch));
  memory.sizes = static_cast<PlanSizes*>(at(Region::kPlanSizes));
  memory.tickets = words(Region::kTickets);
  memory.counters = words(Region::kCounters);
  memory.class_counts = words(Region::kAllClassCounts);
  memory.expert_offsets = static_cast<std::int64_t*>(at(Region::kExpertOffsets));
  if (problem.num_ranks > 1) {
    memory.sources = static_cast<RowSource*>(at(Region::kRowSources));
    memory.row_weights = static_cast<float*>(at(Region::kRowWeights));
    memory.meeting = static_cast<MeetingResult*>(at(Region::kMeeting));
    memory.token_starts = reinterpret_cast<std::int64_t*>(memory.meeting + 1);
  }
  memory.tables = {static_cast<RowTile*>(at(Region::kRowTiles)), static_cast<Segment*>(at(Region::kSegments)),
                   words(Region::kMinibatchEnds), words(Region::kExpertTiles),
                   words(Region::kExpertTiles) + problem.local_experts() + 1};
  memory.tasks = static_cast<Task*>(at(Region::kTasks));
  memory.scratch = words(Region::kPlanScratch);
  return memory;
}
// Bytes of that memory.
inline std::int64_t local_plan_bytes(const Problem& problem, const Tiling& tiling, const Schedule& schedule) {
  return region_offset(Region::kXRing, problem, tiling, schedule, 1);
}

// The plan as dependencies.h takes it. Call after the wait for kPlanReady. `needs` are read in backward only.
MOE_HOST_DEVICE inline Plan plan_in_memory(const PlanMemory& memory, const Problem& problem, const Tiling& tiling,
                                           const Schedule& schedule, std::int64_t tokens, std::int64_t generation,
                                           Direction direction = Direction::kForward, const GradNeeds& needs = {}) {
  Plan plan{};
  plan.problem = problem;
  plan.tiling = tiling;
  plan.schedule = schedule;
  plan.direction = direction;
  plan.needs = needs;
  plan.tables = memory.tables;
  plan.counts = memory.sizes->counts;
  plan.tasks = memory.tasks;
  plan.num_tasks = memory.sizes->num_tasks;
  plan.tokens = tokens;
  plan.generation = generation;
  return plan;
}

}  // namespace moe
