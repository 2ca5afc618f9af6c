// The plan of rows.h, tiles.h and tasks.h by the blocks of a cluster, from how many routes go to each expert: same
// tables, bit for bit. Every place in a table follows from prefix sums over experts, segments or minibatches, so all
// threads of all blocks fill them in at once. Forward only. Run by forward/route.cu; see team.h.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/layout.h"
#include "moe/plan/parallel_minibatches.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/tasks.h"
#include "moe/plan/team.h"
#include "moe/plan/tiles.h"

namespace moe {

struct PlanJob {
  PlanShape shape;
  PlanScratch scratch;
  std::int32_t num_parts;  // of scratch.part_counts: their sum is what each expert gets
  // where it writes
  std::int64_t* expert_offsets;        // [L + 1]
  std::int32_t* saved_expert_offsets;  // [L + 1] or null: the same, or -1 if the step is refused
  TileTables tables;
  Task* tasks;
  PlanSizes* sizes;
  RowSource* sources;      // [R], W > 1; see parallel_rows.h
  std::int32_t* counters;  // zeroed
  std::int64_t num_counters;
  std::int32_t* tickets;  // zeroed
  std::int64_t num_tickets;
};

// Zeroes counters and tickets; in the first stage, whose memory latency hides it.
template <typename Block>
MOE_HOST_DEVICE void clear_counters(Block& block, const PlanJob& job) {
  block.phase([&](const Thread& me) {
    me.each_of_cluster(job.num_counters, [&](std::int64_t i) { job.counters[i] = 0; });
    me.each_of_cluster(job.num_tickets, [&](std::int64_t i) { job.tickets[i] = 0; });
  });
}

// Sums over experts, in every block. A refused step has no rows.
template <typename Block>
MOE_HOST_DEVICE void sum_experts(Block& block, const PlanJob& job, bool refused) {
  const PlanShape& shape = job.shape;
  const ExpertSums sums = expert_sums(block, shape);
  block.phase([&](const Thread& me) {
    me.each(sums.experts, [&](std::int32_t e) {
      std::int32_t rows = 0;
      for (std::int32_t part = 0; part < job.num_parts && !refused; ++part) {
        rows += job.scratch.part_counts[std::int64_t{part} * shape.num_experts + shape.first_expert + e];
      }
      const auto row_tile = static_cast<std::int32_t>(kRowTile);
      const std::int32_t tiles = ceil_div32(rows, row_tile);
      const std::int32_t whole = tiles / shape.segment_tiles;
      const std::int32_t rest = tiles % shape.segment_tiles;
      sums.rows[e] = rows;
      sums.tiles[e] = tiles;
      sums.segments[e] = whole + (rest > 0);
      sums.pieces[e] = rows / row_tile * (row_tile / shape.piece_rows) + ceil_div32(rows % row_tile, shape.piece_rows);
      sums.gate_up[e] = whole * shape.segment_gate_up + segment_tasks(rest, shape.act_tiles);
      sums.down[e] = whole * shape.segment_down + segment_tasks(rest, shape.hidden_tiles);
    });
  });
  block.exclusive_sums(sums.rows, sums.experts + 1, static_cast<std::int32_t>(kExpertColumns), sums.experts);
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

MOE_HOST_DEVICE inline Segment segment_at(const PlanJob& job, const PlanParts& parts, const SegmentPlace& place) {
  const ExpertSums& sums = parts.sums;
  return {place.expert, sums.tiles[place.expert] + place.index * job.shape.segment_tiles,
          segment_length(sums, job.shape, place), parts.arrays.minibatch[sums.segments[place.expert] + place.index]};
}

MOE_HOST_DEVICE inline void fill_tiles(const Thread& me, const PlanJob& job, const PlanParts& parts) {
  const ExpertSums& sums = parts.sums;
  me.each_of_cluster(sums.num_tiles(), [&](std::int32_t i) {
    const std::int32_t expert = item_at(sums.tiles, sums.experts, i);
    const std::int32_t row = sums.rows[expert] + (i - sums.tiles[expert]) * static_cast<std::int32_t>(kRowTile);
    job.tables.tiles[i] = {expert, row, min32(sums.rows[expert + 1] - row, kRowTile)};
  });
  me.each_of_cluster(sums.num_segments(),
                     [&](std::int32_t s) { job.tables.segments[s] = segment_at(job, parts, segment_place(sums, s)); });
  me.each_of_cluster(parts.minibatches,
                     [&](std::int32_t q) { job.tables.minibatch_ends[q] = parts.arrays.begins[q + 1]; });
}

// Task `index` of those that one kind has in one segment, in the order of add_minibatch: the row tiles of a segment
// take two columns together in as many tasks as there are tiles.
MOE_HOST_DEVICE inline Task segment_task(TaskKind kind, const Segment& segment, std::int32_t index) {
  const std::int32_t pairs = segment.tiles / 2;
  const std::int32_t even = segment.tiles - pairs;  // tasks of an even column: an odd last tile takes two columns
  const std::int32_t within = index % segment.tiles;
  const bool odd_column = within >= even;
  const std::int32_t i = odd_column ? within - even : within;
  const std::int32_t column = index / segment.tiles * 2 + (odd_column ? 1 : 0);
  return {kind, segment.expert, segment.tile_begin + 2 * i, column, i < pairs ? 0 : 1};
}

// The tasks of tiles, each where order_tasks puts it: behind the tasks of its kind before it, and behind those of the
// other kind's minibatches that come before its own (of down: those before q - lag, of gate_up: up to q + lag).
MOE_HOST_DEVICE inline void fill_tasks(const Thread& me, const PlanJob& job, const PlanParts& parts) {
  const PlanShape& shape = job.shape;
  const ExpertSums& sums = parts.sums;
  const std::int32_t num_gate_up = sums.gate_up[sums.experts];
  me.each_of_cluster(num_gate_up + sums.down[sums.experts], [&](std::int32_t i) {
    const bool gate_up = i < num_gate_up;
    const std::int32_t* before = gate_up ? sums.gate_up : sums.down;
    const std::int32_t per_segment = gate_up ? shape.segment_gate_up : shape.segment_down;
    const std::int32_t of_kind = gate_up ? i : i - num_gate_up;
    const std::int32_t expert = item_at(before, sums.experts, of_kind);
    const std::int32_t of_expert = of_kind - before[expert];
    const std::int32_t number = of_expert / per_segment;
    const Segment segment = segment_at(job, parts, {expert, number});
    const std::int32_t q = segment.minibatch;
    const std::int32_t shift =
        gate_up ? parts.arrays.down_before[q < shape.lag ? 0 : q - shape.lag]
                : parts.arrays.gate_up_before[min32(std::int64_t{q} + shape.lag + 1, parts.minibatches)];
    job.tasks[of_kind + shift] =
        segment_task(gate_up ? TaskKind::kGateUp : TaskKind::kDown, segment, of_expert - number * per_segment);
  });
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
                parts.refused ? 1 : 0,
                0};
}

// Builds all tables of `job`. In the stage after the one that has written part_counts.
template <typename Block>
MOE_HOST_DEVICE void build_in_parallel(Block& block, const PlanJob& job, bool refused) {
  sum_experts(block, job, refused);
  const ExpertSums sums = expert_sums(block, job.shape);
  const SegmentArrays arrays = segment_arrays(block, sums, job.scratch);
  const PlanParts parts{sums, arrays, find_minibatches(block, job.shape, sums, arrays), refused};
  block.phase([&](const Thread& me) {
    fill_experts(me, job, parts);
    fill_tiles(me, job, parts);
    // Short tables keep the first threads busy; most tasks go to the others.
    Thread from_end = me;
    from_end.cluster_index = me.cluster_count - 1 - me.cluster_index;
    fill_tasks(from_end, job, parts);
    fill_ends(me, job, parts);
  });
}

}  // namespace moe
