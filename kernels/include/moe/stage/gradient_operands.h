// Where the operands of the backward's tasks lie, as boxes of the tensor maps. Read by the load role.
//
//   task              product                    depth      rows of the product    columns
//   gate_up           h = x W_gate_up'           H          x rows                 W_gate_up, halves
//   down dgrad        da = dy W_down             H          dy rows                W_down, across
//   gate_up dgrad     dx = dh W_gate_up          2I         dh rows                W_gate_up, across
//   wgrad down        dW_down = dy' (s a)        its rows   dy, across             s a, across
//   wgrad gate_up     dW_gate_up = dh' x         its rows   dh, across             x, across
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "moe/arch/sm90/gemm_traits.h"
#include "moe/backward/kernel_params.h"
#include "moe/stage/operands.h"

namespace moe::sm90 {

// A coordinate of a box: where the first box begins, and steps from box to box and from one depth to the next.
struct BoxLine {
  std::int32_t begin;
  std::int32_t box;
  std::int32_t depth;
};

// One GEMM's operands as boxes of 64 x 64: two for the rows, four for the columns of a block's tile.
template <int kConfig>
struct GradientBoxes {
  using Traits = GemmTraits<kConfig>;
  using Element = typename Traits::Element;
  static constexpr std::int32_t kBox = 64;
  static constexpr std::int32_t kBoxElements = kBox * kBox;

  const CUtensorMap* rows;     // [y, x]
  const CUtensorMap* columns;  // [expert, half, y, x]
  BoxLine rows_x;
  BoxLine rows_y;
  BoxLine columns_x;
  BoxLine columns_y;
  std::int32_t pair_y;     // from the first two boxes of columns to the others: in y, beside columns_y.box ...
  std::int32_t pair_half;  // ... or in halves
  std::int32_t expert;
  std::int32_t steps;
  std::int32_t block;      // in the cluster
  bool share_rows;         // else the columns
  std::int32_t row_boxes;  // 2, or 1 where the second would hold rows that nobody has and nobody reads
  // What the epilogue reads of h: a tile of gate and, `up` columns further, of up; or null. At task's begin it would
  // leave the L2 cache again before it is needed.
  const CUtensorMap* h;
  std::int32_t h_row;
  std::int32_t h_column;
  std::int32_t h_end;  // columns of gate
  std::int32_t up;     // 0: there are none

  static constexpr std::int32_t kStepsAhead = 8;

  // Before the loads of a step.
  __device__ void prefetch(std::int32_t step) const {
    if (h == nullptr || step != (steps > kStepsAhead ? steps - kStepsAhead : 0)) return;
    for (std::int32_t x = h_column; x < h_end && x < h_column + Traits::kColumns; x += kBox) {
      for (std::int32_t y = h_row; y < h_row + Traits::kRows; y += kBox) {
        cute::SM90_TMA_LOAD_2D::PREFETCH::copy(h, x, y);
        if (up > 0) cute::SM90_TMA_LOAD_2D::PREFETCH::copy(h, x + up, y);
      }
    }
  }

