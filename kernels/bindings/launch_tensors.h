// What the bindings of the fused kernels share: checks that tensors are what the kernels take, and from tensors to the
// plain structs of forward/arguments.h. A fault found here is a mistake of src/moe_megakernel/hopper. Included by
// bindings/forward.cpp, bindings/layer_forward.cpp and bindings/backward.cpp.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>

#include "moe/forward/arguments.h"
#include "moe/plan/config.h"

namespace moe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr std::int64_t kAlignedElements = kRowAlignment / 2;  // of bf16
constexpr std::int64_t kRecordWords = static_cast<std::int64_t>(sizeof(LogRecord) / sizeof(std::int64_t));
static_assert(sizeof(LogRecord) % sizeof(std::int64_t) == 0, "a log is a tensor of int64");

inline std::string list(std::initializer_list<std::int64_t> values) {
  std::string text = "[";
  for (const std::int64_t value : values) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  }
  return text + "]";
}

// "BFloat16 [4, 8] with strides [8, 1] on cuda:0"
inline std::string describe(const Tensor& tensor) {
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

inline bool has_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape) {
  if (tensor.dim() != static_cast<std::int64_t>(shape.size())) return false;
  std::int64_t i = 0;
  for (const std::int64_t size : shape) {
    if (tensor.size(i++) != size) return false;
  }
  return true;
}

inline bool is_aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

// Whether TMA and bulk copies can read the rows, where the data is aligned: contiguous, and so many elements apart, at
// least `least`. A stride of a dimension of size 1 means nothing.
inline bool has_readable_rows(const Tensor& t, std::int64_t least) {
  const std::int64_t last = t.dim() - 1;
  bool fits = t.stride(last) == 1;
  for (std::int64_t i = 0; i < last; ++i) {
    fits = fits && (t.size(i) == 1 || (t.stride(i) >= least && t.stride(i) % kAlignedElements == 0));
  }
  return fits;
}

// What the arguments of one call must have in common. `op` begins every message: "moe::hopper_forward: ".
struct Checker {
  const char* op;
  std::int32_t device;

