// What the explorer runs: a configuration, a routing for every launch drawn from the seed, and the plans that all ranks
// make of it. Owns the options of a run and the drawing; plans are built by plan/build.h, rows merged by plan/rows.h.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/plan/build.h"
#include "moe/plan/config.h"
#include "moe/plan/rows.h"
#include "proof/random.h"

namespace moe::proof {

// One int64 each, in this order, behind the fields of PlanConfig.
struct ExploreOptions {
  std::int64_t clusters;    // C: resident clusters of two blocks on each rank
  std::int64_t load_ahead;  // tasks that load may be ahead of compute
  std::int64_t pull_batch;  // pieces that a pulling warp keeps in flight, 1 or more
  std::int64_t x_spare;     // ring slots above ring_minimum
  std::int64_t a_spare;
  std::int64_t directions;  // 0 drawn, 1 forward, 2 backward, 3 in turns
  std::int64_t needs;       // gradients: bit 0 x, 1 topk_weights, 2 w_gate_up, 3 w_down; -1 drawn
  std::int64_t routing;     // see Routing; -1 drawn
  std::int64_t tokens;      // see TokenCounts; -1 drawn
};
inline constexpr std::int64_t kNumExploreOptions = 9;
static_assert(sizeof(ExploreOptions) == static_cast<std::size_t>(kNumExploreOptions) * sizeof(std::int64_t),
              "ExploreOptions is its fields, one int64 each");

enum class Routing : std::int64_t { kUniform = 0, kZipf, kOneExpert, kAllDropped, kSomeDropped };
inline constexpr std::int64_t kNumRoutings = 5;
enum class TokenCounts : std::int64_t { kAllFull = 0, kDifferent, kSomeEmpty, kAllEmpty };
inline constexpr std::int64_t kNumTokenCounts = 4;

// One rank's side of a launch.
struct RankLaunch {
  std::vector<std::int32_t> experts;      // [T, K]: topk_idx
  std::vector<std::int32_t> route_order;  // [T * K]
  std::vector<RowSource> sources;         // [R]
  OwnedPlan owned;

  const Plan& plan() const { return owned.plan; }
  // Route number of a row on its home rank, given that rank's side.
  std::int64_t route(std::int64_t row, const std::vector<RankLaunch>& ranks) const {
    const RowSource& source = sources[static_cast<std::size_t>(row)];
    return ranks[static_cast<std::size_t>(source.rank)].route_order[static_cast<std::size_t>(source.position)];
  }
};

struct Launch {
  Direction direction;
  GradNeeds needs;
  std::vector<RankLaunch> ranks;  // [W]
};

// Draws `count` launches and plans them with rings of one size for all, the greatest minimum of any plus the spare
// slots; `config.schedule` slots that are not 0 are taken as they are. Generations count from 1.
std::vector<Launch> draw_launches(const PlanConfig& config, const ExploreOptions& options, std::int64_t count,
                                  Random& random);

}  // namespace moe::proof
