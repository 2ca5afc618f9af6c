// Registers the CUDA kernel of torch.ops.moe.layer_forward_direct: layer_forward, one rank's forward, without Python
// between the dispatcher and the launch, which is more than half of what the library costs the host. It does ordinary
// calls only; of others it refuses to do anything and returns empty tensors, and the caller takes layer_forward. (It
// could not call that itself: what Python raises would lose its type on the way through C.)
//
// Ordinary is a call for which Python has left a context (src/moe_megakernel/contexts.py) with all that only Python
// knows: memory to work in, the record of errors, settings. Python forgets all contexts whenever one of them might be
// wrong.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "bindings/forward.h"
#include "bindings/launch_tensors.h"
#include "forward/launch.h"

namespace moe {
namespace {

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Settings that a user may change behind Python's back; what they mean is Python's business (config.py).
constexpr std::array<const char*, 2> kVariables = {"MOE_MEGAKERNEL_TIMEOUT", "MOE_MEGAKERNEL_NUM_SMS"};

const char* variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

struct Context {
  Tensor workspace;
  Tensor status;
  std::int64_t num_sms;
  std::int64_t timeout_ns;
  std::array<std::string, kVariables.size()> variables;  // as they were

  // Neither has an earlier step left an error, nor have settings changed.
  bool holds() const {
    const volatile std::int64_t* code = status.const_data_ptr<std::int64_t>();
    if (*code != static_cast<std::int64_t>(StatusCode::kNone)) return false;
    for (std::size_t i = 0; i < kVariables.size(); ++i) {
      if (variables[i] != variable(kVariables[i])) return false;
    }
    return true;
  }
};

// Of a device and one of its streams.
class Contexts {
 public:
  using Key = std::pair<std::int32_t, void*>;

  std::shared_ptr<const Context> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = contexts_.find(key);
    return found != contexts_.end() ? found->second : nullptr;
  }
  void keep(const Key& key, Context context) {
    auto kept = std::make_shared<const Context>(std::move(context));
    const std::lock_guard<std::mutex> lock(mutex_);
    contexts_[key].swap(kept);  // what was there is freed behind the lock
  }
  void forget() {
    std::map<Key, std::shared_ptr<const Context>> forgotten;
    const std::lock_guard<std::mutex> lock(mutex_);
    contexts_.swap(forgotten);
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<const Context>> contexts_;
};

// Never destroyed: at the end of the process the device may be gone before it.
Contexts& contexts() {
  static auto* const all = new Contexts;
  return *all;
}

Tensor new_empty(const Tensor& like, std::initializer_list<std::int64_t> sizes, std::int32_t dtype) {
  std::int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = std::data(sizes)[1] > 0 ? std::data(sizes)[1] : 1;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), std::data(sizes), strides,
                                                  dtype, aoti_torch_device_type_cuda(), like.get_device_index(),
                                                  &made));
  return Tensor(made);
}

// A value of Activation, or -1: Python knows better.
std::int64_t activation_number(const std::string& name) {
  constexpr std::array<const char*, 5> kNames = {"swiglu", "swiglu_oai", "geglu_tanh", "geglu_erf", "relu2"};
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<std::int64_t>(i);
  }
  return -1;
}

bool is_readable(const Tensor& t, std::int64_t least) {
  return has_readable_rows(t, least) && is_aligned(t.const_data_ptr(), kRowAlignment);
}
bool is_readable(const OptionalTensor& bias) {
  return !bias.has_value() || (bias->is_contiguous() && is_aligned(bias->const_data_ptr(), kRowAlignment));
}

// The context for a call on the current stream of the tensors' device, or null.
std::shared_ptr<const Context> find_context(std::int32_t device) {
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != device) return nullptr;
  void* const stream = current_stream(device);
  std::shared_ptr<const Context> found = contexts().find({device, stream});
  if (found == nullptr || !found->holds()) return nullptr;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture);
  return error == cudaSuccess && capture == cudaStreamCaptureStatusNone ? found : nullptr;
}

