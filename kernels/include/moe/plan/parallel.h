// The stages in which a cluster of blocks makes a plan, from the routes or from the counts of all ranks. Called by
// forward/route.cu with the device's cluster and by proof/ with a serial one; see team.h. A cluster has stage(f), which
// calls f with each of its blocks and has a barrier of all of them behind it.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/parallel_plan.h"
#include "moe/plan/parallel_route.h"
#include "moe/plan/parallel_rows.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/rows.h"
#include "moe/plan/team.h"

namespace moe {

// Sorts the routes of the only rank and plans them. Without tables (plan.sizes is null) it only sorts.
template <typename Cluster, typename Id>
MOE_HOST_DEVICE void plan_own_routes(Cluster& cluster, const SortJob<Id>& sort, const PlanJob& plan) {
  MOE_ROLLED
  for (std::int32_t first = 0; first < sort.num_experts; first += sort.experts_at_once) {
    const ExpertRound round = expert_round(sort, first);
    cluster.stage([&](auto& block) {
      if (first == 0 && plan.sizes != nullptr) clear_counters(block, plan);
      count_in_parallel(block, sort, round);
    });
    cluster.stage([&](auto& block) {
      const bool refused = first_bad_of(sort.part_first_bad, block.count) != kNoBadId;
      place_in_parallel(block, sort, round);
      if (round.last && plan.sizes != nullptr) build_in_parallel(block, plan, refused);
    });
  }
}

// Plans the rank of `plan` from the counts of all ranks. Requires its rows to fit their capacity.
template <typename Cluster>
MOE_HOST_DEVICE void plan_all_routes(Cluster& cluster, const RankRoutes& routes, const PlanJob& plan) {
  cluster.stage([&](auto& block) {
    clear_counters(block, plan);
    count_ranks(block, routes, plan.scratch);
  });
  if (plan.sources != nullptr) {
    cluster.stage([&](auto& block) { sum_positions(block, routes, plan.scratch); });
  }
  cluster.stage([&](auto& block) {
    build_in_parallel(block, plan, false);
    if (plan.sources != nullptr) merge_in_parallel(block, plan, routes);
  });
}

}  // namespace moe
