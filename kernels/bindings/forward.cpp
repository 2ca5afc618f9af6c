// Registers the CUDA kernel of torch.ops.moe.hopper_forward, one rank's forward in the fused kernels, and of
// hopper_workspace_bytes: turns tensors into forward/arguments.h and launches on the current stream. Schemas live in
// Python (src/moe_megakernel/hopper/ops.py), which also makes tensors fit (hopper/layout.py).
#include "bindings/launch_tensors.h"
#include "forward/launch.h"

namespace moe {
namespace {

constexpr const char* kOp = "moe::hopper_forward: ";

std::int64_t hopper_workspace_bytes(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
                                    std::int64_t hidden, std::int64_t width, bool gated, bool staged,
                                    std::int64_t num_sms) {
  return forward_workspace_bytes(problem_of(kOp, tokens, top_k, num_experts, hidden, width, gated), staged, num_sms);
}

void hopper_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                    const Tensor& w_down, const OptionalTensor& bias_gate_up, const OptionalTensor& bias_down,
                    const Tensor& y, const Tensor& h, const Tensor& expert_offsets, const Tensor& row_route,
                    const Tensor& workspace, const Tensor& status, const OptionalTensor& log, std::int64_t num_experts,
                    std::int64_t activation, double alpha, double limit, bool staged, std::int64_t num_sms,
                    std::int64_t timeout_ns, std::int64_t skip_counter, std::int64_t skip_index) {
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && x.size(0) >= 1, kOp,
                  "x: expected [T, H] with T >= 1 on a CUDA device, got ", describe(x));
  STD_TORCH_CHECK(topk_idx.dim() == 2 && topk_idx.size(1) >= 1, kOp, "topk_idx: expected [T, K] with K >= 1, got ",
                  describe(topk_idx));
  STD_TORCH_CHECK(w_gate_up.dim() == 3 && w_down.dim() == 3, kOp,
                  "w_gate_up, w_down: expected [L, 2I or I, H] and [L, H, I], got ", describe(w_gate_up), " and ",
                  describe(w_down));
  const Checker check{kOp, x.get_device_index()};
  const std::int64_t tokens = x.size(0), hidden = x.size(1), top_k = topk_idx.size(1), width = w_down.size(2);
  const std::int64_t columns = w_gate_up.size(1), routes = tokens * top_k;

  ForwardArguments a{};
  a.problem = problem_of(kOp, tokens, top_k, num_experts, hidden, width, columns != width);
  a.tokens = tokens;
  a.x = check.rows("x", x, {tokens, hidden});
  a.x_token_stride = x.stride(0);
  a.topk_idx = read_ids(check, topk_idx, tokens, top_k);
  a.topk_weights = read_weights(check, topk_weights, tokens, top_k);
  const std::int64_t h_columns = a.problem.h_columns();
  a.w_gate_up = check.weight("w_gate_up", w_gate_up, {num_experts, h_columns, hidden});
  a.w_down = check.weight("w_down", w_down, {num_experts, hidden, width});
  a.bias_gate_up = check.bias("bias_gate_up", bias_gate_up, {num_experts, h_columns});
  a.bias_down = check.bias("bias_down", bias_down, {num_experts, hidden});
  a.activation = read_activation(check, a.problem, activation);
  a.alpha = static_cast<float>(alpha);
  a.limit = static_cast<float>(limit);

  check.contiguous("y", y, ScalarType::BFloat16, {tokens, hidden});
  a.y = y.mutable_data_ptr();
  const bool keeps_h = h.numel() > 0;
  check.contiguous("h", h, ScalarType::BFloat16, {keeps_h ? routes : 0, h_columns});
  a.h = keeps_h ? h.mutable_data_ptr() : nullptr;
  check.contiguous("expert_offsets", expert_offsets, ScalarType::Int, {num_experts + 1});
  a.saved_expert_offsets = expert_offsets.mutable_data_ptr<std::int32_t>();
  check.contiguous("row_route", row_route, ScalarType::Int, {routes});
  a.row_route = row_route.mutable_data_ptr<std::int32_t>();

  a.options = read_options(check, workspace, status, log, staged, num_sms, timeout_ns, skip_counter, skip_index);
  const std::string fault = forward_fault(a);
  STD_TORCH_CHECK(fault.empty(), kOp, fault);
  check_workspace(check, workspace, forward_workspace_bytes(a.problem, staged, num_sms));

  const torch::stable::accelerator::DeviceGuard guard(check.device);
  const std::string error = launch_forward(a, current_stream(check));
  STD_TORCH_CHECK(error.empty(), kOp, "launch: ", error);
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CUDA, m) { m.impl("hopper_forward", TORCH_BOX(&moe::hopper_forward)); }
// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_workspace_bytes", TORCH_BOX(&moe::hopper_workspace_bytes));
}
