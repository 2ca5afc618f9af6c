// Registers the CUDA kernels of torch.ops.moe.route, the sort alone, and of moe.device_plan, with which tests compare
// the plan that a device builds with that of the host: forward/route_kernel.h and backward/plan_kernel.h on tensors.
// Schemas and fakes live in Python (src/moe_megakernel/schemas.py, plan_ops.py).
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "backward/plan_kernel.h"
#include "forward/route_kernel.h"
#include "plan_arguments.h"
#include "route_arguments.h"

namespace moe {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr const char* kDevicePlan = "device_plan";

cudaStream_t current_stream(std::int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_cuda(const char* op, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "moe::", op,
                  ": launch: expected success, got CUDA error: ", cudaGetErrorString(error));
}

// As on the CPU, see route.cpp. Never synchronises.
std::tuple<Tensor, Tensor, Tensor> route(const Tensor& topk_idx, std::int64_t num_experts) {
  check_route_arguments(topk_idx, num_experts);
  const std::int64_t num_tokens = topk_idx.size(0), top_k = topk_idx.size(1), num_routes = num_tokens * top_k;
  const DeviceGuard guard(topk_idx.get_device_index());
  Tensor route_order = torch::stable::new_empty(topk_idx, {num_routes}, ScalarType::Int);
  Tensor class_counts = torch::stable::new_empty(topk_idx, {num_experts, kTokenResidues}, ScalarType::Int);
  Tensor first_bad = torch::stable::new_empty(topk_idx, {1}, ScalarType::Long);

  RouteArguments arguments{};
  arguments.problem = {1, 0, num_experts, top_k, 1, 1, 0, num_tokens, num_routes};
  arguments.tiling = {1, 1, 1, 1, 1, 1, 1};  // not looked at: there are no tables
  arguments.schedule = {1, 1, 2, 2, 0, 1, 1, 0};
  Tensor scratch = torch::stable::new_empty(topk_idx, {plan_scratch(nullptr, arguments.problem).size}, ScalarType::Int);
  arguments.tokens = num_tokens;
  arguments.topk_idx = {topk_idx.const_data_ptr(), topk_idx.stride(0), topk_idx.stride(1),
                        topk_idx.scalar_type() == ScalarType::Long};
  arguments.memory.route_order = route_order.mutable_data_ptr<std::int32_t>();
  arguments.own_class_counts = class_counts.mutable_data_ptr<std::int32_t>();
  arguments.memory.scratch = scratch.mutable_data_ptr<std::int32_t>();
  arguments.first_bad = first_bad.mutable_data_ptr<std::int64_t>();
  check_cuda("route", launch_route(arguments, current_stream(topk_idx.get_device_index())));
  return {route_order, class_counts, first_bad};
}

// Device memory that is given back when it goes out of scope.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) { check_cuda(kDevicePlan, cudaMalloc(&data_, bytes)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }

  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

Tensor on_host(const Tensor& tensor) {
  return torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

// Plans a backward from the offsets that a forward of these routes saves.
cudaError_t plan_backward(const RouteArguments& route, const Numbers& offsets, std::int64_t needs,
                          std::int32_t* device_offsets, cudaStream_t stream) {
  const std::vector<std::int32_t> saved(offsets.begin(), offsets.end());
  const cudaError_t error = cudaMemcpyAsync(device_offsets, saved.data(), saved.size() * sizeof(std::int32_t),
                                            cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) return error;
  BackwardPlanArguments arguments{};
  arguments.problem = route.problem;
  arguments.tiling = route.tiling;
  arguments.schedule = route.schedule;
  arguments.needs = needs_of_mask(needs);
  arguments.expert_offsets = device_offsets;
  arguments.memory = route.memory;
  return launch_backward_plan(arguments, stream);
}

// class_counts int32 [W, E, 64] on the device; tokens int64 [W] anywhere; config int64 on the host; needs -1 for a
// forward, the mask of a backward -> on the host, as plan_tables gives them: expert_offsets [L + 1], sources [R, 2] (of
// a forward of several ranks), tiles [n, 3], segments [n, 4], minibatch_ends [n], expert_tiles [L + 1], expert_pieces
// [L + 1], tasks [n, 5]. Synchronises.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> device_plan(const Tensor& class_counts,
                                                                                       const Tensor& tokens,
                                                                                       const Tensor& config,
                                                                                       std::int64_t needs) {
  RouteArguments arguments{};
  const PlanConfig read = read_config(kDevicePlan, config);
  arguments.problem = read.problem;
  arguments.tiling = read.tiling;
  arguments.schedule = read.schedule;
  const Tensor host_counts = on_host(class_counts);
  const Numbers starts = token_starts(kDevicePlan, read, host_counts, on_host(tokens));
  check_capacity(kDevicePlan, read, rank_routes(host_counts, starts.data()));
  STD_TORCH_CHECK(read.problem.local_experts() <= kMaxRouteExperts, "moe::device_plan: config: expected at most ",
                  kMaxRouteExperts, " experts a rank, got ", read.problem.local_experts());
  STD_TORCH_CHECK(needs >= -1 && needs < 1 << kNumGradNeeds, "moe::device_plan: needs: expected -1 or a mask of ",
                  kNumGradNeeds, " bits, got ", needs);

  const DeviceGuard guard(class_counts.get_device_index());
  const cudaStream_t stream = current_stream(class_counts.get_device_index());
  const auto bytes = static_cast<std::size_t>(local_plan_bytes(read.problem, read.tiling, read.schedule));
  const DeviceBytes memory(bytes);
  const DeviceBytes device_starts(starts.size() * sizeof(std::int64_t));
  // What the kernel leaves out shows, and the generation is one that it must go on from.
  check_cuda(kDevicePlan, cudaMemsetAsync(memory.get(), 0x55, bytes, stream));
  check_cuda(kDevicePlan, cudaMemcpyAsync(device_starts.get(), starts.data(), starts.size() * sizeof(std::int64_t),
                                          cudaMemcpyHostToDevice, stream));
  arguments.memory = local_plan_memory(memory.get(), read.problem, read.tiling, read.schedule);
  const std::int64_t experts = read.problem.local_experts() + 1;
  const DeviceBytes device_offsets(static_cast<std::size_t>(experts) * sizeof(std::int32_t));
  if (needs < 0) {
    check_cuda(kDevicePlan, launch_plan(arguments, class_counts.const_data_ptr<std::int32_t>(),
                                        static_cast<const std::int64_t*>(device_starts.get()), stream));
  } else {
    const Numbers offsets = offsets_of_experts(read, rank_routes(host_counts, starts.data()));
    check_cuda(kDevicePlan,
               plan_backward(arguments, offsets, needs, static_cast<std::int32_t*>(device_offsets.get()), stream));
  }
  std::vector<std::int64_t> copy(bytes / sizeof(std::int64_t));  // regions are multiples of 256 bytes
  check_cuda(kDevicePlan, cudaMemcpyAsync(copy.data(), memory.get(), bytes, cudaMemcpyDeviceToHost, stream));
  check_cuda(kDevicePlan, cudaStreamSynchronize(stream));

  const PlanMemory plan = local_plan_memory(copy.data(), read.problem, read.tiling, read.schedule);
  STD_TORCH_CHECK(plan.launch->plan_ready == plan.launch->generation + 1,
                  "moe::device_plan: plan_ready: expected generation ", plan.launch->generation + 1, ", got ",
                  plan.launch->plan_ready);
  const TileCounts& n = plan.sizes->counts;
  const auto widen = [&](const std::int32_t* values, std::int64_t count) {
    return to_tensor(config, Numbers(values, values + count), 0);
  };
  const std::int64_t rows = plan.sources == nullptr || needs >= 0 ? 0 : plan.expert_offsets[experts - 1];
  return {to_tensor(config, Numbers(plan.expert_offsets, plan.expert_offsets + experts), 0),
          rows_to_tensor(config, plan.sources, rows, 2, [](const RowSource& s) { return Numbers{s.rank, s.position}; }),
          rows_to_tensor(config, plan.tables.tiles, n.tiles, kTileColumns, numbers_of_tile),
          rows_to_tensor(config, plan.tables.segments, n.segments, kSegmentColumns, numbers_of_segment),
          widen(plan.tables.minibatch_ends, n.minibatches),
          widen(plan.tables.expert_tiles, experts),
          widen(plan.tables.expert_pieces, experts),
          rows_to_tensor(config, plan.tasks, plan.sizes->num_tasks, kTaskColumns, numbers_of_task)};
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CUDA, m) {
  m.impl("route", TORCH_BOX(&moe::route));
  m.impl("device_plan", TORCH_BOX(&moe::device_plan));
}
