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

// `flag_done`, of the only rank, lies in the workspace, `plan` too. `shared` is this rank's part of a group's memory.
CounterMemory counter_memory(const LaunchOptions& options, const PlanMemory& plan, std::int64_t* flag_done,
                             const PeerMemory& peers, unsigned char* shared);

// Why a group's memory cannot serve such a layer, or "".
std::string group_fault(const PeerGroup& group, const Problem& problem, const Tiling& tiling, const Schedule& schedule);

// What a rank says of a step when the ranks of a group meet.
struct StepSummary {
  Direction direction;
  Activation activation;
  float alpha;
  float limit;
  std::int64_t needs;
  bool sends_x;
};
RankHeader rank_header(const Problem& problem, std::int64_t tokens, const StepSummary& step);

// Rows of tokens, which do not overlap, into this rank's part of a group's memory, where they lie one behind the other.
cudaError_t share_tokens(unsigned char* to, const void* rows, std::int64_t token_stride, std::int64_t tokens,
                         std::int64_t hidden, cudaStream_t stream);

// A step is several launches, and threads whose current stream is the same share a workspace: one step's launches must
// stand together on the stream. One mutex for all devices, streams and directions, since a launch takes microseconds.
// No thread waits for it and holds what its owner needs: launching calls back into nothing.
std::mutex& launch_mutex();

}  // namespace moe
