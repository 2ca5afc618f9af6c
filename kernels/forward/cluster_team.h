// The team of plan/team.h on the device: the blocks of one cluster. Owns the barriers and the warp and block primitives
// that the parallel plan is written with; everything else about it runs on the host too. Included by forward/route.cu.
//
// The functions are marked for host and device only because the templates that call them are: they run on the device.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "moe/plan/plan_scratch.h"
#include "moe/plan/team.h"

namespace moe {

inline constexpr int kLanes = 32;

struct ClusterWarp {
  static constexpr std::int32_t lanes = kLanes;
  std::int32_t index;
  std::int32_t lane;

  MOE_HOST_DEVICE void add([[maybe_unused]] std::int32_t* counter) const {
#if defined(__CUDA_ARCH__)
    atomicAdd(counter, 1);
#endif
  }

  MOE_HOST_DEVICE std::int32_t take([[maybe_unused]] std::int32_t* counters, [[maybe_unused]] std::int32_t key) const {
#if defined(__CUDA_ARCH__)
    const unsigned same = __match_any_sync(~0u, key);
    const std::int32_t rank = __popc(same & ((1u << lane) - 1));
    const std::int32_t taken = key < 0 ? 0 : counters[key] + rank;
    __syncwarp();  // all lanes have read what the first of them now replaces
    if (rank == 0 && key >= 0) counters[key] = taken + __popc(same);
    __syncwarp();
    return taken;
#else
    return 0;
#endif
  }
};

// The running block. kWarps of kLanes threads.
template <std::int32_t kWarps>
struct ClusterBlock {
  static constexpr std::int32_t count = static_cast<std::int32_t>(kPlanBlocks);
  static constexpr std::int32_t num_warps = kWarps;
  static constexpr std::int32_t num_threads = kWarps * kLanes;
  static constexpr std::int32_t shared_words = static_cast<std::int32_t>(kPlanSharedWords);

  std::int32_t index;
  std::int32_t thread;
  std::int32_t* shared;
  std::int32_t* warp_sums;  // [kWarps] in shared memory

  template <typename Function>
  MOE_HOST_DEVICE void phase(Function function) {
    function(Thread{thread, num_threads, index * num_threads + thread, count * num_threads});
    barrier();
  }

  template <typename Function>
  MOE_HOST_DEVICE void warps(Function function) {
    function(ClusterWarp{thread / kLanes, thread % kLanes});
    barrier();
  }

  // Every thread sums a run of values, the warps sum those sums, and every warp sums the warps' for itself.
  MOE_HOST_DEVICE void exclusive_sum([[maybe_unused]] std::int32_t* values, [[maybe_unused]] std::int32_t n) {
#if defined(__CUDA_ARCH__)
    static_assert(kWarps <= kLanes);
    const std::int32_t warp = thread / kLanes, lane = thread % kLanes;
    const std::int32_t each = ceil_div32(n, num_threads);
    const std::int32_t begin = min32(n, std::int64_t{thread} * each), end = min32(n, std::int64_t{begin} + each);
    const std::int32_t sum = sum_of(values, begin, end);
    const std::int32_t inclusive = inclusive_sum(sum, lane);
    if (lane == kLanes - 1) warp_sums[warp] = inclusive;
    barrier();
    const std::int32_t of_warp = lane < kWarps ? warp_sums[lane] : 0;
    const std::int32_t before_warp = __shfl_sync(~0u, inclusive_sum(of_warp, lane) - of_warp, warp);
    store_sums(values, begin, end, before_warp + inclusive - sum);
    if (thread == num_threads - 1) values[n] = before_warp + inclusive;
    barrier();
#endif
  }

  // Each column by a warp, every lane a run of it: an odd number, so that lanes read different banks.
  MOE_HOST_DEVICE void exclusive_sums([[maybe_unused]] std::int32_t* values, [[maybe_unused]] std::int32_t pitch,
                                      [[maybe_unused]] std::int32_t columns, [[maybe_unused]] std::int32_t n) {
#if defined(__CUDA_ARCH__)
    const std::int32_t warp = thread / kLanes, lane = thread % kLanes;
    if (warp < columns) {
      std::int32_t* column = values + warp * pitch;
      const std::int32_t each = ceil_div32(n, kLanes) | 1;
      const std::int32_t begin = min32(n, lane * each), end = min32(n, begin + each);
      const std::int32_t sum = sum_of(column, begin, end);
      const std::int32_t inclusive = inclusive_sum(sum, lane);
      store_sums(column, begin, end, inclusive - sum);
      if (lane == kLanes - 1) column[n] = inclusive;
    }
    barrier();
#endif
  }

  MOE_HOST_DEVICE void lower([[maybe_unused]] std::int32_t* address, [[maybe_unused]] std::int32_t value) {
#if defined(__CUDA_ARCH__)
    atomicMin(address, value);
#endif
  }

 private:
  MOE_HOST_DEVICE static void barrier() {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
#if defined(__CUDA_ARCH__)
  __device__ static std::int32_t sum_of(const std::int32_t* values, std::int32_t begin, std::int32_t end) {
    std::int32_t sum = 0;
    MOE_ROLLED
    for (std::int32_t i = begin; i < end; ++i) sum += values[i];
    return sum;
  }
  // Replaces values by the sums of those before them and `before`.
  __device__ static void store_sums(std::int32_t* values, std::int32_t begin, std::int32_t end, std::int32_t before) {
    MOE_ROLLED
    for (std::int32_t i = begin; i < end; ++i) {
      const std::int32_t value = values[i];
      values[i] = before;
      before += value;
    }
  }
  __device__ static std::int32_t inclusive_sum(std::int32_t value, std::int32_t lane) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const std::int32_t lower = __shfl_up_sync(~0u, value, distance);
      if (lane >= distance) value += lower;
    }
    return value;
  }
#endif
};

template <std::int32_t kWarps>
struct ClusterTeam {
  ClusterBlock<kWarps> block;

  // Blocks exchange through global memory, which the cluster's barrier releases and acquires.
  template <typename Function>
  MOE_HOST_DEVICE void stage(Function function) {
    function(block);
#if defined(__CUDA_ARCH__)
    cooperative_groups::this_cluster().sync();
#endif
  }
};

}  // namespace moe
