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

// Words at the begin of shared memory that the plan needs as long as the kernel runs; none where there are no tables.
MOE_HOST_DEVICE inline std::int32_t lasting_words(const PlanJob& plan) {
  return plan.sizes == nullptr ? 0 : static_cast<std::int32_t>(kExpertColumns) * (plan.shape.local_experts + 1);
}

// Sorts the routes of the only rank and plans them. Without tables (plan.sizes is null) it only sorts. Leaves the first
// bad id in shared_parts of all blocks.
template <typename Cluster, typename Id>
MOE_HOST_DEVICE void plan_own_routes(Cluster& cluster, const SortJob<Id>& sort, const PlanJob& plan) {
  const std::int32_t lasting = lasting_words(plan);
  MOE_ROLLED
  for (std::int32_t first = 0; first < sort.num_experts; first += sort.experts_at_once) {
    const ExpertRound round = expert_round(sort, first);
    cluster.stage(
        [&](auto& block) { count_in_parallel(block, sort, sort_shared(block, sort, lasting, round.count), round); });
    cluster.stage([&](auto& block) {
      const SortShared shared = sort_shared(block, sort, lasting, round.count);
      const ExpertSums sums = expert_sums(block, plan.shape);
      const bool with_plan = plan.sizes != nullptr;
      block.phase([&](const Thread& me) {
        if (with_plan && first == 0) clear_counters(me, plan);
        join_parts(me, block, sort, shared, round, lasting);
      });
      // Routes go their way beside the sums of the plan: these keep few threads busy, and for long.
      const bool refused = *shared.parts.all_first_bad != kNoBadId;
      block.phase(
          [&](const Thread& me) {
            fill_rest(me, sort, shared, round);
            if (!with_plan) return;
            me.each(round.count + 1, [&](std::int32_t e) {
              if (refused) return set_expert(sums, plan.shape, first + e, 0, 0);
              const std::int32_t begin = shared.begins[e];
              const std::int32_t rows = e < round.count ? shared.begins[e + 1] - begin : 0;
              set_expert(sums, plan.shape, first + e, begin, rows);
            });
          },
          [&](const auto& warp) { place_routes(warp, block, sort, shared, round); });
      block.phase(
          [&](const Thread& me) {
            if (me.index == 0 && !round.last) *shared.parts.done = shared.begins[round.count];
          },
          [&](const auto& warp) {
            if (with_plan && round.last) sum_column(warp, sums, warp.index + 1);
            store_staged(warp, block, sort, shared, round);
          });
      if (with_plan && round.last) build_in_parallel(block, plan, refused);
    });
  }
}

// Plans the rank of `plan` from the counts of all ranks. Where they have met and refuse the step, or a rank cannot hold
// its rows, the plan is that of a refused step; without a meeting rows must fit their capacity.
template <typename Cluster>
MOE_HOST_DEVICE void plan_all_routes(Cluster& cluster, const RankRoutes& routes, const PlanJob& plan,
                                     std::int64_t row_capacity) {
  const bool merges = plan.sources != nullptr || plan.row_route != nullptr;
  const bool met = plan.meeting != nullptr;
  cluster.stage([&](auto& block) {
    block.phase([&](const Thread& me) { clear_counters(me, plan); });
    if (!met || plan.meeting->refused == 0) count_ranks(block, routes, plan.scratch);
  });
  cluster.stage([&](auto& block) {
    if (merges && (!met || plan.meeting->refused == 0)) sum_positions(block, routes, plan.scratch);
  });
  cluster.stage([&](auto& block) {
    bool refused = met && plan.meeting->refused != 0;
    if (met && !refused) refused = !rows_fit(block, plan, routes, row_capacity);
    sum_ranks(block, plan, refused);
    build_in_parallel(block, plan, refused);
    if (merges && !refused) merge_in_parallel(block, plan, routes);
  });
}

}  // namespace moe
