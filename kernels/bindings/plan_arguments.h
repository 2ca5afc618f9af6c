// Reads and checks the arguments that the plan's ops share: the class counts of all ranks, tokens per rank, and the
// configuration; and copies tables out as integers. Owns the error messages and the columns. Called by rows.cpp,
// plan.cpp and route_cuda.cpp.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "moe/plan/config.h"
#include "moe/plan/rows.h"
#include "moe/plan/tasks.h"
#include "moe/plan/tiles.h"

namespace moe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Numbers = std::vector<std::int64_t>;

inline void check_vector(const char* op, const char* name, const Tensor& tensor, std::int64_t length) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == length && tensor.scalar_type() == ScalarType::Long &&
                      tensor.is_contiguous(),
                  "moe::", op, ": ", name, ": expected a contiguous int64 tensor of ", length, " element(s), got ",
                  tensor.dim(), " dimension(s), ", tensor.numel(), " element(s) of ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

// int32 [W, E, 64], contiguous, no negative count, and no rank with more routes than can be numbered. Returns each
// rank's routes.
inline std::vector<std::int64_t> check_class_counts(const char* op, const Tensor& class_counts) {
  STD_TORCH_CHECK(
      class_counts.dim() == 3 && class_counts.size(2) == kTokenResidues && class_counts.size(0) >= 1 &&
          class_counts.size(1) >= 1 && class_counts.scalar_type() == ScalarType::Int && class_counts.is_contiguous(),
      "moe::", op, ": class_counts: expected a contiguous int32 tensor of shape [W, E, ", kTokenResidues, "], got ",
      class_counts.dim(), " dimension(s) of ", torch::headeronly::toString(class_counts.scalar_type()));
  const std::int64_t num_ranks = class_counts.size(0);
  const std::int64_t classes = class_counts.size(1) * kTokenResidues;
  STD_TORCH_CHECK(class_counts.size(1) <= kMaxExperts, "moe::", op, ": class_counts: expected at most ", kMaxExperts,
                  " experts, got ", class_counts.size(1));
  const std::int32_t* counts = class_counts.const_data_ptr<std::int32_t>();
  std::vector<std::int64_t> routes(static_cast<std::size_t>(num_ranks), 0);
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    std::int64_t sum = 0;
    for (std::int64_t i = rank * classes; i < (rank + 1) * classes; ++i) {
      STD_TORCH_CHECK(counts[i] >= 0, "moe::", op, ": class_counts: expected no negative count, got ", counts[i]);
      sum += counts[i];
    }
    STD_TORCH_CHECK(sum <= kMaxRoutes, "moe::", op, ": class_counts: expected at most ", kMaxRoutes,
                    " routes a rank, got ", sum, " on rank ", rank);
    routes[static_cast<std::size_t>(rank)] = sum;
  }
  return routes;
}

inline RankRoutes rank_routes(const Tensor& class_counts, const std::int64_t* token_starts) {
  return {class_counts.const_data_ptr<std::int32_t>(), token_starts, class_counts.size(0), class_counts.size(1)};
}

inline PlanConfig read_config(const char* op, const Tensor& config) {
  check_vector(op, "config", config, kNumConfigFields);
  std::int64_t values[kNumConfigFields];
  std::memcpy(values, config.const_data_ptr<std::int64_t>(), sizeof(values));
  const std::string field = config_fault(values);
  STD_TORCH_CHECK(field.empty(), "moe::", op, ": config: ", field);
  PlanConfig read;
  std::memcpy(&read, values, sizeof(values));
  const std::string together = config_fault(read);
  STD_TORCH_CHECK(together.empty(), "moe::", op, ": config: ", together);
  return read;
}

