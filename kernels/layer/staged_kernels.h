// The stages that are no GEMM as kernels of their own, for the staged backend: many dispatch warps, many combine warps.
// Both run the very roles of the layer's kernel.
#pragma once

#include <cuda_runtime.h>

#include "moe/backward/kernel_params.h"
#include "moe/forward/kernel_params.h"

namespace moe::sm90 {

cudaError_t launch_dispatch(const ForwardParams& params, int blocks, cudaStream_t stream);
cudaError_t launch_dispatch(const BackwardParams& params, int blocks, cudaStream_t stream);
// Ends the step: after an abort it poisons the outputs of its direction.
cudaError_t launch_combine(const ForwardParams& params, int blocks, cudaStream_t stream);
cudaError_t launch_combine(const BackwardParams& params, int blocks, cudaStream_t stream);

}  // namespace moe::sm90
