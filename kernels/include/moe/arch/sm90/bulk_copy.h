// Bulk copies (cp.async.bulk) between global and shared memory, without tensor maps: how the pulling role moves rows.
// Sizes and addresses are multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "moe/arch/sm90/barrier.h"

namespace moe::sm90 {

// Global to shared; counts its bytes on `barrier`.
__device__ inline void bulk_load(void* shared, const void* global, std::uint32_t bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}
// Shared to global, in this thread's open bulk group.
__device__ inline void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_bulk_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the latest kPending groups of this thread are complete: written, and visible to this thread.
template <int kPending>
__device__ inline void wait_bulk_groups() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Until all but the latest kPending groups have read their shared memory, which may then be overwritten.
template <int kPending>
__device__ inline void wait_bulk_groups_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace moe::sm90
