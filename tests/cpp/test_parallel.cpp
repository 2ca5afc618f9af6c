// Tests the parallel forms of the plan, parallel_*.h, against the serial ones, number by number: the steps that the
// device runs, here one thread after the other in shuffled orders. Random routings, sizes, tilings and teams; memory is
// exactly as large as promised (the sanitizers watch its ends) and filled with a number that nothing writes. Compiled
// and run by test_headers.py.
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "moe/plan/build.h"
#include "moe/plan/config.h"
#include "moe/plan/parallel.h"
#include "moe/plan/parallel_backward.h"
#include "moe/plan/rows.h"
#include "moe/plan/serial_team.h"

namespace {

using Random = std::mt19937_64;
using Ids = std::vector<std::int64_t>;

constexpr std::int32_t kUnwritten = -99;

std::int64_t draw(Random& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}
std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

// One layer's routes on all ranks, and what is made of them.
struct Case {
  moe::PlanConfig config;
  std::vector<Ids> ids;  // of each rank, [T, K]
  std::vector<std::int64_t> starts;
  moe::SerialTeam team;

  std::int64_t tokens(std::int64_t rank) const {
    return static_cast<std::int64_t>(ids[size_of(rank)].size()) / config.problem.top_k;
  }
};

Ids draw_ids(Random& random, std::int64_t routes, std::int64_t num_experts) {
  const std::int64_t kind = draw(random, 0, 3);
  const std::int64_t one = draw(random, 0, num_experts - 1);
  Ids ids(size_of(routes));
  for (std::int64_t& id : ids) {
    id = draw(random, 0, num_experts - 1);
    if (kind == 1) id = one;
    if (kind == 2) id = id * id / num_experts;          // skewed
    if (kind == 3 && draw(random, 0, 9) > 0) id = one;  // nearly all the same
    if (draw(random, 0, 19) == 0) id = -1;
  }
  return ids;
}

Case draw_case(std::uint64_t seed, std::int64_t num_ranks) {
  Random random(seed);
  const auto below = [&](std::int64_t n) { return draw(random, 0, n - 1); };
  Case c{};
  moe::Problem& p = c.config.problem;
  p.num_ranks = num_ranks;
  p.rank = below(num_ranks);
  p.num_experts = below(4) == 0 ? 100 + below(200) : 1 + below(20);
  p.top_k = below(8) == 0 ? 33 + below(20) : 1 + below(10);
  p.hidden = 1 + below(400);
  p.width = 1 + below(900);
  p.gated = below(2);
  const std::int64_t most = below(12) == 0 ? 0 : 12000 / (num_ranks * p.top_k);
  std::int64_t start = 0;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t tokens = most == 0 ? 0 : draw(random, 0, most) * (below(8) != 0);
    c.ids.push_back(draw_ids(random, tokens * p.top_k, p.num_experts));
    c.starts.push_back(start);
    start += tokens;
    p.max_tokens = tokens > p.max_tokens ? tokens : p.max_tokens;
  }
  p.row_capacity = start * p.top_k;
  c.config.tiling = {128 * (1 + below(3)),        1 + below(200), 128 * (1 + below(3)), 128, 256,
                     std::int64_t{1} << below(8), 1 + below(64)};
  c.config.schedule = {1 + below(below(2) == 0 ? 4 : 100),
                       1 + below(4),
                       2 * (1 + below(below(2) == 0 ? 4 : 100)),
                       2 * (1 + below(10)),
                       below(5),
                       0,
                       0,
                       below(6) == 0};
  c.team = {static_cast<std::int32_t>(moe::kPlanBlocks), static_cast<std::int32_t>(1 + below(40)),
            static_cast<std::int32_t>(8 * (1 + below(4))), 0, random()};
  return c;
}

template <typename T>
std::string text(const std::vector<T>& values) {
  std::string out;
  for (const T& value : values) out += std::to_string(value) + " ";
  return out;
}

// Fields one after the other, the first `n` items.
template <typename Item>
std::vector<std::int32_t> words(const std::vector<Item>& items, std::int64_t n) {
  static_assert(sizeof(Item) % 4 == 0);
  const auto* begin = reinterpret_cast<const std::int32_t*>(items.data());
  return std::vector<std::int32_t>(begin, begin + size_of(n) * (sizeof(Item) / 4));
}

struct Sorted {
  std::vector<std::int32_t> route_order;
  std::vector<std::int32_t> class_counts;
  std::int64_t first_bad;
};

