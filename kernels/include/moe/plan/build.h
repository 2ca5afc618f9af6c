// Builds one rank's plan on the host, from the class counts of all ranks to the ordered tasks, in memory of its own.
// The device does the same steps in the plan task, in workspace regions. Called by bindings/plan.cpp and by host tests.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe/plan/config.h"
#include "moe/plan/dependencies.h"
#include "moe/plan/rows.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

// A plan that owns its tables. `plan` points into the vectors: movable, not copyable.
struct OwnedPlan {
  std::vector<std::int64_t> expert_offsets;  // [L + 1]
  std::vector<RowTile> tiles;
  std::vector<Segment> segments;
  std::vector<std::int32_t> minibatch_ends;
  std::vector<std::int32_t> expert_tiles;   // [L + 1]
  std::vector<std::int32_t> expert_pieces;  // [L + 1]
  std::vector<Task> tasks;
  RingSizes ring_minimum;
  Plan plan;

  OwnedPlan() = default;
  OwnedPlan(const OwnedPlan&) = delete;
  OwnedPlan& operator=(const OwnedPlan&) = delete;
  OwnedPlan(OwnedPlan&&) = default;
  OwnedPlan& operator=(OwnedPlan&&) = default;
};

// Plans `config.problem.rank`, for `tokens` tokens there. Slots of 0 are filled in with ring_minimum; slots that are
// too few are kept, so that tests can see them fail: compare with OwnedPlan::ring_minimum. Requires a configuration
// without config_fault, and rows within its capacity.
inline OwnedPlan build_plan(const PlanConfig& config, const std::int64_t* expert_offsets, std::int64_t tokens,
                            Direction direction, const GradNeeds& needs, std::int64_t generation) {
  OwnedPlan owned;
  Problem sized = config.problem;  // tables for the rows there are, not for the capacity
  const auto experts = static_cast<std::size_t>(sized.local_experts() + 1);
  owned.expert_offsets.assign(expert_offsets, expert_offsets + experts);
  sized.row_capacity = owned.expert_offsets.back();
  const auto most = static_cast<std::size_t>(sized.max_row_tiles());
  owned.tiles.resize(most);
  owned.segments.resize(most);
  owned.minibatch_ends.resize(most);
  owned.expert_tiles.resize(experts);
  owned.expert_pieces.resize(experts);

  Plan& plan = owned.plan;
  plan.problem = config.problem;
  plan.tiling = config.tiling;
  plan.direction = direction;
  plan.needs = needs;
  plan.tokens = tokens;
  plan.generation = generation;
  plan.tables = {owned.tiles.data(), owned.segments.data(), owned.minibatch_ends.data(), owned.expert_tiles.data(),
                 owned.expert_pieces.data()};
  plan.counts = cut_rows(config.problem, config.tiling, config.schedule, owned.expert_offsets.data(), plan.tables);
  owned.ring_minimum = ring_minimum(config.problem, config.tiling, config.schedule, plan.tables, plan.counts);
  plan.schedule = with_rings(config.schedule, owned.ring_minimum);
  const auto order = [&](Task* out) {
    return order_tasks(direction, plan.problem, plan.tiling, plan.schedule, needs, plan.tables, plan.counts, out);
  };
  plan.num_tasks = order(nullptr);
  owned.tasks.resize(static_cast<std::size_t>(plan.num_tasks));
  order(owned.tasks.data());
  plan.tasks = owned.tasks.data();
  return owned;
}

}  // namespace moe
