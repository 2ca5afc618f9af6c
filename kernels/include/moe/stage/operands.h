// Where the operands of a task lie, as boxes of the tensor maps. Read by the load role.
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

}  // namespace moe::sm90
