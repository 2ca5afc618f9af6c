// Which counters a task awaits and raises, with indices and targets. Fifth step of the plan: device roles, the checker
// of logs and the explorer all walk tasks through these functions, so that the protocol is written down once. A change
// of protocol is a change here and in edges.h.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/edges.h"
#include "moe/plan/problem.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

// One launch's plan, as views of its tables.
struct Plan {
  Problem problem;
  Tiling tiling;
  Schedule schedule;
  Direction direction;
  GradNeeds needs;  // backward only
  TileTables tables;
  TileCounts counts;
  const Task* tasks;  // the compute stream
  std::int64_t num_tasks;
  std::int64_t tokens;      // T of this rank
  std::int64_t generation;  // of this launch; flags carry it

  MOE_HOST_DEVICE std::int64_t pull_sources() const { return moe::pull_sources(direction, needs); }
  MOE_HOST_DEVICE std::int64_t num_pieces() const { return pull_sources() * counts.tiles * pieces_of_tile(tiling); }
  MOE_HOST_DEVICE std::int64_t num_pull_tickets() const {
    return num_pieces() + combine_tasks(direction, needs, tokens, tiling);
  }
  MOE_HOST_DEVICE PullTicket pull_task(std::int64_t ticket) const {
    return pull_ticket(ticket, counts.tiles, direction, needs, tiling);
  }
  MOE_HOST_DEVICE std::int64_t columns(TaskKind kind) const { return column_tiles(kind, problem, tiling); }
  MOE_HOST_DEVICE BlockWork work(const Task& task, std::int64_t block) const {
    return work_of_block(task, block, columns(task.kind));
  }
};

// What the role sees: `index` into the counter's array, `target` the value from which it may go on.
struct Wait {
  Counter counter;
  std::int64_t index;
  std::int64_t target;
};

// Adds `amount` to element `index` of a counter; sets element `index` of a flag to `amount`, the generation.
struct Raise {
  Counter counter;
  std::int64_t index;
  std::int64_t amount;
};

template <typename Item, int kCapacity>
struct SmallList {
  Item items[kCapacity];
  std::int64_t size = 0;

  MOE_HOST_DEVICE void add(const Item& item) { items[size++] = item; }
};
using Waits = SmallList<Wait, 4>;
using Raises = SmallList<Raise, 4>;

MOE_HOST_DEVICE inline std::int64_t expert_tiles(const Plan& plan, std::int64_t expert) {
  return plan.tables.expert_tiles[expert + 1] - plan.tables.expert_tiles[expert];
}
MOE_HOST_DEVICE inline std::int64_t expert_pieces(const Plan& plan, std::int64_t expert) {
  return plan.tables.expert_pieces[expert + 1] - plan.tables.expert_pieces[expert];
}

// Raises of kPulled in this launch: every filled piece of every source.
MOE_HOST_DEVICE inline std::int64_t total_pieces(const Plan& plan) {
  return plan.tables.expert_pieces[plan.problem.local_experts()] * plan.pull_sources();
}

// Raises of kStored in this launch: every column tile of rows that go home, and every tile's dS.
MOE_HOST_DEVICE inline std::int64_t total_stored(const Plan& plan) {
  const std::int64_t tiles = plan.counts.tiles;
  if (plan.direction == Direction::kForward) return tiles * plan.columns(TaskKind::kDown);
  return (plan.needs.x ? tiles * plan.columns(TaskKind::kGateUpDgrad) : 0) + (plan.needs.topk_weights ? tiles : 0);
}

// -- compute stream ---------------------------------------------------------------------------------------------------

// Waits of one role for one block's part of a task, to be made in this order. Every role waits for the plan first,
// once: see start_wait. A kernel of one direction calls that direction's functions, so that it has no code of the
// other.
MOE_HOST_DEVICE inline Waits close_waits(const Plan& plan, const BlockWork& work, Role role) {
  Waits waits;
  if (role == Role::kCompute && work.valid) {
    waits.add({Counter::kStored, 0, total_stored(plan)});
    waits.add({Counter::kPulled, 0, total_pieces(plan)});
  }
  return waits;
}

