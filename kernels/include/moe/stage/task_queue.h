// How a cluster gets its tasks: the schedule warp of block 0 claims tickets of the compute stream one after the other
// and hands each task to all roles of both blocks through two slots in shared memory.
//
// A slot is free again when the other warps have copied it and the computing warps have gone on to the next one. So
// a cluster holds the task it computes and the next one, which its loads are already running ahead for, and no third:
// late claims keep clusters busy until the end. Claims come in ticket order, which is why the earliest unfinished task
// of all is always some cluster's current one.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"

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

// The tickets of this launch: all of them, or those of one stage.
struct TicketRange {
  std::int64_t begin;
  std::int64_t end;
};

__device__ inline TicketRange ticket_range(const ForwardParams& params, const Plan& plan) {
  const std::int64_t gate_up = params.counters.plan.sizes->num_gate_up;
  switch (params.stages & (kStageGateUp | kStageDown)) {
    case kStageGateUp:
      return {0, gate_up};
    case kStageDown:
      return {gate_up, plan.num_tasks};
    default:
      return {0, plan.num_tasks};
  }
}

// Claims the next ticket and hands its task, or that there is none, to both blocks.
template <int kConfig>
__device__ void claim_task(const ForwardParams& params, SharedStorage<kConfig>& storage, const Counters& counters,
                           std::int32_t block, const TicketRange& range, int slot) {
  const PlanMemory& memory = params.counters.plan;
  const std::int64_t ticket = range.begin + atomicAdd(memory.tickets + kComputeTickets * kTicketStride, 1);
  const bool any = ticket < range.end;
  Task task{};
  RowTile tiles[2] = {};
  if (any) {
    task = memory.tasks[ticket];
    counters.log_claim({block, Role::kLoad, task.kind, static_cast<std::int32_t>(ticket)}, Stream::kCompute);
    if (is_tile_task(task.kind)) {
      tiles[0] = memory.tables.tiles[task.tile];
      tiles[1] = task.paired_columns != 0 ? tiles[0] : memory.tables.tiles[task.tile + 1];
    }
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
template <int kConfig>
__device__ void schedule_tasks(const ForwardParams& params, SharedStorage<kConfig>& storage, const Counters& counters,
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
    const Waits waits = forward_waits(storage.plan, task, rank, Role::kLoad);
    for (std::int64_t i = 0; i < waits.size; ++i) counters.wait<Role::kLoad>(site, waits.items[i]);
    storage.may_load[index].arrive();
    reader.next();
  }
}

}  // namespace moe::sm90
