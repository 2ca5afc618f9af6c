// What the CUDA library's binding (bindings/backward.cpp) asks of the backward kernels: whether they can run a call,
// how much memory it takes, and to launch it. Host only, without torch and CUDA in the interface; implemented in
// launch.cu.
#pragma once

#include <cstdint>
#include <string>

#include "moe/backward/arguments.h"

namespace moe {

// Why the kernels cannot run the call, as "argument: expected ..., got ...", or "" where they can. Looks at sizes,
// strides and options, never at memory.
std::string backward_fault(const BackwardArguments& arguments);

// Bytes that `LaunchOptions::workspace` must have for this problem; otherwise as forward_workspace_bytes, of which it
// can be the same memory.
std::int64_t backward_workspace_bytes(const Problem& problem, bool staged, std::int64_t num_sms);

// Puts the launch (staged: the launches) on `cuda_stream` and returns without waiting; as launch_forward.
std::string launch_backward(const BackwardArguments& arguments, void* cuda_stream);

}  // namespace moe
