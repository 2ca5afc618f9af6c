// Where the operands of a task lie, as boxes of the tensor maps. Read by the load role, and by the schedule warp, which
// fetches the first boxes of a task to the L2 cache while the task before is still computed: a task begins on rows and
// weights that nobody has touched for a while, and the first loads would otherwise wait for memory, and for the address
// translation of new pages, longer than the stages in shared memory can hide.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "moe/arch/sm90/gemm_traits.h"
#include "moe/forward/kernel_params.h"

namespace moe::sm90 {

// One GEMM's operands as boxes.
struct OperandBoxes {
  const CUtensorMap* rows;
  const CUtensorMap* weight;
  std::int32_t row;  // first row of the block's row tile, in rows of the ring
  std::int32_t expert;
  std::int32_t column;      // first row of the weight for half 0
  std::int32_t half_rows;   // from half 0 to half 1: rows of the weight ...
  std::int32_t half_index;  // ... or steps from gate to up
  std::int32_t steps;
};

template <int kConfig>
__device__ OperandBoxes operand_boxes(const ForwardParams& params, const Task& task, std::uint32_t rank) {
  using Traits = GemmTraits<kConfig>;
  const bool gate_up = task.kind == TaskKind::kGateUp;
  const auto block = static_cast<std::int32_t>(rank);
  const std::int32_t tile = task.paired_columns != 0 ? task.tile : task.tile + block;
  const std::int32_t column = task.paired_columns != 0 ? task.column + block : task.column;
  const auto slots = static_cast<std::int32_t>(gate_up ? params.schedule.x_slots : params.schedule.a_slots);
  const bool split = gate_up && params.problem.gated != 0;
  OperandBoxes boxes{};
  boxes.rows = gate_up ? &params.x_ring : &params.a_ring;
  boxes.weight = gate_up ? &params.w_gate_up : &params.w_down;
  boxes.row = tile % slots * Traits::kRows;
  boxes.expert = task.expert;
  boxes.column = column * (split ? Traits::kHalfColumns : Traits::kColumns);
  boxes.half_rows = split ? 0 : Traits::kHalfColumns;
  boxes.half_index = split ? 1 : 0;
  boxes.steps = gate_up ? params.gate_up_steps : params.down_steps;
  return boxes;
}

// The first steps of a task, all that the block's own loads will ask for. By one thread.
template <int kConfig>
__device__ void prefetch_operands(const ForwardParams& params, const Task& task, std::uint32_t rank) {
  using Traits = GemmTraits<kConfig>;
  const OperandBoxes boxes = operand_boxes<kConfig>(params, task, rank);
  const bool share_rows = task.paired_columns != 0;
  const std::int32_t steps = boxes.steps < Traits::kStages ? boxes.steps : Traits::kStages;
  for (std::int32_t step = 0; step < steps; ++step) {
    const std::int32_t depth = step * Traits::kDepth;
    for (std::int32_t half = 0; half < 2; ++half) {
      const bool own = half == static_cast<std::int32_t>(rank);
      if (!share_rows || own) {
        cute::SM90_TMA_LOAD_2D::PREFETCH::copy(boxes.rows, depth, boxes.row + half * Traits::kHalfRows);
      }
      if (share_rows || own) {
        cute::SM90_TMA_LOAD_4D::PREFETCH::copy(boxes.weight, depth, boxes.column + half * boxes.half_rows,
                                               half * boxes.half_index, boxes.expert);
      }
    }
  }
}

}  // namespace moe::sm90