// Starts of the ranks' tokens, after a check that `tokens` and the counts belong to the configuration.
inline Numbers token_starts(const char* op, const PlanConfig& config, const Tensor& class_counts,
                            const Tensor& tokens) {
  const Problem& p = config.problem;
  const Numbers routes = check_class_counts(op, class_counts);
  STD_TORCH_CHECK(class_counts.size(0) == p.num_ranks && class_counts.size(1) == p.num_experts, "moe::", op,
                  ": class_counts: expected shape [", p.num_ranks, ", ", p.num_experts, ", ", kTokenResidues,
                  "] as config says, got [", class_counts.size(0), ", ", class_counts.size(1), ", ", kTokenResidues,
                  "]");
  check_vector(op, "tokens", tokens, p.num_ranks);
  const std::int64_t* count = tokens.const_data_ptr<std::int64_t>();
  Numbers starts;
  std::int64_t start = 0;
  for (std::int64_t rank = 0; rank < p.num_ranks; ++rank) {
    STD_TORCH_CHECK(count[rank] >= 0 && count[rank] <= p.max_tokens, "moe::", op, ": tokens: expected 0 to ",
                    p.max_tokens, " (max_tokens), got ", count[rank], " for rank ", rank);
    const std::int64_t rank_routes = routes[static_cast<std::size_t>(rank)];
    STD_TORCH_CHECK(rank_routes <= count[rank] * p.top_k, "moe::", op, ": class_counts: expected at most ",
                    count[rank] * p.top_k, " routes (tokens * top_k), got ", rank_routes, " for rank ", rank);
    starts.push_back(start);
    start += count[rank];
  }
  return starts;
}

inline void check_capacity(const char* op, const PlanConfig& config, const RankRoutes& routes) {
  const std::int64_t rows = rows_of_rank(routes, config.problem.rank);
  STD_TORCH_CHECK(rows <= config.problem.row_capacity, "moe::", op, ": config: expected row_capacity >= ", rows,
                  ", the rows that arrive at rank ", config.problem.rank, ", got ", config.problem.row_capacity);
}

// [rows, columns] int64 of `values`, which hold rows * columns numbers; columns 0 makes a vector.
inline Tensor to_tensor(const Tensor& like, const std::vector<std::int64_t>& values, std::int64_t columns) {
  const auto size = static_cast<std::int64_t>(values.size());
  Tensor out = columns == 0 ? torch::stable::new_empty(like, {size}, ScalarType::Long)
                            : torch::stable::new_empty(like, {size / columns, columns}, ScalarType::Long);
  if (size > 0) std::memcpy(out.mutable_data_ptr<std::int64_t>(), values.data(), values.size() * sizeof(std::int64_t));
  return out;
}

// The same of `count` rows, each read as `columns` numbers.
template <typename Row, typename Columns>
Tensor rows_to_tensor(const Tensor& like, const Row* rows, std::int64_t count, std::int64_t columns, Columns read) {
  Numbers values;
  values.reserve(static_cast<std::size_t>(count * columns));
  for (std::int64_t i = 0; i < count; ++i) {
    for (const std::int64_t value : read(rows[i])) values.push_back(value);
  }
  return to_tensor(like, values, columns);
}

inline constexpr std::int64_t kTileColumns = 3;
inline Numbers numbers_of_tile(const RowTile& t) { return {t.expert, t.row_begin, t.rows}; }
inline constexpr std::int64_t kSegmentColumns = 4;
inline Numbers numbers_of_segment(const Segment& s) { return {s.expert, s.tile_begin, s.tiles, s.minibatch}; }
inline constexpr std::int64_t kTaskColumns = 5;
inline Numbers numbers_of_task(const Task& t) {
  return {static_cast<std::int64_t>(t.kind), t.expert, t.tile, t.column, t.paired_columns};
}

// expert_offsets [L + 1] of the configuration's rank.
inline Numbers offsets_of_experts(const PlanConfig& config, const RankRoutes& routes) {
  const Problem& p = config.problem;
  Numbers offsets(static_cast<std::size_t>(p.local_experts() + 1));
  Numbers scratch(static_cast<std::size_t>(p.num_ranks * (kTokenResidues + 2)));
  std::int64_t* send = scratch.data() + p.num_ranks * kTokenResidues;
  merge_rows(routes, p.rank, scratch.data(), {offsets.data(), nullptr, send, send + p.num_ranks});
  return offsets;
}

}  // namespace moe
