// The static order of tasks, forward and backward. Fourth step of the plan. Owns what a ticket means: clusters claim
// compute tasks, and pulling warps claim dispatch and combine tasks, each by counting one ticket up; who gets which
// ticket cannot reach a result. Every wait of a task is for tasks earlier in this order or of another stream, so that
// one resident cluster is enough.
//
// Forward:   G0 .. Glag, D0, Glag+1, D1, ... , close, drain        (G gate_up, D down of a minibatch)
// Backward:  A0 .. Alag, B0, Alag+1, B1, ... , close, bias gradients, weight gradients, drain
//            (A down dgrad, B route_grad and gate_up dgrad)
// Backward that recomputes h:  in step s G(s), A(s - lag), B(s - 2 lag), then the same.
// The gradients of weights and biases come last: they fill the time in which rows travel home.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/problem.h"
#include "moe/plan/tiles.h"

namespace moe {

enum class TaskKind : std::int32_t {
  kGateUp = 0,       // h and a of a row tile, one act column tile (backward: h alone, recomputed)
  kDown = 1,         // o of a row tile, one hidden column tile, stored to the home ranks
  kDownDgrad = 2,    // da, s*a, dh and dS partials of a row tile, one dgrad column tile; as many of them as are needed
  kRouteGrad = 3,    // dS of a row tile: partials summed in fixed order, stored to the home ranks
  kGateUpDgrad = 4,  // dx rows of a row tile, one hidden column tile, stored to the home ranks
  kWgradDown = 5,    // one tile of dW_down of an expert
  kWgradGateUp = 6,  // one tile of dW_gate_up of an expert
  kClose = 7,        // every row for the peers has landed and every pull is complete: raise "done" to all ranks
  kDrain = 8,        // wait for "done" of all ranks
  kDispatch = 9,     // pull stream: rows of one piece of a row tile (backward: of dy, and of x)
  kCombine = 10,     // pull stream: sum the rows of some tokens
  kPlan = 11,        // publish routes, wait for every rank's, build the tables
  kBiasDown = 12,    // kBiasColumns columns of dbias_down of an expert
  kBiasGateUp = 13,  // kBiasColumns columns of dbias_gate_up of an expert
};
inline constexpr std::int64_t kNumTaskKinds = 14;
// Columns of one expert's bias gradient that one block sums over the expert's rows.
inline constexpr std::int64_t kBiasColumns = 256;

enum class Direction : std::int32_t { kForward = 0, kBackward = 1 };

// A compute task of one cluster. For tile tasks block b works on (tile + b, column) when `paired_columns` is 0 and on
// (tile, column + b) when it is 1; for weight gradients `tile` is the row tile of the weight and `expert` its expert.
// Bias gradients are `paired_columns` of tile 0.
struct Task {
  TaskKind kind;
  std::int32_t expert;
  std::int32_t tile;
  std::int32_t column;
  std::int32_t paired_columns;
};

// What one block of a cluster does in a task. A block without work still takes part in the cluster's barriers.
struct BlockWork {
  std::int64_t tile;
  std::int64_t column;
  bool valid;
};

MOE_HOST_DEVICE constexpr bool is_tile_task(TaskKind kind) {
  return kind == TaskKind::kGateUp || kind == TaskKind::kDown || kind == TaskKind::kDownDgrad ||
         kind == TaskKind::kGateUpDgrad;
}
MOE_HOST_DEVICE constexpr bool is_wgrad(TaskKind kind) {
  return kind == TaskKind::kWgradDown || kind == TaskKind::kWgradGateUp;
}
MOE_HOST_DEVICE constexpr bool is_bias_grad(TaskKind kind) {
  return kind == TaskKind::kBiasDown || kind == TaskKind::kBiasGateUp;
}

// Column tiles of a row tile (tile tasks), of the weight or of the bias (their gradients); 1 for the others.
MOE_HOST_DEVICE constexpr std::int64_t column_tiles(TaskKind kind, const Problem& p, const Tiling& t) {
  switch (kind) {
    case TaskKind::kGateUp:
      return t.act_tiles(p);
    case TaskKind::kDownDgrad:
      return t.dgrad_tiles(p);
    case TaskKind::kDown:
    case TaskKind::kGateUpDgrad:
      return t.hidden_tiles(p);
    case TaskKind::kWgradDown:
      return ceil_div(p.width, t.wgrad_columns);
    case TaskKind::kWgradGateUp:
      return ceil_div(p.hidden, t.wgrad_columns);
    case TaskKind::kBiasDown:
      return ceil_div(p.hidden, kBiasColumns);
    case TaskKind::kBiasGateUp:
      return ceil_div(p.h_columns(), kBiasColumns);
    default:
      return 1;
  }
}

// Row tiles of one expert's weight gradient.
MOE_HOST_DEVICE constexpr std::int64_t wgrad_row_tiles(TaskKind kind, const Problem& p, const Tiling& t) {
  return ceil_div(kind == TaskKind::kWgradDown ? p.hidden : p.h_columns(), t.wgrad_rows);
}

MOE_HOST_DEVICE constexpr BlockWork work_of_block(const Task& task, std::int64_t block, std::int64_t columns) {
  if (is_tile_task(task.kind) || is_wgrad(task.kind) || is_bias_grad(task.kind)) {
    if (task.paired_columns == 0) return {task.tile + block, task.column, true};
    return {task.tile, task.column + block, task.column + block < columns};
  }
  return {task.tile, task.column, block == 0};
}

// Which gradients the backward computes; frozen tensors drop their tasks.
struct GradNeeds {
  bool x;
  bool topk_weights;
  bool w_gate_up;
  bool w_down;
  bool bias_gate_up;
  bool bias_down;
  bool recompute;  // no gradient: the forward has not saved h