  __device__ void load(std::int32_t step, Element* to_rows, Element* to_columns, std::uint64_t* barrier) const {
    prefetch(step);
    const auto load_rows = [&](std::int32_t box, bool both) {
      if (box >= row_boxes) return;
      const std::int32_t x = rows_x.begin + box * rows_x.box + step * rows_x.depth;
      const std::int32_t y = rows_y.begin + box * rows_y.box + step * rows_y.depth;
      auto* to = to_rows + box * kBoxElements;
      if (both) {
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(rows, barrier, kBothBlocks, kNormalHint, to, x, y);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(rows, barrier, kNormalHint, to, x, y);
      }
    };
    const auto load_columns = [&](std::int32_t box, bool both) {
      const std::int32_t pair = box / 2;
      const std::int32_t x = columns_x.begin + box * columns_x.box + step * columns_x.depth;
      const std::int32_t y = columns_y.begin + box % 2 * columns_y.box + pair * pair_y + step * columns_y.depth;
      auto* to = to_columns + box * kBoxElements;
      if (both) {
        cute::SM90_TMA_LOAD_MULTICAST_4D::copy(columns, barrier, kBothBlocks, kNormalHint, to, x, y, pair * pair_half,
                                               expert);
      } else {
        cute::SM90_TMA_LOAD_4D::copy(columns, barrier, kNormalHint, to, x, y, pair * pair_half, expert);
      }
    };
    if (row_boxes == 1) skip_bytes(barrier, kBoxElements * sizeof(Element));
    if (share_rows) {
      load_rows(block, true);
#pragma unroll
      for (std::int32_t box = 0; box < 4; ++box) load_columns(box, false);
    } else {
      load_rows(0, false);
      load_rows(1, false);
      load_columns(2 * block, true);
      load_columns(2 * block + 1, true);
    }
  }
};

// Steps of the K loop of a weight gradient: an expert's rows. Zeros that it skips behind them change no bit.
__device__ inline std::int32_t wgrad_steps(std::int32_t rows, std::int32_t depth) { return (rows + depth - 1) / depth; }

template <int kConfig>
__device__ GradientBoxes<kConfig> operand_boxes(const BackwardParams& params, const TaskSlot& slot,
                                                std::uint32_t rank) {
  using Traits = GemmTraits<kConfig>;
  constexpr std::int32_t kDepth = Traits::kDepth;
  constexpr std::int32_t kBox = GradientBoxes<kConfig>::kBox;
  const Task task = slot.task();
  const auto block = static_cast<std::int32_t>(rank);
  const std::int32_t tile = task.paired_columns != 0 ? task.tile : task.tile + block;
  const std::int32_t column = (task.paired_columns != 0 ? task.column + block : task.column) * Traits::kColumns;
  const auto hidden = static_cast<std::int32_t>(params.problem.hidden);
  const auto steps_of = [](std::int32_t extent) { return (extent + kDepth - 1) / kDepth; };

  GradientBoxes<kConfig> boxes{};
  boxes.block = block;
  boxes.share_rows = task.paired_columns != 0;
  boxes.row_boxes = is_tile_task(task.kind) && slot.rows <= Traits::kHalfRows ? 1 : 2;
  boxes.expert = task.expert;
  // Rows as they are stored, and columns across; weight gradients and gate_up differ.
  boxes.rows_x = {0, 0, kDepth};
  boxes.rows_y = {tile * Traits::kRows, kBox, 0};
  boxes.columns_x = {column, kBox, 0};
  boxes.columns_y = {0, 0, kDepth};
  switch (task.kind) {
    case TaskKind::kGateUp: {
      const bool split = params.problem.gated != 0;
      boxes.rows = &params.x_rows;
      boxes.columns = &params.w_gate_up_halves;
      boxes.columns_x = {0, 0, kDepth};
      boxes.columns_y = {split ? column / 2 : column, kBox, 0};
      boxes.pair_y = split ? 0 : 2 * kBox;
      boxes.pair_half = split ? 1 : 0;
      boxes.steps = steps_of(hidden);
      break;
    }
    case TaskKind::kDownDgrad:
      boxes.rows = &params.dy_rows;
      boxes.columns = &params.w_down;
      boxes.steps = params.needs.da() ? steps_of(hidden) : 0;
      boxes.h = params.recomputes ? nullptr : &params.h_rows;
      boxes.h_row = slot.row_begin;
      boxes.h_column = column;
      boxes.h_end = static_cast<std::int32_t>(params.problem.width);
      boxes.up = params.h_columns - boxes.h_end;
      break;
    case TaskKind::kGateUpDgrad:
      boxes.rows = &params.dh_rows;
      boxes.columns = &params.w_gate_up;
      boxes.steps = steps_of(params.h_columns);
      break;
    case TaskKind::kWgradDown:
    case TaskKind::kWgradGateUp: {
      const bool down = task.kind == TaskKind::kWgradDown;
      boxes.rows = down ? &params.dy_rows : &params.dh_rows;
      boxes.columns = down ? &params.scaled_a : &params.x_columns;
      boxes.rows_x = {tile * Traits::kRows, kBox, 0};
      boxes.rows_y = {slot.row_begin, 0, kDepth};
      boxes.columns_y = {slot.row_begin, 0, kDepth};
      boxes.expert = 0;
      boxes.steps = wgrad_steps(slot.rows, kDepth);
      break;
    }
    default:
      break;
  }
  return boxes;
}

}  // namespace moe::sm90
