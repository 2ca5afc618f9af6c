// See launching.h.
#include "layer/launching.h"

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
  if (p.num_ranks != 1) return launch_fault("num_ranks", "1", p.num_ranks);
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

CounterMemory counter_memory(const LaunchOptions& options, const PlanMemory& plan, std::int64_t* flag_done) {
  CounterMemory memory{};
  memory.plan = plan;
  memory.flag_done = flag_done;
  memory.status = options.status;
  memory.timeout_ns = options.timeout_ns;
  memory.skip_counter = options.skip_counter;
  memory.skip_index = options.skip_index;
  memory.log = options.log;
  return memory;
}

std::mutex& launch_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace moe