Sorted sort_serially(const Case& c, std::int64_t rank) {
  const moe::Problem& p = c.config.problem;
  const Ids& ids = c.ids[size_of(rank)];
  Sorted sorted{std::vector<std::int32_t>(ids.size()), {}, -1};
  sorted.class_counts.resize(size_of(p.num_experts * moe::kTokenResidues));
  std::vector<std::int32_t> cursors(sorted.class_counts.size());
  const moe::RouteIds<std::int64_t> view{ids.data(), c.tokens(rank), p.top_k, p.top_k, 1};
  sorted.first_bad =
      moe::sort_routes(view, p.num_experts, {sorted.route_order.data(), sorted.class_counts.data(), cursors.data()});
  return sorted;
}

// Memory of a plan, of exactly the promised sizes.
struct PlanMemory {
  std::vector<std::int32_t> scratch;
  std::vector<std::int64_t> expert_offsets;
  std::vector<std::int32_t> saved_offsets;
  std::vector<moe::RowTile> tiles;
  std::vector<moe::Segment> segments;
  std::vector<std::int32_t> minibatch_ends, expert_tiles, expert_pieces;
  std::vector<moe::Task> tasks;
  std::vector<moe::RowSource> sources;
  std::vector<std::int32_t> counters, tickets;
  moe::PlanSizes sizes{};
  moe::PlanJob job{};
  moe::Direction direction = moe::Direction::kForward;
  moe::GradNeeds needs{};

  PlanMemory(Case& c, bool in_shared, std::int64_t room = 0) {
    const moe::Problem& p = c.config.problem;
    const std::int64_t experts = p.local_experts() + 1;
    const auto most = size_of(p.max_row_tiles());
    // What lasts, and the sort's counters and masks; with or without room for the arrays over segments, and for the
    // routes in order and in the order of the walks.
    std::int64_t shared = moe::plan_lasting_words(p.local_experts());
    if (num_ranks(c) == 1) shared += 2 * c.team.num_warps * ((p.num_experts + 1) | 1) + 2 * p.num_experts + 1;
    if (in_shared) shared += moe::kSegmentArrays * (p.max_row_tiles() + 1);
    if (room > 0) shared += p.max_routes() / 2 + 64 * p.top_k;
    if (room > 1) shared += p.max_routes() + 128 * p.top_k;
    c.team.shared_words = static_cast<std::int32_t>(shared);
    scratch.assign(size_of(moe::plan_scratch(nullptr, p, shared).size), kUnwritten);
    expert_offsets.assign(size_of(experts), kUnwritten);
    saved_offsets.assign(size_of(experts), kUnwritten);
    tiles.assign(most, {kUnwritten, kUnwritten, kUnwritten});
    segments.assign(most, {kUnwritten, kUnwritten, kUnwritten, kUnwritten});
    minibatch_ends.assign(most, kUnwritten);
    expert_tiles.assign(size_of(experts), kUnwritten);
    expert_pieces.assign(size_of(experts), kUnwritten);
    set_tasks(c);
    sources.assign(size_of(p.row_capacity), {kUnwritten, kUnwritten});
    counters.assign(100, kUnwritten);
    tickets.assign(2, kUnwritten);
    job.shape = moe::plan_shape(p, c.config.tiling, c.config.schedule);
    job.scratch = moe::plan_scratch(scratch.data(), p, shared);
    job.num_parts = static_cast<std::int32_t>(p.num_ranks == 1 ? moe::kPlanBlocks : p.num_ranks);
    job.expert_offsets = expert_offsets.data();
    job.saved_expert_offsets = saved_offsets.data();
    job.tables = {tiles.data(), segments.data(), minibatch_ends.data(), expert_tiles.data(), expert_pieces.data()};
    job.tasks = tasks.data();
    job.sizes = &sizes;
    job.sources = p.num_ranks > 1 ? sources.data() : nullptr;
    job.counters = counters.data();
    job.num_counters = static_cast<std::int64_t>(counters.size());
    job.tickets = tickets.data();
    job.num_tickets = static_cast<std::int64_t>(tickets.size());
  }

  void set_tasks(const Case& c) {
    tasks.assign(size_of(moe::max_tasks(direction, c.config.problem, c.config.tiling)), moe::Task{});
    job.tasks = tasks.data();
  }
  void set_backward(const Case& c, const moe::GradNeeds& asked) {
    direction = moe::Direction::kBackward;
    needs = asked;
    set_tasks(c);
    job.saved_expert_offsets = nullptr;
    job.sources = nullptr;
  }

