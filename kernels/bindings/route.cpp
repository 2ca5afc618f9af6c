// Registers the CPU kernel of torch.ops.moe.route: checks the arguments, allocates the outputs and calls plan/route.h.
// Schema and fake kernel live in Python (src/moe_megakernel/schemas.py, fake.py). Only torch's stable ABI is used, so
// that one binary loads on every torch >= 2.10 and every Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "moe/plan/route.h"
#include "route_arguments.h"

namespace moe {
namespace {

template <typename Id>
std::int64_t sort_tensor(const Tensor& topk_idx, std::int64_t num_experts, const RouteSort& out) {
  const RouteIds<Id> ids{topk_idx.const_data_ptr<Id>(), topk_idx.size(0), topk_idx.size(1), topk_idx.stride(0),
                         topk_idx.stride(1)};
  return sort_routes(ids, num_experts, out);
}

// topk_idx [T, K] int32 or int64 -> route_order int32 [T * K], class_counts int32 [E, 64], first_bad int64 [1].
// A bad id is reported, not raised: the caller decides, after it has heard from the other ranks.
std::tuple<Tensor, Tensor, Tensor> route(const Tensor& topk_idx, std::int64_t num_experts) {
  check_route_arguments(topk_idx, num_experts);
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
