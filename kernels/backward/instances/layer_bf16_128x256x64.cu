// Instance of the layer's kernel for the backward: configuration 0 of cutlass_configs/forward.h.
#include "moe/stage/gradient_operands.h"
#include "moe/stage/gradients.h"

#include "backward/layer_instances.h"
#include "layer/layer_launch.h"

namespace moe::sm90 {
template cudaError_t launch_layer<0, BackwardParams>(const BackwardParams&, int, cudaStream_t);
}