  static std::int64_t num_ranks(const Case& c) { return c.config.problem.num_ranks; }

  void check(const Case& c, const std::vector<std::int64_t>& offsets, bool refused) const {
    const moe::OwnedPlan plan = moe::build_plan(c.config, offsets.data(), 0, direction, needs, 1);
    const moe::TileCounts& n = plan.plan.counts;
    MOE_CHECK_EQUAL(sizes.counts.tiles, n.tiles);
    MOE_CHECK_EQUAL(sizes.counts.segments, n.segments);
    MOE_CHECK_EQUAL(sizes.counts.minibatches, n.minibatches);
    MOE_CHECK_EQUAL(sizes.num_tasks, plan.plan.num_tasks);
    const auto num_of = [&](moe::TaskKind kind) {
      std::int64_t tasks_of_kind = 0;
      for (const moe::Task& task : plan.tasks) tasks_of_kind += task.kind == kind;
      return tasks_of_kind;
    };
    MOE_CHECK_EQUAL(sizes.num_gate_up, num_of(moe::TaskKind::kGateUp));
    MOE_CHECK_EQUAL(sizes.num_down_dgrad, num_of(moe::TaskKind::kDownDgrad));
    MOE_CHECK_EQUAL(sizes.num_gate_up_dgrad, num_of(moe::TaskKind::kRouteGrad) + num_of(moe::TaskKind::kGateUpDgrad));
    MOE_CHECK_EQUAL(sizes.refused, refused ? 1 : 0);
    MOE_CHECK_EQUAL(text(expert_offsets), text(plan.expert_offsets));
    const std::vector<std::int64_t> none(offsets.size(), -1);
    const std::vector<std::int64_t> unwritten(offsets.size(), kUnwritten);
    const bool forward = direction == moe::Direction::kForward;
    MOE_CHECK_EQUAL(text(saved_offsets), text(!forward ? unwritten : refused ? none : offsets));
    MOE_CHECK_EQUAL(text(words(tiles, n.tiles)), text(words(plan.tiles, n.tiles)));
    MOE_CHECK_EQUAL(text(words(segments, n.segments)), text(words(plan.segments, n.segments)));
    MOE_CHECK_EQUAL(text(words(minibatch_ends, n.minibatches)), text(words(plan.minibatch_ends, n.minibatches)));
    MOE_CHECK_EQUAL(text(expert_tiles), text(plan.expert_tiles));
    MOE_CHECK_EQUAL(text(expert_pieces), text(plan.expert_pieces));
    MOE_CHECK_EQUAL(text(words(tasks, sizes.num_tasks)), text(words(plan.tasks, plan.plan.num_tasks)));
    MOE_CHECK_EQUAL(text(counters), text(std::vector<std::int32_t>(counters.size(), 0)));
    MOE_CHECK_EQUAL(text(tickets), text(std::vector<std::int32_t>(tickets.size(), 0)));
  }
};

struct Offsets {
  std::vector<std::int64_t> offsets;
  std::vector<moe::RowSource> sources;
};

Offsets merge_serially(const Case& c, const std::vector<std::int32_t>& counts) {
  const moe::Problem& p = c.config.problem;
  const moe::RankRoutes routes{counts.data(), c.starts.data(), p.num_ranks, p.num_experts};
  Offsets out{std::vector<std::int64_t>(size_of(p.local_experts() + 1)),
              std::vector<moe::RowSource>(size_of(p.row_capacity))};
  std::vector<std::int64_t> begins(size_of(p.num_ranks * moe::kTokenResidues)), send(size_of(p.num_ranks));
  std::vector<std::int64_t> receive(send.size());
  moe::merge_rows(routes, p.rank, begins.data(), {out.offsets.data(), out.sources.data(), send.data(), receive.data()});
  return out;
}

