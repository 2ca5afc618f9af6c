// The signal warp, which does the waiting and raising of the computing warps, so that no computing thread ever stands
// at a counter in memory, and the end of a task on their side.
//
// Order inside a task: the signal warp awaits what the epilogue may overwrite or reads, and opens `may_store`; the
// computing warps multiply, pass `may_store`, store, fence and arrive at `stored`; the signal warp, which waits there,
// releases the task's counters. The computing warps do that last step behind the first products of their next task if
// these can begin at once, and before they wait for anything otherwise: no wait of theirs can hold up what others wait
// for. Arrivals and waits on these barriers are releases and acquires, so what a computing thread has stored is ordered
// before the raise.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/stage/layer_params.h"
#include "moe/stage/protocol.h"
#include "moe/stage/task_queue.h"

namespace moe::sm90 {

// One thread of the signal warp.
template <int kConfig, Direction kDirection>
__device__ void signal_tasks(SharedStorage<kConfig>& storage, const Counters& counters, std::int32_t block) {
  const Plan& plan = storage.plan;
  const auto rank = block_in_cluster();
  TaskReader<kConfig> reader(storage);
  while (true) {
    const TaskSlot slot = reader.wait();
    reader.release_current();
    if (slot.kind < 0) return;
    const Task task = slot.task();
    const Site site{block, Role::kCompute, task.kind, slot.ticket};
    const Waits waits = Protocol<kDirection>::waits(plan, task, rank, Role::kCompute);
    for (std::int64_t i = 0; i < waits.size; ++i) counters.wait<Role::kCompute>(site, waits.items[i]);
    if (task.kind == TaskKind::kDrain && rank == 0) counters.wait_done(site);
    storage.may_store[reader.slot()].arrive();
    storage.stored[reader.slot()].wait(reader.parity());
    const Raises raises = Protocol<kDirection>::raises(plan, task, rank);
    for (std::int64_t i = 0; i < raises.size; ++i) counters.raise(site, raises.items[i]);
    if (task.kind == TaskKind::kClose && rank == 0) counters.raise_done(site);
    reader.next();
  }
}

// The end of a computing warp's task: what it has stored is made visible to loads of the async proxy, and the signal
// warp hears of it. Put off until the products of the next task are under way, since the fence takes as long as the
// stores do.
template <int kConfig>
class TaskEnd {
 public:
  __device__ explicit TaskEnd(SharedStorage<kConfig>& storage) : storage_(storage) {}

  __device__ void put_off(int slot, bool fence) {
    slot_ = slot;
    fence_ = fence;
  }
  // Makes up for it; nothing if that has been done.
  __device__ void now() {
    if (slot_ < 0) return;
    if (fence_) fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) storage_.stored[slot_].arrive();
    slot_ = -1;
  }

 private:
  SharedStorage<kConfig>& storage_;
  int slot_ = -1;
  bool fence_ = false;
};

}  // namespace moe::sm90
