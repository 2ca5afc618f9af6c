// Registers the CUDA kernel of torch.ops.moe.hopper_forward, one rank's forward in the fused kernels, and of
// hopper_workspace_bytes: checks that tensors are what the kernels take, turns them into forward/arguments.h, and
// launches on the current stream. Schemas live in Python (src/moe_megakernel/hopper/ops.py), which also makes tensors
// fit (hopper/layout.py); a fault found here is a mistake of that side.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "forward/launch.h"
#include "moe/plan/config.h"

namespace moe {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "moe::hopper_forward: ";
constexpr std::int64_t kAlignedElements = kRowAlignment / 2;  // of bf16
constexpr std::int64_t kRecordWords = static_cast<std::int64_t>(sizeof(LogRecord) / sizeof(std::int64_t));
static_assert(sizeof(LogRecord) % sizeof(std::int64_t) == 0, "a log is a tensor of int64");

std::string list(std::initializer_list<std::int64_t> values) {
  std::string text = "[";
  for (const std::int64_t value : values) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  }
  return text + "]";
}

// "BFloat16 [4, 8] with strides [8, 1] on cuda:0"
std::string describe(const Tensor& tensor) {
  std::string sizes, strides;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    sizes += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
    strides += (i > 0 ? ", " : "") + std::to_string(tensor.stride(i));
  }
  const std::string device = tensor.is_cuda()  ? "cuda:" + std::to_string(tensor.get_device_index())
                             : tensor.is_cpu() ? "cpu"
                                               : "another device";
  return std::string(torch::headeronly::toString(tensor.scalar_type())) + " [" + sizes + "] with strides [" + strides +
         "] on " + device;
}

bool has_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape) {
  if (tensor.dim() != static_cast<std::int64_t>(shape.size())) return false;
  std::int64_t i = 0;
  for (const std::int64_t size : shape) {
    if (tensor.size(i++) != size) return false;
  }
  return true;
}

bool is_aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

// What the arguments of one call must have in common.
struct Checker {
  std::int32_t device;

  void tensor(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<std::int64_t> shape) const {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device && t.scalar_type() == dtype && has_shape(t, shape),
                    kOp, name, ": expected ", torch::headeronly::toString(dtype), " ", list(shape), " on cuda:", device,
                    ", got ", describe(t));
  }
  void contiguous(const char* name, const Tensor& t, ScalarType dtype,
                  std::initializer_list<std::int64_t> shape) const {
    tensor(name, t, dtype, shape);
    STD_TORCH_CHECK(t.is_contiguous(), kOp, name, ": expected a contiguous tensor, got ", describe(t));
  }
  // Rows that TMA and bulk copies can read: contiguous, 16-byte aligned, and so many elements apart, at least `least`.
  // A stride of a dimension of size 1 means nothing.
  const void* rows(const char* name, const Tensor& t, std::initializer_list<std::int64_t> shape,
                   std::int64_t least = 0) const {
    tensor(name, t, ScalarType::BFloat16, shape);
    const std::int64_t last = t.dim() - 1;
    bool fits = t.stride(last) == 1;
    for (std::int64_t i = 0; i < last; ++i) {
      fits = fits && (t.size(i) == 1 || (t.stride(i) >= least && t.stride(i) % kAlignedElements == 0));
    }
    STD_TORCH_CHECK(fits, kOp, name, ": expected contiguous rows and other strides a multiple of ", kAlignedElements,
                    " from ", least, " on, got ", describe(t));
    const void* data = t.const_data_ptr();
    STD_TORCH_CHECK(is_aligned(data, kRowAlignment), kOp, name, ": expected data aligned to ", kRowAlignment,
                    " bytes, got a pointer to ", describe(t), " that is not");
    return data;
  }
  // TMA does not take strides of 0, nor rows that overlap.
  WeightView weight(const char* name, const Tensor& t, std::initializer_list<std::int64_t> shape) const {
    const void* data = rows(name, t, shape, t.dim() == 3 ? t.size(2) : 0);
    const std::int64_t row_stride = t.size(1) == 1 ? t.size(2) : t.stride(1);
    return {data, t.size(0) == 1 ? t.size(1) * row_stride : t.stride(0), row_stride};
  }
  const void* bias(const char* name, const OptionalTensor& t, std::initializer_list<std::int64_t> shape) const {
    if (!t.has_value()) return nullptr;
    contiguous(name, *t, ScalarType::BFloat16, shape);
    return t->const_data_ptr();
  }
};

// One rank: every expert is local and every route arrives here.
Problem problem_of(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts, std::int64_t hidden,
                   std::int64_t width, bool gated) {
  STD_TORCH_CHECK(routes_fit(tokens, top_k), kOp, "topk_idx: expected at most ", kMaxRoutes,
                  " routes, got T = ", tokens, ", K = ", top_k);
  return {1, 0, num_experts, top_k, hidden, width, gated ? 1 : 0, tokens, tokens * top_k};
}

void read_log(const OptionalTensor& log, const Checker& check, ForwardArguments& arguments) {
  if (!log.has_value()) return;
  check.contiguous("log", *log, ScalarType::Long, {log->numel()});
  STD_TORCH_CHECK(log->numel() >= 1, kOp, "log: expected at least one element, the count, got ", describe(*log));
  auto* words = log->mutable_data_ptr<std::int64_t>();
  arguments.log = {reinterpret_cast<LogRecord*>(words + 1), (log->numel() - 1) / kRecordWords,
                   reinterpret_cast<unsigned long long*>(words)};
}

