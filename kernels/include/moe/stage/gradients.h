// The compute role of the backward: two warpgroups that run the K loops and the epilogues of all gradients. Order
// inside a task: see stage/signal.h.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/arch/sm90/mainloop.h"
#include "moe/backward/kernel_params.h"
#include "moe/stage/down.h"
#include "moe/stage/down_dgrad.h"
#include "moe/stage/gate_up.h"
#include "moe/stage/gradient_operands.h"
#include "moe/stage/signal.h"
#include "moe/stage/small_gradients.h"
#include "moe/stage/task_queue.h"
#include "moe/stage/wgrad.h"

namespace moe::sm90 {

template <int kConfig>
class GradientRole {
  using Traits = GemmTraits<kConfig>;
  using Pipeline = typename Traits::Pipeline;

 public:
  __device__ GradientRole(const BackwardParams& params, SharedStorage<kConfig>& storage, Pipeline& pipeline)
      : params_(params), storage_(storage), mainloop_(storage, pipeline), reader_(storage), task_end_(storage) {
    rank_ = static_cast<std::int32_t>(block_in_cluster());
    first_row_ = (static_cast<std::int32_t>(threadIdx.x) / 128 - 1) * Traits::kHalfRows;
  }

  __device__ __forceinline__ void run() {
    while (true) {
      const TaskSlot slot = reader_.wait_by_warp();
      if (threadIdx.x % 32 == 0) reader_.release_previous();
      if (slot.kind < 0) break;
      bool fence = false;
      switch (static_cast<TaskKind>(slot.kind)) {
        case TaskKind::kGateUp:
          gate_up(slot);
          break;
        case TaskKind::kDownDgrad:
        case TaskKind::kGateUpDgrad:
          fence = dgrad(slot);
          break;
        case TaskKind::kWgradDown:
        case TaskKind::kWgradGateUp:
          wgrad(slot);
          break;
        default:
          task_end_.now();
          may_store();
          small_gradient(slot);
          break;
      }
      task_end_.put_off(reader_.slot(), fence);
      reader_.next();
    }
    task_end_.now();
  }

 private:
  __device__ __forceinline__ void may_store() { storage_.may_store[reader_.slot()].wait(reader_.parity()); }
  __device__ BlockWork work_of(const Task& task, std::int32_t columns) const {
    return work_of_block(task, rank_, columns);
  }
  template <typename Operands, typename Accumulators>
  __device__ __forceinline__ void multiply(Accumulators& accumulators, std::int32_t steps, bool works) {
    mainloop_.template run<Operands>(accumulators, steps, works, [&] { task_end_.now(); });
  }
  __device__ static std::int32_t steps_of(std::int64_t extent) {
    return static_cast<std::int32_t>((extent + Traits::kDepth - 1) / Traits::kDepth);
  }

  // h once more, to where dh will stand.
  __device__ __forceinline__ void gate_up(const TaskSlot& slot) {
    const Task task = slot.task();
    const BlockWork work = work_of(task, params_.gate_up_tiles);
    const bool works = work.valid && first_row_ < slot.rows;
    auto accumulators = make_accumulators<kConfig>();
    multiply<ForwardOperands<kConfig>>(accumulators, steps_of(params_.problem.hidden), works);
    may_store();
    if (!works) return;
    const auto column = static_cast<std::int32_t>(work.column * params_.tiling.act_columns);
    recompute_epilogue(accumulators, params_,
                       {task.expert, column, 0, slot.rows, static_cast<std::int32_t>(work.tile) * Traits::kRows});
  }

  // Of down or of gate_up. Whether it has stored what the async proxy reads.
  __device__ __forceinline__ bool dgrad(const TaskSlot& slot) {
    const Task task = slot.task();
    const bool down = task.kind == TaskKind::kDownDgrad;
    const BlockWork work = work_of(task, down ? params_.dgrad_tiles : params_.hidden_tiles);
    const bool works = work.valid && first_row_ < slot.rows;
    const std::int64_t tile_row = work.tile * Traits::kRows;
    DgradTile tile{static_cast<std::int32_t>(work.column) * Traits::kColumns,
                   slot.rows,
                   params_.recomputes ? tile_row : slot.row_begin,
                   tile_row,
                   {0.0f, 0.0f}};
    std::int32_t routes[2] = {-1, -1};
    if (works) read_routes(params_, slot.row_begin, slot.rows, routes);
    if (works && down) read_route_weights(params_, slot.row_begin, routes, tile.weights);
    if (down && !params_.needs.da()) {
      task_end_.now();
      may_store();
      if (works) scaled_activation_tile(params_, tile);
      return works;
    }
    auto accumulators = make_accumulators<kConfig>();
    multiply<DgradOperands<kConfig>>(accumulators, steps_of(down ? params_.problem.hidden : params_.h_columns), works);
    may_store();
    if (works && down) {
      down_dgrad_epilogue(accumulators, params_, tile);
    } else if (works) {
      store_routed_rows(accumulators, params_.counters.peers, params_.dx_rows, params_.problem.hidden, tile.column,
                        routes);
    }
    return works && down;
  }

  __device__ __forceinline__ void wgrad(const TaskSlot& slot) {
    const Task task = slot.task();
    const WeightGrad& grad = task.kind == TaskKind::kWgradDown ? params_.dw_down : params_.dw_gate_up;
    const BlockWork work = work_of(task, (grad.columns + Traits::kColumns - 1) / Traits::kColumns);
    const WgradTile tile{task.expert, static_cast<std::int32_t>(work.tile) * Traits::kRows,
                         static_cast<std::int32_t>(work.column) * Traits::kColumns};
    const bool works = work.valid && tile.row + first_row_ < grad.rows;
    const std::int32_t steps = wgrad_steps(slot.rows, Traits::kDepth);
    if (steps == 0) {
      task_end_.now();
      may_store();
      if (works) fill_wgrad_tile(grad, tile, refused());
      return;
    }
    auto accumulators = make_accumulators<kConfig>();
    multiply<WgradOperands<kConfig>>(accumulators, steps, works);
    may_store();
    if (works) wgrad_epilogue(accumulators, grad, tile);
  }

  __device__ __forceinline__ void small_gradient(const TaskSlot& slot) {
    const Task task = slot.task();
    const bool down = task.kind == TaskKind::kBiasDown;
    if (task.kind == TaskKind::kRouteGrad) {
      if (rank_ == 0) {
        route_gradients(params_, task.expert, std::int64_t{task.tile} * Traits::kRows, slot.row_begin, slot.rows);
      }
    } else if (down || task.kind == TaskKind::kBiasGateUp) {
      const std::int64_t width = down ? params_.problem.hidden : params_.h_columns;
      const std::int32_t column = (task.column + rank_) * kBiasColumns;
      if (column >= width) return;
      bias_gradient(params_, down, task.expert, column, slot.row_begin,
                    params_.counters.plan.expert_offsets[task.expert], slot.rows, refused());
    }
  }

  __device__ bool refused() const { return params_.counters.plan.sizes->refused != 0; }

  const BackwardParams& params_;
  SharedStorage<kConfig>& storage_;
  Mainloop<kConfig> mainloop_;
  TaskReader<kConfig> reader_;
  TaskEnd<kConfig> task_end_;
  std::int32_t rank_;
  std::int32_t first_row_;
};

template <int kConfig>
__device__ __forceinline__ void compute_tasks(const BackwardParams& params, SharedStorage<kConfig>& storage,
                                              typename GemmTraits<kConfig>::Pipeline& pipeline) {
  GradientRole<kConfig>(params, storage, pipeline).run();
}

}  // namespace moe::sm90
