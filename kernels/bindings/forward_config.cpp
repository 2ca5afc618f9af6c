// Registers torch.ops.moe.hopper_plan_config: the plan's configuration that a forward launch of the fused kernels
// takes, as cutlass_configs/forward.h chooses it. Plain C++ in the library for CPU tensors, so that the choice is
// tested without a GPU. Its schema lives in src/moe_megakernel/hopper/ops.py; hopper/testing.py turns the row into a
// PlanConfig.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>

#include "cutlass_configs/forward.h"
#include "plan_arguments.h"

namespace moe {
namespace {

constexpr const char* kOp = "hopper_plan_config";

// -> int64 [23], PlanConfig of one rank.
Tensor hopper_plan_config(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts, std::int64_t hidden,
                          std::int64_t width, bool gated, bool staged, std::int64_t num_sms) {
  for (const std::int64_t size : {tokens, top_k, num_experts, hidden, width}) {
    STD_TORCH_CHECK(size >= 1, "moe::", kOp, ": expected tokens, top_k, num_experts, hidden and width >= 1, got ",
                    tokens, ", ", top_k, ", ", num_experts, ", ", hidden, " and ", width);
  }
  STD_TORCH_CHECK(routes_fit(tokens, top_k), "moe::", kOp, ": tokens: expected at most ", kMaxRoutes,
                  " routes, got tokens = ", tokens, ", top_k = ", top_k);
  STD_TORCH_CHECK(num_sms >= 2 && num_sms % 2 == 0, "moe::", kOp, ": num_sms: expected an even number >= 2, got ",
                  num_sms);
  const Problem problem{1, 0, num_experts, top_k, hidden, width, gated ? 1 : 0, tokens, tokens * top_k};
  const ForwardChoice choice = choose_forward(problem, staged, num_sms);
  const PlanConfig config{problem, choice.tiling, choice.schedule};
  Tensor row = torch::stable::empty({kNumConfigFields}, ScalarType::Long);
  std::memcpy(row.mutable_data_ptr<std::int64_t>(), &config, sizeof(config));
  return row;
}

}  // namespace
}  // namespace moe

// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_plan_config", TORCH_BOX(&moe::hopper_plan_config));
}