MOE_HOST_DEVICE inline Waits forward_waits(const Plan& plan, const Task& task, std::int64_t block, Role role) {
  Waits waits;
  const BlockWork work = plan.work(task, block);
  const bool load = role == Role::kLoad;
  switch (task.kind) {
    case TaskKind::kGateUp:
      // Both blocks load parts of a shared row tile, so a block without a column of its own waits as well.
      if (load) waits.add({Counter::kXReady, work.tile, filled_pieces(plan.tables.tiles[work.tile], plan.tiling)});
      if (role == Role::kCompute && work.valid && work.tile >= plan.schedule.a_slots) {
        waits.add({Counter::kARead, work.tile - plan.schedule.a_slots, plan.columns(TaskKind::kDown)});
      }
      return waits;
    case TaskKind::kDown:
      if (load) waits.add({Counter::kAReady, work.tile, plan.columns(TaskKind::kGateUp)});
      return waits;
    case TaskKind::kClose:
      return close_waits(plan, work, role);
    default:
      return waits;
  }
}

// Every dgrad tile of an expert's rows.
MOE_HOST_DEVICE inline Wait expert_dh_wait(const Plan& plan, std::int64_t expert) {
  return {Counter::kExpertDh, expert, expert_tiles(plan, expert) * plan.columns(TaskKind::kDownDgrad)};
}

MOE_HOST_DEVICE inline Waits backward_waits(const Plan& plan, const Task& task, std::int64_t block, Role role) {
  Waits waits;
  const BlockWork work = plan.work(task, block);
  const bool load = role == Role::kLoad;
  const bool compute = role == Role::kCompute && work.valid;
  switch (task.kind) {
    case TaskKind::kGateUp:
      // No rings: x and h have buffers as large as all row tiles.
      if (load) waits.add({Counter::kXReady, work.tile, filled_pieces(plan.tables.tiles[work.tile], plan.tiling)});
      break;
    case TaskKind::kDownDgrad:
      // Without da nothing is loaded. The weights s of the rows are in the row table, behind kPlanReady.
      if (load && plan.needs.da()) {
        waits.add({Counter::kDyReady, work.tile, filled_pieces(plan.tables.tiles[work.tile], plan.tiling)});
      }
      // Recomputed h lies where dh will: a tile of dh overwrites the columns of h that it has read, and no others.
      if (compute && plan.needs.recomputes()) {
        waits.add({Counter::kAReady, work.tile, plan.columns(TaskKind::kGateUp)});
      }
      break;
    case TaskKind::kRouteGrad:
      // May also read dy, by the generic proxy and without a wait for kDyReady: dS is needed, so da is, so the down
      // dgrads have waited for dy before they loaded it, and raised kDhReady behind that. Release and acquire are
      // transitive, and the bulk copies that wrote dy were complete before the first release of the chain.
      if (compute) waits.add({Counter::kDhReady, work.tile, plan.columns(TaskKind::kDownDgrad)});
      break;
    case TaskKind::kGateUpDgrad:
      if (load) waits.add({Counter::kDhReady, work.tile, plan.columns(TaskKind::kDownDgrad)});
      break;
    case TaskKind::kWgradDown:
    case TaskKind::kWgradGateUp:
      if (load) {
        waits.add(expert_dh_wait(plan, task.expert));
        const bool down = task.kind == TaskKind::kWgradDown;
        waits.add({down ? Counter::kExpertDy : Counter::kExpertX, task.expert, expert_pieces(plan, task.expert)});
      }
      break;
    case TaskKind::kBiasDown:
      if (compute) waits.add({Counter::kExpertDy, task.expert, expert_pieces(plan, task.expert)});
      break;
    case TaskKind::kBiasGateUp:
      if (compute) waits.add(expert_dh_wait(plan, task.expert));
      break;
    case TaskKind::kClose:
      return close_waits(plan, work, role);
    default:
      break;
  }
  return waits;
}

MOE_HOST_DEVICE inline Waits task_waits(const Plan& plan, const Task& task, std::int64_t block, Role role) {
  return plan.direction == Direction::kForward ? forward_waits(plan, task, block, role)
                                               : backward_waits(plan, task, block, role);
}

// Raises of one block's part of a task, by its compute role, after its loads and stores. kClose raises flags: see
// flag_raises.
MOE_HOST_DEVICE inline Raises forward_raises(const Plan& plan, const Task& task, std::int64_t block) {
  Raises raises;
  const BlockWork work = plan.work(task, block);
  if (!work.valid) return raises;
  if (task.kind == TaskKind::kGateUp) {
    raises.add({Counter::kXRead, work.tile, 1});
    raises.add({Counter::kAReady, work.tile, 1});
  } else if (task.kind == TaskKind::kDown) {
    raises.add({Counter::kARead, work.tile, 1});
    raises.add({Counter::kStored, 0, 1});
  }
  return raises;
}

