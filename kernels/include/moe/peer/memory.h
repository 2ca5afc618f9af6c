// Memory that the ranks of a group share, as kernels of one rank reach it: one piece on every rank, all mapped here,
// with the shared regions of plan/layout.h at the same offsets. Owns no memory. With one rank there is none of it.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/layout.h"

namespace moe {

// A group as the host passes it; filled in from the tensor `group` of hopper/ops.py, in this order.
struct PeerGroup {
  std::int64_t num_ranks;     // W; 1: no group, nothing else counts
  std::int64_t rank;          // this rank
  std::int64_t max_tokens;    // agreed by all ranks
  std::int64_t row_capacity;  // likewise
  std::int64_t needs;         // mask of the gradients asked for, compared between ranks
  std::int64_t bases;         // address of [W] addresses on the device: every rank's memory as it is mapped here
  std::int64_t own;           // address of this rank's memory
  std::int64_t bytes;         // of each rank's memory
};
inline constexpr std::int64_t kPeerGroupFields = 8;
static_assert(sizeof(PeerGroup) == kPeerGroupFields * sizeof(std::int64_t));

struct PeerMemory {
  unsigned char* const* bases;  // device [W]; null: one rank
  std::int64_t num_ranks;
  std::int64_t rank;
  std::int32_t route_bits;  // see route_bits
  // Byte offsets of the shared regions.
  std::int64_t flag_ready;
  std::int64_t headers;
  std::int64_t flag_done;
  std::int64_t abort;
  std::int64_t class_counts;
  std::int64_t route_order;
  std::int64_t route_weights;
  std::int64_t tokens[2];  // by PullTicket::source
  std::int64_t rows;
  std::int64_t route_grads;

  MOE_HOST_DEVICE bool shared() const { return bases != nullptr; }

  template <typename T>
  MOE_HOST_DEVICE T* at(std::int64_t peer, std::int64_t offset) const {
    return reinterpret_cast<T*>(bases[peer] + offset);
  }
  // Where a row's token lives, and its route there; `row_route` is not negative.
  MOE_HOST_DEVICE std::int32_t home(std::int32_t row_route) const { return row_route >> route_bits; }
  MOE_HOST_DEVICE std::int32_t route(std::int32_t row_route) const {
    return row_route & static_cast<std::int32_t>((std::int64_t{1} << route_bits) - 1);
  }
};

inline PeerMemory peer_memory(const PeerGroup& group, const Problem& p, const Tiling& t, const Schedule& s,
                              std::int64_t element) {
  const auto offset = [&](Region region) { return region_offset(region, p, t, s, element); };
  PeerMemory memory{};
  memory.num_ranks = p.num_ranks;
  memory.rank = p.rank;
  memory.route_bits = route_bits(p.num_ranks);
  if (p.num_ranks == 1) return memory;
  memory.bases = reinterpret_cast<unsigned char* const*>(group.bases);
  memory.flag_ready = offset(Region::kFlagReady);
  memory.headers = offset(Region::kHeader);
  memory.flag_done = offset(Region::kFlagDone);
  memory.abort = offset(Region::kAbort);
  memory.class_counts = offset(Region::kClassCounts);
  memory.route_order = offset(Region::kRouteOrder);
  memory.route_weights = offset(Region::kRouteWeights);
  memory.tokens[0] = offset(Region::kTokens);
  memory.tokens[1] = offset(Region::kTokensX);
  memory.rows = offset(Region::kRows);
  memory.route_grads = offset(Region::kRouteGrads);
  return memory;
}

}  // namespace moe
