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

  MOE_HOST_DEVICE void clear([[maybe_unused]] std::int32_t* values, [[maybe_unused]] std::int32_t n) const {
#if defined(__CUDA_ARCH__)
    MOE_ROLLED
    for (std::int32_t i = lane; i < n; i += lanes) values[i] = 0;
    __syncwarp();
#endif
  }

  // Every lane a run: an odd number, so that lanes read different banks.
  MOE_HOST_DEVICE void exclusive_sum([[maybe_unused]] std::int32_t* values, [[maybe_unused]] std::int32_t n) const {
#if defined(__CUDA_ARCH__)
    const std::int32_t each = (n + lanes - 1) / lanes | 1;
    const std::int32_t begin = lane * each < n ? lane * each : n, end = begin + each < n ? begin + each : n;
    std::int32_t sum = 0;
    MOE_ROLLED
    for (std::int32_t i = begin; i < end; ++i) sum += values[i];
    const std::int32_t inclusive = inclusive_sum(sum, lane);
    std::int32_t before = inclusive - sum;
    MOE_ROLLED
    for (std::int32_t i = begin; i < end; ++i) {
      const std::int32_t value = values[i];
      values[i] = before;
      before += value;
    }
    if (lane == lanes - 1) values[n] = inclusive;
#endif
  }

  // Lanes with the same key find each other in its mask. An atomic in shared memory costs less than votes on all bits
  // of the keys, and those less than `match` wherever lanes differ.
  MOE_HOST_DEVICE std::int32_t take([[maybe_unused]] std::int32_t* counters, [[maybe_unused]] std::int32_t* masks,
                                    [[maybe_unused]] std::int32_t key) const {
#if defined(__CUDA_ARCH__)
    atomicOr(reinterpret_cast<unsigned*>(masks + key), 1u << lane);
    __syncwarp();
    const auto same = static_cast<unsigned>(masks[key]);
    const std::int32_t taken = counters[key] + __popc(same & ((1u << lane) - 1));
    __syncwarp();  // all lanes have read what the last of them now replaces
    if (same >> lane == 1) {
      counters[key] = taken + 1;
      masks[key] = 0;
    }
    __syncwarp();
    return taken;
#else
    return 0;
#endif
  }

#if defined(__CUDA_ARCH__)
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

// The running block. kWarps of kLanes threads.
template <std::int32_t kWarps>
struct ClusterBlock {
  static constexpr std::int32_t count = static_cast<std::int32_t>(kPlanBlocks);
  static constexpr std::int32_t num_warps = kWarps;
  static constexpr std::int32_t num_threads = kWarps * kLanes;
  static constexpr std::int32_t shared_words = static_cast<std::int32_t>(kPlanSharedWords);

  std::int32_t index;
  std::int32_t thread;

  // Named where it is used, so that the compiler knows that it is shared memory.
  MOE_HOST_DEVICE static std::int32_t* shared() {
#if defined(__CUDA_ARCH__)
    extern __shared__ std::int32_t words[];
    return words;
#else
    return nullptr;
#endif
  }

  // Distributed shared memory.
  MOE_HOST_DEVICE const std::int32_t* peer([[maybe_unused]] std::int32_t block) const {
#if defined(__CUDA_ARCH__)
    return cooperative_groups::this_cluster().map_shared_rank(shared(), static_cast<unsigned>(block));
#else
    return nullptr;
#endif
  }

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

  template <typename ThreadFunction, typename WarpFunction>
  MOE_HOST_DEVICE void phase(ThreadFunction of_thread, WarpFunction of_warp) {
    of_thread(Thread{thread, num_threads, index * num_threads + thread, count * num_threads});
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
    warps(of_warp);
  }

  // Every thread sums a run of values, the warps sum those sums, and every warp sums the warps' for itself.
  template <typename Value, typename Put>
  MOE_HOST_DEVICE void scan([[maybe_unused]] std::int32_t n, [[maybe_unused]] Value value, [[maybe_unused]] Put put) {
#if defined(__CUDA_ARCH__)
    static_assert(kWarps <= kLanes);
    __shared__ std::int32_t warp_sums[kWarps];
    const std::int32_t warp = thread / kLanes, lane = thread % kLanes;
    const std::int32_t each = (n + num_threads - 1) / num_threads;
    const std::int32_t begin = thread * each < n ? thread * each : n, end = begin + each < n ? begin + each : n;
    std::int32_t sum = 0;
    MOE_ROLLED
    for (std::int32_t i = begin; i < end; ++i) sum += value(i);
    const std::int32_t inclusive = ClusterWarp::inclusive_sum(sum, lane);
    if (lane == kLanes - 1) warp_sums[warp] = inclusive;
    barrier();
    const std::int32_t of_warp = lane < kWarps ? warp_sums[lane] : 0;
    std::int32_t before = __shfl_sync(~0u, ClusterWarp::inclusive_sum(of_warp, lane) - of_warp, warp);
    before += inclusive - sum;
    MOE_ROLLED
    for (std::int32_t i = begin; i < end; ++i) {
      const std::int32_t added = value(i);
      put(i, before);
      before += added;
    }
    if (thread == num_threads - 1) put(n, before);
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
};

template <std::int32_t kWarps>
struct ClusterTeam {
  ClusterBlock<kWarps> block;

  // Behind the block's barrier, which ends every phase, one thread's fence speaks for all of the block's.
  template <typename Function>
  MOE_HOST_DEVICE void stage(Function function) {
    function(block);
#if defined(__CUDA_ARCH__)
    if (block.thread == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
};

}  // namespace moe
