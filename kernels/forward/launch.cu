// One forward call from the host: checks that the kernels can run it, lays the workspace out, encodes the tensor maps,
// and launches the route kernel and then either the layer's kernel (mega) or one kernel per stage (staged). Called by
// bindings/forward.cpp.
#include "forward/launch.h"

#include <cuda_runtime.h>

#include "cutlass_configs/forward.h"
#include "forward/layer_instances.h"
#include "forward/route_kernel.h"
#include "layer/launching.h"
#include "layer/staged_kernels.h"
#include "layer/tensor_maps.h"
#include "moe/forward/kernel_params.h"
#include "moe/forward/workspace.h"
#include "moe/stage/activation.h"

namespace moe {
namespace {

unsigned char* shared_memory(const PeerGroup& group) { return reinterpret_cast<unsigned char*>(group.own); }

RouteArguments route_arguments(const ForwardArguments& a, const ForwardParams& params) {
  RouteArguments route{};
  route.problem = params.problem;
  route.tiling = params.tiling;
  route.schedule = params.schedule;
  // Of tokens that are too many for the group's memory nothing is looked at: the ranks will refuse the step.
  route.tokens = a.tokens <= a.problem.max_tokens ? a.tokens : 0;
  route.topk_idx = a.topk_idx;
  route.memory = params.counters.plan;
  route.own_class_counts = route.memory.class_counts;
  route.peers = params.counters.peers;
  if (route.peers.shared()) {
    route.own_class_counts = reinterpret_cast<std::int32_t*>(shared_memory(a.group) + route.peers.class_counts);
    route.header =
        rank_header(a.problem, a.tokens, {Direction::kForward, a.activation, a.alpha, a.limit, a.group.needs, true});
    route.timeout_ns = a.options.timeout_ns;
  }
  route.saved_expert_offsets = a.saved_expert_offsets;
  route.status = a.options.status;
  route.log = a.options.log;
  return route;
}

void fill_in(ForwardParams& params, const ForwardArguments& a, const ForwardChoice& choice) {
  const ForwardConfig& config = kForwardConfigs[choice.config];
  const ForwardWorkspace workspace(a.problem, choice);
  auto* base = static_cast<unsigned char*>(a.options.workspace);
  params.problem = a.problem;
  params.tiling = choice.tiling;
  params.schedule = choice.schedule;
  params.act_tiles = static_cast<std::int32_t>(choice.tiling.act_tiles(a.problem));
  params.hidden_tiles = static_cast<std::int32_t>(choice.tiling.hidden_tiles(a.problem));
  params.gate_up_steps = static_cast<std::int32_t>(ceil_div(a.problem.hidden, config.tile_depth));
  params.down_steps = static_cast<std::int32_t>(ceil_div(a.problem.width, config.tile_depth));
  params.tokens = a.tokens;
  unsigned char* const shared = shared_memory(a.group);
  const PeerMemory peers = peer_memory(a.group, a.problem, choice.tiling, choice.schedule, kElementBytes);
  params.counters = counter_memory(a.options, workspace.plan_memory(base, a.row_route, shared),
                                   reinterpret_cast<std::int64_t*>(base + workspace.flag_done_offset()), peers, shared);
  params.direction = Direction::kForward;
  params.needs = {};
  params.activation = activation_params(a.activation, a.alpha, a.limit);
  params.stages = kStageForward;
  params.sources[0] = {static_cast<const unsigned char*>(a.x), a.x_token_stride * kElementBytes,
                       base + workspace.offset(Region::kXRing), choice.schedule.x_slots};
  params.sources[1] = {};
  if (peers.shared()) params.sources[0].token_bytes = a.problem.hidden * kElementBytes;
  params.o_rows =
      reinterpret_cast<std::uint16_t*>(peers.shared() ? shared + peers.rows : base + workspace.o_rows_offset());
  params.combine = {params.o_rows, static_cast<std::uint16_t*>(a.y), a.topk_idx, a.topk_weights, nullptr, nullptr};
  params.bias_gate_up = static_cast<const std::uint16_t*>(a.bias_gate_up);
  params.bias_down = static_cast<const std::uint16_t*>(a.bias_down);
  params.a_rows = reinterpret_cast<std::uint16_t*>(base + workspace.offset(Region::kARing));
  params.h = static_cast<std::uint16_t*>(a.h);
  params.saved_expert_offsets = a.saved_expert_offsets;
}

std::string encode_maps(ForwardParams& params, const ForwardArguments& a, const ForwardChoice& choice) {
  const Problem& p = a.problem;
  const Schedule& s = choice.schedule;
  const int row_box = kForwardConfigs[choice.config].tile_rows / 2;
  const int weight_box = kForwardConfigs[choice.config].tile_columns / 2;
  std::string text = encode_rows(params.x_ring, params.sources[0].tiles, s.x_slots * kRowTile, p.hidden, row_box);
  if (text.empty()) text = encode_rows(params.a_ring, params.a_rows, s.a_slots * kRowTile, p.width, row_box);
  const std::int64_t halves = p.gated != 0 ? 2 : 1;
  const std::int64_t experts = p.local_experts();
  if (experts == 0) return text;
  if (text.empty()) {
    text = encode_weight(params.w_gate_up, a.w_gate_up, experts, halves, p.width, p.hidden, weight_box);
  }
  if (text.empty()) text = encode_weight(params.w_down, a.w_down, experts, 1, p.hidden, p.width, weight_box);
  return text;
}

std::string launch_stages(ForwardParams& params, sm90::LayerLaunch launch_layer, int blocks, cudaStream_t stream) {
  cudaError_t error = sm90::launch_dispatch(params, blocks, stream);
  if (error != cudaSuccess) return launch_error("dispatch", error);
  for (const std::int32_t stage : {kStageGateUp, kStageDown}) {
    params.stages = stage;
    error = launch_layer(params, blocks, stream);
    if (error != cudaSuccess) return launch_error(stage == kStageGateUp ? "gate_up" : "down", error);
  }
  error = sm90::launch_combine(params, blocks, stream);
  return error == cudaSuccess ? "" : launch_error("combine", error);
}

}  // namespace

std::string forward_fault(const ForwardArguments& a) {
  const ForwardChoice choice = choose_forward(a.problem, a.options.staged, a.options.num_sms);
  const std::string text = layer_fault(a.problem, choice.tiling, choice.schedule, a.options);
  return text.empty() ? group_fault(a.group, a.problem, choice.tiling, choice.schedule) : text;
}

std::int64_t forward_workspace_bytes(const Problem& problem, bool staged, std::int64_t num_sms) {
  return ForwardWorkspace(problem, choose_forward(problem, staged, num_sms)).bytes();
}

std::int64_t group_memory_bytes(const Problem& problem, bool staged, std::int64_t num_sms) {
  const ForwardChoice choice = choose_forward(problem, staged, num_sms);
  return workspace_bytes(true, problem, choice.tiling, choice.schedule, kElementBytes);
}

std::string forward_plan_fault(const Problem& problem, bool staged, std::int64_t num_sms) {
  const ForwardChoice choice = choose_forward(problem, staged, num_sms);
  return config_fault(PlanConfig{problem, choice.tiling, choice.schedule});
}

std::string refuse_step(const PeerGroup& group, void* workspace, StepStatus* status, std::int64_t timeout_ns,
                        void* cuda_stream) {
  // Flags, and what launches hand on, lie where no size of a layer moves them.
  const Problem problem{group.num_ranks, group.rank, 1, 1, 1, 1, 0, 0, 0};
  const ForwardChoice choice = choose_forward(problem, false, 2);
  const ForwardWorkspace layout(problem, choice);
  RefusalArguments arguments{};
  arguments.peers = peer_memory(group, problem, choice.tiling, choice.schedule, kElementBytes);
  arguments.launch =
      reinterpret_cast<LaunchState*>(static_cast<unsigned char*>(workspace) + layout.offset(Region::kLaunch));
  arguments.status = status;
  arguments.timeout_ns = timeout_ns;
  const std::lock_guard<std::mutex> lock(launch_mutex());
  const cudaError_t error = launch_refusal(arguments, static_cast<cudaStream_t>(cuda_stream));
  return error == cudaSuccess ? "" : launch_error("refuse", error);
}

std::string launch_forward(const ForwardArguments& arguments, void* cuda_stream) {
  auto* stream = static_cast<cudaStream_t>(cuda_stream);
  const ForwardChoice choice = choose_forward(arguments.problem, arguments.options.staged, arguments.options.num_sms);
  const auto blocks = static_cast<int>(arguments.options.num_sms);
  ForwardParams params;
  fill_in(params, arguments, choice);
  const std::string text = encode_maps(params, arguments, choice);
  if (!text.empty()) return text;
  const std::lock_guard<std::mutex> lock(launch_mutex());
  const PeerMemory& peers = params.counters.peers;
  if (peers.shared() && arguments.tokens <= arguments.problem.max_tokens) {
    const cudaError_t error =
        share_tokens(shared_memory(arguments.group) + peers.tokens[0], arguments.x, arguments.x_token_stride,
                     arguments.tokens, arguments.problem.hidden, stream);
    if (error != cudaSuccess) return launch_error("share x", error);
  }
  cudaError_t error = launch_route(route_arguments(arguments, params), stream);
  if (error != cudaSuccess) return launch_error("route", error);
  const sm90::LayerLaunch launch_layer = sm90::kLayerLaunches[choice.config];
  if (arguments.options.staged) return launch_stages(params, launch_layer, blocks, stream);
  error = launch_layer(params, blocks, stream);
  return error == cudaSuccess ? "" : launch_error("layer", error);
}

}  // namespace moe