  MOE_HOST_DEVICE constexpr bool dh() const { return x || w_gate_up || bias_gate_up; }
  MOE_HOST_DEVICE constexpr bool da() const { return dh() || topk_weights; }
  // Whether there are down dgrads. Without da they multiply nothing, and only make s*a from h.
  MOE_HOST_DEVICE constexpr bool act() const { return da() || w_down; }
  MOE_HOST_DEVICE constexpr bool recomputes() const { return recompute && act(); }
  MOE_HOST_DEVICE constexpr bool pulls_x() const { return w_gate_up || recomputes(); }
  MOE_HOST_DEVICE constexpr bool pulls_dy() const { return act() || bias_down; }
};

// The fields as bits, the first in bit 0.
inline constexpr std::int64_t kNumGradNeeds = 7;
MOE_HOST_DEVICE constexpr GradNeeds needs_of_mask(std::int64_t mask) {
  const auto bit = [&](int i) { return (mask >> i & 1) != 0; };
  return {bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bit(6)};
}
MOE_HOST_DEVICE constexpr std::int64_t mask_of_needs(const GradNeeds& needs) {
  const bool bits[] = {needs.x,         needs.topk_weights, needs.w_gate_up, needs.w_down, needs.bias_gate_up,
                       needs.bias_down, needs.recompute};
  std::int64_t mask = 0;
  for (int i = 0; i < static_cast<int>(kNumGradNeeds); ++i) mask |= std::int64_t{bits[i] ? 1 : 0} << i;
  return mask;
}

// Appends tasks to a table, or only counts them where the table is null.
struct TaskList {
  Task* tasks;
  std::int64_t size;

