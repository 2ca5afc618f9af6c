// Segments and minibatches of tiles.h from prefix sums over experts, without a walk from segment to segment. Every
// block of the cluster does this for itself: it is shorter than handing results over. Owns the sums and the arrays over
// segments that parallel_plan.h fills the tables from; see team.h.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/problem.h"
#include "moe/plan/route.h"
#include "moe/plan/team.h"
#include "moe/plan/tiles.h"

namespace moe {

// The numbers that a plan is built with, as int32: divisions and sums are a multiple of the cost in 64 bits. Worked out
// once, by the host. Bounds that no routing reaches are cut, so that no product overflows.
struct PlanShape {
  std::int32_t first_expert;  // of this rank
  std::int32_t local_experts;
  std::int32_t num_experts;
  std::int32_t num_ranks;
  std::int32_t act_tiles;
  std::int32_t hidden_tiles;
  std::int32_t segment_tiles;
  std::int32_t segment_gate_up;  // tasks of a whole segment
  std::int32_t segment_down;
  std::int32_t piece_rows;
  Divisor by_segment_gate_up;
  std::int32_t enough;  // gate_up tasks of a minibatch, at least
  std::int32_t lag;     // minibatches; at least their number if stages are separate
};

MOE_HOST_DEVICE constexpr PlanShape plan_shape(const Problem& p, const Tiling& t, const Schedule& s) {
  const std::int64_t most = p.max_row_tiles();
  const std::int64_t tiles = min32(s.segment_tiles, most < 2 ? 2 : round_up(most, 2));
  const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  return {narrow(p.split().begin(p.rank)),
          narrow(p.local_experts()),
          narrow(p.num_experts),
          narrow(p.num_ranks),
          narrow(t.act_tiles(p)),
          narrow(t.hidden_tiles(p)),
          narrow(tiles),
          narrow(tasks_of_segment(tiles, t.act_tiles(p))),
          narrow(tasks_of_segment(tiles, t.hidden_tiles(p))),
          narrow(t.piece_rows),
          divisor(narrow(tasks_of_segment(tiles, t.act_tiles(p)))),
          min32(s.waves * s.num_clusters, kMaxRoutes),
          s.separate_stages != 0 ? narrow(most) : min32(s.lag, most)};
}

MOE_HOST_DEVICE constexpr std::int32_t segment_tasks(std::int32_t tiles, std::int32_t columns) {
  return tiles / 2 * columns + tiles % 2 * ((columns + 1) / 2);
}

// Prefix sums [L + 1] over the local experts, side by side.
struct ExpertSums {
  std::int32_t* rows;
  std::int32_t* tiles;
  std::int32_t* segments;
  std::int32_t* pieces;
  std::int32_t* gate_up;  // tasks
  std::int32_t* down;
  std::int32_t experts;  // L

