// Words for what the explorer and the checker of logs talk about: counters, tasks, roles, places in memory. Every error
// text of proof/ is put together from these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "moe/plan/edges.h"
#include "moe/plan/tasks.h"

namespace moe::proof {

inline constexpr const char* kCounterNames[] = {"kPlanReady", "kXReady",  "kXRead",     "kAReady",   "kARead",
                                                "kDyReady",   "kDhReady", "kExpertDh",  "kExpertDy", "kExpertX",
                                                "kStored",    "kPulled",  "kPeerReady", "kPeerDone"};
static_assert(sizeof(kCounterNames) / sizeof(kCounterNames[0]) == static_cast<std::size_t>(kNumCounters),
              "every counter has a name");

inline constexpr const char* kTaskNames[] = {
    "gate_up", "down",  "down dgrad", "route grad", "gate_up dgrad", "down wgrad", "gate_up wgrad",
    "close",   "drain", "dispatch",   "combine",    "plan",          "down bias",  "gate_up bias"};
static_assert(sizeof(kTaskNames) / sizeof(kTaskNames[0]) == static_cast<std::size_t>(kNumTaskKinds),
              "every kind of task has a name");

// Role, then the stream that launches kernels one after the other.
inline constexpr const char* kRoleNames[] = {"plan", "pull", "load", "compute", "stream"};

inline std::string name(Counter counter) { return kCounterNames[static_cast<std::size_t>(counter)]; }
inline std::string name(TaskKind kind) { return kTaskNames[static_cast<std::size_t>(kind)]; }
inline std::string name(Role role) { return kRoleNames[static_cast<std::size_t>(role)]; }

}  // namespace moe::proof
