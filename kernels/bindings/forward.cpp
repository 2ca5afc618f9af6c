// Registers the CUDA kernel of torch.ops.moe.hopper_forward, a rank's forward in the fused kernels, of
// hopper_workspace_bytes, and of what the ranks of a group need besides (hopper_group_bytes, hopper_group_refuse):
// turns tensors into forward/arguments.h and launches on the current stream. Schemas live in Python
// (src/moe_megakernel/hopper/ops.py), which also makes tensors fit (hopper/layout.py).
#include <torch/csrc/stable/ops.h>

#include "backward/launch.h"
#include "bindings/forward.h"
#include "bindings/launch_tensors.h"
#include "forward/launch.h"

namespace moe {
namespace {

constexpr const char* kOp = "moe::hopper_forward: ";

std::int64_t workspace_bytes_of_op(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
                                   std::int64_t hidden, std::int64_t width, bool gated, bool staged,
                                   std::int64_t num_sms) {
  return forward_workspace_bytes(problem_of(kOp, tokens, top_k, num_experts, hidden, width, gated), staged, num_sms);
}

// -> int64 [2]: bytes of shared memory that each rank of a group needs, and of workspace, for both directions; the same
// on every rank.
Tensor hopper_group_bytes(std::int64_t max_tokens, std::int64_t top_k, std::int64_t num_experts, std::int64_t hidden,
                          std::int64_t width, bool gated, bool staged, std::int64_t num_sms, std::int64_t num_ranks,
                          std::int64_t row_capacity) {
  constexpr const char* kBytesOp = "moe::hopper_group_bytes: ";
  STD_TORCH_CHECK(num_ranks >= 2, kBytesOp, "num_ranks: expected at least 2, got ", num_ranks);
  // The first rank has the most experts.
  const PeerGroup group{num_ranks, 0, max_tokens, row_capacity, 0, 0, 0, 0};
  const Problem problem = group_problem(group, top_k, num_experts, hidden, width, gated);
  const std::string fault = forward_plan_fault(problem, staged, num_sms);
  STD_TORCH_CHECK(fault.empty(), kBytesOp, fault);
  const std::int64_t forward = forward_workspace_bytes(problem, staged, num_sms);
  const std::int64_t backward = backward_workspace_bytes(problem, staged, num_sms);
  Tensor bytes = torch::stable::empty({2}, ScalarType::Long);
  auto* values = bytes.mutable_data_ptr<std::int64_t>();
  values[0] = group_memory_bytes(problem, staged, num_sms);
  values[1] = forward > backward ? forward : backward;
  return bytes;
}

void hopper_group_refuse(const Tensor& workspace, const Tensor& status, const Tensor& group, std::int64_t timeout_ns) {
  constexpr const char* kRefuseOp = "moe::hopper_group_refuse: ";
  const PeerGroup peers = read_group(kRefuseOp, group);
  const Checker check{kRefuseOp, workspace.get_device_index()};
  check.contiguous("workspace", workspace, ScalarType::Byte, {workspace.numel()});
  check_workspace(check, workspace, kZeroedBytes);
  const torch::stable::accelerator::DeviceGuard guard(check.device);
  const std::string error = refuse_step(peers, workspace.mutable_data_ptr(), read_status(check, status), timeout_ns,
                                        current_stream(check.device));
  STD_TORCH_CHECK(error.empty(), kRefuseOp, "launch: ", error);
}

}  // namespace

void hopper_forward(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& w_gate_up,
                    const Tensor& w_down, const OptionalTensor& bias_gate_up, const OptionalTensor& bias_down,
                    const Tensor& y, const Tensor& h, const Tensor& expert_offsets, const Tensor& row_route,
                    const Tensor& workspace, const Tensor& status, const OptionalTensor& log,
                    const OptionalTensor& group, std::int64_t num_experts, std::int64_t activation, double alpha,
                    double limit, bool staged, std::int64_t num_sms, std::int64_t timeout_ns, std::int64_t skip_counter,
                    std::int64_t skip_index) {
  const PeerGroup peers = read_group(kOp, group);
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && (x.size(0) >= 1 || peers.num_ranks > 1), kOp,
                  "x: expected [T, H] with T >= 1 on a CUDA device, got ", describe(x));
  STD_TORCH_CHECK(topk_idx.dim() == 2 && topk_idx.size(1) >= 1, kOp, "topk_idx: expected [T, K] with K >= 1, got ",
                  describe(topk_idx));
  STD_TORCH_CHECK(w_gate_up.dim() == 3 && w_down.dim() == 3, kOp,
                  "w_gate_up, w_down: expected [L, 2I or I, H] and [L, H, I], got ", describe(w_gate_up), " and ",
                  describe(w_down));
  const Checker check{kOp, x.get_device_index()};
  const std::int64_t tokens = x.size(0), hidden = x.size(1), top_k = topk_idx.size(1), width = w_down.size(2);
  const std::int64_t columns = w_gate_up.size(1);

