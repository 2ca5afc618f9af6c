// The instances of the layer's kernel for the forward, one translation unit each under forward/instances, and the table
// by which forward/launch.cu finds that of the chosen configuration.
#pragma once

#include <cuda_runtime.h>

#include "cutlass_configs/forward.h"
#include "moe/forward/kernel_params.h"

namespace moe::sm90 {

// Launches configuration kConfig of cutlass_configs/forward.h with `blocks` blocks, an even number.
template <int kConfig, typename Params>
cudaError_t launch_layer(const Params& params, int blocks, cudaStream_t stream);

extern template cudaError_t launch_layer<0, ForwardParams>(const ForwardParams&, int, cudaStream_t);

using LayerLaunch = cudaError_t (*)(const ForwardParams& params, int blocks, cudaStream_t stream);
inline constexpr LayerLaunch kLayerLaunches[] = {launch_layer<0, ForwardParams>};
static_assert(sizeof(kLayerLaunches) / sizeof(kLayerLaunches[0]) == kNumForwardConfigs,
              "one instance for each configuration");

}  // namespace moe::sm90
