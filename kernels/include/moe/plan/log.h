// What a debug build writes down while it runs, and what the checker reads: one record for each claim, wait and raise.
// Owns the format; written by device roles, read by proof/check_log.h on the CPU, which accepts a log only if the
// kernel did what the plan says. Records of one agent are in its program order.
#pragma once

#include <cstdint>

namespace moe {

// Where tickets come from.
enum class Stream : std::int32_t {
  kCompute = 0,  // tickets are indices of Plan::tasks
  kPull = 1,     // tickets of Plan::pull_task
  kPlan = 2,     // the plan task, ticket 0
};

enum class LogEvent : std::int32_t {
  kClaim = 0,  // counter: 0 compute stream, 1 pull stream; index: ticket. Not for tickets past the end
  kWait = 1,   // a wait was met: counter, index, value = what was seen
  kRaise = 2,  // counter, index, value = what was added (flags: set). Flags of peers: index is the rank that they are
               // set on
};

struct LogRecord {
  std::int32_t block;    // of the launch
  std::int32_t role;     // Role
  std::int32_t event;    // LogEvent
  std::int32_t task;     // ticket the agent works on; -1 in the plan task and for the wait that a role starts with
  std::int32_t counter;  // Counter, or stream
  std::int32_t index;
  std::int64_t value;
  std::int64_t time;  // ns of a clock all blocks share (globaltimer); raises are stamped before, waits after the access
};

// Where the records of a launch go. Does not own the memory.
struct LaunchLog {
  LogRecord* records;  // device memory, or null: nothing is written down
  std::int64_t capacity;
  unsigned long long* size;  // records written; more than `capacity`: some are missing
};

}  // namespace moe