// The ids as the op may get them: int64 or int32, and strided.
template <typename Id>
void run_own(Case& c, const Sorted& expected, std::int64_t bad_fill, bool with_plan) {
  const moe::Problem& p = c.config.problem;
  const bool transposed = c.team.seed % 2 == 0;
  const std::int64_t tokens = c.tokens(0);
  std::vector<Id> ids(c.ids[0].size());
  moe::RouteIds<Id> view{ids.data(), tokens, p.top_k, transposed ? 1 : p.top_k, transposed ? tokens : 1};
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < p.top_k; ++k) {
      ids[size_of(t * view.token_stride + k * view.slot_stride)] = static_cast<Id>(c.ids[0][size_of(t * p.top_k + k)]);
    }
  }
  PlanMemory memory(c, c.team.seed % 4 < 2, static_cast<std::int64_t>(c.team.seed % 7 % 3));
  std::vector<std::int32_t> route_order(ids.size(), kUnwritten), counts(expected.class_counts.size(), kUnwritten);
  moe::SortJob<Id> sort{};
  sort.ids = view;
  sort.num_experts = static_cast<std::int32_t>(p.num_experts);
  sort.experts_at_once = static_cast<std::int32_t>(c.team.seed % 3 == 0 ? 1 + c.team.seed % 40 : 300);
  sort.route_order = route_order.data();
  sort.class_counts = counts.data();
  std::int64_t first_bad = kUnwritten;
  sort.first_bad = &first_bad;
  moe::set_walks(sort, c.team.num_blocks, c.team.num_warps, 1);
  if (!with_plan) memory.job.sizes = nullptr;
  moe::SerialCluster cluster(c.team);
  moe::plan_own_routes(cluster, sort, memory.job);
  MOE_CHECK_EQUAL(text(route_order), text(expected.route_order));
  MOE_CHECK_EQUAL(text(counts), text(expected.class_counts));
  MOE_CHECK_EQUAL(first_bad, expected.first_bad);
  MOE_CHECK_EQUAL(expected.first_bad >= 0, bad_fill > 0);
  std::vector<std::int64_t> offsets(size_of(p.num_experts + 1), 0);
  if (expected.first_bad < 0) offsets = merge_serially(c, expected.class_counts).offsets;
  if (with_plan) memory.check(c, offsets, expected.first_bad >= 0);
}

void test_own_routes() {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Case c = draw_case(seed, 1);
    Random random(seed);
    std::int64_t bad = seed % 7 == 0 ? draw(random, 1, 3) : 0;
    if (c.ids[0].empty()) bad = 0;
    for (std::int64_t i = 0; i < bad; ++i) {
      const std::int64_t wrong[] = {c.config.problem.num_experts, -2};
      c.ids[0][size_of(draw(random, 0, static_cast<std::int64_t>(c.ids[0].size()) - 1))] = wrong[draw(random, 0, 1)];
    }
    const Sorted expected = sort_serially(c, 0);
    if (seed % 2 == 0) run_own<std::int32_t>(c, expected, bad, seed % 5 != 0);
    if (seed % 2 == 1) run_own<std::int64_t>(c, expected, bad, seed % 5 != 0);
  }
}

void test_routes_of_all_ranks() {
  for (std::uint64_t seed = 1000; seed < 1200; ++seed) {
    Case c = draw_case(seed, 1 + static_cast<std::int64_t>(seed % 9));
    const moe::Problem& p = c.config.problem;
    std::vector<std::int32_t> counts;
    for (std::int64_t rank = 0; rank < p.num_ranks; ++rank) {
      const std::vector<std::int32_t> own = sort_serially(c, rank).class_counts;
      counts.insert(counts.end(), own.begin(), own.end());
    }
    PlanMemory memory(c, seed % 2 == 0);
    memory.job.num_parts = static_cast<std::int32_t>(p.num_ranks);
    moe::SerialCluster cluster(c.team);
    const moe::RankRoutes routes{counts.data(), c.starts.data(), p.num_ranks, p.num_experts};
    moe::plan_all_routes(cluster, routes, memory.job, p.row_capacity);
    const Offsets expected = merge_serially(c, counts);
    memory.check(c, expected.offsets, false);
    if (p.num_ranks > 1) {
      const std::int64_t rows = expected.offsets.back();
      MOE_CHECK_EQUAL(text(words(memory.sources, rows)), text(words(expected.sources, rows)));
    }
  }
}

// 3000 segments: as many minibatches as segments, some, and one.
void test_long_chains_of_minibatches() {
  for (const std::int64_t clusters : {1, 3, 7, 40, 100000}) {
    Case c = draw_case(7, 1);
    moe::Problem& p = c.config.problem;
    p.num_experts = 200;
    p.top_k = 1;
    p.width = 200;
    p.max_tokens = 200 * 15 * 256;
    p.row_capacity = p.max_tokens;
    c.config.schedule = {clusters, 1, 2, 2, 2, 0, 0, 0};
    std::vector<std::int32_t> counts(size_of(200 * 64), 60);  // 30 row tiles an expert
    for (std::size_t i = 0; i < counts.size(); i += 3) counts[i] = 0;
    PlanMemory memory(c, true);
    memory.job.num_parts = 1;
    moe::SerialCluster cluster(c.team);
    moe::plan_all_routes(cluster, {counts.data(), c.starts.data(), 1, 200}, memory.job, 0);
    memory.check(c, merge_serially(c, counts).offsets, false);
    MOE_CHECK_EQUAL(memory.sizes.counts.segments > 1900, true);
  }
}

