// moe::hopper_forward as a function, for the bindings of other ops. Defined in bindings/forward.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace moe {

void hopper_forward(const torch::stable::Tensor& x, const torch::stable::Tensor& topk_idx,
                    const torch::stable::Tensor& topk_weights, const torch::stable::Tensor& w_gate_up,
                    const torch::stable::Tensor& w_down, const std::optional<torch::stable::Tensor>& bias_gate_up,
                    const std::optional<torch::stable::Tensor>& bias_down, const torch::stable::Tensor& y,
                    const torch::stable::Tensor& h, const torch::stable::Tensor& expert_offsets,
                    const torch::stable::Tensor& row_route, const torch::stable::Tensor& workspace,
                    const torch::stable::Tensor& status, const std::optional<torch::stable::Tensor>& log,
                    const std::optional<torch::stable::Tensor>& group, std::int64_t num_experts,
                    std::int64_t activation, double alpha, double limit, bool staged, std::int64_t num_sms,
                    std::int64_t timeout_ns, std::int64_t skip_counter, std::int64_t skip_index);

}  // namespace moe
