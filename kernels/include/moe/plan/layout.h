// The byte map of every workspace buffer. Owns offsets: host allocation, kernels, peers and tests all take them from
// here. The shared region lies in memory that peers map (same offsets on every rank, from the agreed capacities); the
// local one is this rank's.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/dependencies.h"
#include "moe/plan/edges.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/problem.h"
#include "moe/plan/rows.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

enum class Region : std::int32_t {
  // shared with peers
  kFlagReady = 0,  // [W] int64 generation
  kHeader,         // [W] RankHeader: what each rank is about to do
  kFlagDone,       // [W] int64 generation
  kAbort,          // int64: 0, or 1 + the rank because of which another rank has given up
  kClassCounts,    // [E, 64] int32
  kRouteOrder,     // [max_T * K] int32
  kRouteWeights,   // [max_T * K] float32
  kTokens,         // [max_T, H] x or dy
  kTokensX,        // [max_T, H] x, in backward beside dy
  kRows,           // [max_T * K, H] o or dx rows of this rank's tokens, stored by peers
  kRouteGrads,     // [max_T * K] float32 dS of this rank's routes, stored by peers
  // local
  kLaunch,          // LaunchState, the only memory that one launch hands to the next
  kPlanSizes,       // PlanSizes: what only the device knows
  kTickets,         // 3 x int32, each in a cache line of its own: compute stream, pieces, combine
  kCounters,        // see counter_offset
  kAllClassCounts,  // [W, E, 64] int32, copies of the peers'
  kMeeting,         // MeetingResult, then [W] int64: where each rank's tokens start in the global order
  kExpertOffsets,   // [L + 1] int64
  kRowSources,      // [row_capacity] RowSource
  kRowWeights,      // [row_capacity] float32 backward: s of each row
  kRowTiles,        // [max_row_tiles] RowTile
  kSegments,        // [max_row_tiles] Segment
  kMinibatchEnds,   // [max_row_tiles] int32
  kExpertTiles,     // 2 x [L + 1] int32: expert_tiles, expert_pieces
  kTasks,           // [max_tasks] Task
  kPlanScratch,     // int32 arrays of the blocks that build the plan, see plan_scratch.h
  kXRing,           // [x_slots, kRowTile, H] forward
  kARing,           // [a_slots, kRowTile, I] forward
  kDyRows,          // [max_row_tiles, kRowTile, H] backward
  kXRows,           // [max_row_tiles, kRowTile, H] backward
  kScaledA,         // [max_row_tiles, kRowTile, I] backward: s*a
  kDh,              // [max_row_tiles, kRowTile, 2I] backward: dh, before it recomputed h
  kPartials,        // [max_row_tiles, kRowTile, ceil(I / 128)] float32 backward: dS partials
};
inline constexpr std::int64_t kNumRegions = 33;
inline constexpr std::int64_t kFirstLocalRegion = static_cast<std::int64_t>(Region::kLaunch);
// Bytes. TMA needs 128 for its swizzle atoms; a pair of cache lines is 256.
inline constexpr std::int64_t kRegionAlignment = 256;
inline constexpr std::int64_t kRowAlignment = 16;     // bytes; the stride of TMA and the unit of bulk copies
inline constexpr std::int64_t kPartialColumns = 128;  // columns of one dS partial sum

// Leading bytes that are zeroed when the memory is allocated: the "done" flags, LaunchState, PlanSizes and the tickets,
// with room for more. Known to hopper/workspaces.py.
inline constexpr std::int64_t kZeroedBytes = 4096;
// Of them, in front: the "done" flag of the only rank. A group has its flags in shared memory.
inline constexpr std::int64_t kOwnFlagBytes = kRegionAlignment;

// What must agree on all ranks, in the order in which a difference is looked for. Named in hopper/peer_status.py.
enum class HeaderField : std::int32_t {
  kDirection = 0,
  kHidden,
  kWidth,
  kNumExperts,
  kTopK,
  kMaxTokens,
  kRowCapacity,
  kActivation,  // Activation, and the bits of its parameters
  kAlpha,
  kLimit,
  kNeeds,   // mask of the gradients asked for
  kSendsX,  // backward: x travels, for the gradient of w_gate_up or to compute h again
};
inline constexpr std::int64_t kHeaderFields = 12;