// Few segments of many tasks, which are dealt in parts of a segment; and what the parts are.
void test_few_segments_of_many_tasks() {
  for (std::uint64_t seed = 2000; seed < 2100; ++seed) {
    Random random(seed);
    Case c = draw_case(seed, 1);
    moe::Problem& p = c.config.problem;
    p.num_experts = draw(random, 1, 9);
    p.top_k = 1;
    p.hidden = draw(random, 1, 260);
    p.width = draw(random, 1, 20000);
    p.max_tokens = 64 * 40 * p.num_experts;
    p.row_capacity = p.max_tokens;
    c.config.tiling.act_columns = 128;
    c.config.tiling.hidden_columns = draw(random, 1, 20);
    c.config.schedule.segment_tiles = 2 * draw(random, 1, 10);
    c.config.schedule.num_clusters = draw(random, 1, 300);
    std::vector<std::int32_t> counts(size_of(p.num_experts * 64));
    for (std::int32_t& count : counts) count = static_cast<std::int32_t>(draw(random, 0, 40));
    PlanMemory memory(c, seed % 2 == 0);
    memory.job.num_parts = 1;
    moe::SerialCluster cluster(c.team);
    moe::plan_all_routes(cluster, {counts.data(), c.starts.data(), 1, p.num_experts}, memory.job, 0);
    memory.check(c, merge_serially(c, counts).offsets, false);
  }
}

// The tasks that a staged launch runs are ranges of tickets.
void check_ranges(const PlanMemory& memory) {
  std::int64_t end = 0;
  const auto next = [&](std::int64_t tasks, moe::TaskKind first, moe::TaskKind second) {
    for (const std::int64_t begin = end; end < begin + tasks; ++end) {
      const moe::TaskKind kind = memory.tasks[size_of(end)].kind;
      MOE_CHECK_EQUAL(kind == first || kind == second, true);
    }
  };
  next(memory.sizes.num_gate_up, moe::TaskKind::kGateUp, moe::TaskKind::kGateUp);
  next(memory.sizes.num_down_dgrad, moe::TaskKind::kDownDgrad, moe::TaskKind::kDownDgrad);
  next(memory.sizes.num_gate_up_dgrad, moe::TaskKind::kRouteGrad, moe::TaskKind::kGateUpDgrad);
  next(1, moe::TaskKind::kClose, moe::TaskKind::kClose);
}

void check_saved_offsets(Case& c, const std::vector<std::int64_t>& offsets, const moe::GradNeeds& needs,
                         bool in_shared) {
  PlanMemory memory(c, in_shared);
  memory.set_backward(c, needs);
  const moe::PlanConfig& config = c.config;
  const bool refused = offsets[0] < 0;
  const std::vector<std::int32_t> saved(offsets.begin(), offsets.end());
  moe::SerialCluster cluster(c.team);
  moe::plan_saved_offsets(
      cluster, saved.data(),
      moe::BackwardJob{memory.job, moe::backward_shape(config.problem, config.tiling, config.schedule, needs)});
  memory.check(c, refused ? std::vector<std::int64_t>(offsets.size(), 0) : offsets, refused);
  if (config.schedule.separate_stages != 0) check_ranges(memory);
}

// Every mask of gradients several times; experts without rows, with some and with many.
void test_saved_offsets() {
  for (std::uint64_t seed = 3000; seed < 3640; ++seed) {
    Case c = draw_case(seed, 1 + static_cast<std::int64_t>(seed % 3));
    Random random(seed);
    moe::Problem& p = c.config.problem;
    const std::int64_t most = draw(random, 1, seed % 5 == 0 ? 20000 : 1200);
    std::vector<std::int64_t> offsets{0};
    for (std::int64_t e = 0; e < p.local_experts(); ++e) {
      const std::int64_t rows = draw(random, 0, 2) == 0 ? 0 : draw(random, 0, p.num_experts > 30 ? 300 : most);
      offsets.push_back(offsets.back() + rows);
    }
    p.row_capacity = offsets.back() + draw(random, 0, 1) * draw(random, 0, 1000);
    p.max_tokens = 1;
    c.config.schedule.separate_stages = draw(random, 0, 3) == 0;
    if (seed % 9 == 0) offsets.assign(offsets.size(), -1);
    check_saved_offsets(c, offsets, moe::needs_of_mask(static_cast<std::int64_t>(seed % 128)), seed % 2 == 0);
  }
}

