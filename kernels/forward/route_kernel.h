// Launches the route kernel, the first launch of a layer's forward: it sorts this rank's routes, plans the step and
// raises "plan ready". One cluster, so that all of its blocks run together and may wait for each other. Called by
// forward/launch.cu and by bindings/route_cuda.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "moe/forward/route_arguments.h"

namespace moe {

// Requires num_experts <= kMaxRouteExperts. Of a group: the kernel waits for the other ranks', at most timeout_ns.
// Never synchronises.
cudaError_t launch_route(const RouteArguments& arguments, cudaStream_t stream);

// Lets the other ranks of a group know that this one refuses the step, and ends it; waits for them as launch_route
// does.
cudaError_t launch_refusal(const RefusalArguments& arguments, cudaStream_t stream);

// The plan alone, of any rank of any W, from class_counts [W, E, 64] and token_starts [W] in device memory. Reads of
// `arguments` sizes and memory; writes what launch_route writes behind the sort, and sources. Requires the rows to fit
// row_capacity.
cudaError_t launch_plan(const RouteArguments& arguments, const std::int32_t* class_counts,
                        const std::int64_t* token_starts, cudaStream_t stream);

}  // namespace moe
