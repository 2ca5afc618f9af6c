// Shared-memory barriers (mbarrier) within a block and across the two blocks of a cluster, in the forms that CUTLASS
// has no wrapper for: arrivals on the other block's barrier with cluster scope, and waits that acquire at cluster
// scope. Used by the task queue, the pulling role and the epilogues; the TMA pipeline uses cutlass::PipelineTmaAsync.
#pragma once

#include <cstdint>

namespace moe::sm90 {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
// The same shared variable in another block of the cluster, as an address for shared::cluster instructions.
__device__ inline std::uint32_t peer_address(const void* pointer, std::uint32_t block) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(block));
  return address;
}
__device__ inline void store_cluster(std::uint32_t address, std::int32_t value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

struct Barrier {
  std::uint64_t word;

  __device__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  __device__ void arrive_at(std::uint32_t block) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_address(this, block))
                 : "memory");
  }
  __device__ void expect_bytes(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  // Waits for the end of the phase with this parity; acquires at cluster scope.
  __device__ void wait(std::uint32_t parity) {
    std::uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.b32 %0, 1, 0, p;\n"
          "}\n"
          : "=r"(done)
          : "r"(shared_address(this)), "r"(parity)
          : "memory");
    }
  }
};

// Counts bytes that a phase does without as arrived. By the thread that says how many will arrive.
__device__ inline void skip_bytes(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Number of this block in its cluster.
__device__ inline std::uint32_t block_in_cluster() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// One of the numbered barriers of a block.
__device__ inline void named_sync(std::uint32_t barrier, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace moe::sm90
