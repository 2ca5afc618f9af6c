// The backward's plan by the blocks of a cluster, from the expert offsets that the forward has saved: the tables of
// order_tasks, bit for bit. What is not of the backward alone is in parallel_plan.h. Run by backward/plan.cu; see
// team.h.
//
// The tile tasks are three stages of minibatches that follow each other with a delay: h recomputed, the down dgrads,
// and last dS with the gate_up dgrads. A task stands behind all that is before it in its own stage, behind the
// minibatches of earlier stages up to those of its own step, and behind the minibatches of later stages before that
// step.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/parallel_minibatches.h"
#include "moe/plan/parallel_plan.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/tasks.h"
#include "moe/plan/team.h"
#include "moe/plan/tiles.h"

namespace moe {

// The gradient tasks of one kind: of every expert a matrix of tiles.
struct GradTasks {
  TaskKind kind;
  std::int32_t rows;     // tiles; 1 for a bias
  std::int32_t columns;  // tiles; 0 if nobody needs the gradient
};
inline constexpr std::int32_t kGradTasks = 4;

// Tasks of one expert's gradient, in segments of at most `segment_tiles` row tiles.
MOE_HOST_DEVICE constexpr std::int32_t gradient_tasks(const GradTasks& tasks, std::int32_t segment_tiles) {
  const std::int32_t whole = tasks.rows / segment_tiles;
  return whole * segment_tasks(segment_tiles, tasks.columns) +
         segment_tasks(tasks.rows - whole * segment_tiles, tasks.columns);
}

struct BackwardShape {
  GradNeeds needs;
  std::int32_t dgrad_tiles;
  std::int32_t segment_dgrad;       // down dgrads of a whole segment
  std::int32_t segment_rows;        // row tiles of a segment of a gradient, at most
  GradTasks gradients[kGradTasks];  // in their order
};

MOE_HOST_DEVICE constexpr BackwardShape backward_shape(const Problem& p, const Tiling& t, const Schedule& s,
                                                       const GradNeeds& needs) {
  const auto bias = [&](TaskKind kind, bool needed) {
    return GradTasks{kind, 1, needed ? static_cast<std::int32_t>(column_tiles(kind, p, t)) : 0};
  };
  const auto weight = [&](TaskKind kind, bool needed) {
    return GradTasks{kind, static_cast<std::int32_t>(wgrad_row_tiles(kind, p, t)),
                     needed ? static_cast<std::int32_t>(column_tiles(kind, p, t)) : 0};
  };
  const std::int64_t segment_tiles = plan_shape(p, t, s).segment_tiles;
  return {needs,
          static_cast<std::int32_t>(t.dgrad_tiles(p)),
          static_cast<std::int32_t>(tasks_of_segment(segment_tiles, t.dgrad_tiles(p))),
          static_cast<std::int32_t>(s.wgrad_tiles),
          {bias(TaskKind::kBiasDown, needs.bias_down), bias(TaskKind::kBiasGateUp, needs.bias_gate_up),
           weight(TaskKind::kWgradDown, needs.w_down), weight(TaskKind::kWgradGateUp, needs.w_gate_up)}};
}

// sources and saved_expert_offsets of the plan are null: the forward has written them.
struct BackwardJob {
  PlanJob plan;
  BackwardShape shape;
};

// Prefix sums over experts: one more column than the forward's, where that keeps what blocks read from each other.
struct BackwardSums {
  ExpertSums all;
  std::int32_t* dgrad;  // down dgrads
};

template <typename Block>
MOE_HOST_DEVICE BackwardSums backward_sums(const Block& block, const PlanShape& shape) {
  return {expert_sums(block, shape), block.shared() + kExpertColumns * (shape.local_experts + 1)};
}

// Sums over experts from their offsets, in every block. Of a refused step no expert has rows.
template <typename Block>
MOE_HOST_DEVICE void sum_offsets(Block& block, const BackwardJob& job, const BackwardSums& sums,
                                 const std::int32_t* offsets, bool refused) {
  const PlanShape& shape = job.plan.shape;
  const std::int32_t experts = sums.all.experts;
  block.phase([&](const Thread& me) {
    clear_counters(me, job.plan);
    me.each(experts + 1, [&](std::int32_t e) {
      const std::int32_t begin = refused ? 0 : offsets[e];
      const std::int32_t end = refused || e == experts ? begin : offsets[e + 1];
      set_expert(sums.all, shape, e, begin, end - begin);
      const std::int32_t tiles = sums.all.tiles[e];
      const std::int32_t whole = tiles / shape.segment_tiles;
      const std::int32_t rest = tiles - whole * shape.segment_tiles;
      sums.dgrad[e] = whole * job.shape.segment_dgrad + segment_tasks(rest, job.shape.dgrad_tiles);
    });
  });
  block.warps([&](const auto& warp) {
    const std::int32_t column = warp.index + 1;  // rows are sums already
    if (column <= static_cast<std::int32_t>(kExpertColumns)) {
      warp.exclusive_sum(sums.all.rows + column * (experts + 1), experts);
    }
  });
}

// What the functions below fill the tables from. Over minibatches [n + 1]: tasks, or tiles, of all before, then of all.
struct BackwardParts {
  PlanParts plan;
  BackwardSums sums;
  std::int32_t* dgrad_before;
  std::int32_t* tiles_before;
};

// Arrays that find_minibatches is through with take the two that the forward has no use for.
template <typename Block>
MOE_HOST_DEVICE BackwardParts find_backward(Block& block, const BackwardJob& job, const BackwardSums& sums,
                                            bool refused) {
  const PlanShape& shape = job.plan.shape;
  const SegmentArrays arrays = segment_arrays(block, sums.all, job.plan.scratch);
  const std::int32_t minibatches = find_minibatches(block, shape, sums.all, arrays);
  const BackwardParts parts{{sums.all, arrays, minibatches, refused}, sums, arrays.jumps, arrays.next_jumps};
  block.phase([&](const Thread& me) {
    if (minibatches == 0) return;
    me.each(minibatches + 1, [&](std::int32_t q) {
      const std::int32_t first = arrays.begins[q];
      const std::int32_t expert = arrays.experts[first];
      const std::int32_t index = first - sums.all.segments[expert];
      parts.dgrad_before[q] = sums.dgrad[expert] + index * job.shape.segment_dgrad;
      parts.tiles_before[q] = sums.all.tiles[expert] + index * shape.segment_tiles;
    });
  });
  return parts;
}

inline constexpr std::int32_t kStages = 3;  // h recomputed; down dgrads; dS and gate_up dgrads

// How many tasks each stage has, and where they stand.
struct StageOrder {
  const BackwardParts& parts;
  const GradNeeds& needs;
  std::int32_t dgrad_delay;  // in minibatches, behind the first stage
  std::int32_t last_delay;

