// One forward call from the host: checks that the kernels can run it, lays the workspace out, encodes the tensor maps,
// and launches the route kernel and then either the layer's kernel (mega) or one kernel per stage (staged). Called by
// bindings/forward.cpp.
#include "forward/launch.h"

#include <cuda_runtime.h>

#include <mutex>

#include "cutlass_configs/forward.h"
#include "forward/layer_instances.h"
#include "forward/route_kernel.h"
#include "forward/staged_kernels.h"
#include "forward/tensor_maps.h"
#include "moe/forward/kernel_params.h"
#include "moe/forward/workspace.h"
#include "moe/plan/config.h"
#include "moe/stage/activation.h"

namespace moe {
namespace {

std::string fault(const char* argument, const std::string& expected, std::int64_t got) {
  return std::string(argument) + ": expected " + expected + ", got " + std::to_string(got);
}

std::string error_text(const char* what, cudaError_t error) {
  return std::string(what) + ": expected to launch, got CUDA error: " + cudaGetErrorString(error);
}

RouteArguments route_arguments(const ForwardArguments& a, const ForwardParams& params) {
  RouteArguments route{};
  route.problem = params.problem;
  route.tiling = params.tiling;
  route.schedule = params.schedule;
  route.tokens = a.tokens;
  route.topk_idx = a.topk_idx;
  route.memory = params.counters.plan;
  route.saved_expert_offsets = a.saved_expert_offsets;
  route.status = a.status;
  route.log = a.log;
  return route;
}

CounterMemory counter_memory(const ForwardArguments& a, const ForwardWorkspace& workspace) {
  auto* base = static_cast<unsigned char*>(a.workspace);
  CounterMemory memory{};
  memory.plan = workspace.plan_memory(base, a.row_route);
  memory.flag_done = reinterpret_cast<std::int64_t*>(base + workspace.flag_done_offset());
  memory.status = a.status;
  memory.timeout_ns = a.timeout_ns;
  memory.skip_counter = a.skip_counter;
  memory.skip_index = a.skip_index;
  memory.log = a.log;
  return memory;
}

void fill_in(ForwardParams& params, const ForwardArguments& a, const ForwardChoice& choice) {
  const ForwardConfig& config = kForwardConfigs[choice.config];
  const ForwardWorkspace workspace(a.problem, choice);
  auto* base = static_cast<unsigned char*>(a.workspace);
  params.problem = a.problem;
  params.tiling = choice.tiling;
  params.schedule = choice.schedule;
  params.act_tiles = static_cast<std::int32_t>(choice.tiling.act_tiles(a.problem));
  params.hidden_tiles = static_cast<std::int32_t>(choice.tiling.hidden_tiles(a.problem));
  params.gate_up_steps = static_cast<std::int32_t>(ceil_div(a.problem.hidden, config.tile_depth));
  params.down_steps = static_cast<std::int32_t>(ceil_div(a.problem.width, config.tile_depth));
  params.tokens = a.tokens;
  params.counters = counter_memory(a, workspace);
  params.activation = activation_params(a.activation, a.alpha, a.limit);
  params.stages = kStageAll;
  params.x = static_cast<const unsigned char*>(a.x);
  params.x_token_bytes = a.x_token_stride * kElementBytes;
  params.topk_idx = a.topk_idx;
  params.topk_weights = a.topk_weights;
  params.bias_gate_up = static_cast<const std::uint16_t*>(a.bias_gate_up);
  params.bias_down = static_cast<const std::uint16_t*>(a.bias_down);
  params.x_rows = base + workspace.offset(Region::kXRing);
  params.a_rows = reinterpret_cast<std::uint16_t*>(base + workspace.offset(Region::kARing));
  params.o_rows = reinterpret_cast<std::uint16_t*>(base + workspace.o_rows_offset());
  params.h = static_cast<std::uint16_t*>(a.h);
  params.y = static_cast<std::uint16_t*>(a.y);
  params.saved_expert_offsets = a.saved_expert_offsets;
}

std::string encode_maps(ForwardParams& params, const ForwardArguments& a, const ForwardChoice& choice) {
  const Problem& p = a.problem;
  const Schedule& s = choice.schedule;
  const int row_box = kForwardConfigs[choice.config].tile_rows / 2;
  const int weight_box = kForwardConfigs[choice.config].tile_columns / 2;
  std::string text = encode_rows(params.x_ring, params.x_rows, s.x_slots * kRowTile, p.hidden, row_box);
  if (text.empty()) text = encode_rows(params.a_ring, params.a_rows, s.a_slots * kRowTile, p.width, row_box);
  const std::int64_t halves = p.gated != 0 ? 2 : 1;
  const std::int64_t experts = p.local_experts();
  if (text.empty()) {
    text = encode_weight(params.w_gate_up, a.w_gate_up, experts, halves, p.width, p.hidden, weight_box);
  }
  if (text.empty()) text = encode_weight(params.w_down, a.w_down, experts, 1, p.hidden, p.width, weight_box);
  return text;
}

// A step is several launches, and threads whose current stream is the same share a workspace: one step's launches must
// stand together on the stream. One mutex for all devices and streams, since a launch takes microseconds. No thread
// waits for it and holds what its owner needs: launching calls back into nothing.
std::mutex& launch_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::string launch_stages(ForwardParams& params, sm90::LayerLaunch launch_layer, int blocks, cudaStream_t stream) {
  cudaError_t error = sm90::launch_dispatch(params, blocks, stream);
  if (error != cudaSuccess) return error_text("dispatch", error);
  for (const std::int32_t stage : {kStageGateUp, kStageDown}) {
    params.stages = stage;
    error = launch_layer(params, blocks, stream);
    if (error != cudaSuccess) return error_text(stage == kStageGateUp ? "gate_up" : "down", error);
  }
  error = sm90::launch_combine(params, blocks, stream);
  return error == cudaSuccess ? "" : error_text("combine", error);
}

}  // namespace

std::string forward_fault(const ForwardArguments& a) {
  const Problem& p = a.problem;
  if (p.num_ranks != 1) return fault("num_ranks", "1", p.num_ranks);
  if (p.num_experts > kMaxRouteExperts) {
    return fault("num_experts", "at most " + std::to_string(kMaxRouteExperts), p.num_experts);
  }
  if (p.hidden % 8 != 0) return fault("x", "H a multiple of 8 (16-byte rows)", p.hidden);
  if (p.width % 8 != 0) return fault("w_down", "I a multiple of 8 (16-byte rows)", p.width);
  if (a.num_sms < 2 || a.num_sms % 2 != 0) return fault("num_sms", "an even number >= 2", a.num_sms);
  const ForwardChoice choice = choose_forward(p, a.staged, a.num_sms);
  const PlanConfig config{p, choice.tiling, choice.schedule};
  const std::string text = config_fault(config);
  return text.empty() ? "" : "plan: " + text;
}

std::int64_t forward_workspace_bytes(const Problem& problem, bool staged, std::int64_t num_sms) {
  return ForwardWorkspace(problem, choose_forward(problem, staged, num_sms)).bytes();
}

std::string launch_forward(const ForwardArguments& arguments, void* cuda_stream) {
  auto* stream = static_cast<cudaStream_t>(cuda_stream);
  const ForwardChoice choice = choose_forward(arguments.problem, arguments.staged, arguments.num_sms);
  const auto blocks = static_cast<int>(arguments.num_sms);
  ForwardParams params;
  fill_in(params, arguments, choice);
  const std::string text = encode_maps(params, arguments, choice);
  if (!text.empty()) return text;
  const std::lock_guard<std::mutex> lock(launch_mutex());
  cudaError_t error = launch_route(route_arguments(arguments, params), stream);
  if (error != cudaSuccess) return error_text("route", error);
  const sm90::LayerLaunch launch_layer = sm90::kLayerLaunches[choice.config];
  if (arguments.staged) return launch_stages(params, launch_layer, blocks, stream);
  error = launch_layer(params, blocks, stream);
  return error == cudaSuccess ? "" : error_text("layer", error);
}

}  // namespace moe
