// What launching has in common for both directions: limits of a layer, errors in words, counters and their memory. Host
// only; included by forward/launch.cu and backward/launch.cu.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <string>

#include "moe/forward/arguments.h"
#include "moe/plan/config.h"
#include "moe/sync/counters.h"

namespace moe {

// "argument: expected ..., got ..."
std::string launch_fault(const char* argument, const std::string& expected, std::int64_t got);

std::string launch_error(const char* kernel, cudaError_t error);

// Why no kernel can run such a layer, or "".
std::string layer_fault(const Problem& problem, const Tiling& tiling, const Schedule& schedule,
                        const LaunchOptions& options);

// `flag_done` lies in the workspace, `plan` too.
CounterMemory counter_memory(const LaunchOptions& options, const PlanMemory& plan, std::int64_t* flag_done);

// A step is several launches, and threads whose current stream is the same share a workspace: one step's launches must
// stand together on the stream. One mutex for all devices, streams and directions, since a launch takes microseconds.
// No thread waits for it and holds what its owner needs: launching calls back into nothing.
std::mutex& launch_mutex();

}  // namespace moe
