// Instance of the layer's kernel: configuration 0 of cutlass_configs/forward.h.
#include "forward/layer_launch.h"

namespace moe::sm90 {
template cudaError_t launch_layer<0>(const ForwardParams&, int, cudaStream_t);
}