void check_status(const Tensor& status) {
  constexpr auto kWords = static_cast<std::int64_t>(sizeof(StepStatus) / sizeof(std::int64_t));
  STD_TORCH_CHECK(status.is_cpu() && status.scalar_type() == ScalarType::Long && has_shape(status, {kWords}) &&
                      status.is_contiguous(),
                  kOp, "status: expected pinned Long [", kWords, "] on cpu, got ", describe(status));
}

void check_options(const ForwardArguments& a) {
  STD_TORCH_CHECK(a.num_sms >= 2 && a.num_sms % 2 == 0, kOp, "num_sms: expected an even number >= 2, got ", a.num_sms);
  STD_TORCH_CHECK(a.timeout_ns > 0, kOp, "timeout_ns: expected a number > 0, got ", a.timeout_ns);
  STD_TORCH_CHECK(a.skip_counter >= -1 && a.skip_counter < kNumCounters, kOp, "skip_counter: expected -1 to ",
                  kNumCounters - 1, ", got ", a.skip_counter);
  const auto activation = static_cast<std::int32_t>(a.activation);
  STD_TORCH_CHECK(activation >= 0 && activation <= static_cast<std::int32_t>(Activation::kRelu2), kOp,
                  "activation: expected 0 to ", static_cast<std::int32_t>(Activation::kRelu2), ", got ", activation);
  STD_TORCH_CHECK((a.activation != Activation::kRelu2) == (a.problem.gated != 0), kOp,
                  "w_gate_up: expected rows for activation ", activation, ", got ", a.problem.h_columns(),
                  " rows with width ", a.problem.width);
}

std::int64_t hopper_workspace_bytes(std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
                                    std::int64_t hidden, std::int64_t width, bool gated, bool staged,
                                    std::int64_t num_sms) {
  return forward_workspace_bytes(problem_of(tokens, top_k, num_experts, hidden, width, gated), staged, num_sms);
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
  const Checker check{x.get_device_index()};
  const std::int64_t tokens = x.size(0), hidden = x.size(1), top_k = topk_idx.size(1), width = w_down.size(2);
  const std::int64_t columns = w_gate_up.size(1), routes = tokens * top_k;

  ForwardArguments a{};
  a.problem = problem_of(tokens, top_k, num_experts, hidden, width, columns != width);
  a.tokens = tokens;
  a.x = check.rows("x", x, {tokens, hidden});
  a.x_token_stride = x.stride(0);
  const bool wide = topk_idx.scalar_type() == ScalarType::Long;
  check.tensor("topk_idx", topk_idx, wide ? ScalarType::Long : ScalarType::Int, {tokens, top_k});
  a.topk_idx = {topk_idx.const_data_ptr(), topk_idx.stride(0), topk_idx.stride(1), wide};
  check.tensor("topk_weights", topk_weights, ScalarType::Float, {tokens, top_k});
  a.topk_weights = {topk_weights.const_data_ptr<float>(), topk_weights.stride(0), topk_weights.stride(1)};
  const std::int64_t h_columns = a.problem.h_columns();
  a.w_gate_up = check.weight("w_gate_up", w_gate_up, {num_experts, h_columns, hidden});
  a.w_down = check.weight("w_down", w_down, {num_experts, hidden, width});
  a.bias_gate_up = check.bias("bias_gate_up", bias_gate_up, {num_experts, h_columns});
  a.bias_down = check.bias("bias_down", bias_down, {num_experts, hidden});
  a.activation = static_cast<Activation>(activation);
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

  // Pinned memory has one address for the host and all devices.
  check_status(status);
  a.status = reinterpret_cast<StepStatus*>(status.mutable_data_ptr<std::int64_t>());
  a.staged = staged;
  a.num_sms = num_sms;
  a.timeout_ns = timeout_ns;
  a.skip_counter = static_cast<std::int32_t>(skip_counter);
  a.skip_index = skip_index;
  check_options(a);
  read_log(log, check, a);

  const std::string fault = forward_fault(a);
  STD_TORCH_CHECK(fault.empty(), kOp, fault);
  const std::int64_t needed = forward_workspace_bytes(a.problem, staged, num_sms);
  check.contiguous("workspace", workspace, ScalarType::Byte, {workspace.numel()});
  a.workspace = workspace.mutable_data_ptr();
  STD_TORCH_CHECK(workspace.numel() >= needed && is_aligned(a.workspace, kRegionAlignment), kOp,
                  "workspace: expected at least ", needed, " bytes aligned to ", kRegionAlignment, ", got ",
                  workspace.numel(), is_aligned(a.workspace, kRegionAlignment) ? " bytes" : " bytes that are not");

  const torch::stable::accelerator::DeviceGuard guard(check.device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(check.device, &stream));
  const std::string error = launch_forward(a, stream);
  STD_TORCH_CHECK(error.empty(), kOp, "launch: ", error);
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CUDA, m) { m.impl("hopper_forward", TORCH_BOX(&moe::hopper_forward)); }
// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_workspace_bytes", TORCH_BOX(&moe::hopper_workspace_bytes));
}
