// Registers the CPU kernel of torch.ops.moe.route: checks the arguments, allocates the outputs and calls plan/route.h.
// Schema and fake kernel live in Python (src/moe_megakernel/schemas.py, fake.py). Only torch's stable ABI is used, so
// that one binary loads on every torch >= 2.10 and every Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "moe/plan/route.h"

namespace moe {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_arguments(const Tensor& topk_idx, std::int64_t num_experts) {
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

template <typename Id>
std::int64_t sort_tensor(const Tensor& topk_idx, std::int64_t num_experts, const RouteSort& out) {
  const RouteIds<Id> ids{topk_idx.const_data_ptr<Id>(), topk_idx.size(0), topk_idx.size(1), topk_idx.stride(0),
                         topk_idx.stride(1)};
  return sort_routes(ids, num_experts, out);
}

// topk_idx [T, K] int32 or int64 -> route_order int32 [T * K], class_counts int32 [E, 64], first_bad int64 [1].
// A bad id is reported, not raised: the caller decides, after it has heard from the other ranks.
std::tuple<Tensor, Tensor, Tensor> route(const Tensor& topk_idx, std::int64_t num_experts) {
  check_arguments(topk_idx, num_experts);
  const std::int64_t num_routes = topk_idx.size(0) * topk_idx.size(1);
  Tensor route_order = torch::stable::new_empty(topk_idx, {num_routes}, ScalarType::Int);
  Tensor class_counts = torch::stable::new_empty(topk_idx, {num_experts, kTokenResidues}, ScalarType::Int);
  Tensor first_bad = torch::stable::new_empty(topk_idx, {1}, ScalarType::Long);

  std::vector<std::int32_t> class_cursors(static_cast<std::size_t>(num_experts * kTokenResidues));
  const RouteSort out{route_order.mutable_data_ptr<std::int32_t>(), class_counts.mutable_data_ptr<std::int32_t>(),
                      class_cursors.data()};
  *first_bad.mutable_data_ptr<std::int64_t>() = topk_idx.scalar_type() == ScalarType::Int
                                                    ? sort_tensor<std::int32_t>(topk_idx, num_experts, out)
                                                    : sort_tensor<std::int64_t>(topk_idx, num_experts, out);
  return {route_order, class_counts, first_bad};
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CPU, m) { m.impl("route", TORCH_BOX(&moe::route)); }
