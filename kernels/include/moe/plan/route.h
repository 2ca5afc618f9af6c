// First step of the plan: sorts one rank's routes into expert-major order, which fixes the row order of everything
// after it. Owns the sort key and the rule of which ids are valid; plain C++17 without torch or CUDA. Called by
// bindings/route.cpp on CPU tensors, included by device code for the same key, and tested alone by tests/cpp.
//
// Legend: T tokens on this rank, K top_k, E experts in the whole group. A route is one slot of topk_idx; its number is
// r = t * K + k, its flattened position.
//
// Sort key: (expert, t mod 64, t div 64, k). The middle parts interleave tokens so that the rows of one expert take
// turns among the ranks that send them, and the order does not depend on how the tokens are split over ranks: a rank
// publishes its counts per (expert, t mod 64), called a class here, and a reader merges the classes of all ranks in a
// fixed order.
#pragma once

#include <cstdint>
#include <limits>

#include "moe/host_device.h"

namespace moe {

// Tokens are dealt to this many residues before they are ordered by age. A power of two, so that mod and div are bit
// operations.
inline constexpr std::int64_t kTokenResidues = 64;

// Route numbers, counts and class numbers are int32.
inline constexpr std::int64_t kMaxRoutes = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t kMaxExperts = kMaxRoutes / kTokenResidues;

// topk_idx of one rank, as it lies in memory. Does not own it.
template <typename Id>
struct RouteIds {
  const Id* ids;              // id (t, k) stands at ids[t * token_stride + k * slot_stride]; null if T == 0
  std::int64_t num_tokens;    // T >= 0
  std::int64_t top_k;         // K >= 1, and T * K <= kMaxRoutes
  std::int64_t token_stride;  // in elements, any value; 0 for an expanded tensor
  std::int64_t slot_stride;   // in elements, any value

  MOE_HOST_DEVICE Id at(std::int64_t token_idx, std::int64_t slot_idx) const {
    return ids[token_idx * token_stride + slot_idx * slot_stride];
  }
};

// Where sort_routes writes. Does not own the memory; every element of the three arrays is written.
struct RouteSort {
  std::int32_t* route_order;    // [T * K]: valid route numbers in key order, then -1 for each dropped or bad route
  std::int32_t* class_counts;   // [E, 64]: valid routes per (expert, t mod 64)
  std::int32_t* class_cursors;  // [E, 64] scratch; afterwards one past the last position of each class in route_order
};

enum class RouteKind { kValid, kDropped, kBad };

// -1 drops a route, [0, num_experts) sends it to that expert, all else is bad. The test runs in 64 bits: an int64 id of
// 2^32 + 1 is bad, it is not expert 1.
MOE_HOST_DEVICE constexpr RouteKind route_kind(std::int64_t id, std::int64_t num_experts) {
  if (id == -1) return RouteKind::kDropped;
  return id >= 0 && id < num_experts ? RouteKind::kValid : RouteKind::kBad;
}

// Number of the class (expert, t mod 64) in row-major [E, 64]. expert must be valid.
MOE_HOST_DEVICE constexpr std::int64_t route_class(std::int64_t expert, std::int64_t token_idx) {
  return expert * kTokenResidues + token_idx % kTokenResidues;
}

// True where T * K route numbers fit; never overflows, whatever the arguments (T >= 0, K >= 1).
MOE_HOST_DEVICE constexpr bool routes_fit(std::int64_t num_tokens, std::int64_t top_k) {
  return num_tokens <= kMaxRoutes / top_k;
}

// Writes class_counts [E, 64]. Returns the position t * K + k of the first bad id, or -1.
template <typename Id>
MOE_HOST_DEVICE std::int64_t count_routes(const RouteIds<Id>& topk_idx, std::int64_t num_experts,
                                          std::int32_t* class_counts) {
  for (std::int64_t class_idx = 0; class_idx < num_experts * kTokenResidues; ++class_idx) class_counts[class_idx] = 0;
  std::int64_t first_bad = -1;
  for (std::int64_t t = 0; t < topk_idx.num_tokens; ++t) {
    for (std::int64_t k = 0; k < topk_idx.top_k; ++k) {
      const std::int64_t id = topk_idx.at(t, k);
      const RouteKind kind = route_kind(id, num_experts);
      if (kind == RouteKind::kValid) ++class_counts[route_class(id, t)];
      if (kind == RouteKind::kBad && first_bad < 0) first_bad = t * topk_idx.top_k + k;
    }
  }
  return first_bad;
}

// Exclusive prefix sum of class_counts [E, 64] into class_cursors [E, 64]. Returns the number of valid routes.
MOE_HOST_DEVICE inline std::int64_t sum_classes(const std::int32_t* class_counts, std::int64_t num_experts,
                                                std::int32_t* class_cursors) {
  std::int32_t num_valid = 0;
  for (std::int64_t class_idx = 0; class_idx < num_experts * kTokenResidues; ++class_idx) {
    class_cursors[class_idx] = num_valid;
    num_valid += class_counts[class_idx];
  }
  return num_valid;
}

// Puts every valid route at the cursor of its class and advances the cursor. Routes are visited in ascending (t, k),
// which within one class is ascending (t div 64, k): the sort is stable, and no comparison is made.
template <typename Id>
MOE_HOST_DEVICE void place_routes(const RouteIds<Id>& topk_idx, std::int64_t num_experts, std::int32_t* class_cursors,
                                  std::int32_t* route_order) {
  for (std::int64_t t = 0; t < topk_idx.num_tokens; ++t) {
    for (std::int64_t k = 0; k < topk_idx.top_k; ++k) {
      const std::int64_t id = topk_idx.at(t, k);
      if (route_kind(id, num_experts) != RouteKind::kValid) continue;
      const std::int32_t position = class_cursors[route_class(id, t)]++;
      route_order[position] = static_cast<std::int32_t>(t * topk_idx.top_k + k);
    }
  }
}

// Stable counting sort: count, prefix sum, place; O(T * K + E * 64). Bad ids are skipped like dropped ones. Returns the
// position of the first bad id, or -1. Requires 1 <= num_experts <= kMaxExperts and routes_fit(T, K).
template <typename Id>
MOE_HOST_DEVICE std::int64_t sort_routes(const RouteIds<Id>& topk_idx, std::int64_t num_experts, const RouteSort& out) {
  const std::int64_t first_bad = count_routes(topk_idx, num_experts, out.class_counts);
  const std::int64_t num_valid = sum_classes(out.class_counts, num_experts, out.class_cursors);
  place_routes(topk_idx, num_experts, out.class_cursors, out.route_order);
  const std::int64_t num_routes = topk_idx.num_tokens * topk_idx.top_k;
  for (std::int64_t position = num_valid; position < num_routes; ++position) out.route_order[position] = -1;
  return first_bad;
}

}  // namespace moe
