// Draws routings of all sorts - even, skewed, all to one expert, dropped, ranks without tokens - and plans them for
// every rank, as the plan task does. See launches.h.
#include "proof/launches.h"

#include <algorithm>
#include <utility>

#include "moe/plan/route.h"

namespace moe::proof {
namespace {

std::vector<std::int64_t> draw_tokens(const PlanConfig& config, const ExploreOptions& options, Random& random) {
  const std::int64_t most = config.problem.max_tokens;
  // A launch without any token is drawn rarely: there is little to see in it.
  std::int64_t kind = options.tokens >= 0 ? options.tokens : random.below(kNumTokenCounts);
  if (options.tokens < 0 && kind == static_cast<std::int64_t>(TokenCounts::kAllEmpty) && !random.one_in(4)) kind = 0;
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(config.problem.num_ranks));
  for (std::int64_t& t : tokens) {
    const bool empty = kind == static_cast<std::int64_t>(TokenCounts::kAllEmpty) ||
                       (kind == static_cast<std::int64_t>(TokenCounts::kSomeEmpty) && random.one_in(2));
    t = empty ? 0 : (kind == static_cast<std::int64_t>(TokenCounts::kDifferent) ? random.below(most + 1) : most);
  }
  return tokens;
}

// Draws experts for one launch; the ranks share the popularity of experts.
class ExpertDraw {
 public:
  ExpertDraw(std::int64_t num_experts, const ExploreOptions& options, Random& random)
      : num_experts_(num_experts),
        kind_(static_cast<Routing>(options.routing >= 0 ? options.routing : random.below(kNumRoutings))),
        favourite_(random.below(num_experts)) {
    if (kind_ == Routing::kAllDropped && options.routing < 0 && !random.one_in(3)) kind_ = Routing::kUniform;
  }

  std::int32_t operator()(Random& random) const {
    switch (kind_) {
      case Routing::kAllDropped:
        return -1;
      case Routing::kSomeDropped:
        return static_cast<std::int32_t>(random.one_in(3) ? -1 : random.below(num_experts_));
      case Routing::kOneExpert:
        return static_cast<std::int32_t>(favourite_);
      case Routing::kZipf: {
        // Expert at distance d from the favourite is taken with a weight near 1 / (d + 1): the least of two draws.
        const std::int64_t distance = random.below(random.below(num_experts_) + 1);
        return static_cast<std::int32_t>((favourite_ + distance) % num_experts_);
      }
      default:
        return static_cast<std::int32_t>(random.below(num_experts_));
    }
  }

 private:
  std::int64_t num_experts_;
  Routing kind_;
  std::int64_t favourite_;
};

GradNeeds draw_needs(const ExploreOptions& options, Random& random) {
  const std::int64_t mask = options.needs >= 0 ? options.needs : 1 + random.below((1 << kNumGradNeeds) - 1);
  return needs_of_mask(mask);
}

Direction draw_direction(const ExploreOptions& options, std::int64_t index, Random& random) {
  switch (options.directions) {
    case 1:
      return Direction::kForward;
    case 2:
      return Direction::kBackward;
    case 3:
      return index % 2 == 0 ? Direction::kForward : Direction::kBackward;
    default:
      return random.one_in(2) ? Direction::kForward : Direction::kBackward;
  }
}

// Routes, row maps and plans of one launch, every rank for itself.
void plan_launch(const PlanConfig& config, const std::vector<std::int64_t>& tokens, std::int64_t generation,
                 Launch& launch) {
  const std::int64_t ranks = config.problem.num_ranks;
  const std::int64_t classes = config.problem.num_experts * kTokenResidues;
  std::vector<std::int32_t> counts(static_cast<std::size_t>(ranks * classes));
  std::vector<std::int32_t> cursors(static_cast<std::size_t>(classes));
  std::vector<std::int64_t> starts(static_cast<std::size_t>(ranks), 0);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (rank > 0) starts[at] = starts[at - 1] + tokens[at - 1];
    RankLaunch& side = launch.ranks[at];
    side.route_order.resize(side.experts.size());
    sort_routes(RouteIds<std::int32_t>{side.experts.data(), tokens[at], config.problem.top_k, config.problem.top_k, 1},
                config.problem.num_experts,
                RouteSort{side.route_order.data(), counts.data() + rank * classes, cursors.data()});
  }
  const RankRoutes routes{counts.data(), starts.data(), ranks, config.problem.num_experts};
  std::vector<std::int64_t> scratch(static_cast<std::size_t>(ranks * kTokenResidues));
  std::vector<std::int64_t> sent(static_cast<std::size_t>(ranks));
  std::vector<std::int64_t> received(static_cast<std::size_t>(ranks));
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    RankLaunch& side = launch.ranks[static_cast<std::size_t>(rank)];
    PlanConfig own = config;
    own.problem.rank = rank;
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(own.problem.local_experts() + 1));
    side.sources.resize(static_cast<std::size_t>(rows_of_rank(routes, rank)));
    merge_rows(routes, rank, scratch.data(), {offsets.data(), side.sources.data(), sent.data(), received.data()});
    side.owned = build_plan(own, offsets.data(), tokens[static_cast<std::size_t>(rank)], launch.direction, launch.needs,
                            generation);
  }
}

}  // namespace

std::vector<Launch> draw_launches(const PlanConfig& config, const ExploreOptions& options, std::int64_t count,
                                  Random& random) {
  std::vector<Launch> launches;
  RingSizes rings{1, 1};
  for (std::int64_t index = 0; index < count; ++index) {
    Launch launch;
    launch.direction = draw_direction(options, index, random);
    launch.needs = draw_needs(options, random);
    launch.ranks.resize(static_cast<std::size_t>(config.problem.num_ranks));
    const std::vector<std::int64_t> tokens = draw_tokens(config, options, random);
    const ExpertDraw draw(config.problem.num_experts, options, random);
    for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
      std::vector<std::int32_t>& experts = launch.ranks[rank].experts;
      experts.resize(static_cast<std::size_t>(tokens[rank] * config.problem.top_k));
      for (std::int32_t& expert : experts) expert = draw(random);
    }
    plan_launch(config, tokens, index + 1, launch);
    for (const RankLaunch& side : launch.ranks) {
      if (launch.direction == Direction::kBackward) continue;
      rings.x_slots = std::max(rings.x_slots, side.owned.ring_minimum.x_slots);
      rings.a_slots = std::max(rings.a_slots, side.owned.ring_minimum.a_slots);
    }
    launches.push_back(std::move(launch));
  }
  Schedule schedule = config.schedule;
  if (schedule.x_slots == 0) schedule.x_slots = rings.x_slots + options.x_spare;
  if (schedule.a_slots == 0) schedule.a_slots = rings.a_slots + options.a_spare;
  for (Launch& launch : launches) {
    for (RankLaunch& side : launch.ranks) side.owned.plan.schedule = schedule;
  }
  return launches;
}

}  // namespace moe::proof
