// The instances of the layer's kernel for the backward, one translation unit each under backward/instances, and the
// table by which backward/launch.cu finds that of the chosen configuration.
#pragma once

#include <cuda_runtime.h>

#include "cutlass_configs/backward.h"
#include "moe/backward/kernel_params.h"

namespace moe::sm90 {

// Launches configuration kConfig of cutlass_configs/forward.h with `blocks` blocks, an even number.
template <int kConfig, typename Params>
cudaError_t launch_layer(const Params& params, int blocks, cudaStream_t stream);

extern template cudaError_t launch_layer<0, BackwardParams>(const BackwardParams&, int, cudaStream_t);

using GradientLaunch = cudaError_t (*)(const BackwardParams& params, int blocks, cudaStream_t stream);
inline constexpr GradientLaunch kGradientLaunches[] = {launch_layer<0, BackwardParams>};
static_assert(sizeof(kGradientLaunches) / sizeof(kGradientLaunches[0]) == kNumForwardConfigs,
              "one instance for each configuration");

}  // namespace moe::sm90
