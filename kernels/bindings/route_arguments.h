// Checks the arguments of moe::route. Owns the error messages.
// Called by route.cpp and route_cuda.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "moe/plan/route.h"

namespace moe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_route_arguments(const Tensor& topk_idx, std::int64_t num_experts) {
  STD_TORCH_CHECK(topk_idx.dim() == 2, "moe::route: topk_idx: expected shape [T, K], got ", topk_idx.dim(),
                  " dimension(s)");
  const ScalarType dtype = topk_idx.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long,
                  "moe::route: topk_idx: expected dtype int32 or int64, got ", torch::headeronly::toString(dtype));
  const std::int64_t num_tokens = topk_idx.size(0);
  const std::int64_t top_k = topk_idx.size(1);
  STD_TORCH_CHECK(top_k >= 1, "moe::route: topk_idx: expected shape [T, K] with K >= 1, got [", num_tokens, ", ", top_k,
                  "]");
  STD_TORCH_CHECK(routes_fit(num_tokens, top_k), "moe::route: topk_idx: expected T * K <= ", kMaxRoutes,
                  " routes, got T = ", num_tokens, ", K = ", top_k);
  STD_TORCH_CHECK(num_experts >= 1 && num_experts <= kMaxExperts, "moe::route: num_experts: expected 1 to ",
                  kMaxExperts, ", got ", num_experts);
}

}  // namespace moe