  MOE_HOST_DEVICE StageOrder(const BackwardJob& job, const BackwardParts& of)
      : parts(of),
        needs(job.shape.needs),
        dgrad_delay(needs.recomputes() ? job.plan.shape.lag : 0),
        last_delay(dgrad_delay + job.plan.shape.lag) {}

  MOE_HOST_DEVICE std::int32_t delay(std::int32_t stage) const {
    return stage == 0 ? 0 : stage == 1 ? dgrad_delay : last_delay;
  }

  // Tasks of a stage that belong to minibatches before q.
  MOE_HOST_DEVICE std::int32_t before(std::int32_t stage, std::int32_t q) const {
    if (stage == 0) return needs.recomputes() ? parts.plan.arrays.gate_up_before[q] : 0;
    if (stage == 1) return needs.act() ? parts.dgrad_before[q] : 0;
    return (needs.topk_weights ? parts.tiles_before[q] : 0) + (needs.x ? parts.plan.arrays.down_before[q] : 0);
  }
  // Tasks of the other stages that stand before those of this stage's minibatch q.
  MOE_HOST_DEVICE std::int32_t others(std::int32_t stage, std::int32_t q) const {
    std::int32_t tasks = 0;
    MOE_ROLLED
    for (std::int32_t other = 0; other < kStages; ++other) {
      if (other == stage) continue;
      const std::int32_t at = q + delay(stage) - delay(other) + (other < stage ? 1 : 0);
      tasks += before(other, at < 0 ? 0 : min32(at, parts.plan.minibatches));
    }
    return tasks;
  }
  // All tasks of a stage.
  MOE_HOST_DEVICE std::int32_t total(std::int32_t stage) const {
    const ExpertSums& sums = parts.sums.all;
    if (stage == 0) return needs.recomputes() ? sums.gate_up[sums.experts] : 0;
    if (stage == 1) return needs.act() ? parts.sums.dgrad[sums.experts] : 0;
    return (needs.topk_weights ? sums.num_tiles() : 0) + (needs.x ? sums.down[sums.experts] : 0);
  }
  MOE_HOST_DEVICE std::int32_t tile_tasks() const { return total(0) + total(1) + total(2); }
};

// dS of every row tile of a segment.
template <typename Warp>
MOE_HOST_DEVICE void fill_route_grads(const Warp& warp, Task* tasks, const Segment& segment) {
  constexpr std::int32_t kFields = sizeof(Task) / sizeof(std::int32_t);
  MOE_ROLLED
  for (std::int32_t i = warp.lane; i < segment.tiles * kFields; i += warp.lanes) {
    const std::int32_t tile = i / kFields, field = i % kFields;
    std::int32_t value = field == 0 ? static_cast<std::int32_t>(TaskKind::kRouteGrad) : 0;
    if (field == 1) value = segment.expert;
    if (field == 2) value = segment.tile_begin + tile;
    store_word(tasks, i, value);
  }
}

// A segment by its number.
MOE_HOST_DEVICE inline Segment segment_of(const PlanShape& shape, const PlanParts& parts, std::int32_t number) {
  const ExpertSums& sums = parts.sums;
  const std::int32_t expert = parts.arrays.experts[number];
  const SegmentPlace place{expert, number - sums.segments[expert]};
  return {expert, sums.tiles[expert] + place.index * shape.segment_tiles, segment_length(sums, shape, place),
          item_at(parts.arrays.begins, parts.minibatches, number)};
}

// Segments, their row tiles and dS, each by one warp.
template <typename Block, typename Warp>
MOE_HOST_DEVICE void fill_backward_segments(const Warp& warp, const Block& block, const BackwardJob& job,
                                            const BackwardParts& parts, const StageOrder& order) {
  MOE_ROLLED
  for (std::int32_t number = warp.index * block.count + block.index; number < parts.sums.all.num_segments();
       number += block.num_warps * block.count) {
    const Segment segment = segment_of(job.plan.shape, parts.plan, number);
    fill_segment(warp, job.plan, parts.plan, number, segment);
    if (!order.needs.topk_weights) continue;
    const std::int32_t q = segment.minibatch;
    const std::int32_t dgrads = order.needs.x ? parts.plan.arrays.down_before[q] : 0;
    fill_route_grads(warp, job.plan.tasks + order.others(2, q) + dgrads + segment.tile_begin, segment);
  }
}

// The tasks of one stage's kind over a segment, of a kind that nobody needs none.
struct StageTasks {
  TaskKind kind;
  std::int32_t columns;
};

MOE_HOST_DEVICE inline StageTasks stage_tasks(const BackwardJob& job, std::int32_t stage) {
  const PlanShape& shape = job.plan.shape;
  const GradNeeds& needs = job.shape.needs;
  if (stage == 0) return {TaskKind::kGateUp, needs.recomputes() ? shape.act_tiles : 0};
  if (stage == 1) return {TaskKind::kDownDgrad, needs.act() ? job.shape.dgrad_tiles : 0};
  return {TaskKind::kGateUpDgrad, needs.x ? shape.hidden_tiles : 0};
}

// Where the tasks of a stage over a segment begin.
MOE_HOST_DEVICE inline std::int32_t stage_begin(const BackwardJob& job, const BackwardParts& parts,
                                                const StageOrder& order, std::int32_t stage, const Segment& segment) {
  const PlanShape& shape = job.plan.shape;
  const ExpertSums& sums = parts.sums.all;
  const SegmentPlace place{segment.expert, (segment.tile_begin - sums.tiles[segment.expert]) / shape.segment_tiles};
  const std::int32_t others = order.others(stage, segment.minibatch);
  if (stage == 0) return others + gate_up_before(sums, shape, place);
  if (stage == 1) return others + parts.sums.dgrad[place.expert] + place.index * job.shape.segment_dgrad;
  const std::int32_t route_grads = order.needs.topk_weights ? parts.tiles_before[segment.minibatch + 1] : 0;
  return others + route_grads + down_before(sums, shape, place);
}

// Each warp takes pairs of columns of segments: 2^shift of them, the fewest with which there is no more than one such
// part for every warp of the cluster, or all columns of a kind.
template <typename Block, typename Warp>
MOE_HOST_DEVICE void fill_stages(const Warp& warp, const Block& block, const BackwardJob& job,
                                 const BackwardParts& parts, const StageOrder& order) {
  const std::int32_t segments = parts.sums.all.num_segments();
  const std::int32_t warps = block.num_warps * block.count;
  MOE_ROLLED
  for (std::int32_t stage = 0; stage < kStages; ++stage) {
    const StageTasks tasks = stage_tasks(job, stage);
    std::int32_t shift = 0;
    std::int32_t dealt = (tasks.columns + 1) / 2;
    MOE_ROLLED
    for (; dealt > 1 && std::int64_t{segments} * dealt > warps; ++shift) dealt = (dealt + 1) / 2;
    MOE_ROLLED
    for (std::int32_t i = warp.index * block.count + block.index; i < segments * dealt; i += warps) {
      const std::int32_t part = i / segments;
      const Segment segment = segment_of(job.plan.shape, parts.plan, i - part * segments);
      const std::int32_t pairs = part << shift;
      fill_tasks(warp,
                 job.plan.tasks + stage_begin(job, parts, order, stage, segment) + std::int64_t{pairs} * segment.tiles,
                 tasks.kind, 2 * pairs, min32(tasks.columns, 2 * (std::int64_t{pairs} + (1 << shift))), segment);
    }
  }
}

// The gradients' tasks from ticket `first` on: of every expert, with rows or without, a pair of columns of a segment
// for each warp.
template <typename Block, typename Warp>
MOE_HOST_DEVICE void fill_gradients(const Warp& warp, const Block& block, const BackwardJob& job, std::int32_t first) {
  const std::int32_t experts = job.plan.shape.local_experts;
  const std::int32_t most = job.shape.segment_rows;
  MOE_ROLLED
  for (std::int32_t g = 0; g < kGradTasks; ++g) {
    const GradTasks& tasks = job.shape.gradients[g];
    const std::int32_t pairs = (tasks.columns + 1) / 2;
    const std::int32_t of_expert = gradient_tasks(tasks, most);
    const std::int32_t parts = (tasks.rows + most - 1) / most * pairs;
    MOE_ROLLED
    for (std::int32_t i = warp.index * block.count + block.index; i < experts * parts;
         i += block.num_warps * block.count) {
      const std::int32_t expert = i / parts, part = i - expert * parts;
      const std::int32_t begin = part / pairs * most, pair = part % pairs;
      const std::int32_t rows = min32(most, tasks.rows - begin);
      fill_tasks(warp,
                 job.plan.tasks + first + std::int64_t{expert} * of_expert +
                     std::int64_t{begin / most} * segment_tasks(most, tasks.columns) + std::int64_t{pair} * rows,
                 tasks.kind, 2 * pair, min32(tasks.columns, 2 * std::int64_t{pair} + 2), {expert, begin, rows, 0});
    }
    first += experts * of_expert;
  }
}

// The two tasks that are there once, and the sizes.
MOE_HOST_DEVICE inline void fill_backward_ends(const Thread& me, const BackwardJob& job, const BackwardParts& parts,
                                               const StageOrder& order) {
  if (me.cluster_index != 0) return;
  const ExpertSums& sums = parts.sums.all;
  const std::int32_t close = order.tile_tasks();
  std::int32_t drain = close + 1;
  for (const GradTasks& tasks : job.shape.gradients)
    drain += sums.experts * gradient_tasks(tasks, job.shape.segment_rows);
  job.plan.tasks[close] = {TaskKind::kClose, 0, 0, 0, 0};
  job.plan.tasks[drain] = {TaskKind::kDrain, 0, 0, 0, 0};
  PlanSizes sizes{};
  sizes.counts = {sums.num_tiles(), sums.num_segments(), parts.plan.minibatches};
  sizes.num_tasks = drain + 1;
  sizes.num_gate_up = order.total(0);
  sizes.num_down_dgrad = order.total(1);
  sizes.num_gate_up_dgrad = order.total(2);
  sizes.refused = parts.plan.refused ? 1 : 0;
  *job.plan.sizes = sizes;
}

// Plans a backward from the expert offsets [L + 1] that the forward has saved: all of them -1 if it has refused the
// step, as the meeting of a group may also do. Then there are no tiles and no tile tasks, but the gradients of weights
// and biases, which become NaN.
template <typename Cluster>
MOE_HOST_DEVICE void plan_saved_offsets(Cluster& cluster, const std::int32_t* offsets, const BackwardJob& job) {
  cluster.stage([&](auto& block) {
    const MeetingResult* meeting = job.plan.meeting;
    const bool refused = offsets[0] < 0 || (meeting != nullptr && meeting->refused != 0);
    const BackwardSums sums = backward_sums(block, job.plan.shape);
    sum_offsets(block, job, sums, offsets, refused);
    const BackwardParts parts = find_backward(block, job, sums, refused);
    const StageOrder order(job, parts);
    block.phase(
        [&](const Thread& me) {
          fill_experts(me, job.plan, parts.plan);
          fill_minibatches(me, job.plan, parts.plan);
          fill_backward_ends(me, job, parts, order);
        },
        [&](const auto& warp) {
          fill_backward_segments(warp, block, job, parts, order);
          fill_stages(warp, block, job, parts, order);
          fill_gradients(warp, block, job, order.tile_tasks() + 1);
        });
  });
}

}  // namespace moe