Results layer_forward_direct(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights,
                             const Tensor& w_gate_up, const Tensor& w_down, const OptionalTensor& bias_gate_up,
                             const OptionalTensor& bias_down, const OptionalTensor& /*main_grad_gate_up*/,
                             const OptionalTensor& /*main_grad_down*/, std::int64_t num_experts,
                             const std::string& activation, double alpha, double limit, const std::string& backend,
                             std::int64_t needs, bool recompute) {
  const auto refuse = [&]() -> Results {
    const auto empty = [&] { return new_empty(x, {0}, aoti_torch_dtype_bfloat16()); };
    return {empty(), empty(), empty(), empty(), empty()};
  };
  const bool staged = backend == "staged";
  const std::int64_t number = activation_number(activation);
  if ((!staged && backend != "mega") || number < 0) return refuse();
  if (x.dim() != 2 || topk_idx.dim() != 2 || w_gate_up.dim() != 3 || w_down.dim() != 3) return refuse();
  const std::int64_t tokens = topk_idx.size(0), routes = tokens * topk_idx.size(1);
  if (routes < 1 || x.size(0) != tokens) return refuse();
  if (!is_readable(x, 0) || !is_readable(w_gate_up, w_gate_up.size(2)) || !is_readable(w_down, w_down.size(2)) ||
      !is_readable(bias_gate_up) || !is_readable(bias_down)) {
    return refuse();
  }
  const std::shared_ptr<const Context> context = find_context(x.get_device_index());
  if (context == nullptr) return refuse();
  const std::int64_t hidden = x.size(1), width = w_down.size(2), columns = w_gate_up.size(1);
  if (!routes_fit(tokens, topk_idx.size(1))) return refuse();
  const Problem problem = problem_of("", tokens, topk_idx.size(1), num_experts, hidden, width, columns != width);
  if (context->workspace.numel() < forward_workspace_bytes(problem, staged, context->num_sms)) return refuse();

  Results made;
  try {
    const std::int32_t dtype = aoti_torch_dtype_bfloat16(), index_dtype = aoti_torch_dtype_int32();
    made = {new_empty(x, {tokens, hidden}, dtype),
            new_empty(x, {needs != 0 && !recompute ? routes : 0, columns}, dtype), new_empty(x, {0}, dtype),
            new_empty(x, {num_experts + 1}, index_dtype), new_empty(x, {routes}, index_dtype)};
  } catch (const std::exception&) {  // out of memory: Python raises it by its own name
    return refuse();
  }
  const auto& [y, h, anchor, expert_offsets, row_route] = made;
  hopper_forward(x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, y, h, expert_offsets, row_route,
                 context->workspace, context->status, std::nullopt, std::nullopt, num_experts, number, alpha, limit,
                 staged, context->num_sms, context->timeout_ns, -1, 0);
  return made;
}

void keep_context(const Tensor& workspace, const Tensor& status, std::int64_t stream, std::int64_t num_sms,
                  std::int64_t timeout_ns) {
  const Checker check{"moe::hopper_keep_context: ", workspace.get_device_index()};
  read_options(check, workspace, status, std::nullopt, false, num_sms, timeout_ns, -1, 0);
  Context context{workspace, status, num_sms, timeout_ns, {}};
  for (std::size_t i = 0; i < kVariables.size(); ++i) context.variables[i] = variable(kVariables[i]);
  contexts().keep({check.device, reinterpret_cast<void*>(stream)}, std::move(context));
}

void forget_contexts() { contexts().forget(); }

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CUDA, m) {
  m.impl("layer_forward_direct", TORCH_BOX(&moe::layer_forward_direct));
  m.impl("hopper_keep_context", TORCH_BOX(&moe::keep_context));
}
// It takes no tensor, so no device chooses its kernel.
STABLE_TORCH_LIBRARY_IMPL(moe, CompositeExplicitAutograd, m) {
  m.impl("hopper_forget_contexts", TORCH_BOX(&moe::forget_contexts));
}
