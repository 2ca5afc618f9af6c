// Memory that the blocks building a plan share while they do, and its size. Owns the arrays' order in the workspace's
// region kPlanScratch. Used by parallel_*.h, and by layout.h for the size.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/problem.h"
#include "moe/plan/route.h"

namespace moe {

// Blocks of the cluster that builds the plan: the largest cluster that every device takes.
inline constexpr std::int64_t kPlanBlocks = 8;
// Shared memory of each, in int32: 225 KiB, the most that a block of compute capability 9.0 may have, less 2 KiB for
// what has a fixed size.
inline constexpr std::int64_t kPlanSharedWords = 225 * 256;
// The most experts whose counters and masks that holds for 32 warps, see SortShared: more are sorted in several rounds.
inline constexpr std::int64_t kRoundExperts = 512;
// The most experts that the layer's kernels take.
inline constexpr std::int64_t kMaxRouteExperts = 1024;

// Columns of prefix sums over local experts, and arrays over segments, see parallel_plan.h.
inline constexpr std::int64_t kExpertColumns = 6;
inline constexpr std::int64_t kSegmentArrays = 8;
// At the begin of shared memory, what lasts as long as the kernel: those columns, and behind them what blocks read from
// each other, see SharedParts; in the backward one more column.
MOE_HOST_DEVICE constexpr std::int64_t plan_lasting_words(std::int64_t local_experts) {
  return (kExpertColumns + 1) * (local_experts + 1) + 3;
}

// Views of it.
struct PlanScratch {
  std::int32_t* part_counts;  // [W, E]: routes of each rank to each expert
  std::int32_t* positions;    // [W, E + 1]: first_position of each rank and expert, then the routes; W > 1
  std::int32_t* runs;         // per block, runs_per_block: runs of rows with one source; W > 1
  std::int32_t* segments;     // per block, segments_per_block: arrays over segments that shared memory does not hold
  std::int64_t runs_per_block;
  std::int64_t segments_per_block;
  std::int64_t size;  // of all, in int32
};

MOE_HOST_DEVICE constexpr PlanScratch plan_scratch(std::int32_t* begin, const Problem& p,
                                                   std::int64_t shared_words = kPlanSharedWords) {
  const std::int64_t local = p.local_experts();
  const std::int64_t runs = p.num_ranks > 1 ? 2 * (ceil_div(local, kPlanBlocks) * kTokenResidues * p.num_ranks + 1) : 0;
  const std::int64_t segments = kSegmentArrays * (p.max_row_tiles() + 1);
  const bool fits = plan_lasting_words(local) + segments <= shared_words;
  PlanScratch scratch{};
  scratch.runs_per_block = runs;
  scratch.segments_per_block = fits ? 0 : segments;
  const std::int64_t sizes[] = {p.num_ranks * p.num_experts, p.num_ranks > 1 ? p.num_ranks * (p.num_experts + 1) : 0,
                                kPlanBlocks * runs, kPlanBlocks * scratch.segments_per_block};
  std::int32_t* arrays[4] = {};
  for (int i = 0; i < 4; ++i) {
    arrays[i] = begin == nullptr ? nullptr : begin + scratch.size;
    scratch.size += sizes[i];
  }
  scratch.part_counts = arrays[0];
  scratch.positions = arrays[1];
  scratch.runs = arrays[2];
  scratch.segments = arrays[3];
  return scratch;
}

}  // namespace moe
