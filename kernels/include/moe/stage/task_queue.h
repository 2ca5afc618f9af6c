// How a cluster gets its tasks: the schedule warp of block 0 claims tickets of the compute stream one after the other
// and hands each task to all roles of both blocks through two slots in shared memory.
//
// A slot is free again when the other warps have copied it and the computing warps have gone on to the next one. So
// a cluster holds the task it computes and the next one, which its loads are already running ahead for, and no third:
// late claims keep clusters busy until the end. Claims come in ticket order, which is why the earliest unfinished task
// of all is always some cluster's current one.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/stage/layer_params.h"
#include "moe/stage/protocol.h"

namespace moe::sm90 {

// Reads slots in order. One per reading warp.
template <int kConfig>
class TaskReader {
 public:
  __device__ explicit TaskReader(SharedStorage<kConfig>& storage) : storage_(storage) {}

  __device__ int slot() const { return index_ % kTaskSlots; }
  __device__ std::uint32_t parity() const { return (index_ / kTaskSlots) & 1; }

  __device__ TaskSlot wait() {
    storage_.slot_full[slot()].wait(parity());
    return storage_.slots[slot()];
  }
  // By all threads of a warp: one reads for all, so that the one which releases the slot is the one which has read it.
  __device__ TaskSlot wait_by_warp() {
    storage_.slot_full[slot()].wait(parity());
    TaskSlot read{};
    if (threadIdx.x % 32 == 0) read = storage_.slots[slot()];
    for (std::int32_t* word : {&read.kind, &read.expert, &read.tile, &read.column, &read.paired_columns, &read.ticket,
                               &read.row_begin, &read.rows}) {
      *word = __shfl_sync(~0u, *word, 0);
    }
    return read;
  }
  // By the thread that has read.
  __device__ void release_current() { storage_.slot_empty[slot()].arrive_at(0); }
  __device__ void release_previous() {
    if (index_ > 0) storage_.slot_empty[(index_ - 1) % kTaskSlots].arrive_at(0);
  }
  __device__ void next() { ++index_; }

 private:
  SharedStorage<kConfig>& storage_;
  int index_ = 0;
};

// The tickets of this launch: all of them, or those of one stage, where stages are separate.
struct TicketRange {
  std::int64_t begin;
  std::int64_t end;
};

__device__ inline TicketRange ticket_range(const LayerParams& params, const Plan& plan) {
  const PlanSizes& sizes = *params.counters.plan.sizes;
  const std::int64_t gate_up = sizes.num_gate_up;
  const std::int64_t down_dgrad = gate_up + sizes.num_down_dgrad;
  const std::int64_t gate_up_dgrad = down_dgrad + sizes.num_gate_up_dgrad;
  switch (params.stages & kStageTasks) {
    case kStageGateUp:
      return {0, gate_up};
    case kStageDown:
      return {gate_up, plan.num_tasks};
    case kStageDownDgrad:
      return {gate_up, down_dgrad};
    case kStageGateUpDgrad:
      return {down_dgrad, gate_up_dgrad};
    case kStageWgrad:
      return {gate_up_dgrad, plan.num_tasks};
    default:
      return {0, plan.num_tasks};
  }
}

// What a task says about rows: the first and how many. Of tile tasks in compact rows; of the gradients of one expert's
// parameters in rows of whole tiles, of which the expert's are the first.
__device__ inline RowTile rows_of_task(const PlanMemory& memory, const Task& task, std::uint32_t block) {
  const TileTables& tables = memory.tables;
  if (is_tile_task(task.kind)) return tables.tiles[task.paired_columns != 0 ? task.tile : task.tile + block];
  if (task.kind == TaskKind::kRouteGrad) return tables.tiles[task.tile];
  if (!is_wgrad(task.kind) && !is_bias_grad(task.kind)) return {};
  const std::int64_t* offsets = memory.expert_offsets + task.expert;
  return {task.expert, tables.expert_tiles[task.expert] * static_cast<std::int32_t>(kRowTile),
          static_cast<std::int32_t>(offsets[1] - offsets[0])};
}

// Claims the next ticket and hands its task, or that there is none, to both blocks.
template <int kConfig>
__device__ void claim_task(const LayerParams& params, SharedStorage<kConfig>& storage, const Counters& counters,
                           std::int32_t block, const TicketRange& range, int slot) {
  const PlanMemory& memory = params.counters.plan;
  const std::int64_t ticket = range.begin + atomicAdd(memory.tickets + kComputeTickets * kTicketStride, 1);
  const bool any = ticket < range.end;
  Task task{};
  RowTile tiles[2] = {};
  if (any) {
    task = memory.tasks[ticket];
    counters.log_claim({block, Role::kLoad, task.kind, static_cast<std::int32_t>(ticket)}, Stream::kCompute);
    tiles[0] = rows_of_task(memory, task, 0);
    tiles[1] = rows_of_task(memory, task, 1);
  }
  for (std::uint32_t target = 0; target < 2; ++target) {
    const std::uint32_t base = peer_address(&storage.slots[slot], target);
    const std::int32_t words[] = {any ? static_cast<std::int32_t>(task.kind) : -1,
                                  task.expert,
                                  task.tile,
                                  task.column,
                                  task.paired_columns,
                                  static_cast<std::int32_t>(ticket),
                                  tiles[target].row_begin,
                                  tiles[target].rows};
    static_assert(sizeof(words) == sizeof(TaskSlot));
    for (int i = 0; i < 8; ++i) store_cluster(base + 4 * i, words[i]);
    storage.slot_full[slot].arrive_at(target);
  }
}

// The schedule warps of both blocks, by one thread each. Block 0 claims; both make the waits of their load role, a task
// ahead of it, so that the loads of one task follow those of another without a pause: what the waits have acquired goes
// to the load warp through `may_load`.
template <int kConfig, Direction kDirection>
__device__ void schedule_tasks(const LayerParams& params, SharedStorage<kConfig>& storage, const Counters& counters,
                               std::int32_t block) {
  const auto rank = block_in_cluster();
  const TicketRange range = ticket_range(params, storage.plan);
  TaskReader<kConfig> reader(storage);
  while (true) {
    const int index = reader.slot();
    if (rank == 0) {
      storage.slot_empty[index].wait(reader.parity() ^ 1);
      claim_task(params, storage, counters, block, range, index);
    }
    const TaskSlot slot = reader.wait();
    reader.release_current();
    if (slot.kind < 0) return;
    const Task task = slot.task();
    const Site site{block, Role::kLoad, task.kind, slot.ticket};
    const Waits waits = Protocol<kDirection>::waits(storage.plan, task, rank, Role::kLoad);
    for (std::int64_t i = 0; i < waits.size; ++i) counters.wait<Role::kLoad>(site, waits.items[i]);
    storage.may_load[index].arrive();
    reader.next();
  }
}

}  // namespace moe::sm90
