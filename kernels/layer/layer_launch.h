// Host side of the layer's kernel: shared memory, cluster, launch. Included by the instances alone; launchers see the
// declarations of launch_layer in forward/layer_instances.h and backward/layer_instances.h.
#pragma once

#include "layer/layer_kernel.h"
#include "layer/shared_memory.h"

namespace moe::sm90 {

template <int kConfig, typename Params>
cudaError_t launch_layer(const Params& params, int blocks, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(SharedStorage<kConfig>));
  static_assert(kBytes <= 232448, "a block has 227 KB of shared memory");
  static SharedMemoryPermission permission;
  const cudaError_t error = permission.ask(layer_kernel<kConfig, Params>, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, layer_kernel<kConfig, Params>, params);
}

}  // namespace moe::sm90