  ForwardArguments a{};
  a.group = peers;
  a.problem = problem_of(kOp, peers, tokens, top_k, num_experts, hidden, width, columns != width);
  a.tokens = tokens;
  a.x = check.rows("x", x, {tokens, hidden}, peers.num_ranks > 1 ? hidden : 0);
  a.x_token_stride = x.stride(0);
  a.topk_idx = read_ids(check, topk_idx, tokens, top_k);
  a.topk_weights = read_weights(check, topk_weights, tokens, top_k);
  const std::int64_t h_columns = a.problem.h_columns(), experts = a.problem.local_experts();
  const std::int64_t rows = a.problem.row_capacity;  // with one rank T * K
  a.w_gate_up = check.weight("w_gate_up", w_gate_up, {experts, h_columns, hidden});
  a.w_down = check.weight("w_down", w_down, {experts, hidden, width});
  a.bias_gate_up = check.bias("bias_gate_up", bias_gate_up, {experts, h_columns});
  a.bias_down = check.bias("bias_down", bias_down, {experts, hidden});
  a.activation = read_activation(check, a.problem, activation);
  a.alpha = static_cast<float>(alpha);
  a.limit = static_cast<float>(limit);

  check.contiguous("y", y, ScalarType::BFloat16, {tokens, hidden});
  a.y = y.mutable_data_ptr();
  const bool keeps_h = h.numel() > 0;
  check.contiguous("h", h, ScalarType::BFloat16, {keeps_h ? rows : 0, h_columns});
  a.h = keeps_h ? h.mutable_data_ptr() : nullptr;
  check.contiguous("expert_offsets", expert_offsets, ScalarType::Int, {experts + 1});
  a.saved_expert_offsets = expert_offsets.mutable_data_ptr<std::int32_t>();
  check.contiguous("row_route", row_route, ScalarType::Int, {rows});
  a.row_route = row_route.mutable_data_ptr<std::int32_t>();

  a.options = read_options(check, workspace, status, log, staged, num_sms, timeout_ns, skip_counter, skip_index);
  const std::string fault = forward_fault(a);
  STD_TORCH_CHECK(fault.empty(), kOp, fault);
  check_workspace(check, workspace, forward_workspace_bytes(a.problem, staged, num_sms));

  const torch::stable::accelerator::DeviceGuard guard(check.device);
  const std::string error = launch_forward(a, current_stream(check.device));
  STD_TORCH_CHECK(error.empty(), kOp, "launch: ", error);
}

}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CUDA, m) {
  m.impl("hopper_forward", TORCH_BOX(&moe::hopper_forward));
  m.impl("hopper_group_refuse", TORCH_BOX(&moe::hopper_group_refuse));
}
// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_workspace_bytes", TORCH_BOX(&moe::workspace_bytes_of_op));
  m.impl("hopper_group_bytes", TORCH_BOX(&moe::hopper_group_bytes));
}
