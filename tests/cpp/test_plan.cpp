// Tests plan/ with nothing but a C++17 compiler: every fence of every edge is needed and its loss is noticed, numbers
// that logs and Python rely on, and random plans whose tables are exactly as large as promised (the sanitizers watch
// their ends). What plans mean is tested from Python, tests/plan. Compiled and run by test_headers.py.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "moe/plan/build.h"
#include "moe/plan/config.h"
#include "moe/plan/edges.h"
#include "moe/plan/layout.h"
#include "moe/plan/log.h"
#include "moe/plan/records.h"

namespace {

using moe::Edge;

// Values that are written to logs, tensors and device memory: a change is a change of format.
static_assert(static_cast<int>(moe::TaskKind::kGateUp) == 0 && static_cast<int>(moe::TaskKind::kPlan) == 11);
static_assert(static_cast<int>(moe::TaskKind::kBiasGateUp) + 1 == moe::kNumTaskKinds);
static_assert(static_cast<int>(moe::Counter::kPlanReady) == 0 && static_cast<int>(moe::Counter::kPeerDone) == 13);
static_assert(static_cast<int>(moe::Counter::kPeerDone) + 1 == moe::kNumCounters);
static_assert(static_cast<int>(moe::Region::kPartials) + 1 == moe::kNumRegions);
static_assert(static_cast<int>(moe::Role::kPlan) == 0 && static_cast<int>(moe::Role::kCompute) == 3);
static_assert(static_cast<int>(moe::LogEvent::kClaim) == 0 && static_cast<int>(moe::LogEvent::kRaise) == 2);
static_assert(static_cast<int>(moe::Direction::kForward) == 0 && static_cast<int>(moe::Direction::kBackward) == 1);
static_assert(sizeof(moe::RowTile) == 12 && sizeof(moe::Segment) == 16 && sizeof(moe::Task) == 20);
static_assert(sizeof(moe::RowSource) == 8 && sizeof(moe::RankHeader) == 128 && sizeof(moe::MeetingResult) == 40 &&
              sizeof(moe::LaunchState) == 24);
static_assert(sizeof(moe::LogRecord) == 40);

// All fences there are, on both sides.
constexpr std::int32_t kFences[] = {moe::kBulkWait, moe::kLoadsDone, moe::kProxyFence};

void test_every_fence_is_needed() {
  std::int64_t needed = 0;
  for (const Edge& edge : moe::kEdges) {
    MOE_CHECK_EQUAL(moe::edge_is_fenced(edge), true);
    for (const std::int32_t fence : kFences) {
      Edge without = edge;
      without.raiser_fences &= ~fence;
      if (without.raiser_fences != edge.raiser_fences) {
        ++needed;
        MOE_CHECK_EQUAL(moe::edge_is_fenced(without), false);
      }
      without = edge;
      without.waiter_fences &= ~fence;
      if (without.waiter_fences != edge.waiter_fences) {
        ++needed;
        MOE_CHECK_EQUAL(moe::edge_is_fenced(without), false);
      }
    }
  }
  MOE_CHECK_EQUAL(needed, 17);
}

void test_gpu_scope_does_not_cross_ranks() {
  std::int64_t crossing = 0;
  for (const Edge& edge : moe::kEdges) {
    MOE_CHECK_EQUAL(edge.crosses_ranks, moe::counter_crosses_ranks(edge.counter));
    if (!edge.crosses_ranks) continue;
    ++crossing;
    Edge narrow = edge;
    narrow.scope = moe::Scope::kGpu;
    MOE_CHECK_EQUAL(moe::edge_is_fenced(narrow), false);
  }
  MOE_CHECK_EQUAL(crossing, 3);
}

// One edge of each kind with its fences, and the same edge with those of another kind.
void test_rules_of_fences() {
  using moe::Proxy;
  const auto edge = [](Proxy raiser, Proxy waiter, bool overwrites, std::int32_t raise, std::int32_t wait) {
    return moe::edge_is_fenced({moe::Counter::kXReady, moe::Role::kPull, moe::Role::kLoad, raiser, waiter, overwrites,
                                false, moe::Scope::kGpu, raise, wait});
  };
  const Proxy generic = Proxy::kGeneric, async = Proxy::kAsync;
  for (const bool overwrites : {false, true}) {
    MOE_CHECK_EQUAL(edge(generic, generic, overwrites, moe::kNoFence, moe::kNoFence), true);
    MOE_CHECK_EQUAL(edge(generic, async, overwrites, moe::kNoFence, moe::kNoFence), false);
    MOE_CHECK_EQUAL(edge(generic, async, overwrites, moe::kProxyFence, moe::kNoFence), true);
    MOE_CHECK_EQUAL(edge(generic, async, overwrites, moe::kNoFence, moe::kProxyFence), true);
    const std::int32_t complete = overwrites ? moe::kLoadsDone : moe::kBulkWait;
    const std::int32_t other = overwrites ? moe::kBulkWait : moe::kLoadsDone;
    MOE_CHECK_EQUAL(edge(async, generic, overwrites, complete, moe::kNoFence), true);
    MOE_CHECK_EQUAL(edge(async, generic, overwrites, other | moe::kProxyFence, moe::kProxyFence), false);
    MOE_CHECK_EQUAL(edge(async, async, overwrites, complete, moe::kProxyFence), true);
    MOE_CHECK_EQUAL(edge(async, async, overwrites, complete | moe::kProxyFence, moe::kNoFence), false);
    MOE_CHECK_EQUAL(edge(async, async, overwrites, other, moe::kProxyFence), false);
  }
}

void test_edges_are_found() {
  for (std::int64_t i = 0; i < moe::kNumEdges; ++i) {
    MOE_CHECK_EQUAL(moe::find_edge(moe::kEdges[i].counter, moe::kEdges[i].waiter), i);  // no pair stands twice
  }
  MOE_CHECK_EQUAL(moe::find_edge(moe::Counter::kXReady, moe::Role::kCompute), -1);
  MOE_CHECK_EQUAL(moe::raise_fences(moe::Counter::kXReady, moe::Role::kPull), moe::kBulkWait);
  MOE_CHECK_EQUAL(moe::wait_fences(moe::Counter::kXReady, moe::Role::kLoad), moe::kProxyFence);
  MOE_CHECK_EQUAL(moe::raise_fences(moe::Counter::kDhReady, moe::Role::kCompute), moe::kProxyFence);
  MOE_CHECK_EQUAL(moe::raise_fences(moe::Counter::kDhReady, moe::Role::kPull), moe::kNoFence);
}

// Filled pieces and what is cleared behind the last make up the whole tile.
void test_pieces_of_a_tile() {
  for (const std::int64_t piece_rows : {1, 8, 32, 128}) {
    moe::Tiling tiling{};
    tiling.piece_rows = piece_rows;
    for (std::int32_t rows = 1; rows <= moe::kRowTile; ++rows) {
      const moe::RowTile tile{0, 0, rows};
      std::int64_t moved = 0, cleared = 0, filled = 0;
      for (std::int64_t piece = 0; piece < moe::pieces_of_tile(tiling); ++piece) {
        const std::int64_t own = moe::rows_of_piece(tile, piece, tiling);
        moved += own;
        filled += own > 0 ? 1 : 0;
        cleared += moe::rows_to_clear(tile, piece, tiling);
        MOE_CHECK_EQUAL(own > 0 || moe::rows_to_clear(tile, piece, tiling) == 0, true);
      }
      MOE_CHECK_EQUAL(moved, rows);
      MOE_CHECK_EQUAL(cleared, moe::kRowTile - rows);
      MOE_CHECK_EQUAL(filled, moe::filled_pieces(tile, tiling));
    }
  }
}

moe::PlanConfig random_config(std::mt19937_64& random) {
  const auto draw = [&](std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
  };
  moe::PlanConfig config;
  config.problem = {draw(1, 5), 0, draw(1, 12), draw(1, 4), draw(1, 300), draw(1, 700), draw(0, 1), draw(0, 1200), 0};
  config.problem.rank = draw(0, config.problem.num_ranks - 1);
  config.tiling = {128 * draw(1, 2), draw(16, 200), 128 * draw(1, 3),
                   draw(64, 256),    draw(64, 256), std::int64_t{1} << draw(0, 7),
                   draw(1, 64)};
  config.schedule = {draw(1, 6), draw(1, 3), 2 * draw(1, 4), 2 * draw(1, 4), draw(0, 3), 0, 0, draw(0, 4) == 0};
  return config;
}

// Plans of random rows per expert, at a capacity that is exactly used.
void test_random_plans() {
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    moe::PlanConfig config = random_config(random);
    const std::int64_t experts = config.problem.local_experts();
    std::vector<std::int64_t> offsets{0};
    for (std::int64_t e = 0; e < experts; ++e) {
      offsets.push_back(offsets.back() + (random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 1500)));
    }
    config.problem.row_capacity = offsets.back();
    MOE_CHECK_EQUAL(moe::config_fault(config), std::string());
    for (const moe::Direction direction : {moe::Direction::kForward, moe::Direction::kBackward}) {
      const moe::GradNeeds needs = moe::needs_of_mask(static_cast<std::int64_t>(random() % 128));
      MOE_CHECK_EQUAL(moe::mask_of_needs(moe::needs_of_mask(moe::mask_of_needs(needs))), moe::mask_of_needs(needs));
      const moe::OwnedPlan owned =
          moe::build_plan(config, offsets.data(), config.problem.max_tokens, direction, needs, 7);
      const moe::Plan& plan = owned.plan;
      const moe::RingSizes bound = moe::ring_bound(config.problem, config.tiling, config.schedule);
      MOE_CHECK_EQUAL(owned.ring_minimum.x_slots <= bound.x_slots, true);
      MOE_CHECK_EQUAL(owned.ring_minimum.a_slots <= bound.a_slots, true);
      MOE_CHECK_EQUAL(plan.num_tasks <= moe::max_tasks(direction, plan.problem, plan.tiling), true);
      MOE_CHECK_EQUAL(plan.counts.tiles <= plan.problem.max_row_tiles(), true);
      const moe::Records records = moe::record_plan(plan);
      for (std::size_t row = 0; row < records.raises.size(); row += moe::kRecordColumns) {
        const auto counter = static_cast<moe::Counter>(records.raises[row + 4]);
        if (moe::counter_is_flag(counter)) {
          MOE_CHECK_EQUAL(records.raises[row + 6], 7);
        } else {
          MOE_CHECK_EQUAL(records.raises[row + 5] < moe::counter_size(counter, plan.problem), true);
        }
      }
    }
  }
}

