// What device code tells others than itself: records of a test's log, and the one record by which a failed step is
// known to the host. Used by the route kernel and by all waits and raises of the layer's kernel.
#pragma once

#include <cstdint>

#include "moe/forward/status.h"
#include "moe/plan/log.h"

namespace moe {

__device__ inline std::int64_t global_ns() {
  std::int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Appends a record, stamped now, if there is a log and room in it.
__device__ inline void write_record(const LaunchLog& log, LogRecord record) {
  if (log.records == nullptr) return;
  const unsigned long long slot = atomicAdd(log.size, 1ULL);
  if (slot >= static_cast<unsigned long long>(log.capacity)) return;
  record.time = global_ns();
  log.records[slot] = record;
}

// The host looks at the code alone, so it is written last; a record that it has not taken yet stays.
template <int kValues>
__device__ void report_status(StepStatus& status, StatusCode code, const std::int64_t (&values)[kValues]) {
  static_assert(kValues <= kStatusValues, "a record has so many values");
  volatile std::int64_t* written = &status.code;
  if (*written != static_cast<std::int64_t>(StatusCode::kNone)) return;
  for (int i = 0; i < kValues; ++i) status.values[i] = values[i];
  __threadfence_system();
  *written = static_cast<std::int64_t>(code);
  __threadfence_system();
}

}  // namespace moe
