// The compute role: two warpgroups that run the K loops and the epilogues of gate_up and down, and the signal warp that
// does their waiting and raising, so that no computing thread ever stands at a counter in memory.
//
// Order inside a task: the signal warp awaits what the epilogue may overwrite and opens `may_store`; the computing
// warps multiply, pass `may_store`, store, fence and arrive at `stored`; the signal warp, which waits there, releases
// the task's counters. The computing warps do that last step behind the first products of their next task if these can
// begin at once, and before they wait for anything otherwise: no wait of theirs can hold up what others wait for.
// Arrivals and waits on these barriers are releases and acquires, so what a computing thread has stored is ordered
// before the raise.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/arch/sm90/mainloop.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/down.h"
#include "moe/stage/gate_up.h"
#include "moe/stage/task_queue.h"

namespace moe::sm90 {

// One thread of the signal warp.
template <int kConfig>
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
    const Waits waits = forward_waits(plan, task, rank, Role::kCompute);
    for (std::int64_t i = 0; i < waits.size; ++i) counters.wait<Role::kCompute>(site, waits.items[i]);
    if (task.kind == TaskKind::kDrain && rank == 0) counters.wait_done(site);
    storage.may_store[reader.slot()].arrive();
    storage.stored[reader.slot()].wait(reader.parity());
    const Raises raises = forward_raises(plan, task, rank);
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

template <int kConfig>
__device__ void compute_tasks(const ForwardParams& params, SharedStorage<kConfig>& storage,
                              typename GemmTraits<kConfig>::Pipeline& pipeline) {
  using Traits = GemmTraits<kConfig>;
  const auto rank = static_cast<std::int32_t>(block_in_cluster());
  const std::int32_t first_row = (static_cast<std::int32_t>(threadIdx.x) / 128 - 1) * Traits::kHalfRows;
  Mainloop<kConfig> mainloop(storage, pipeline);
  TaskReader<kConfig> reader(storage);
  TaskEnd<kConfig> task_end(storage);
  while (true) {
    const TaskSlot slot = reader.wait_by_warp();
    if (threadIdx.x % 32 == 0) reader.release_previous();
    const Task task = slot.task();
    const bool gate_up = task.kind == TaskKind::kGateUp;
    bool works = false;
    if (slot.kind >= 0 && is_tile_task(task.kind)) {
      const BlockWork work = work_of_block(task, rank, gate_up ? params.act_tiles : params.hidden_tiles);
      works = work.valid && first_row < slot.rows;
      auto accumulators = cute::make_tensor<float>(cute::partition_shape_C(
          typename Traits::Mma{}, cute::Shape<cute::Int<Traits::kRows>, cute::Int<Traits::kColumns>>{}));
      std::int32_t routes[2] = {-1, -1};
      if (works && !gate_up) read_routes(params, slot.row_begin, slot.rows, routes);
      mainloop.run(accumulators, gate_up ? params.gate_up_steps : params.down_steps, works, [&] { task_end.now(); });
      storage.may_store[reader.slot()].wait(reader.parity());
      if (works && gate_up) {
        const auto ring_row =
            static_cast<std::int32_t>(work.tile) % static_cast<std::int32_t>(params.schedule.a_slots) * Traits::kRows;
        const auto column = static_cast<std::int32_t>(work.column * params.tiling.act_columns);
        gate_up_epilogue(accumulators, params, {task.expert, column, slot.row_begin, slot.rows, ring_row});
      } else if (works) {
        const auto column = static_cast<std::int32_t>(work.column) * Traits::kColumns;
        down_epilogue(accumulators, params, {task.expert, column, {routes[0], routes[1]}});
      }
    } else {
      task_end.now();
      if (slot.kind < 0) break;
      storage.may_store[reader.slot()].wait(reader.parity());
    }
    task_end.put_off(reader.slot(), works && gate_up);
    reader.next();
  }
}

}  // namespace moe::sm90