  void tensor(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<std::int64_t> shape) const {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device && t.scalar_type() == dtype && has_shape(t, shape),
                    op, name, ": expected ", torch::headeronly::toString(dtype), " ", list(shape), " on cuda:", device,
                    ", got ", describe(t));
  }
  void contiguous(const char* name, const Tensor& t, ScalarType dtype,
                  std::initializer_list<std::int64_t> shape) const {
    tensor(name, t, dtype, shape);
    STD_TORCH_CHECK(t.is_contiguous(), op, name, ": expected a contiguous tensor, got ", describe(t));
  }
  // Requires rows as has_readable_rows wants them.
  const void* rows(const char* name, const Tensor& t, std::initializer_list<std::int64_t> shape,
                   std::int64_t least = 0) const {
    tensor(name, t, ScalarType::BFloat16, shape);
    STD_TORCH_CHECK(has_readable_rows(t, least), op, name,
                    ": expected contiguous rows and other strides a multiple of ", kAlignedElements, " from ", least,
                    " on, got ", describe(t));
    const void* data = t.const_data_ptr();
    STD_TORCH_CHECK(is_aligned(data, kRowAlignment), op, name, ": expected data aligned to ", kRowAlignment,
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

// PeerGroup as a tensor, or none: one rank.
inline PeerGroup read_group(const char* op, const OptionalTensor& group) {
  if (!group.has_value()) return {1, 0, 0, 0, 0, 0, 0, 0};
  STD_TORCH_CHECK(group->is_cpu() && group->scalar_type() == ScalarType::Long &&
                      has_shape(*group, {kPeerGroupFields}) && group->is_contiguous(),
                  op, "group: expected Long [", kPeerGroupFields, "] on cpu, got ", describe(*group));
  PeerGroup read{};
  std::memcpy(&read, group->const_data_ptr<std::int64_t>(), sizeof(read));
  STD_TORCH_CHECK(read.num_ranks >= 2 && read.rank >= 0 && read.rank < read.num_ranks && read.max_tokens >= 0 &&
                      read.row_capacity >= 0,
                  op, "group: expected at least two ranks, one of them, and capacities, got ranks = ", read.num_ranks,
                  ", rank = ", read.rank, ", max_tokens = ", read.max_tokens, ", row_capacity = ", read.row_capacity);
  return read;
}

// Sizes of one rank of a group: experts are split over ranks, and what may arrive is agreed.
inline Problem group_problem(const PeerGroup& group, std::int64_t top_k, std::int64_t num_experts, std::int64_t hidden,
                             std::int64_t width, bool gated) {
  return {group.num_ranks, group.rank,       num_experts,       top_k, hidden, width,
          gated ? 1 : 0,   group.max_tokens, group.row_capacity};
}

// One rank: every expert is local and every route arrives here.
inline Problem problem_of(const char* op, std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
                          std::int64_t hidden, std::int64_t width, bool gated) {
  STD_TORCH_CHECK(routes_fit(tokens, top_k), op, "topk_idx: expected at most ", kMaxRoutes, " routes, got T = ", tokens,
                  ", K = ", top_k);
  return {1, 0, num_experts, top_k, hidden, width, gated ? 1 : 0, tokens, tokens * top_k};
}

inline Problem problem_of(const char* op, const PeerGroup& group, std::int64_t tokens, std::int64_t top_k,
                          std::int64_t num_experts, std::int64_t hidden, std::int64_t width, bool gated) {
  if (group.num_ranks > 1) return group_problem(group, top_k, num_experts, hidden, width, gated);
  return problem_of(op, tokens, top_k, num_experts, hidden, width, gated);
}

// Pinned memory has one address for the host and all devices.
inline StepStatus* read_status(const Checker& check, const Tensor& status) {
  constexpr auto kWords = static_cast<std::int64_t>(sizeof(StepStatus) / sizeof(std::int64_t));
  STD_TORCH_CHECK(status.is_cpu() && status.scalar_type() == ScalarType::Long && has_shape(status, {kWords}) &&
                      status.is_contiguous(),
                  check.op, "status: expected pinned Long [", kWords, "] on cpu, got ", describe(status));
  return reinterpret_cast<StepStatus*>(status.mutable_data_ptr<std::int64_t>());
}

inline LaunchLog read_log(const Checker& check, const OptionalTensor& log) {
  if (!log.has_value()) return {};
  check.contiguous("log", *log, ScalarType::Long, {log->numel()});
  STD_TORCH_CHECK(log->numel() >= 1, check.op, "log: expected at least one element, the count, got ", describe(*log));
  auto* words = log->mutable_data_ptr<std::int64_t>();
  return {reinterpret_cast<LogRecord*>(words + 1), (log->numel() - 1) / kRecordWords,
          reinterpret_cast<unsigned long long*>(words)};
}

inline LaunchOptions read_options(const Checker& check, const Tensor& workspace, const Tensor& status,
                                  const OptionalTensor& log, bool staged, std::int64_t num_sms, std::int64_t timeout_ns,
                                  std::int64_t skip_counter, std::int64_t skip_index) {
  check.contiguous("workspace", workspace, ScalarType::Byte, {workspace.numel()});
  STD_TORCH_CHECK(num_sms >= 2 && num_sms % 2 == 0, check.op, "num_sms: expected an even number >= 2, got ", num_sms);
  STD_TORCH_CHECK(timeout_ns > 0, check.op, "timeout_ns: expected a number > 0, got ", timeout_ns);
  STD_TORCH_CHECK(skip_counter >= -1 && skip_counter < kNumCounters, check.op, "skip_counter: expected -1 to ",
                  kNumCounters - 1, ", got ", skip_counter);
  return {workspace.mutable_data_ptr(),
          read_status(check, status),
          staged,
          num_sms,
          timeout_ns,
          static_cast<std::int32_t>(skip_counter),
          skip_index,
          read_log(check, log)};
}

inline void check_workspace(const Checker& check, const Tensor& workspace, std::int64_t needed) {
  const bool aligned = is_aligned(workspace.const_data_ptr(), kRegionAlignment);
  STD_TORCH_CHECK(workspace.numel() >= needed && aligned, check.op, "workspace: expected at least ", needed,
                  " bytes aligned to ", kRegionAlignment, ", got ", workspace.numel(),
                  aligned ? " bytes" : " bytes that are not");
}

inline Activation read_activation(const Checker& check, const Problem& problem, std::int64_t number) {
  constexpr auto kMost = static_cast<std::int64_t>(Activation::kRelu2);
  STD_TORCH_CHECK(number >= 0 && number <= kMost, check.op, "activation: expected 0 to ", kMost, ", got ", number);
  const auto activation = static_cast<Activation>(number);
  STD_TORCH_CHECK((activation != Activation::kRelu2) == (problem.gated != 0), check.op,
                  "w_gate_up: expected rows for activation ", number, ", got ", problem.h_columns(),
                  " rows with width ", problem.width);
  return activation;
}

inline TopkIds read_ids(const Checker& check, const Tensor& ids, std::int64_t tokens, std::int64_t top_k) {
  const bool wide = ids.scalar_type() == ScalarType::Long;
  check.tensor("topk_idx", ids, wide ? ScalarType::Long : ScalarType::Int, {tokens, top_k});
  return {ids.const_data_ptr(), ids.stride(0), ids.stride(1), wide};
}

inline TopkWeights read_weights(const Checker& check, const Tensor& weights, std::int64_t tokens, std::int64_t top_k) {
  check.tensor("topk_weights", weights, ScalarType::Float, {tokens, top_k});
  return {weights.const_data_ptr<float>(), weights.stride(0), weights.stride(1)};
}

// The current stream of the device, which must be current.
inline void* current_stream(std::int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

}  // namespace moe
