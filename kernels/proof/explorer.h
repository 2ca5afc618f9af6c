// The explorer: runs the role programs of W ranks over several launches in one interleaving and checks progress, order
// and data at every step. Called by bindings/proof.cpp; tests call it over many cases, schedulers and seeded faults.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moe/plan/log.h"
#include "proof/launches.h"
#include "proof/scheduler.h"
#include "proof/world.h"

namespace moe::proof {

struct RunOptions {
  PlanConfig config;
  ExploreOptions explore;
  std::uint64_t seed;
  std::int64_t launches;
  std::int64_t max_steps;
  Policy policy;
  Fault fault;
  std::int64_t log_launch = -1;  // index of the launch to write a log of, or -1
  std::int64_t log_rank = 0;
};

// What a run leaves behind beside its numbers: the log asked for, and the plan that it must agree with.
struct RunLog {
  std::vector<LogRecord> records;
  PlanConfig config;
  std::vector<std::int64_t> expert_offsets;
  Direction direction = Direction::kForward;
  GradNeeds needs{};
  std::int64_t tokens = 0;
  std::int64_t generation = 0;
};

// Throws Violation with what went wrong: a deadlock, a race, wrong content, a counter or a task count that is off, or
// max_steps passed. `log` may be null.
Stats explore(const RunOptions& options, RunLog* log);

}  // namespace moe::proof
