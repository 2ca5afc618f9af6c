// See launching.h.
#include "layer/launching.h"

#include <cstring>

#include "moe/forward/workspace.h"
#include "moe/plan/plan_scratch.h"

namespace moe {

std::string launch_fault(const char* argument, const std::string& expected, std::int64_t got) {
  return std::string(argument) + ": expected " + expected + ", got " + std::to_string(got);
}

std::string launch_error(const char* kernel, cudaError_t error) {
  return std::string(kernel) + ": expected to launch, got CUDA error: " + cudaGetErrorString(error);
}

std::string layer_fault(const Problem& p, const Tiling& tiling, const Schedule& schedule,
                        const LaunchOptions& options) {
  if (p.num_experts > kMaxRouteExperts) {
    return launch_fault("num_experts", "at most " + std::to_string(kMaxRouteExperts), p.num_experts);
  }
  if (p.hidden % 8 != 0) return launch_fault("x", "H a multiple of 8 (16-byte rows)", p.hidden);
  if (p.width % 8 != 0) return launch_fault("w_down", "I a multiple of 8 (16-byte rows)", p.width);
  if (options.num_sms < 2 || options.num_sms % 2 != 0) {
    return launch_fault("num_sms", "an even number >= 2", options.num_sms);
  }
  const std::string text = config_fault(PlanConfig{p, tiling, schedule});
  return text.empty() ? "" : "plan: " + text;
}

CounterMemory counter_memory(const LaunchOptions& options, const PlanMemory& plan, std::int64_t* flag_done,
                             const PeerMemory& peers, unsigned char* shared) {
  CounterMemory memory{};
  memory.plan = plan;
  memory.peers = peers;
  memory.flag_done = peers.shared() ? reinterpret_cast<std::int64_t*>(shared + peers.flag_done) : flag_done;
  memory.abort_word = peers.shared() ? reinterpret_cast<const std::int64_t*>(shared + peers.abort) : nullptr;
  memory.status = options.status;
  memory.timeout_ns = options.timeout_ns;
  memory.skip_counter = options.skip_counter;
  memory.skip_index = options.skip_index;
  memory.log = options.log;
  return memory;
}

std::string group_fault(const PeerGroup& group, const Problem& p, const Tiling& tiling, const Schedule& schedule) {
  if (p.num_ranks == 1) return "";
  if (group.bases == 0 || group.own == 0) return launch_fault("group", "addresses of shared memory", 0);
  const std::int64_t needed = workspace_bytes(true, p, tiling, schedule, kElementBytes);
  if (group.bytes >= needed) return "";
  return launch_fault("group", "at least " + std::to_string(needed) + " bytes of shared memory", group.bytes);
}

RankHeader rank_header(const Problem& p, std::int64_t tokens, const StepSummary& step) {
  const auto bits = [](float value) {
    std::int32_t word = 0;
    std::memcpy(&word, &value, sizeof(word));
    return std::int64_t{word};
  };
  RankHeader header{};
  header.tokens = tokens;
  header.bad_route = -1;
  const auto set = [&](HeaderField field, std::int64_t value) { header.fields[static_cast<int>(field)] = value; };
  set(HeaderField::kDirection, static_cast<std::int64_t>(step.direction));
  set(HeaderField::kHidden, p.hidden);
  set(HeaderField::kWidth, p.width);
  set(HeaderField::kNumExperts, p.num_experts);
  set(HeaderField::kTopK, p.top_k);
  set(HeaderField::kMaxTokens, p.max_tokens);
  set(HeaderField::kRowCapacity, p.row_capacity);
  set(HeaderField::kActivation, static_cast<std::int64_t>(step.activation));
  set(HeaderField::kAlpha, bits(step.alpha));
  set(HeaderField::kLimit, bits(step.limit));
  set(HeaderField::kNeeds, step.needs);
  set(HeaderField::kSendsX, step.sends_x ? 1 : 0);
  return header;
}

cudaError_t share_tokens(unsigned char* to, const void* rows, std::int64_t token_stride, std::int64_t tokens,
                         std::int64_t hidden, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto bytes = static_cast<std::size_t>(hidden * kElementBytes);
  const auto pitch = static_cast<std::size_t>(token_stride * kElementBytes);
  if (pitch == bytes) return cudaMemcpyAsync(to, rows, bytes * tokens, cudaMemcpyDeviceToDevice, stream);
  return cudaMemcpy2DAsync(to, bytes, rows, pitch, bytes, static_cast<std::size_t>(tokens), cudaMemcpyDeviceToDevice,
                           stream);
}

std::mutex& launch_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace moe
