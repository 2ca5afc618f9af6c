// Where the operands of the forward's tasks lie, as boxes of the tensor maps. Read by the load role.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"

namespace moe::sm90 {

inline constexpr std::uint64_t kNormalHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
inline constexpr std::uint16_t kBothBlocks = 3;

// One GEMM's operands as boxes: two of 64 rows, two of 128 rows of the weight.
template <int kConfig>
struct OperandBoxes {
  using Traits = GemmTraits<kConfig>;
  using Element = typename Traits::Element;

  const CUtensorMap* rows;
  const CUtensorMap* weight;
  std::int32_t row;  // first row of the block's row tile, in rows of the ring
  std::int32_t expert;
  std::int32_t column;      // first row of the weight for half 0
  std::int32_t half_rows;   // from half 0 to half 1: rows of the weight ...
  std::int32_t half_index;  // ... or steps from gate to up
  std::int32_t steps;
  std::int32_t block;      // in the cluster
  bool share_rows;         // else the weight
  std::int32_t row_boxes;  // 2, or 1 where the second would hold rows that nobody has and nobody reads

  // By one thread: everything that this block loads of one step.
  __device__ void load(std::int32_t step, Element* to_rows, Element* to_columns, std::uint64_t* barrier) const {
    const std::int32_t depth = step * Traits::kDepth;
    const auto load_rows = [&](std::int32_t half, bool both) {
      if (half >= row_boxes) return;
      auto* to = to_rows + half * Traits::kHalfRows * Traits::kDepth;
      const std::int32_t y = row + half * Traits::kHalfRows;
      if (both) {
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(rows, barrier, kBothBlocks, kNormalHint, to, depth, y);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(rows, barrier, kNormalHint, to, depth, y);
      }
    };
    const auto load_columns = [&](std::int32_t half, bool both) {
      auto* to = to_columns + half * Traits::kHalfColumns * Traits::kDepth;
      const std::int32_t y = column + half * half_rows;
      const std::int32_t index = half * half_index;
      if (both) {
        cute::SM90_TMA_LOAD_MULTICAST_4D::copy(weight, barrier, kBothBlocks, kNormalHint, to, depth, y, index, expert);
      } else {
        cute::SM90_TMA_LOAD_4D::copy(weight, barrier, kNormalHint, to, depth, y, index, expert);
      }
    };
    if (row_boxes == 1) skip_bytes(barrier, Traits::kHalfRows * Traits::kDepth * sizeof(Element));
    if (share_rows) {
      load_rows(block, true);
      load_columns(0, false);
      load_columns(1, false);
    } else {
      load_rows(0, false);
      load_rows(1, false);
      load_columns(block, true);
    }
  }
};

template <int kConfig>
__device__ OperandBoxes<kConfig> operand_boxes(const ForwardParams& params, const TaskSlot& slot, std::uint32_t rank) {
  using Traits = GemmTraits<kConfig>;
  const Task task = slot.task();
  OperandBoxes<kConfig> boxes{};
  if (!is_tile_task(task.kind)) return boxes;
  const bool gate_up = task.kind == TaskKind::kGateUp;
  const auto block = static_cast<std::int32_t>(rank);
  const std::int32_t tile = task.paired_columns != 0 ? task.tile : task.tile + block;
  const std::int32_t column = task.paired_columns != 0 ? task.column + block : task.column;
  const auto slots = static_cast<std::int32_t>(gate_up ? params.schedule.x_slots : params.schedule.a_slots);
  const bool split = gate_up && params.problem.gated != 0;
  boxes.rows = gate_up ? &params.x_ring : &params.a_ring;
  boxes.weight = gate_up ? &params.w_gate_up : &params.w_down;
  boxes.row = tile % slots * Traits::kRows;
  boxes.expert = task.expert;
  boxes.column = column * (split ? Traits::kHalfColumns : Traits::kColumns);
  boxes.half_rows = split ? 0 : Traits::kHalfColumns;
  boxes.half_index = split ? 1 : 0;
  boxes.steps = gate_up ? params.gate_up_steps : params.down_steps;
  boxes.block = block;
  boxes.share_rows = task.paired_columns != 0;
  boxes.row_boxes = slot.rows <= Traits::kHalfRows ? 1 : 2;
  return boxes;
}

}  // namespace moe::sm90