  MOE_HOST_DEVICE void add(TaskKind kind, std::int64_t expert, std::int64_t tile, std::int64_t column, bool paired) {
    if (tasks != nullptr) {
      tasks[size] = {kind, static_cast<std::int32_t>(expert), static_cast<std::int32_t>(tile),
                     static_cast<std::int32_t>(column), paired ? 1 : 0};
    }
    ++size;
  }
};

// The tasks of one kind over a segment of row tiles: column after column, all row tiles for one column, so that
// clusters beside each other share the weight tile.
MOE_HOST_DEVICE inline void add_segment(TaskKind kind, std::int64_t expert, std::int64_t tile_begin, std::int64_t tiles,
                                        std::int64_t columns, TaskList& list) {
  const std::int64_t even = tiles / 2 * 2;
  for (std::int64_t column = 0; column < columns; ++column) {
    for (std::int64_t i = 0; i < even; i += 2) list.add(kind, expert, tile_begin + i, column, false);
    if (even < tiles && column % 2 == 0) list.add(kind, expert, tile_begin + even, column, true);
  }
}

// The tile tasks of one kind over one minibatch, segment after segment.
MOE_HOST_DEVICE inline void add_minibatch(TaskKind kind, const Problem& p, const Tiling& t, const TileTables& tables,
                                          std::int64_t minibatch, TaskList& list) {
  const std::int64_t begin = minibatch == 0 ? 0 : tables.minibatch_ends[minibatch - 1];
  for (std::int64_t s = begin; s < tables.minibatch_ends[minibatch]; ++s) {
    const Segment& segment = tables.segments[s];
    add_segment(kind, segment.expert, segment.tile_begin, segment.tiles, column_tiles(kind, p, t), list);
  }
}

// dS of every row tile of a minibatch: one task a tile, of which one block does the work.
MOE_HOST_DEVICE inline void add_route_grads(const TileTables& tables, std::int64_t minibatch, TaskList& list) {
  const std::int64_t begin = minibatch == 0 ? 0 : tables.minibatch_ends[minibatch - 1];
  for (std::int64_t s = begin; s < tables.minibatch_ends[minibatch]; ++s) {
    const Segment& segment = tables.segments[s];
    for (std::int64_t i = 0; i < segment.tiles; ++i) {
      list.add(TaskKind::kRouteGrad, segment.expert, segment.tile_begin + i, 0, false);
    }
  }
}

// All tiles of one weight gradient, in segments as the tile tasks: the tiles worked on at one time read few rows and
// few columns. Experts without rows are here too: their tiles are stored as zeros.
MOE_HOST_DEVICE inline void add_wgrad(TaskKind kind, const Problem& p, const Tiling& t, const Schedule& s,
                                      TaskList& list) {
  const std::int64_t rows = wgrad_row_tiles(kind, p, t);
  const std::int64_t columns = column_tiles(kind, p, t);
  for (std::int64_t e = 0; e < p.local_experts(); ++e) {
    for (std::int64_t begin = 0; begin < rows; begin += s.wgrad_tiles) {
      const std::int64_t left = rows - begin;
      add_segment(kind, e, begin, left < s.wgrad_tiles ? left : s.wgrad_tiles, columns, list);
    }
  }
}

// All columns of one bias gradient, two at a time. Experts without rows are here too, as in add_wgrad.
MOE_HOST_DEVICE inline void add_bias_grad(TaskKind kind, const Problem& p, const Tiling& t, TaskList& list) {
  const std::int64_t columns = column_tiles(kind, p, t);
  for (std::int64_t e = 0; e < p.local_experts(); ++e) {
    for (std::int64_t column = 0; column < columns; column += 2) list.add(kind, e, 0, column, true);
  }
}

// The minibatches of the tile tasks, each stage `lag` steps behind the one before.
MOE_HOST_DEVICE inline void add_forward(const Problem& p, const Tiling& t, const TileTables& tables,
                                        std::int64_t minibatches, std::int64_t lag, TaskList& list) {
  for (std::int64_t step = 0; step < minibatches + lag; ++step) {
    if (step < minibatches) add_minibatch(TaskKind::kGateUp, p, t, tables, step, list);
    if (step >= lag) add_minibatch(TaskKind::kDown, p, t, tables, step - lag, list);
  }
}
MOE_HOST_DEVICE inline void add_backward(const Problem& p, const Tiling& t, const GradNeeds& needs,
                                         const TileTables& tables, std::int64_t minibatches, std::int64_t lag,
                                         TaskList& list) {
  const std::int64_t dgrad_lag = needs.recomputes() ? lag : 0;
  for (std::int64_t step = 0; step < minibatches + dgrad_lag + lag; ++step) {
    if (needs.recomputes() && step < minibatches) add_minibatch(TaskKind::kGateUp, p, t, tables, step, list);
    const std::int64_t dgrad = step - dgrad_lag;
    if (needs.act() && dgrad >= 0 && dgrad < minibatches) {
      add_minibatch(TaskKind::kDownDgrad, p, t, tables, dgrad, list);
    }
    const std::int64_t last = dgrad - lag;
    if (last < 0) continue;
    if (needs.topk_weights) add_route_grads(tables, last, list);
    if (needs.x) add_minibatch(TaskKind::kGateUpDgrad, p, t, tables, last, list);
  }
}

// Writes the compute stream of one direction and returns its length. `needs` is read in backward only. With out ==
// nullptr it counts.
MOE_HOST_DEVICE inline std::int64_t order_tasks(Direction direction, const Problem& p, const Tiling& t,
                                                const Schedule& s, const GradNeeds& needs, const TileTables& tables,
                                                const TileCounts& n, Task* out) {
  TaskList list{out, 0};
  const bool forward = direction == Direction::kForward;
  const std::int64_t lag = s.separate_stages != 0 ? n.minibatches : s.lag;
  if (forward) add_forward(p, t, tables, n.minibatches, lag, list);
  if (!forward) add_backward(p, t, needs, tables, n.minibatches, lag, list);
  list.add(TaskKind::kClose, 0, 0, 0, false);
  if (!forward && needs.bias_down) add_bias_grad(TaskKind::kBiasDown, p, t, list);
  if (!forward && needs.bias_gate_up) add_bias_grad(TaskKind::kBiasGateUp, p, t, list);
  if (!forward && needs.w_down) add_wgrad(TaskKind::kWgradDown, p, t, s, list);
  if (!forward && needs.w_gate_up) add_wgrad(TaskKind::kWgradGateUp, p, t, s, list);
  list.add(TaskKind::kDrain, 0, 0, 0, false);
  return list.size;
}

// The most tasks that any routing can give, for sizing the table.
MOE_HOST_DEVICE constexpr std::int64_t max_tasks(Direction direction, const Problem& p, const Tiling& t) {
  const std::int64_t tiles = p.max_row_tiles();
  const std::int64_t act = t.act_tiles(p);
  const std::int64_t hidden = t.hidden_tiles(p);
  if (direction == Direction::kForward) return tiles * (act + hidden) + 2;
  const auto gradient = [&](TaskKind weight, TaskKind bias) {
    return wgrad_row_tiles(weight, p, t) * column_tiles(weight, p, t) + column_tiles(bias, p, t);
  };
  const std::int64_t down = gradient(TaskKind::kWgradDown, TaskKind::kBiasDown);
  const std::int64_t up = gradient(TaskKind::kWgradGateUp, TaskKind::kBiasGateUp);
  return tiles * (act + t.dgrad_tiles(p) + hidden + 1) + p.local_experts() * (down + up) + 2;
}

// -- the pull stream --------------------------------------------------------------------------------------------------

// Tickets of the pull stream: first the pieces, tile after tile, then the combine. Backward: all pieces of dy, then
// those of x, which only the last weight gradient needs; or, where h is recomputed, x and then dy tile by tile.
struct PullTicket {
  TaskKind kind;        // kDispatch or kCombine
  std::int32_t source;  // dispatch: 0 the op's rows (x forward, dy backward), 1 x in backward
  std::int64_t tile;    // dispatch: row tile; combine: index of the token block
  std::int64_t piece;
};

// Who needs x in backward needs dy as well.
MOE_HOST_DEVICE constexpr std::int64_t pull_sources(Direction direction, const GradNeeds& needs) {
  if (direction == Direction::kForward) return 1;
  return (needs.pulls_dy() ? 1 : 0) + (needs.pulls_x() ? 1 : 0);
}

MOE_HOST_DEVICE constexpr std::int64_t combine_tasks(Direction direction, const GradNeeds& needs, std::int64_t tokens,
                                                     const Tiling& t) {
  const bool any = direction == Direction::kForward || needs.x || needs.topk_weights;
  return any ? ceil_div(tokens, t.combine_tokens) : 0;
}

MOE_HOST_DEVICE constexpr PullTicket forward_pull_ticket(std::int64_t ticket, std::int64_t tiles, const Tiling& t) {
  const std::int64_t pieces = pieces_of_tile(t);
  if (ticket >= tiles * pieces) return {TaskKind::kCombine, 0, ticket - tiles * pieces, 0};
  return {TaskKind::kDispatch, 0, ticket / pieces, ticket % pieces};
}

MOE_HOST_DEVICE constexpr PullTicket pull_ticket(std::int64_t ticket, std::int64_t tiles, Direction direction,
                                                 const GradNeeds& needs, const Tiling& t) {
  if (direction == Direction::kForward) return forward_pull_ticket(ticket, tiles, t);
  const std::int64_t pieces = pieces_of_tile(t);
  const std::int64_t dispatches = pull_sources(direction, needs) * tiles * pieces;
  if (ticket >= dispatches) return {TaskKind::kCombine, 0, ticket - dispatches, 0};
  if (needs.recomputes()) {
    const std::int64_t within = ticket % (2 * pieces);
    return {TaskKind::kDispatch, within < pieces ? 1 : 0, ticket / (2 * pieces), within % pieces};
  }
  const std::int64_t within = ticket % (tiles * pieces);
  return {TaskKind::kDispatch, static_cast<std::int32_t>(ticket / (tiles * pieces)), within / pieces, within % pieces};
}

}  // namespace moe
