// Registers the CPU kernel of torch.ops.moe.merge_rows: checks the arguments, allocates the outputs and calls
// plan/rows.h. Schema and fake kernel live in Python (src/moe_megakernel/plan_ops.py); called by the reference
// backend's exchange.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "moe/plan/rows.h"
#include "plan_arguments.h"

namespace moe {
namespace {

// class_counts int32 [W, E, 64], token_starts int64 [W] -> expert_offsets int64 [L + 1], sources int32 [R, 2] (rank,
// position in its route_order), send int64 [W], receive int64 [W].
std::tuple<Tensor, Tensor, Tensor, Tensor> merge_rows_cpu(const Tensor& class_counts, const Tensor& token_starts,
                                                          std::int64_t rank) {
  check_class_counts("merge_rows", class_counts);
  const std::int64_t num_ranks = class_counts.size(0);
  check_vector("merge_rows", "token_starts", token_starts, num_ranks);
  STD_TORCH_CHECK(rank >= 0 && rank < num_ranks, "moe::merge_rows: rank: expected 0 to ", num_ranks - 1, ", got ",
                  rank);
  const std::int64_t* starts = token_starts.const_data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < num_ranks; ++r) {
    STD_TORCH_CHECK(starts[r] >= (r == 0 ? 0 : starts[r - 1]),
                    "moe::merge_rows: token_starts: expected ascending token indices, got ", starts[r], " for rank ",
                    r);
  }
  const RankRoutes routes = rank_routes(class_counts, starts);
  const std::int64_t rows = rows_of_rank(routes, rank);
  const std::int64_t num_local = ExpertSplit{routes.num_experts, num_ranks}.count(rank);

  Tensor expert_offsets = torch::stable::new_empty(token_starts, {num_local + 1});
  Tensor sources = torch::stable::new_empty(class_counts, {rows, 2});
  Tensor send = torch::stable::new_empty(token_starts, {num_ranks});
  Tensor receive = torch::stable::new_empty(token_starts, {num_ranks});
  static_assert(sizeof(RowSource) == 2 * sizeof(std::int32_t));
  std::vector<std::int64_t> class_begins(static_cast<std::size_t>(num_ranks * kTokenResidues));
  merge_rows(routes, rank, class_begins.data(),
             {expert_offsets.mutable_data_ptr<std::int64_t>(),
              reinterpret_cast<RowSource*>(sources.mutable_data_ptr<std::int32_t>()),
              send.mutable_data_ptr<std::int64_t>(), receive.mutable_data_ptr<std::int64_t>()});
  return {expert_offsets, sources, send, receive};
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CPU, m) { m.impl("merge_rows", TORCH_BOX(&moe::merge_rows_cpu)); }
