// The instances of the layer's kernel, one translation unit each under forward/instances.
#pragma once

#include <cuda_runtime.h>

#include "moe/forward/kernel_params.h"

namespace moe::sm90 {

// Launches configuration kConfig of cutlass_configs/forward.h with `blocks` blocks, an even number.
template <int kConfig>
cudaError_t launch_layer(const ForwardParams& params, int blocks, cudaStream_t stream);

extern template cudaError_t launch_layer<0>(const ForwardParams&, int, cudaStream_t);

}  // namespace moe::sm90
