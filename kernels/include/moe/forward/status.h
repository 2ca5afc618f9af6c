// What a launch tells the host when a step fails: one record in memory that both can reach, written once, read by
// Python without waiting for the device. Owns the codes and the meaning of the values; the twin of
// moe_megakernel.device_status.
#pragma once

#include <cstdint>

namespace moe {

enum class StatusCode : std::int64_t {
  kNone = 0,
  kBadId = 1,    // values: position t * K + k in topk_idx, the id found there, top_k, num_experts, rank (-1: only one)
  kTimeout = 2,  // values: block, Role, TaskKind, ticket, Counter, index, expected, seen, timeout in ns
  // of a group
  kMismatch = 3,     // values: HeaderField, its value on rank 0, another rank, the value there
  kManyTokens = 4,   // values: rank, its tokens, the most that are agreed
  kFull = 5,         // values: rank, rows it would get, rows it can hold
  kPeerAborted = 6,  // values: the rank because of which another rank gave up
  kPeerRefused = 7,  // values: the rank that refused its own arguments
};
inline constexpr std::int64_t kStatusValues = 15;

// Host memory, mapped into the device. The device fills in `values` first and `code` last, and only where `code` is
// kNone; the host takes the record and sets `code` to kNone again.
struct StepStatus {
  std::int64_t code;
  std::int64_t values[kStatusValues];
};

}  // namespace moe
