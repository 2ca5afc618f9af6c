// The compute role of the forward: two warpgroups that run the K loops and the epilogues of gate_up and down. Order
// inside a task: see stage/signal.h.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/arch/sm90/mainloop.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/down.h"
#include "moe/stage/gate_up.h"
#include "moe/stage/signal.h"
#include "moe/stage/task_queue.h"

namespace moe::sm90 {

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
      auto accumulators = make_accumulators<kConfig>();
      std::int32_t routes[2] = {-1, -1};
      if (works && !gate_up) read_routes(params, slot.row_begin, slot.rows, routes);
      mainloop.template run<ForwardOperands<kConfig>>(accumulators, gate_up ? params.gate_up_steps : params.down_steps,
                                                      works, [&] { task_end.now(); });
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
