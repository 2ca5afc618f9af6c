// Lets a kernel take more dynamic shared memory than the 48 KB that every kernel may. The permission belongs to a
// kernel and a device; asking for it at every launch would cost each of them a call of the driver. Host only.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace moe {

// One for each kernel, of static storage.
class SharedMemoryPermission {
 public:
  // For the current device, once; threads may call it at once. After an error the next call asks again.
  template <typename... Arguments>
  cudaError_t ask(void (*kernel)(Arguments...), int bytes) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    // Devices past the 64th have no bit and ask every time.
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((given_.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) given_.fetch_or(bit, std::memory_order_release);
    return error;
  }

 private:
  std::atomic<std::uint64_t> given_{0};  // one bit for each device
};

}  // namespace moe
