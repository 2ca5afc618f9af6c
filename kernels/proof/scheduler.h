// Which agent takes the next step. Owns the ways to be unfair: random, by priorities that change at random points, by
// role, and with an agent or a rank that only moves when nobody else can. A run is a function of its seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "proof/faults.h"
#include "proof/random.h"
#include "proof/world.h"

namespace moe::proof {

enum class Policy : std::int32_t {
  kUniform = 0,  // any agent that can step
  kPriorities,   // the one of highest priority; now and then the one that ran last falls to the lowest
  kRoles,        // roles in a random strict order: pull always first or always last, and the like
  kStarveAgent,  // one agent steps only when no other can; which one changes
  kStarveRank,   // the same with all agents of a rank
  kMixed,        // one of these, by the seed
};
inline constexpr const char* kPolicyNames[] = {"uniform",      "priorities",  "roles",
                                               "starve_agent", "starve_rank", "mixed"};

// Throws std::invalid_argument with "expected ..., got ...".
inline Policy parse_policy(const std::string& text) {
  const std::int64_t index = index_of(text, kPolicyNames);
  if (index < 0) {
    throw std::invalid_argument("expected uniform, priorities, roles, starve_agent, starve_rank or mixed, got '" +
                                text + "'");
  }
  return static_cast<Policy>(index);
}

class Scheduler {
 public:
  Scheduler(Policy policy, const std::vector<Agent>& agents, std::int64_t num_ranks, std::uint64_t seed)
      : random_(seed), policy_(policy), agents_(agents), num_ranks_(num_ranks), priorities_(agents.size()) {
    if (policy_ == Policy::kMixed) policy_ = static_cast<Policy>(random_.below(5));
    for (std::int64_t& priority : priorities_) priority = random_.below(1 << 20);
    for (std::int64_t& rank : role_ranks_) rank = random_.below(1 << 20);
    draw_victim();
  }

  // One of `able`, which is not empty.
  std::int32_t pick(const std::vector<std::int32_t>& able) {
    switch (policy_) {
      case Policy::kPriorities: {
        const std::int32_t chosen = best(able, [&](std::int32_t id) { return priorities_[at(id)]; });
        if (random_.one_in(kSteadySteps)) priorities_[at(chosen)] = --lowest_;
        return chosen;
      }
      case Policy::kRoles: {
        if (random_.one_in(4)) return any(able);
        return best(able,
                    [&](std::int32_t id) { return role_ranks_[static_cast<std::size_t>(agents_[at(id)].actor)]; });
      }
      case Policy::kStarveAgent:
      case Policy::kStarveRank: {
        if (random_.one_in(kSteadySteps)) draw_victim();
        const std::size_t begin = at(any_index(able));
        for (std::size_t i = 0; i < able.size(); ++i) {
          const std::int32_t id = able[(begin + i) % able.size()];
          if (!starves(id)) return id;
        }
        return able[begin];
      }
      default:
        return any(able);
    }
  }

 private:
  static constexpr std::int64_t kSteadySteps = 512;  // steps between changes, on average

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  std::int32_t any_index(const std::vector<std::int32_t>& able) {
    return static_cast<std::int32_t>(random_.below(static_cast<std::int64_t>(able.size())));
  }
  std::int32_t any(const std::vector<std::int32_t>& able) { return able[at(any_index(able))]; }
  template <typename Value>
  static std::int32_t best(const std::vector<std::int32_t>& able, const Value& value) {
    return *std::max_element(able.begin(), able.end(),
                             [&](std::int32_t a, std::int32_t b) { return value(a) < value(b); });
  }
  bool starves(std::int32_t id) const {
    return policy_ == Policy::kStarveAgent ? id == victim_ : agents_[at(id)].rank == victim_;
  }
  void draw_victim() {
    victim_ = policy_ == Policy::kStarveRank ? random_.below(num_ranks_)
                                             : random_.below(static_cast<std::int64_t>(agents_.size()));
  }

  Random random_;
  Policy policy_;
  const std::vector<Agent>& agents_;
  std::int64_t num_ranks_;
  std::vector<std::int64_t> priorities_;
  std::int64_t role_ranks_[5];
  std::int64_t lowest_ = 0;
  std::int64_t victim_ = 0;
};

}  // namespace moe::proof
