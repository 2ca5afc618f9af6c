// The K loop of all GEMMs: 64 x 256 fp32 accumulators of one warpgroup over the stages that the load role fills.
// Always from the first column to the last, so that a row's result does not depend on what else is computed.
#pragma once

#include "cute/algorithm/gemm.hpp"
#include "moe/arch/sm90/gemm_traits.h"

namespace moe::sm90 {

template <int kConfig>
class Mainloop {
  using Traits = GemmTraits<kConfig>;
  using Pipeline = typename Traits::Pipeline;

 public:
  __device__ Mainloop(SharedStorage<kConfig>& storage, Pipeline& pipeline) : storage_(storage), pipeline_(pipeline) {}

  // Accumulators come in the order of the instruction: of its warp's 16 rows, a thread's element 4 j + 2 r + c is row
  // lane / 4 + 8 r and column 8 j + 2 (lane % 4) + c.
  //
  // `pending` is the end of the task before: called as soon as this task's products are under way, or before anything
  // is waited for. With `works` false the stages are only passed on. One thread of a warpgroup releases a stage for all
  // of it: where they multiply, the instruction keeps its four warps together; where they do not, a barrier must, or a
  // slow warp would miss the stage's next phase and wait forever.
  // Requires at least one step.
  template <typename Operands, typename Accumulators, typename Pending>
  __device__ __forceinline__ void run(Accumulators& accumulators, std::int32_t steps, bool works, Pending pending) {
    auto token = pipeline_.consumer_test_wait(state_);
    bool is_pending = true;
    if (!works || token != cutlass::BarrierStatus::WaitDone) {
      pending();
      is_pending = false;
    }
    if (!works) {
      for (std::int32_t step = 0; step < steps; ++step) {
        pipeline_.consumer_wait(state_);
        named_sync(1 + threadIdx.x / 128, 128);
        pipeline_.consumer_release(state_);
        ++state_;
      }
      return;
    }
    using namespace cute;
    const auto rows = make_tensor(make_smem_ptr(storage_.rows), typename Operands::RowsLayout{});
    const auto columns = make_tensor(make_smem_ptr(storage_.columns), typename Operands::ColumnsLayout{});
    typename Operands::Mma mma;
    const auto thread = mma.get_slice(static_cast<int>(threadIdx.x) - 128);
    const auto a = thread.make_fragment_A(thread.partition_A(rows));
    const auto b = thread.make_fragment_B(thread.partition_B(columns));
    auto release = state_;
    pipeline_.consumer_wait(state_, token);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    multiply(mma, a, b, accumulators);
    if (is_pending) pending();
    for (std::int32_t step = 1; step < steps; ++step) {
      pipeline_.consumer_wait(state_);
      multiply(mma, a, b, accumulators);
      warpgroup_wait<1>();
      warpgroup_fence_operand(accumulators);
      pipeline_.consumer_release(release);
      ++release;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulators);
    pipeline_.consumer_release(release);
  }

 private:
  // Starts the products of one stage. Inlined wherever it is used: ptxas serialises products around a call.
  template <typename Mma, typename A, typename B, typename Accumulators>
  __device__ __forceinline__ void multiply(Mma& mma, const A& a, const B& b, Accumulators& accumulators) {
    using namespace cute;
    warpgroup_fence_operand(accumulators);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
      cute::gemm(mma, a(_, _, k, state_.index()), b(_, _, k, state_.index()), accumulators);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    ++state_;
  }

  SharedStorage<kConfig>& storage_;
  Pipeline& pipeline_;
  typename Traits::PipelineState state_;
};

}  // namespace moe::sm90
