// The load role of all GEMMs: one thread feeds a task's operands to shared memory by TMA, behind the waits that the
// schedule warp makes for it. Where they lie is the business of operand_boxes, by direction.
// Blocks of a cluster share what they have in common: two row tiles share the weight tile, and each block loads half of
// it for both; two column tiles of one row tile share the rows in the same way.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/stage/task_queue.h"

namespace moe::sm90 {

// Every direction has one, for its parameters; this one only makes the name known.
template <int kConfig>
void operand_boxes() = delete;

template <int kConfig, typename Params>
class LoadRole {
  using Traits = GemmTraits<kConfig>;
  using Pipeline = typename Traits::Pipeline;

 public:
  __device__ LoadRole(const Params& params, SharedStorage<kConfig>& storage, Pipeline& pipeline)
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
      load(operand_boxes<kConfig>(params_, slot, rank));
    }
    pipeline_.producer_tail(state_);
  }

 private:
  template <typename Boxes>
  __device__ void load(const Boxes& boxes) {
    for (std::int32_t step = 0; step < boxes.steps; ++step) {
      pipeline_.producer_acquire(state_);
      auto* barrier = reinterpret_cast<std::uint64_t*>(pipeline_.producer_get_barrier(state_));
      const int stage = static_cast<int>(state_.index());
      boxes.load(step, storage_.rows + stage * Traits::kRows * Traits::kDepth,
                 storage_.columns + stage * Traits::kColumns * Traits::kDepth, barrier);
      ++state_;
    }
  }

  const Params& params_;
  SharedStorage<kConfig>& storage_;
  Pipeline& pipeline_;
  typename Traits::PipelineState state_;
};

}  // namespace moe::sm90
