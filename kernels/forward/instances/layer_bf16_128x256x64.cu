// Instance of the layer's kernel for the forward: configuration 0 of cutlass_configs/forward.h.
#include "moe/stage/compute.h"
#include "moe/stage/operands.h"

#include "forward/layer_instances.h"
#include "layer/layer_launch.h"

namespace moe::sm90 {
template cudaError_t launch_layer<0, ForwardParams>(const ForwardParams&, int, cudaStream_t);
}
