// Shapes, shared-memory layouts and the tensor-core instructions of one configuration. Everything that the load and
// compute roles of the GEMMs share; composed from CuTe. See cutlass_configs/forward.h for the numbers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "cutlass_configs/forward.h"
#include "moe/arch/sm90/barrier.h"
#include "moe/plan/dependencies.h"

namespace moe::sm90 {

template <int kConfig>
struct GemmTraits {
  static constexpr ForwardConfig kShape = kForwardConfigs[kConfig];
  static constexpr int kRows = kShape.tile_rows;
  static constexpr int kColumns = kShape.tile_columns;
  static constexpr int kDepth = kShape.tile_depth;
  static constexpr int kStages = kShape.stages;
  static constexpr int kHalfColumns = kColumns / 2;  // of one weight box: gate or up, or half of o's columns
  static constexpr int kHalfRows = kRows / 2;        // of one row box, and of a warpgroup

  using Element = cutlass::bfloat16_t;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Pipeline = cutlass::PipelineTmaAsync<kStages>;
  using PipelineState = typename Pipeline::PipelineState;

  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * static_cast<int>(sizeof(Element));
};

// How the two operands of a GEMM lie in shared memory: with neighbours along the depth (K) or along rows or columns of
// the product (MN), whichever is contiguous in memory. Lines of 64 elements (128 bytes) in the 128-byte swizzle, as TMA
// stores a box of 64 x 64 and as the tensor cores read it; boxes follow each other along rows or columns.
template <int kConfig, cute::GMMA::Major kRowsMajor, cute::GMMA::Major kColumnsMajor>
struct Operands {
  using Traits = GemmTraits<kConfig>;
  template <cute::GMMA::Major kMajor, int kExtent>
  using Layout = decltype(cute::tile_to_shape(
      std::conditional_t<kMajor == cute::GMMA::Major::K, cute::GMMA::Layout_K_SW128_Atom<typename Traits::Element>,
                         cute::GMMA::Layout_MN_SW128_Atom<typename Traits::Element>>{},
      cute::make_shape(cute::Int<kExtent>{}, cute::Int<Traits::kDepth>{}, cute::Int<Traits::kStages>{}),
      std::conditional_t<kMajor == cute::GMMA::Major::K, cute::Step<cute::_1, cute::_2, cute::_3>,
                         cute::Step<cute::_2, cute::_1, cute::_3>>{}));
  using RowsLayout = Layout<kRowsMajor, Traits::kRows>;
  using ColumnsLayout = Layout<kColumnsMajor, Traits::kColumns>;
  // Two warpgroups, 64 rows each, all columns.
  using Mma = decltype(cute::make_tiled_mma(cute::SM90_64x256x16_F32BF16BF16_SS<kRowsMajor, kColumnsMajor>{},
                                            cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
};
// Of gate_up and down: weights as they are stored.
template <int kConfig>
using ForwardOperands = Operands<kConfig, cute::GMMA::Major::K, cute::GMMA::Major::K>;
// Of their gradients with respect to rows: the weights read across.
template <int kConfig>
using DgradOperands = Operands<kConfig, cute::GMMA::Major::K, cute::GMMA::Major::MN>;
// And with respect to weights: the depth are an expert's rows.
template <int kConfig>
using WgradOperands = Operands<kConfig, cute::GMMA::Major::MN, cute::GMMA::Major::MN>;

// fp32 accumulators of one thread; the order of elements is that of Mainloop::run.
template <int kConfig>
__device__ auto make_accumulators() {
  using Traits = GemmTraits<kConfig>;
  return cute::make_tensor<float>(cute::partition_shape_C(
      typename ForwardOperands<kConfig>::Mma{}, cute::Shape<cute::Int<Traits::kRows>, cute::Int<Traits::kColumns>>{}));
}

// Thread layout of a block: one warpgroup of single-warp roles, two warpgroups that compute.
inline constexpr int kThreads = 384;
inline constexpr int kComputeThreads = 256;
enum class Warp : int { kLoad = 0, kPull = 1, kSchedule = 2, kSignal = 3, kCompute = 4 };

// One claimed task on its way from the schedule warp to all other roles of both blocks.
struct TaskSlot {
  std::int32_t kind;  // TaskKind, or -1: no more tasks
  std::int32_t expert;
  std::int32_t tile;
  std::int32_t column;
  std::int32_t paired_columns;
  std::int32_t ticket;
  std::int32_t row_begin;  // of this block's rows, see rows_of_task
  std::int32_t rows;

  __device__ Task task() const { return {static_cast<TaskKind>(kind), expert, tile, column, paired_columns}; }
};
inline constexpr int kTaskSlots = 2;
// Readers of a slot in one block: schedule, load, signal and eight computing warps.
inline constexpr int kSlotReaders = 11;

template <int kConfig>
struct SharedStorage {
  using Traits = GemmTraits<kConfig>;
  alignas(1024) typename Traits::Element rows[Traits::kStages * Traits::kRows * Traits::kDepth];
  alignas(1024) typename Traits::Element columns[Traits::kStages * Traits::kColumns * Traits::kDepth];
  alignas(128) unsigned char staging[2][Traits::kShape.staging_bytes];
  typename Traits::Pipeline::SharedStorage pipeline;
  TaskSlot slots[kTaskSlots];
  Barrier slot_full[kTaskSlots];   // raised by the schedule warp of block 0, in both blocks
  Barrier slot_empty[kTaskSlots];  // of block 0: all readers of both blocks
  Barrier may_load[kTaskSlots];    // schedule warp: the load role's waits are met
  Barrier may_store[kTaskSlots];   // signal warp: the compute role's waits are met
  Barrier stored[kTaskSlots];      // computing warps: loads read, outputs stored
  Barrier staged[2];               // bytes of a half of the staging memory
  Plan plan;
  std::int32_t counter_offsets[kNumCounters];
  std::int32_t is_last;  // this block is the last to leave
};

}  // namespace moe::sm90
