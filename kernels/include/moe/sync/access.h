// Loads, stores and fences by which ranks, blocks and roles order each other: acquire and release at the scopes of
// plan/edges.h. Used by sync/counters.h and by the meeting of a group's ranks.
#pragma once

#include <cstdint>

namespace moe {

__device__ inline std::int32_t load_acquire_gpu(const std::int32_t* address) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::int64_t load_acquire_gpu(const std::int64_t* address) {
  std::int64_t value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::int64_t load_acquire_system(const std::int64_t* address) {
  std::int64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::int64_t load_relaxed_system(const std::int64_t* address) {
  std::int64_t value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::int64_t load_relaxed(const std::int64_t* address) {
  std::int64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void store_release_system(std::int64_t* address, std::int64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void add_release_gpu(std::int32_t* address, std::int32_t amount) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(amount) : "memory");
}
// Orders accesses of the generic proxy and of the async proxy (TMA, bulk copies) to global memory, either way.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace moe
