// Registers the CUDA kernel of torch.ops.moe.hopper_backward, one rank's backward in the fused kernels, and of
// hopper_backward_workspace_bytes: turns tensors into backward/arguments.h and launches on the current stream. A
// gradient that is not given is not asked for. Schemas live in Python (src/moe_megakernel/hopper/ops.py), which also
// makes tensors fit (hopper/layout.py).
#include "backward/launch.h"
#include "bindings/launch_tensors.h"

namespace moe {
namespace {

constexpr const char* kOp = "moe::hopper_backward: ";

void* given(const OptionalTensor& tensor) { return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr; }

WeightGradView read_weight_grad(const Checker& check, const char* name, const OptionalTensor& grad,
                                std::initializer_list<std::int64_t> shape) {
  if (!grad.has_value()) return {nullptr, false};
  const bool accumulates = grad->scalar_type() == ScalarType::Float;
  check.contiguous(name, *grad, accumulates ? ScalarType::Float : ScalarType::BFloat16, shape);
  return {grad->mutable_data_ptr(), accumulates};
}

std::int64_t hopper_backward_workspace_bytes(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
                                             std::int64_t hidden, std::int64_t width, bool gated, bool staged,
                                             std::int64_t num_sms) {
  return backward_workspace_bytes(problem_of(kOp, tokens, top_k, num_experts, hidden, width, gated), staged, num_sms);
}

// Which gradients are asked for, and what they need of the inputs.
void check_inputs(const GradNeeds& needs, bool has_x, bool has_gate_up, bool has_down) {
  const auto needs_input = [](bool needed, bool given, const char* name, const char* by) {
    STD_TORCH_CHECK(!needed || given, kOp, name, ": expected a tensor for ", by, ", got None");
  };
  needs_input(needs.pulls_x(), has_x, "x", "dw_gate_up, or for h that is not kept");
  needs_input(needs.x || needs.recomputes(), has_gate_up, "w_gate_up", "dx, or for h that is not kept");
  needs_input(needs.da(), has_down, "w_down", "a gradient of h or of topk_weights");
}

void hopper_backward(const Tensor& dy, const OptionalTensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                     const OptionalTensor& w_gate_up, const OptionalTensor& w_down, const OptionalTensor& bias_gate_up,
                     const OptionalTensor& bias_down, const OptionalTensor& h, const Tensor& expert_offsets,
                     const Tensor& row_route, const OptionalTensor& dx, const OptionalTensor& dtopk_weights,
                     const OptionalTensor& dw_gate_up, const OptionalTensor& dw_down,
                     const OptionalTensor& dbias_gate_up, const OptionalTensor& dbias_down, const Tensor& workspace,
                     const Tensor& status, const OptionalTensor& log, const OptionalTensor& group,
                     std::int64_t num_experts, std::int64_t width, std::int64_t activation, double alpha, double limit,
                     bool staged, std::int64_t num_sms, std::int64_t timeout_ns, std::int64_t skip_counter,
                     std::int64_t skip_index) {
  const PeerGroup peers = read_group(kOp, group);
  STD_TORCH_CHECK(dy.is_cuda() && dy.dim() == 2 && (dy.size(0) >= 1 || peers.num_ranks > 1), kOp,
                  "dy: expected [T, H] with T >= 1 on a CUDA device, got ", describe(dy));
  STD_TORCH_CHECK(topk_idx.dim() == 2 && topk_idx.size(1) >= 1, kOp, "topk_idx: expected [T, K] with K >= 1, got ",
                  describe(topk_idx));
  STD_TORCH_CHECK(num_experts >= 1 && width >= 1, kOp, "num_experts, width: expected numbers >= 1, got ", num_experts,
                  " and ", width);
  const Checker check{kOp, dy.get_device_index()};
  const std::int64_t tokens = dy.size(0), hidden = dy.size(1), top_k = topk_idx.size(1);
  const bool gated = activation != static_cast<std::int64_t>(Activation::kRelu2);

  BackwardArguments a{};
  a.group = peers;
  a.problem = problem_of(kOp, peers, tokens, top_k, num_experts, hidden, width, gated);
  a.tokens = tokens;
  a.activation = read_activation(check, a.problem, activation);
  a.alpha = static_cast<float>(alpha);
  a.limit = static_cast<float>(limit);
  const std::int64_t h_columns = a.problem.h_columns(), experts = a.problem.local_experts();
  const std::int64_t rows = a.problem.row_capacity;  // with one rank T * K
  const std::int64_t least = peers.num_ranks > 1 ? hidden : 0;
  a.needs = {dx.has_value(),      dtopk_weights.has_value(), dw_gate_up.has_value(),
             dw_down.has_value(), dbias_gate_up.has_value(), dbias_down.has_value(),
             !h.has_value()};
  a.dy = check.rows("dy", dy, {tokens, hidden}, least);
  a.dy_token_stride = dy.stride(0);
  if (x.has_value()) {
    a.x = check.rows("x", *x, {tokens, hidden}, least);
    a.x_token_stride = x->stride(0);
  }
  a.topk_idx = read_ids(check, topk_idx, tokens, top_k);
  a.topk_weights = read_weights(check, topk_weights, tokens, top_k);
  if (peers.num_ranks > 1) check.contiguous("topk_weights", topk_weights, ScalarType::Float, {tokens, top_k});
  if (w_gate_up.has_value()) a.w_gate_up = check.weight("w_gate_up", *w_gate_up, {experts, h_columns, hidden});
  if (w_down.has_value()) a.w_down = check.weight("w_down", *w_down, {experts, hidden, width});
  a.bias_gate_up = check.bias("bias_gate_up", bias_gate_up, {experts, h_columns});
  a.bias_down = check.bias("bias_down", bias_down, {experts, hidden});
  if (h.has_value()) {
    check.contiguous("h", *h, ScalarType::BFloat16, {rows, h_columns});
    a.h = h->const_data_ptr();
  }
  check.contiguous("expert_offsets", expert_offsets, ScalarType::Int, {experts + 1});
  a.expert_offsets = expert_offsets.const_data_ptr<std::int32_t>();
  check.contiguous("row_route", row_route, ScalarType::Int, {rows});
  a.row_route = row_route.const_data_ptr<std::int32_t>();
  check_inputs(a.needs, x.has_value(), w_gate_up.has_value(), w_down.has_value());

  const auto output = [&](const char* name, const OptionalTensor& tensor, ScalarType dtype,
                          std::initializer_list<std::int64_t> shape) {
    if (tensor.has_value()) check.contiguous(name, *tensor, dtype, shape);
    return given(tensor);
  };
  a.dx = output("dx", dx, ScalarType::BFloat16, {tokens, hidden});
  a.dtopk_weights = static_cast<float*>(output("dtopk_weights", dtopk_weights, ScalarType::Float, {tokens, top_k}));
  a.dw_gate_up = read_weight_grad(check, "dw_gate_up", dw_gate_up, {experts, h_columns, hidden});
  a.dw_down = read_weight_grad(check, "dw_down", dw_down, {experts, hidden, width});
  a.dbias_gate_up = output("dbias_gate_up", dbias_gate_up, ScalarType::BFloat16, {experts, h_columns});
  a.dbias_down = output("dbias_down", dbias_down, ScalarType::BFloat16, {experts, hidden});

  a.options = read_options(check, workspace, status, log, staged, num_sms, timeout_ns, skip_counter, skip_index);
  const std::string fault = backward_fault(a);
  STD_TORCH_CHECK(fault.empty(), kOp, fault);
  check_workspace(check, workspace, backward_workspace_bytes(a.problem, staged, num_sms));

  const torch::stable::accelerator::DeviceGuard guard(check.device);
  const std::string error = launch_backward(a, current_stream(check.device));
  STD_TORCH_CHECK(error.empty(), kOp, "launch: ", error);
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CUDA, m) { m.impl("hopper_backward", TORCH_BOX(&moe::hopper_backward)); }
// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_backward_workspace_bytes", TORCH_BOX(&moe::hopper_backward_workspace_bytes));
}