void test_fill_parts() {
  for (const std::int32_t act : {1, 2, 3, 6, 7, 112, 8191}) {
    for (const std::int32_t hidden : {1, 2, 8, 16, 33, 4096}) {
      for (const std::int32_t segments : {0, 1, 2, 12, 16, 17, 127, 128, 129, 5000}) {
        moe::PlanShape shape{};
        shape.act_tiles = act;
        shape.hidden_tiles = hidden;
        const moe::FillParts parts = moe::fill_parts(shape, segments, 256);
        const auto parts_of = [](std::int32_t columns, std::int32_t shift) {
          return (columns + (2 << shift) - 1) / (2 << shift);
        };
        MOE_CHECK_EQUAL(parts.gate_up, parts_of(act, parts.shift));
        MOE_CHECK_EQUAL(parts.down, parts_of(hidden, parts.shift));
        MOE_CHECK_EQUAL(segments * (parts.gate_up + parts.down) <= 256 || parts.gate_up + parts.down == 2, true);
        if (parts.shift == 0) continue;
        const std::int32_t finer = parts_of(act, parts.shift - 1) + parts_of(hidden, parts.shift - 1);
        MOE_CHECK_EQUAL(segments * finer > 256, true);
      }
    }
  }
}

// What a warp of 32 lanes walks, step by step over the lanes, is what one of a single lane does.
void test_lanes_walk_in_order() {
  struct Lanes {
    std::int32_t lane;
    std::int32_t lanes;
  };
  for (const std::int64_t top_k : {1, 2, 3, 8, 31, 32, 33, 70}) {
    for (const std::int32_t ages : {0, 1, 5, 40}) {
      const std::int64_t tokens = 64 * 50;
      Ids ids(size_of(tokens * top_k));
      std::iota(ids.begin(), ids.end(), 0);
      moe::SortJob<std::int64_t> job{};
      job.ids = {ids.data(), tokens, top_k, top_k, 1};
      moe::set_walks(job, 8, 8, 32);
      const moe::WarpRoutes range{7, 3, ages};
      std::vector<std::vector<std::int64_t>> by_lane;
      for (std::int32_t lane = 0; lane < 32; ++lane) {
        by_lane.emplace_back();
        const auto read = [](std::int64_t id, std::int32_t) { return static_cast<std::int32_t>(id); };
        moe::walk_routes<4>(
            job, range, Lanes{lane, 32}, [] {}, read,
            [&](std::int32_t id, std::int32_t n) {
              if (id >= 0) MOE_CHECK_EQUAL(id, moe::route_of(job, range, n));
              by_lane.back().push_back(id);
            });
        MOE_CHECK_EQUAL(by_lane.back().size(), by_lane.front().size());
      }
      std::vector<std::int64_t> walked, expected;
      for (std::size_t step = 0; step < by_lane[0].size(); ++step) {
        for (const auto& lane : by_lane) {
          if (lane[step] >= 0) walked.push_back(lane[step]);
        }
      }
      for (std::int64_t age = 3; age < 3 + ages; ++age) {
        for (std::int64_t k = 0; k < top_k; ++k) expected.push_back((age * 64 + 7) * top_k + k);
      }
      MOE_CHECK_EQUAL(text(walked), text(expected));
    }
  }
}

void test_divisors() {
  Random random(1);
  for (std::int64_t i = 0; i < 100000; ++i) {
    const std::int64_t most = std::int64_t{1} << draw(random, 0, 31);
    const auto d = static_cast<std::int32_t>(draw(random, 1, most > moe::kMaxIndex ? moe::kMaxIndex : most));
    const auto any = static_cast<std::int32_t>(draw(random, 0, moe::kMaxIndex));
    const std::int32_t multiple = any / d * d;
    for (const std::int32_t n : {any, multiple, multiple > 0 ? multiple - 1 : 0, 0, d, d - 1}) {
      MOE_CHECK_EQUAL(moe::divisor(d).divide(n), n / d);
    }
  }
}

}  // namespace

int main() {
  test_divisors();
  test_lanes_walk_in_order();
  test_own_routes();
  test_routes_of_all_ranks();
  test_long_chains_of_minibatches();
  test_few_segments_of_many_tasks();
  test_fill_parts();
  test_saved_offsets();
  return moe_test::exit_status();
}
