// The plan's configuration as one row of integers, and what values it may have. Owns the order of the fields, their
// limits and the words of the errors; host only. Read by the bindings from a tensor and by launchers; the twin of
// moe_megakernel.plan.PlanConfig.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "moe/plan/layout.h"
#include "moe/plan/problem.h"
#include "moe/plan/route.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

struct PlanConfig {
  Problem problem;
  Tiling tiling;
  Schedule schedule;
};

// A field is right if it lies in [least, most] and is a multiple of `unit`.
struct ConfigField {
  const char* name;
  std::int64_t least;
  std::int64_t most;
  std::int64_t unit;
};

inline constexpr std::int64_t kMaxExtent = std::int64_t{1} << 20;  // of H, I, tiles: no product leaves 63 bits
inline constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

// In the order of PlanConfig. Slots may be 0: as many as are needed.
inline constexpr ConfigField kConfigFields[] = {
    {"num_ranks", 1, 4096, 1},
    {"rank", 0, 4095, 1},
    {"num_experts", 1, kMaxExperts, 1},
    {"top_k", 1, kMaxRoutes, 1},
    {"hidden", 1, kMaxExtent, 1},
    {"width", 1, kMaxExtent, 1},
    {"gated", 0, 1, 1},
    {"max_tokens", 0, kMaxRoutes, 1},
    {"row_capacity", 0, kMaxIndex, 1},
    {"act_columns", kPartialColumns, kMaxExtent, kPartialColumns},
    {"hidden_columns", 1, kMaxExtent, 1},
    {"dgrad_columns", kPartialColumns, kMaxExtent, kPartialColumns},
    {"wgrad_rows", 16, kMaxExtent, 1},
    {"wgrad_columns", 16, kMaxExtent, 1},
    {"piece_rows", 1, kRowTile, 1},
    {"combine_tokens", 1, kMaxIndex, 1},
    {"num_clusters", 1, kMaxExtent, 1},
    {"waves", 1, kMaxExtent, 1},
    {"segment_tiles", 2, kMaxExtent, 2},
    {"wgrad_tiles", 2, kMaxExtent, 2},
    {"lag", 0, kMaxExtent, 1},
    {"x_slots", 0, kMaxExtent, 1},
    {"a_slots", 0, kMaxExtent, 1},
    {"separate_stages", 0, 1, 1},
};
inline constexpr std::int64_t kNumConfigFields =
    static_cast<std::int64_t>(sizeof(kConfigFields) / sizeof(kConfigFields[0]));
static_assert(sizeof(PlanConfig) == static_cast<std::size_t>(kNumConfigFields) * sizeof(std::int64_t),
              "PlanConfig is its fields, one int64 each, in the order of kConfigFields");

// The first thing wrong with a configuration, as "expected ..., got ...", or an empty string.
inline std::string config_fault(const std::int64_t (&values)[kNumConfigFields]) {
  for (std::int64_t i = 0; i < kNumConfigFields; ++i) {
    const ConfigField& field = kConfigFields[i];
    if (values[i] >= field.least && values[i] <= field.most && values[i] % field.unit == 0) continue;
    std::string text = std::string("expected ") + field.name;
    if (field.unit > 1) text += " a multiple of " + std::to_string(field.unit);
    text += " in [" + std::to_string(field.least) + ", " + std::to_string(field.most) + "]";
    return text + ", got " + std::to_string(values[i]);
  }
  return "";
}

// The same for what fields must be to each other; every field alone is right.
inline std::string config_fault(const PlanConfig& config) {
  const Problem& p = config.problem;
  const auto fault = [](const std::string& expected, std::int64_t got) {
    return "expected " + expected + ", got " + std::to_string(got);
  };
  if (p.rank >= p.num_ranks) return fault("rank < num_ranks = " + std::to_string(p.num_ranks), p.rank);
  if (!routes_fit(p.max_tokens, p.top_k)) {
    return fault("max_tokens * top_k <= " + std::to_string(kMaxRoutes) + " with top_k = " + std::to_string(p.top_k),
                 p.max_tokens);
  }
  if (p.max_routes() > std::int64_t{1} << route_bits(p.num_ranks)) {
    return fault("max_tokens * top_k <= " + std::to_string(std::int64_t{1} << route_bits(p.num_ranks)) + " with " +
                     std::to_string(p.num_ranks) + " ranks and top_k = " + std::to_string(p.top_k),
                 p.max_tokens);
  }
  if (kRowTile % config.tiling.piece_rows != 0) {
    return fault("piece_rows a divisor of " + std::to_string(kRowTile), config.tiling.piece_rows);
  }
  const std::int64_t forward = max_tasks(Direction::kForward, p, config.tiling);
  const std::int64_t backward = max_tasks(Direction::kBackward, p, config.tiling);
  const std::int64_t tasks = forward > backward ? forward : backward;
  if (tasks > kMaxIndex) return fault("tiles large enough for at most " + std::to_string(kMaxIndex) + " tasks", tasks);
  const std::int64_t pulls = 2 * p.max_row_tiles() * pieces_of_tile(config.tiling) +
                             combine_tasks(Direction::kForward, {}, p.max_tokens, config.tiling);
  if (pulls > kMaxIndex) {
    return fault("piece_rows large enough for at most " + std::to_string(kMaxIndex) + " pull tickets", pulls);
  }
  return "";
}

// The same for the forward's rings against what they must hold, see ring_minimum and ring_bound.
inline std::string ring_fault(const Schedule& schedule, const RingSizes& least) {
  const auto fault = [](const char* name, std::int64_t expected, std::int64_t got) {
    return std::string("expected ") + name + " >= " + std::to_string(expected) + " (or 0: as many as needed), got " +
           std::to_string(got);
  };
  if (schedule.x_slots != 0 && schedule.x_slots < least.x_slots) {
    return fault("x_slots", least.x_slots, schedule.x_slots);
  }
  if (schedule.a_slots != 0 && schedule.a_slots < least.a_slots) {
    return fault("a_slots", least.a_slots, schedule.a_slots);
  }
  return "";
}

// The schedule with slots of 0 replaced by what they must hold; a ring has at least one slot.
inline Schedule with_rings(Schedule schedule, const RingSizes& least) {
  if (schedule.x_slots == 0) schedule.x_slots = least.x_slots > 1 ? least.x_slots : 1;
  if (schedule.a_slots == 0) schedule.a_slots = least.a_slots > 1 ? least.a_slots : 1;
  return schedule;
}

}  // namespace moe
