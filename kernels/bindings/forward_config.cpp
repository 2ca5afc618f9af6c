// Registers torch.ops.moe.hopper_plan_config and hopper_backward_plan_config: the plan's configuration that a launch of
// the fused kernels takes, as cutlass_configs/ chooses it. Plain C++ in the library for CPU tensors, so that the choice
// is tested without a GPU. Schemas live in src/moe_megakernel/hopper/ops.py; hopper/testing.py turns a row into a
// PlanConfig.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>

#include "cutlass_configs/backward.h"
#include "cutlass_configs/forward.h"
#include "plan_arguments.h"

namespace moe {
namespace {

struct Sizes {
  std::int64_t tokens;
  std::int64_t top_k;
  std::int64_t num_experts;
  std::int64_t hidden;
  std::int64_t width;
  bool gated;
};

// -> int64 [kNumConfigFields], PlanConfig of one rank. `choose` is that of a direction.
template <typename Choose>
Tensor plan_config(const char* op, const Sizes& sizes, bool staged, std::int64_t num_sms, Choose choose) {
  const auto [tokens, top_k, num_experts, hidden, width, gated] = sizes;
  for (const std::int64_t size : {tokens, top_k, num_experts, hidden, width}) {
    STD_TORCH_CHECK(size >= 1, "moe::", op, ": expected tokens, top_k, num_experts, hidden and width >= 1, got ",
                    tokens, ", ", top_k, ", ", num_experts, ", ", hidden, " and ", width);
  }
  STD_TORCH_CHECK(routes_fit(tokens, top_k), "moe::", op, ": tokens: expected at most ", kMaxRoutes,
                  " routes, got tokens = ", tokens, ", top_k = ", top_k);
  STD_TORCH_CHECK(num_sms >= 2 && num_sms % 2 == 0, "moe::", op, ": num_sms: expected an even number >= 2, got ",
                  num_sms);
  const Problem problem{1, 0, num_experts, top_k, hidden, width, gated ? 1 : 0, tokens, tokens * top_k};
  const auto choice = choose(problem, staged, num_sms);
  const PlanConfig config{problem, choice.tiling, choice.schedule};
  Tensor row = torch::stable::empty({kNumConfigFields}, ScalarType::Long);
  std::memcpy(row.mutable_data_ptr<std::int64_t>(), &config, sizeof(config));
  return row;
}

// -> the same of one rank of a group; `tokens` is the most that any rank brings.
Tensor hopper_group_plan_config(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts, std::int64_t hidden,
                                std::int64_t width, bool gated, bool staged, std::int64_t num_sms,
                                std::int64_t num_ranks, std::int64_t row_capacity, std::int64_t rank, bool backward) {
  const Problem problem{num_ranks, rank, num_experts, top_k, hidden, width, gated ? 1 : 0, tokens, row_capacity};
  const ForwardChoice forward = choose_forward(problem, staged, num_sms);
  const BackwardChoice choice = choose_backward(problem, staged, num_sms);
  const PlanConfig config = backward ? PlanConfig{problem, choice.tiling, choice.schedule}
                                     : PlanConfig{problem, forward.tiling, forward.schedule};
  const std::string fault = config_fault(config);
  STD_TORCH_CHECK(fault.empty(), "moe::hopper_group_plan_config: ", fault);
  Tensor row = torch::stable::empty({kNumConfigFields}, ScalarType::Long);
  std::memcpy(row.mutable_data_ptr<std::int64_t>(), &config, sizeof(config));
  return row;
}

Tensor hopper_plan_config(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts, std::int64_t hidden,
                          std::int64_t width, bool gated, bool staged, std::int64_t num_sms) {
  return plan_config("hopper_plan_config", {tokens, top_k, num_experts, hidden, width, gated}, staged, num_sms,
                     choose_forward);
}

Tensor hopper_backward_plan_config(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
                                   std::int64_t hidden, std::int64_t width, bool gated, bool staged,
                                   std::int64_t num_sms) {
  return plan_config("hopper_backward_plan_config", {tokens, top_k, num_experts, hidden, width, gated}, staged, num_sms,
                     choose_backward);
}

}  // namespace
}  // namespace moe

// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_plan_config", TORCH_BOX(&moe::hopper_plan_config));
  m.impl("hopper_group_plan_config", TORCH_BOX(&moe::hopper_group_plan_config));
  m.impl("hopper_backward_plan_config", TORCH_BOX(&moe::hopper_backward_plan_config));
}