// The largest values that every field may have alone are refused together without an overflow on the way.
void test_largest_config() {
  std::int64_t values[moe::kNumConfigFields];
  for (std::int64_t i = 0; i < moe::kNumConfigFields; ++i) values[i] = moe::kConfigFields[i].most;
  MOE_CHECK_EQUAL(moe::config_fault(values), std::string());
  const std::int64_t top = moe::kMaxIndex, extent = moe::kMaxExtent;
  moe::PlanConfig config{{1, 0, moe::kMaxExperts, 1, extent, extent, 1, top, top}, {128, 1, 128, 16, 16, 128, 1}, {}};
  config.schedule = {extent, extent, extent, extent, extent, extent, extent, 0};
  MOE_CHECK_EQUAL(moe::config_fault(config).find("expected tiles large enough"), std::size_t{0});
  config.tiling = {extent, extent, extent, extent, extent, 128, 64};
  MOE_CHECK_EQUAL(moe::config_fault(config).find("expected tiles large enough"), std::size_t{0});  // bias gradients
  config.problem.num_experts = 1 << 16;
  MOE_CHECK_EQUAL(moe::config_fault(config), std::string());
  MOE_CHECK_EQUAL(moe::workspace_bytes(true, config.problem, config.tiling, config.schedule, 8) > 0, true);
  MOE_CHECK_EQUAL(moe::workspace_bytes(false, config.problem, config.tiling, config.schedule, 8) > 0, true);
  MOE_CHECK_EQUAL(moe::ring_bound(config.problem, config.tiling, config.schedule).x_slots, 2);
}

// A plan keeps its tables when it is moved.
void test_plans_move() {
  std::mt19937_64 random(4);
  moe::PlanConfig config = random_config(random);
  config.problem = {1, 0, 2, 1, 64, 256, 1, 600, 600};
  const std::int64_t offsets[] = {0, 250, 600};
  moe::OwnedPlan first = moe::build_plan(config, offsets, 600, moe::Direction::kForward, moe::needs_of_mask(63), 1);
  const std::int64_t tiles = first.plan.counts.tiles;
  const moe::OwnedPlan second = std::move(first);
  MOE_CHECK_EQUAL(second.plan.tables.tiles == second.tiles.data(), true);
  MOE_CHECK_EQUAL(second.plan.tasks == second.tasks.data(), true);
  MOE_CHECK_EQUAL(second.plan.tables.expert_tiles[2], tiles);
}

}  // namespace

int main() {
  test_every_fence_is_needed();
  test_gpu_scope_does_not_cross_ranks();
  test_rules_of_fences();
  test_edges_are_found();
  test_pieces_of_a_tile();
  test_random_plans();
  test_largest_config();
  test_plans_move();
  return moe_test::exit_status();
}