// What a rank publishes with flag 1 and every other rank compares.
struct RankHeader {
  std::int64_t tokens;     // T
  std::int64_t refuses;    // 1: this rank's own arguments were refused, nothing else here counts
  std::int64_t bad_route;  // position t * K + k of its first bad id, or -1
  std::int64_t bad_id;
  std::int64_t fields[kHeaderFields];
};

// What the ranks have decided when they met; the same on all of them unless one has given up.
struct MeetingResult {
  std::int64_t refused;    // 1: no work is done, outputs are NaN
  std::int64_t aborted;    // 1: a rank did not come in time, ...
  std::int64_t culprit;    // ... this one
  std::int64_t full_rank;  // the rank that would get the most rows, if it cannot hold them, or -1
  std::int64_t full_rows;  // and how many
};

// `row_route` of a row: its home rank in the upper bits, its route number t * K + k there in this many lower ones. With
// one rank it is the route number.
MOE_HOST_DEVICE constexpr std::int32_t route_bits(std::int64_t num_ranks) {
  std::int32_t bits = 31;
  while (std::int64_t{1} << (31 - bits) < num_ranks) --bits;
  return bits;
}

// What launches share. The last block to leave a launch, which finds blocks_left at the number of blocks, zeroes it and
// advances the generation, so that a replayed graph advances it too and a block that starts late still reads its own.
struct LaunchState {
  std::int64_t generation;   // of the last launch that has ended; this one's is one more
  std::int64_t plan_ready;   // Counter::kPlanReady
  std::int64_t blocks_left;  // blocks of this launch that have left
};

// What the plan task has found out about sizes, which the host does not know. A refused step (a bad id) has no tiles
// and no tile tasks; its combine stores NaN.
struct PlanSizes {
  TileCounts counts;
  std::int64_t num_tasks;
  // Of them, in the order in which they stand where stages are separate, from ticket 0 on: kGateUp (backward: those
  // that recompute h); kDownDgrad; kRouteGrad and kGateUpDgrad together.
  std::int64_t num_gate_up;
  std::int64_t num_down_dgrad;
  std::int64_t num_gate_up_dgrad;
  std::int64_t refused;  // 1: outputs are NaN
  // 0, or 1 + the rank because of which a wait has run out of time: from then on no wait of this launch waits.
  std::int64_t aborted;
};

// int32 counters of one launch, one array after the other, zeroed by the plan task before anything waits for them.
MOE_HOST_DEVICE constexpr std::int64_t counter_size(Counter counter, const Problem& p) {
  switch (counter) {
    case Counter::kStored:
    case Counter::kPulled:
      return 1;
    case Counter::kExpertDh:
    case Counter::kExpertDy:
    case Counter::kExpertX:
      return p.local_experts();
    case Counter::kPlanReady:
    case Counter::kPeerReady:
    case Counter::kPeerDone:
      return 0;  // flags: LaunchState and shared regions of their own
    default:
      return p.max_row_tiles();
  }
}
// Index of a counter array's first element. Arrays start on cache lines of their own (32 counters).
MOE_HOST_DEVICE constexpr std::int64_t counter_offset(Counter counter, const Problem& p) {
  std::int64_t offset = 0;
  for (std::int64_t c = 0; c < static_cast<std::int64_t>(counter); ++c) {
    offset += round_up(counter_size(static_cast<Counter>(c), p), 32);
  }
  return offset;
}

// Bytes from one row of a matrix to the next; the gap behind a row that is no multiple of the alignment is never read.
MOE_HOST_DEVICE constexpr std::int64_t row_pitch(std::int64_t columns, std::int64_t element) {
  return round_up(columns * element, kRowAlignment);
}

