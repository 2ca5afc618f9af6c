// What the CUDA library's binding (bindings/forward.cpp) asks of the forward kernels: whether they can run a call, how
// much memory it takes, and to launch it. Host only, without torch and CUDA in the interface; implemented in launch.cu.
#pragma once

#include <cstdint>
#include <string>

#include "moe/forward/arguments.h"

namespace moe {

// Why the kernels cannot run the call, as "argument: expected ..., got ...", or "" where they can. Looks at sizes,
// strides and options, never at memory.
std::string forward_fault(const ForwardArguments& arguments);

// Bytes that `ForwardArguments::workspace` must have for this problem: never less for more tokens. The memory belongs
// to one stream, its first kZeroedBytes (moe/plan/layout.h) are zeroed when it is allocated, and it may be reused
// by later launches of any size that fits.
std::int64_t forward_workspace_bytes(const Problem& problem, bool staged, std::int64_t num_sms);

// Bytes of memory that each rank of a group shares with the others, for both directions. The same on all ranks.
std::int64_t group_memory_bytes(const Problem& problem, bool staged, std::int64_t num_sms);

// Why there is no plan for such sizes, or "".
std::string forward_plan_fault(const Problem& problem, bool staged, std::int64_t num_sms);

// Ends a step of a group that this rank refuses before its launch: the other ranks refuse it too. `workspace` and
// `status` are those of the group's launches. Otherwise as launch_forward.
std::string refuse_step(const PeerGroup& group, void* workspace, StepStatus* status, std::int64_t timeout_ns,
                        void* cuda_stream);

// Puts the launch (staged: the launches) on `cuda_stream`, a cudaStream_t of the current device, and returns without
// waiting. No allocation, no synchronisation, so that the stream may be under capture. Threads may call it at once,
// also with one workspace on one stream: launches of one step stand together. Returns "" or an error in words; what
// goes wrong later on the device is written to `ForwardArguments::status`.
std::string launch_forward(const ForwardArguments& arguments, void* cuda_stream);

}  // namespace moe
