// One backward call from the host: lays the workspace out, encodes the tensor maps, and launches the plan kernel and
// then either the layer's kernel (mega) or one kernel per stage (staged). Called by bindings/backward.cpp.
#include "backward/launch.h"

#include <cuda_runtime.h>

#include "backward/layer_instances.h"
#include "backward/plan_kernel.h"
#include "cutlass_configs/backward.h"
#include "layer/launching.h"
#include "layer/staged_kernels.h"
#include "layer/tensor_maps.h"
#include "moe/backward/kernel_params.h"
#include "moe/backward/workspace.h"
#include "moe/stage/activation.h"

namespace moe {
namespace {

WeightGrad weight_grad(const WeightGradView& view, std::int64_t rows, std::int64_t columns) {
  return {view.data, view.accumulates ? 1 : 0, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(columns)};
}

void fill_in(BackwardParams& params, const BackwardArguments& a, const BackwardChoice& choice) {
  const Problem& p = a.problem;
  const BackwardWorkspace workspace(p, choice);
  auto* base = static_cast<unsigned char*>(a.options.workspace);
  const auto at = [&](Region region) { return base + workspace.offset(region); };
  const auto elements = [&](Region region) { return reinterpret_cast<std::uint16_t*>(at(region)); };
  params.problem = p;
  params.tiling = choice.tiling;
  params.schedule = choice.schedule;
  params.direction = Direction::kBackward;
  params.needs = a.needs;
  params.tokens = a.tokens;
  auto* const shared = reinterpret_cast<unsigned char*>(a.group.own);
  const PeerMemory peers = peer_memory(a.group, p, choice.tiling, choice.schedule, kElementBytes);
  params.counters = counter_memory(a.options, workspace.plan_memory(base, a.row_route),
                                   reinterpret_cast<std::int64_t*>(base + workspace.flag_done_offset()), peers, shared);
  params.activation = activation_params(a.activation, a.alpha, a.limit);
  params.stages = kStageBackward;
  const std::int64_t tiles = p.max_row_tiles();
  params.sources[0] = {static_cast<const unsigned char*>(a.dy), a.dy_token_stride * kElementBytes, at(Region::kDyRows),
                       tiles};
  params.sources[1] = {static_cast<const unsigned char*>(a.x), a.x_token_stride * kElementBytes, at(Region::kXRows),
                       tiles};
  if (peers.shared()) {
    for (PullSource& source : params.sources) source.token_bytes = p.hidden * kElementBytes;
    params.route_grads = reinterpret_cast<float*>(shared + peers.route_grads);
    params.dx_rows = reinterpret_cast<std::uint16_t*>(shared + peers.rows);
  } else {
    params.route_grads = reinterpret_cast<float*>(at(Region::kRouteGrads));
    params.dx_rows = elements(Region::kRows);
  }
  params.combine = {a.needs.x ? params.dx_rows : nullptr,
                    static_cast<std::uint16_t*>(a.dx),
                    a.topk_idx,
                    TopkWeights{},
                    params.route_grads,
                    a.needs.topk_weights ? a.dtopk_weights : nullptr};

  params.gate_up_tiles = static_cast<std::int32_t>(choice.tiling.act_tiles(p));
  params.dgrad_tiles = static_cast<std::int32_t>(choice.tiling.dgrad_tiles(p));
  params.hidden_tiles = static_cast<std::int32_t>(choice.tiling.hidden_tiles(p));
  params.h_columns = static_cast<std::int32_t>(p.h_columns());
  params.recomputes = a.needs.recomputes();
  params.dh = elements(Region::kDh);
  params.h = params.recomputes ? params.dh : static_cast<const std::uint16_t*>(a.h);
  params.scaled = elements(Region::kScaledA);
  params.partials = reinterpret_cast<float*>(at(Region::kPartials));
  params.dy_tiles = elements(Region::kDyRows);
  params.topk_weights = a.topk_weights;
  params.bias_gate_up = static_cast<const std::uint16_t*>(a.bias_gate_up);
  params.bias_down = static_cast<const std::uint16_t*>(a.bias_down);
  params.dw_gate_up = weight_grad(a.dw_gate_up, p.h_columns(), p.hidden);
  params.dw_down = weight_grad(a.dw_down, p.hidden, p.width);
  params.dbias_gate_up = static_cast<std::uint16_t*>(a.dbias_gate_up);
  params.dbias_down = static_cast<std::uint16_t*>(a.dbias_down);
}

// Rows as columns of a product: [1, 1, rows, columns].
WeightView as_weight(const void* rows, std::int64_t num_rows, std::int64_t columns) {
  return {rows, num_rows * columns, columns};
}

// Maps of weights that no task reads stay empty.
std::string encode_maps(BackwardParams& params, const BackwardArguments& a) {
  constexpr int kBox = 64;
  const Problem& p = a.problem;
  const std::int64_t experts = p.local_experts();
  const std::int64_t tiles = p.max_row_tiles();
  const std::int64_t rows = (tiles > 0 ? tiles : 1) * kRowTile;  // a map has rows, also where no rank may receive any
  const void* x_rows = params.sources[1].tiles;
  std::string text = encode_rows(params.dy_rows, params.dy_tiles, rows, p.hidden, kBox);
  if (text.empty()) text = encode_rows(params.x_rows, x_rows, rows, p.hidden, kBox);
  if (text.empty()) text = encode_rows(params.dh_rows, params.dh, rows, p.h_columns(), kBox);
  if (text.empty() && !params.recomputes && params.h != nullptr && p.row_capacity > 0) {
    text = encode_rows(params.h_rows, params.h, p.row_capacity, p.h_columns(), kBox);
  }
  const auto columns = [&](CUtensorMap& map, const WeightView& view, std::int64_t num, std::int64_t halves,
                           std::int64_t num_rows, std::int64_t num_columns) {
    if (text.empty() && view.data != nullptr && num > 0) {
      text = encode_weight(map, view, num, halves, num_rows, num_columns, kBox);
    }
  };
  columns(params.x_columns, as_weight(x_rows, rows, p.hidden), 1, 1, rows, p.hidden);
  columns(params.scaled_a, as_weight(params.scaled, rows, p.width), 1, 1, rows, p.width);
  columns(params.w_gate_up, a.w_gate_up, experts, 1, p.h_columns(), p.hidden);
  columns(params.w_gate_up_halves, a.w_gate_up, experts, p.gated != 0 ? 2 : 1, p.width, p.hidden);
  columns(params.w_down, a.w_down, experts, 1, p.hidden, p.width);
  return text;
}

BackwardPlanArguments plan_arguments(const BackwardArguments& a, const BackwardParams& params) {
  BackwardPlanArguments plan{};
  plan.problem = params.problem;
  plan.tiling = params.tiling;
  plan.schedule = params.schedule;
  plan.needs = params.needs;
  plan.expert_offsets = a.expert_offsets;
  plan.peers = params.counters.peers;
  if (plan.peers.shared()) {
    plan.header = rank_header(a.problem, a.tokens,
                              {Direction::kBackward, a.activation, a.alpha, a.limit,
                               mask_of_needs(a.needs) & ~(std::int64_t{1} << (kNumGradNeeds - 1)), a.needs.pulls_x()});
    plan.status = a.options.status;
    plan.timeout_ns = a.options.timeout_ns;
  }
  plan.memory = params.counters.plan;
  plan.log = a.options.log;
  return plan;
}

struct StageName {
  std::int32_t stage;
  const char* name;
};
constexpr StageName kTaskStages[] = {{kStageGateUp, "gate_up"},
                                     {kStageDownDgrad, "down dgrad"},
                                     {kStageGateUpDgrad, "gate_up dgrad"},
                                     {kStageWgrad, "wgrad"}};

std::string launch_stages(BackwardParams& params, sm90::GradientLaunch launch_layer, int blocks, cudaStream_t stream) {
  cudaError_t error = sm90::launch_dispatch(params, blocks, stream);
  if (error != cudaSuccess) return launch_error("dispatch", error);
  for (const StageName& stage : kTaskStages) {
    if (stage.stage == kStageGateUp && !params.recomputes) continue;
    params.stages = stage.stage;
    error = launch_layer(params, blocks, stream);
    if (error != cudaSuccess) return launch_error(stage.name, error);
  }
  error = sm90::launch_combine(params, blocks, stream);
  return error == cudaSuccess ? "" : launch_error("combine", error);
}

// What other ranks read of this one, to where they can.
cudaError_t share_inputs(const BackwardArguments& a, const PeerMemory& peers, cudaStream_t stream) {
  if (!peers.shared() || a.tokens == 0 || a.tokens > a.problem.max_tokens) return cudaSuccess;
  auto* const shared = reinterpret_cast<unsigned char*>(a.group.own);
  cudaError_t error = cudaSuccess;
  if (a.needs.pulls_dy()) {
    error = share_tokens(shared + peers.tokens[0], a.dy, a.dy_token_stride, a.tokens, a.problem.hidden, stream);
  }
  if (error == cudaSuccess && a.needs.pulls_x()) {
    error = share_tokens(shared + peers.tokens[1], a.x, a.x_token_stride, a.tokens, a.problem.hidden, stream);
  }
  if (error != cudaSuccess) return error;
  return cudaMemcpyAsync(shared + peers.route_weights, a.topk_weights.weights,
                         static_cast<std::size_t>(a.tokens * a.problem.top_k) * sizeof(float), cudaMemcpyDeviceToDevice,
                         stream);
}

}  // namespace

std::string backward_fault(const BackwardArguments& a) {
  const BackwardChoice choice = choose_backward(a.problem, a.options.staged, a.options.num_sms);
  const std::string text = layer_fault(a.problem, choice.tiling, choice.schedule, a.options);
  return text.empty() ? group_fault(a.group, a.problem, choice.tiling, choice.schedule) : text;
}

std::int64_t backward_workspace_bytes(const Problem& problem, bool staged, std::int64_t num_sms) {
  return BackwardWorkspace(problem, choose_backward(problem, staged, num_sms)).bytes();
}

std::string launch_backward(const BackwardArguments& arguments, void* cuda_stream) {
  auto* stream = static_cast<cudaStream_t>(cuda_stream);
  const LaunchOptions& options = arguments.options;
  const BackwardChoice choice = choose_backward(arguments.problem, options.staged, options.num_sms);
  const auto blocks = static_cast<int>(options.num_sms);
  BackwardParams params{};
  fill_in(params, arguments, choice);
  const std::string text = encode_maps(params, arguments);
  if (!text.empty()) return text;
  const std::lock_guard<std::mutex> lock(launch_mutex());
  cudaError_t error = share_inputs(arguments, params.counters.peers, stream);
  if (error != cudaSuccess) return launch_error("share dy", error);
  error = launch_backward_plan(plan_arguments(arguments, params), stream);
  if (error != cudaSuccess) return launch_error("plan", error);
  const sm90::GradientLaunch launch_layer = sm90::kGradientLaunches[choice.config];
  if (options.staged) return launch_stages(params, launch_layer, blocks, stream);
  error = launch_layer(params, blocks, stream);
  return error == cudaSuccess ? "" : launch_error("layer", error);
}

}  // namespace moe