  MOE_HOST_DEVICE std::int32_t num_tiles() const { return tiles[experts]; }
  MOE_HOST_DEVICE std::int32_t num_segments() const { return segments[experts]; }
};

template <typename Block>
MOE_HOST_DEVICE ExpertSums expert_sums(const Block& block, const PlanShape& shape) {
  const std::int32_t pitch = shape.local_experts + 1;
  std::int32_t* at = block.shared();
  return {at, at + pitch, at + 2 * pitch, at + 3 * pitch, at + 4 * pitch, at + 5 * pitch, shape.local_experts};
}

// A segment by its expert and its number there; s = num_segments stands behind the last.
struct SegmentPlace {
  std::int32_t expert;
  std::int32_t index;
};

MOE_HOST_DEVICE inline SegmentPlace segment_place(const ExpertSums& sums, std::int32_t segment) {
  const std::int32_t expert = item_at(sums.segments, sums.experts, segment);
  return {expert, segment - sums.segments[expert]};
}
MOE_HOST_DEVICE inline std::int32_t segment_length(const ExpertSums& sums, const PlanShape& shape,
                                                   const SegmentPlace& place) {
  const std::int32_t tiles = sums.tiles[place.expert + 1] - sums.tiles[place.expert];
  return min32(std::int64_t{tiles} - place.index * shape.segment_tiles, shape.segment_tiles);
}
// Tasks of the segments before this one.
MOE_HOST_DEVICE inline std::int32_t gate_up_before(const ExpertSums& sums, const PlanShape& shape,
                                                   const SegmentPlace& place) {
  return sums.gate_up[place.expert] + place.index * shape.segment_gate_up;
}
MOE_HOST_DEVICE inline std::int32_t down_before(const ExpertSums& sums, const PlanShape& shape,
                                                const SegmentPlace& place) {
  return sums.down[place.expert] + place.index * shape.segment_down;
}

// Where the minibatch that begins with segment `first` ends: behind the first segment that completes `enough` tasks, or
// with the last if what is left there is less than a minibatch.
MOE_HOST_DEVICE inline std::int32_t minibatch_end(const ExpertSums& sums, const PlanShape& shape,
                                                  const SegmentPlace& first) {
  const std::int32_t all = sums.gate_up[sums.experts];
  const std::int32_t before = gate_up_before(sums, shape, first);
  if (all - before < shape.enough) return sums.num_segments();
  const std::int32_t target = before + shape.enough;
  const std::int32_t expert =
      first_where(sums.experts + 1, [&](std::int32_t e) { return sums.gate_up[e] >= target; }) - 1;
  const std::int32_t needed = shape.by_segment_gate_up.divide(target - sums.gate_up[expert] - 1) + 1;
  const bool whole = needed >= sums.segments[expert + 1] - sums.segments[expert];  // its last segment may be short
  const std::int32_t end = whole ? sums.segments[expert + 1] : sums.segments[expert] + needed;
  const std::int32_t reached = gate_up_before(sums, shape, {whole ? expert + 1 : expert, whole ? 0 : needed});
  return all - reached < shape.enough ? sums.num_segments() : end;
}

// Arrays [num_segments + 1] over segments, and over minibatches, of which there are no more.
struct SegmentArrays {
  std::int32_t* ends;            // of a minibatch that began here
  std::int32_t* order;           // number of the minibatch that begins here, or -1; last their number
  std::int32_t* jumps;           // the begin of the 2^i-th minibatch after one that began here
  std::int32_t* next_jumps;      // of the 2^(i + 1)-th
  std::int32_t* experts;         // a segment belongs to
  std::int32_t* begins;          // over minibatches: first segment, then num_segments
  std::int32_t* gate_up_before;  // over minibatches: tasks of all before, then of all
  std::int32_t* down_before;
};

// In shared memory behind what lasts there if they fit there, else in the block's part of the scratch.
template <typename Block>
MOE_HOST_DEVICE SegmentArrays segment_arrays(const Block& block, const ExpertSums& sums, const PlanScratch& scratch) {
  const std::int32_t pitch = sums.num_segments() + 1;
  const auto used = static_cast<std::int32_t>(plan_lasting_words(sums.experts));
  const bool fits = used + kSegmentArrays * pitch <= block.shared_words;
  std::int32_t* at = fits ? block.shared() + used : scratch.segments + block.index * scratch.segments_per_block;
  const auto array = [&](std::int32_t i) { return at + std::int64_t{i} * pitch; };
  return {array(0), array(1), array(2), array(3), array(4), array(5), array(6), array(7)};
}

// The longest chain of minibatches that is followed link by link. A link is a load from shared memory, taken to be 45
// cycles (not measured); a round of find_minibatches takes 640 (H200, 2026-12).
inline constexpr std::int32_t kMaxLinks = 64;

// Fills the arrays and returns the number of minibatches. They form a chain from segment 0 on. One thread follows it
// where it must be short: a minibatch has at least `enough` tasks, or is the only one. Otherwise as many of its members
// as are known lead to as many more, so the rounds are the logarithm of its length.
template <typename Block>
MOE_HOST_DEVICE std::int32_t find_minibatches(Block& block, const PlanShape& shape, const ExpertSums& sums,
                                              const SegmentArrays& arrays) {
  const std::int32_t segments = sums.num_segments();
  if (segments == 0) return 0;
  block.phase([&](const Thread& me) {
    me.each(segments + 1, [&](std::int32_t s) {
      const SegmentPlace place = segment_place(sums, s);
      const std::int32_t end = s < segments ? minibatch_end(sums, shape, place) : segments;
      arrays.experts[s] = place.expert;
      arrays.ends[s] = end;
      arrays.jumps[s] = end;
      arrays.order[s] = s == 0 ? 0 : -1;
    });
  });
  const bool is_short = segments <= kMaxLinks || sums.gate_up[sums.experts] / kMaxLinks < shape.enough;
  if (is_short) {
    block.phase([&](const Thread& me) {
      if (me.index != 0) return;
      std::int32_t number = 0;
      MOE_ROLLED
      for (std::int32_t s = 0; s < segments; s = arrays.ends[s]) arrays.order[s] = number++;
    });
  }
  std::int32_t* jumps = arrays.jumps;
  std::int32_t* next = arrays.next_jumps;
  for (std::int32_t known = 1; !is_short && jumps[0] < segments; known *= 2) {
    block.phase([&](const Thread& me) {
      me.each(segments + 1, [&](std::int32_t s) {
        const std::int32_t to = jumps[s];
        next[s] = jumps[to];
        // Whether another thread's order of this round is seen or not: what follows from it is right.
        const std::int32_t order = arrays.order[s];
        if (order >= 0 && to < segments) arrays.order[to] = order + known;
      });
    });
    std::int32_t* const done = jumps;
    jumps = next;
    next = done;
  }
  block.phase([&](const Thread& me) {
    me.each(segments, [&](std::int32_t s) {
      const std::int32_t q = arrays.order[s];
      if (q < 0) return;
      const std::int32_t expert = arrays.experts[s];
      const SegmentPlace place{expert, s - sums.segments[expert]};
      arrays.begins[q] = s;
      arrays.gate_up_before[q] = gate_up_before(sums, shape, place);
      arrays.down_before[q] = down_before(sums, shape, place);
      if (arrays.ends[s] < segments) return;
      arrays.begins[q + 1] = segments;
      arrays.gate_up_before[q + 1] = sums.gate_up[sums.experts];
      arrays.down_before[q + 1] = sums.down[sums.experts];
      arrays.order[segments] = q + 1;
    });
  });
  return arrays.order[segments];
}

}  // namespace moe