// Bytes of one region. Both directions have their regions side by side: a workspace serves forward and backward.
// `element` is the size of an activation element (2 for bf16). Shared regions depend only on what all ranks agree on.
MOE_HOST_DEVICE constexpr std::int64_t region_bytes(Region region, const Problem& p, const Tiling& t, const Schedule& s,
                                                    std::int64_t element) {
  const std::int64_t tiles = p.max_row_tiles();
  const std::int64_t forward = max_tasks(Direction::kForward, p, t);
  const std::int64_t backward = max_tasks(Direction::kBackward, p, t);
  switch (region) {
    case Region::kFlagReady:
    case Region::kFlagDone:
      return p.num_ranks * 8;
    case Region::kHeader:
      return p.num_ranks * static_cast<std::int64_t>(sizeof(RankHeader));
    case Region::kAbort:
      return 8;
    case Region::kClassCounts:
      return p.num_experts * kTokenResidues * 4;
    case Region::kRouteOrder:
    case Region::kRouteWeights:
    case Region::kRouteGrads:
      return p.max_routes() * 4;
    case Region::kTokens:
    case Region::kTokensX:
      return p.max_tokens * row_pitch(p.hidden, element);
    case Region::kRows:
      return p.max_routes() * row_pitch(p.hidden, element);
    case Region::kLaunch:
      return static_cast<std::int64_t>(sizeof(LaunchState));
    case Region::kTickets:
      return 3 * kRegionAlignment;
    case Region::kCounters:
      return 4 * counter_offset(static_cast<Counter>(kNumCounters), p);
    case Region::kAllClassCounts:
      return p.num_ranks * p.num_experts * kTokenResidues * 4;
    case Region::kMeeting:
      return static_cast<std::int64_t>(sizeof(MeetingResult)) + p.num_ranks * 8;
    case Region::kExpertOffsets:
      return (p.local_experts() + 1) * 8;
    case Region::kRowSources:
      return p.row_capacity * static_cast<std::int64_t>(sizeof(RowSource));
    case Region::kRowWeights:
      return p.row_capacity * 4;
    case Region::kRowTiles:
      return tiles * static_cast<std::int64_t>(sizeof(RowTile));
    case Region::kSegments:
      return tiles * static_cast<std::int64_t>(sizeof(Segment));
    case Region::kMinibatchEnds:
      return tiles * 4;
    case Region::kExpertTiles:
      return 2 * (p.local_experts() + 1) * 4;
    case Region::kTasks:
      return (forward > backward ? forward : backward) * static_cast<std::int64_t>(sizeof(Task));
    case Region::kPlanSizes:
      return static_cast<std::int64_t>(sizeof(PlanSizes));
    case Region::kPlanScratch:
      return plan_scratch(nullptr, p).size * 4;
    case Region::kXRing:
      return s.x_slots * kRowTile * row_pitch(p.hidden, element);
    case Region::kARing:
      return s.a_slots * kRowTile * row_pitch(p.width, element);
    case Region::kDyRows:
    case Region::kXRows:
      return tiles * kRowTile * row_pitch(p.hidden, element);
    case Region::kScaledA:
      return tiles * kRowTile * row_pitch(p.width, element);
    case Region::kDh:
      return tiles * kRowTile * row_pitch(p.h_columns(), element);
    case Region::kPartials:
      return tiles * kRowTile * ceil_div(p.width, kPartialColumns) * 4;
  }
  return 0;
}

// Offset of a region in its memory (shared or local), in bytes, a multiple of kRegionAlignment.
MOE_HOST_DEVICE constexpr std::int64_t region_offset(Region region, const Problem& p, const Tiling& t,
                                                     const Schedule& s, std::int64_t element) {
  const std::int64_t index = static_cast<std::int64_t>(region);
  std::int64_t offset = 0;
  for (std::int64_t r = index < kFirstLocalRegion ? 0 : kFirstLocalRegion; r < index; ++r) {
    offset += round_up(region_bytes(static_cast<Region>(r), p, t, s, element), kRegionAlignment);
  }
  return offset;
}

// Total bytes of the shared (symmetric) or the local memory.
MOE_HOST_DEVICE constexpr std::int64_t workspace_bytes(bool shared, const Problem& p, const Tiling& t,
                                                       const Schedule& s, std::int64_t element) {
  std::int64_t bytes = 0;
  for (std::int64_t r = shared ? 0 : kFirstLocalRegion; r < (shared ? kFirstLocalRegion : kNumRegions); ++r) {
    bytes += round_up(region_bytes(static_cast<Region>(r), p, t, s, element), kRegionAlignment);
  }
  return bytes;
}

}  // namespace moe
