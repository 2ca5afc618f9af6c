// The plan of rows.h, tiles.h and tasks.h by the blocks of a cluster, from how many routes go to each expert: same
// tables, bit for bit. Every place in a table follows from prefix sums over experts, segments or minibatches, so all
// threads of all blocks fill them in at once. The forward's tasks; parallel_backward.h has the backward's. Run by
// forward/route.cu; see team.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "moe/host_device.h"
#include "moe/plan/layout.h"
#include "moe/plan/parallel_minibatches.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/tasks.h"
#include "moe/plan/team.h"
#include "moe/plan/tiles.h"

namespace moe {

// The route order of every rank of a group, in the memory that they share.
struct PeerRoutes {
  const unsigned char* const* bases;  // [W]
  std::int64_t offset;                // bytes, the same on every rank
  std::int32_t bits;                  // see route_bits

  MOE_HOST_DEVICE std::int32_t row_route(std::int32_t rank, std::int32_t position) const {
    const auto* order = reinterpret_cast<const std::int32_t*>(bases[rank] + offset);
    return rank << bits | order[position];
  }
};

struct PlanJob {
  PlanShape shape;
  PlanScratch scratch;
  std::int32_t num_parts;  // of scratch.part_counts: their sum is what each expert gets, of several ranks
  // where it writes
  std::int64_t* expert_offsets;        // [L + 1]
  std::int32_t* saved_expert_offsets;  // [L + 1] or null: the same, or -1 if the step is refused
  TileTables tables;
  Task* tasks;
  PlanSizes* sizes;
  // W > 1, see parallel_rows.h
  RowSource* sources;       // [R], or null
  std::int32_t* row_route;  // [R], or null
  PeerRoutes peer_routes;   // read for row_route
  MeetingResult* meeting;   // what the ranks have decided before, or null: the rows are known to fit
  std::int32_t* counters;   // zeroed
  std::int64_t num_counters;
  std::int32_t* tickets;  // zeroed
  std::int64_t num_tickets;
};

// Zeroes counters and tickets; early, so that other work hides the memory's latency.
MOE_HOST_DEVICE inline void clear_counters(const Thread& me, const PlanJob& job) {
  me.each_of_cluster(static_cast<std::int32_t>(job.num_counters), [&](std::int32_t i) { job.counters[i] = 0; });
  me.each_of_cluster(static_cast<std::int32_t>(job.num_tickets), [&](std::int32_t i) { job.tickets[i] = 0; });
}

// What an expert with this many rows adds to the sums; its column of rows takes `rows_before` as it is.
MOE_HOST_DEVICE inline void set_expert(const ExpertSums& sums, const PlanShape& shape, std::int32_t expert,
                                       std::int32_t rows_before, std::int32_t rows) {
  const auto row_tile = static_cast<std::int32_t>(kRowTile);
  const std::int32_t tiles = ceil_div32(rows, row_tile);
  const std::int32_t whole = tiles / shape.segment_tiles;
  const std::int32_t rest = tiles - whole * shape.segment_tiles;
  sums.rows[expert] = rows_before;
  sums.tiles[expert] = tiles;
  sums.segments[expert] = whole + (rest > 0);
  sums.pieces[expert] = rows / row_tile * (row_tile / shape.piece_rows) + ceil_div32(rows % row_tile, shape.piece_rows);
  sums.gate_up[expert] = whole * shape.segment_gate_up + segment_tasks(rest, shape.act_tiles);
  sums.down[expert] = whole * shape.segment_down + segment_tasks(rest, shape.hidden_tiles);
}

// One of the kExpertColumns columns; nothing for a number behind the last.
template <typename Warp>
MOE_HOST_DEVICE void sum_column(const Warp& warp, const ExpertSums& sums, std::int32_t column) {
  if (column < static_cast<std::int32_t>(kExpertColumns)) {
    warp.exclusive_sum(sums.rows + column * (sums.experts + 1), sums.experts);
  }
}

// Sums over experts from the counts of ranks, in every block. Of a refused step no expert has rows.
template <typename Block>
MOE_HOST_DEVICE void sum_ranks(Block& block, const PlanJob& job, bool refused) {
  const PlanShape& shape = job.shape;
  const ExpertSums sums = expert_sums(block, shape);
  block.phase([&](const Thread& me) {
    me.each(sums.experts, [&](std::int32_t e) {
      std::int32_t rows = 0;
      for (std::int32_t part = 0; part < job.num_parts && !refused; ++part) {
        rows += job.scratch.part_counts[std::int64_t{part} * shape.num_experts + shape.first_expert + e];
      }
      set_expert(sums, shape, e, rows, rows);
    });
  });
  block.warps([&](const auto& warp) { sum_column(warp, sums, warp.index); });
}

// What the functions below fill the tables from.
struct PlanParts {
  ExpertSums sums;
  SegmentArrays arrays;
  std::int32_t minibatches;
  bool refused;
};

MOE_HOST_DEVICE inline void fill_experts(const Thread& me, const PlanJob& job, const PlanParts& parts) {
  const ExpertSums& sums = parts.sums;
  me.each_of_cluster(sums.experts + 1, [&](std::int32_t e) {
    job.expert_offsets[e] = sums.rows[e];
    job.tables.expert_tiles[e] = sums.tiles[e];
    job.tables.expert_pieces[e] = sums.pieces[e];
    if (job.saved_expert_offsets != nullptr) job.saved_expert_offsets[e] = parts.refused ? -1 : sums.rows[e];
  });
}

MOE_HOST_DEVICE inline void fill_minibatches(const Thread& me, const PlanJob& job, const PlanParts& parts) {
  me.each_of_cluster(parts.minibatches,
                     [&](std::int32_t q) { job.tables.minibatch_ends[q] = parts.arrays.begins[q + 1]; });
}

// Word `i` of an array of structs that are int32 throughout: what lanes beside each other store is one piece.
template <typename Item>
MOE_HOST_DEVICE void store_word(Item* items, std::int32_t i, std::int32_t value) {
  static_assert(sizeof(Item) % sizeof(value) == 0 && alignof(Item) == alignof(std::int32_t));
#if defined(__CUDA_ARCH__)
  reinterpret_cast<std::int32_t*>(items)[i] = value;
#else
  std::memcpy(reinterpret_cast<char*>(items) + std::int64_t{i} * 4, &value, sizeof(value));
#endif
}

// The row tiles of a segment, and the segment.
template <typename Warp>
MOE_HOST_DEVICE void fill_segment(const Warp& warp, const PlanJob& job, const PlanParts& parts, std::int32_t number,
                                  const Segment& segment) {
  constexpr std::int32_t kFields = sizeof(RowTile) / sizeof(std::int32_t);
  const auto row_tile = static_cast<std::int32_t>(kRowTile);
  const ExpertSums& sums = parts.sums;
  const std::int32_t first_row =
      sums.rows[segment.expert] + (segment.tile_begin - sums.tiles[segment.expert]) * row_tile;
  const std::int32_t end_row = sums.rows[segment.expert + 1];
  MOE_ROLLED
  for (std::int32_t i = warp.lane; i < segment.tiles * kFields; i += warp.lanes) {
    const std::int32_t tile = i / kFields, field = i % kFields;
    const std::int32_t row = first_row + tile * row_tile;
    const std::int32_t rows = end_row - row < row_tile ? end_row - row : row_tile;
    store_word(job.tables.tiles + segment.tile_begin, i, field == 0 ? segment.expert : field == 1 ? row : rows);
  }
  if (warp.lane == 0) job.tables.segments[number] = segment;
}

// The tasks that one kind has in columns [begin, columns) of one segment, in the order of add_minibatch: of two columns
// together as many as there are row tiles, those of the even column first, because an odd last tile takes both. `begin`
// is even.
template <typename Warp>
MOE_HOST_DEVICE void fill_tasks(const Warp& warp, Task* tasks, TaskKind kind, std::int32_t begin, std::int32_t columns,
                                const Segment& segment) {
  constexpr std::int32_t kFields = sizeof(Task) / sizeof(std::int32_t);
  const std::int32_t pairs = segment.tiles / 2;
  const std::int32_t even = segment.tiles - pairs;
  MOE_ROLLED
  for (std::int32_t first = begin; first < columns; first += 2) {
    const std::int32_t count = first + 1 < columns ? segment.tiles : even;
    MOE_ROLLED
    for (std::int32_t i = warp.lane; i < count * kFields; i += warp.lanes) {
      const std::int32_t task = i / kFields, field = i % kFields;
      const bool odd = task >= even;
      const std::int32_t pair = odd ? task - even : task;
      std::int32_t value = field == 0 ? static_cast<std::int32_t>(kind) : segment.expert;
      if (field == 2) value = segment.tile_begin + 2 * pair;
      if (field == 3) value = first + (odd ? 1 : 0);
      if (field == 4) value = pair < pairs ? 0 : 1;
      store_word(tasks, i, value);
    }
    tasks += count;
  }
}

// How the tasks of a segment are dealt: 2^shift pairs of columns together, the fewest with which there is no more than
// one such part for every warp of the cluster; or all columns of a kind, where there are too many segments for that.
struct FillParts {
  std::int32_t shift;
  std::int32_t gate_up;  // parts of a segment
  std::int32_t down;
};

MOE_HOST_DEVICE inline FillParts fill_parts(const PlanShape& shape, std::int32_t segments, std::int32_t warps) {
  FillParts parts{0, (shape.act_tiles + 1) / 2, (shape.hidden_tiles + 1) / 2};
  MOE_ROLLED
  while (parts.gate_up + parts.down > 2 && segments * (parts.gate_up + parts.down) > warps) {
    ++parts.shift;
    parts.gate_up = (parts.gate_up + 1) / 2;
    parts.down = (parts.down + 1) / 2;
  }
  return parts;
}

// Each warp takes some parts of segments, for the tasks of one kind; with the first of gate_up also what lies behind
// fill_segment. They go where order_tasks puts them: behind the tasks of its kind before it, and behind those of the
// other kind's minibatches that come before its own (of down: those before q - lag, of gate_up: up to q + lag).
template <typename Block, typename Warp>
MOE_HOST_DEVICE void fill_segments(const Warp& warp, const Block& block, const PlanJob& job, const PlanParts& parts) {
  const PlanShape& shape = job.shape;
  const ExpertSums& sums = parts.sums;
  const std::int32_t segments = sums.num_segments();
  const std::int32_t warps = block.num_warps * block.count;
  const FillParts dealt = fill_parts(shape, segments, warps);
  MOE_ROLLED
  for (std::int32_t i = warp.index * block.count + block.index; i < segments * (dealt.gate_up + dealt.down);
       i += warps) {
    std::int32_t part = i / segments;
    const std::int32_t number = i - part * segments;
    const bool gate_up = part < dealt.gate_up;
    part -= gate_up ? 0 : dealt.gate_up;
    const std::int32_t expert = parts.arrays.experts[number];
    const SegmentPlace place{expert, number - sums.segments[expert]};
    const std::int32_t q = item_at(parts.arrays.begins, parts.minibatches, number);
    const Segment segment{expert, sums.tiles[expert] + place.index * shape.segment_tiles,
                          segment_length(sums, shape, place), q};
    if (gate_up && part == 0) fill_segment(warp, job, parts, number, segment);
    const std::int32_t before =
        gate_up ? gate_up_before(sums, shape, place) + parts.arrays.down_before[q < shape.lag ? 0 : q - shape.lag]
                : down_before(sums, shape, place) +
                      parts.arrays.gate_up_before[min32(std::int64_t{q} + shape.lag + 1, parts.minibatches)];
    const std::int32_t columns = gate_up ? shape.act_tiles : shape.hidden_tiles;
    const std::int32_t pairs = part << dealt.shift;
    fill_tasks(warp, job.tasks + before + pairs * segment.tiles, gate_up ? TaskKind::kGateUp : TaskKind::kDown,
               2 * pairs, min32(columns, 2 * (std::int64_t{pairs} + (1 << dealt.shift))), segment);
  }
}

// The tasks behind those of tiles, and the sizes.
MOE_HOST_DEVICE inline void fill_ends(const Thread& me, const PlanJob& job, const PlanParts& parts) {
  if (me.cluster_index != 0) return;
  const ExpertSums& sums = parts.sums;
  const std::int32_t tile_tasks = sums.gate_up[sums.experts] + sums.down[sums.experts];
  job.tasks[tile_tasks] = {TaskKind::kClose, 0, 0, 0, 0};
  job.tasks[tile_tasks + 1] = {TaskKind::kDrain, 0, 0, 0, 0};
  *job.sizes = {{sums.num_tiles(), sums.num_segments(), parts.minibatches},
                tile_tasks + 2,
                sums.gate_up[sums.experts],
                0,
                0,
                parts.refused ? 1 : 0,
                0};
}

// Builds all tables of `job` from the sums over experts.
template <typename Block>
MOE_HOST_DEVICE void build_in_parallel(Block& block, const PlanJob& job, bool refused) {
  const ExpertSums sums = expert_sums(block, job.shape);
  const SegmentArrays arrays = segment_arrays(block, sums, job.scratch);
  const PlanParts parts{sums, arrays, find_minibatches(block, job.shape, sums, arrays), refused};
  block.phase(
      [&](const Thread& me) {
        fill_experts(me, job, parts);
        fill_minibatches(me, job, parts);
        fill_ends(me, job, parts);
      },
      [&](const auto& warp) { fill_segments(warp, block, job, parts); });
}

}  // namespace moe