MOE_HOST_DEVICE inline Raises backward_raises(const Plan& plan, const Task& task, std::int64_t block) {
  Raises raises;
  const BlockWork work = plan.work(task, block);
  if (!work.valid) return raises;
  switch (task.kind) {
    case TaskKind::kGateUp:
      raises.add({Counter::kAReady, work.tile, 1});
      break;
    case TaskKind::kDownDgrad:
      raises.add({Counter::kDhReady, work.tile, 1});
      raises.add({Counter::kExpertDh, task.expert, 1});
      break;
    case TaskKind::kRouteGrad:
    case TaskKind::kGateUpDgrad:
      raises.add({Counter::kStored, 0, 1});
      break;
    default:
      break;
  }
  return raises;
}

MOE_HOST_DEVICE inline Raises task_raises(const Plan& plan, const Task& task, std::int64_t block) {
  return plan.direction == Direction::kForward ? forward_raises(plan, task, block) : backward_raises(plan, task, block);
}

// -- pull stream ------------------------------------------------------------------------------------------------------

// Waits before one piece is written: its ring slot must have been read by every column tile (forward; backward fills
// whole buffers). A pulling warp must complete and raise all it has in flight before it makes a wait that is not yet
// met. An empty piece neither waits nor raises.
MOE_HOST_DEVICE inline Waits forward_piece_waits(const Plan& plan, const PullTicket& pull) {
  Waits waits;
  if (rows_of_piece(plan.tables.tiles[pull.tile], pull.piece, plan.tiling) == 0) return waits;
  if (pull.tile >= plan.schedule.x_slots) {
    waits.add({Counter::kXRead, pull.tile - plan.schedule.x_slots, plan.columns(TaskKind::kGateUp)});
  }
  return waits;
}

MOE_HOST_DEVICE inline Waits piece_waits(const Plan& plan, const PullTicket& pull) {
  return plan.direction == Direction::kForward ? forward_piece_waits(plan, pull) : Waits{};
}

// Raises after one piece has landed, in backward with rows_to_clear behind it.
MOE_HOST_DEVICE inline Raises forward_piece_raises(const Plan& plan, const PullTicket& pull) {
  Raises raises;
  if (rows_of_piece(plan.tables.tiles[pull.tile], pull.piece, plan.tiling) == 0) return raises;
  raises.add({Counter::kXReady, pull.tile, 1});
  raises.add({Counter::kPulled, 0, 1});
  return raises;
}

MOE_HOST_DEVICE inline Raises backward_piece_raises(const Plan& plan, const PullTicket& pull) {
  Raises raises;
  const RowTile& tile = plan.tables.tiles[pull.tile];
  if (rows_of_piece(tile, pull.piece, plan.tiling) == 0) return raises;
  if (pull.source == 0) {
    raises.add({Counter::kDyReady, pull.tile, 1});
    if (plan.needs.w_down || plan.needs.bias_down) raises.add({Counter::kExpertDy, tile.expert, 1});
  } else {
    if (plan.needs.recomputes()) raises.add({Counter::kXReady, pull.tile, 1});
    if (plan.needs.w_gate_up) raises.add({Counter::kExpertX, tile.expert, 1});
  }
  raises.add({Counter::kPulled, 0, 1});
  return raises;
}

MOE_HOST_DEVICE inline Raises piece_raises(const Plan& plan, const PullTicket& pull) {
  return plan.direction == Direction::kForward ? forward_piece_raises(plan, pull) : backward_piece_raises(plan, pull);
}

// -- flags ------------------------------------------------------------------------------------------------------------

// Flag waits of a task: kPlan waits for "ready" of every rank, kCombine and kDrain for "done" of every rank. `peer` in
// [0, W), this rank too.
MOE_HOST_DEVICE inline Wait flag_wait(const Plan& plan, TaskKind kind, std::int64_t peer) {
  return {kind == TaskKind::kPlan ? Counter::kPeerReady : Counter::kPeerDone, peer, plan.generation};
}

// The flag that a task sets in the memory of every rank, this one too, at the slot of this rank: kPlan "ready" when it
// begins, kClose "done".
MOE_HOST_DEVICE inline Raise flag_raise(const Plan& plan, TaskKind kind) {
  return {kind == TaskKind::kPlan ? Counter::kPeerReady : Counter::kPeerDone, plan.problem.rank, plan.generation};
}

// What the plan task sets when it ends, and what every other role of this rank waits for before it reads a table, the
// row table among them, a ticket or a counter.
MOE_HOST_DEVICE inline Raise start_raise(const Plan& plan) { return {Counter::kPlanReady, 0, plan.generation}; }
MOE_HOST_DEVICE inline Wait start_wait(const Plan& plan) { return {Counter::kPlanReady, 0, plan.generation}; }

}  // namespace moe
