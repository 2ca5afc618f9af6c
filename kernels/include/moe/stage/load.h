// The load role of the two GEMMs: one thread feeds a task's operands to shared memory by TMA, behind the waits that the
// schedule warp makes for it.
// Blocks of a cluster share what they have in common: two row tiles share the weight tile, and each block loads half of
// it for both; two column tiles of one row tile share the rows in the same way.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"
#include "moe/stage/operands.h"
#include "moe/stage/task_queue.h"

namespace moe::sm90 {

template <int kConfig>
class LoadRole {
  using Traits = GemmTraits<kConfig>;
  using Pipeline = typename Traits::Pipeline;

 public:
  __device__ LoadRole(const ForwardParams& params, SharedStorage<kConfig>& storage, Pipeline& pipeline)
      : params_(params),
        storage_(storage),
        pipeline_(pipeline),
        state_(cutlass::make_producer_start_state<Pipeline>()) {}

  __device__ void run() {
    const auto rank = block_in_cluster();
    TaskReader<kConfig> reader(storage_);
    while (true) {
      const TaskSlot slot = reader.wait();
      if (slot.kind < 0) {
        reader.release_current();
        break;
      }
      storage_.may_load[reader.slot()].wait(reader.parity());
      reader.release_current();
      reader.next();
      const Task task = slot.task();
      if (is_tile_task(task.kind)) load(operand_boxes<kConfig>(params_, task, rank), task.paired_columns != 0, rank);
    }
    pipeline_.producer_tail(state_);
  }

 private:
  __device__ void load(const OperandBoxes& boxes, bool share_rows, std::uint32_t rank) {
    constexpr std::uint16_t kBoth = 3;
    const auto own = static_cast<std::int32_t>(rank);
    for (std::int32_t step = 0; step < boxes.steps; ++step) {
      pipeline_.producer_acquire(state_);
      auto* barrier = reinterpret_cast<std::uint64_t*>(pipeline_.producer_get_barrier(state_));
      const int stage = static_cast<int>(state_.index());
      auto* rows = storage_.rows + stage * Traits::kRows * Traits::kDepth;
      auto* columns = storage_.columns + stage * Traits::kColumns * Traits::kDepth;
      const std::int32_t depth = step * Traits::kDepth;
      const auto load_rows = [&](std::int32_t half, bool both) {
        auto* to = rows + half * Traits::kHalfRows * Traits::kDepth;
        const std::int32_t row = boxes.row + half * Traits::kHalfRows;
        if (both) {
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(boxes.rows, barrier, kBoth, kNormal, to, depth, row);
        } else {
          cute::SM90_TMA_LOAD_2D::copy(boxes.rows, barrier, kNormal, to, depth, row);
        }
      };
      const auto load_columns = [&](std::int32_t half, bool both) {
        auto* to = columns + half * Traits::kHalfColumns * Traits::kDepth;
        const std::int32_t row = boxes.column + half * boxes.half_rows;
        const std::int32_t index = half * boxes.half_index;
        if (both) {
          cute::SM90_TMA_LOAD_MULTICAST_4D::copy(boxes.weight, barrier, kBoth, kNormal, to, depth, row, index,
                                                 boxes.expert);
        } else {
          cute::SM90_TMA_LOAD_4D::copy(boxes.weight, barrier, kNormal, to, depth, row, index, boxes.expert);
        }
      };
      if (share_rows) {
        load_rows(own, true);
        load_columns(0, false);
        load_columns(1, false);
      } else {
        load_rows(0, false);
        load_rows(1, false);
        load_columns(own, true);
      }
      ++state_;
    }
  }

  static constexpr std::uint64_t kNormal = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  const ForwardParams& params_;
  SharedStorage<kConfig>& storage_;
  Pipeline& pipeline_;
  typename Traits::PipelineState state_;
};

}  // namespace moe::sm90
