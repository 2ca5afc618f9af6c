// The row map of rows.h by the blocks of a cluster, for several ranks: what each expert gets from the class counts of
// all ranks, and where every row comes from. With one rank there is nothing to merge: row i is position i of its
// route_order. Run by forward/route.cu; see team.h.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/parallel_plan.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/rows.h"
#include "moe/plan/team.h"

namespace moe {

// First stage: part_counts, the routes of each rank to each expert.
template <typename Block>
MOE_HOST_DEVICE void count_ranks(Block& block, const RankRoutes& routes, const PlanScratch& scratch) {
  block.phase([&](const Thread& me) {
    const std::int64_t pairs = routes.num_ranks * routes.num_experts;
    me.each_of_cluster(pairs, [&](std::int64_t i) {
      std::int32_t sum = 0;
      for (std::int64_t c = 0; c < kTokenResidues; ++c) sum += routes.class_counts[i * kTokenResidues + c];
      scratch.part_counts[i] = sum;
    });
  });
}

// Second stage: positions, from the first one's counts. Each block takes some of the ranks.
template <typename Block>
MOE_HOST_DEVICE void sum_positions(Block& block, const RankRoutes& routes, const PlanScratch& scratch) {
  const auto num_experts = static_cast<std::int32_t>(routes.num_experts);
  for (std::int64_t rank = block.index; rank < routes.num_ranks; rank += block.count) {
    std::int32_t* positions = scratch.positions + rank * (routes.num_experts + 1);
    block.phase([&](const Thread& me) {
      me.each(num_experts, [&](std::int32_t e) { positions[e] = scratch.part_counts[rank * routes.num_experts + e]; });
    });
    exclusive_sum(block, positions, num_experts);
  }
}

// Whether every rank can hold the rows that it gets, by the positions of the second stage; if not, block 0 leaves in
// `meeting` which rank gets the most. Every block, and every rank, comes to the same answer.
template <typename Block>
MOE_HOST_DEVICE bool rows_fit(Block& block, const PlanJob& job, const RankRoutes& routes, std::int64_t row_capacity) {
  const ExpertSplit split{routes.num_experts, routes.num_ranks};
  std::int32_t* const most = block.shared() + plan_lasting_words(job.shape.local_experts) - 3;
  std::int32_t* const full = most + 1;
  const auto rows_of = [&](std::int32_t reader) {
    std::int32_t rows = 0;
    for (std::int64_t rank = 0; rank < routes.num_ranks; ++rank) {
      const std::int32_t* positions = job.scratch.positions + rank * (routes.num_experts + 1);
      rows += positions[split.begin(reader + 1)] - positions[split.begin(reader)];
    }
    return rows;
  };
  const auto num_ranks = static_cast<std::int32_t>(routes.num_ranks);
  block.phase([&](const Thread& me) {
    if (me.index != 0) return;
    *most = 0;
    *full = num_ranks;
  });
  // The smallest of what is below zero is the most rows.
  block.phase([&](const Thread& me) { me.each(num_ranks, [&](std::int32_t r) { block.lower(most, -rows_of(r)); }); });
  block.phase([&](const Thread& me) {
    me.each(num_ranks, [&](std::int32_t r) {
      if (rows_of(r) == -*most) block.lower(full, r);
    });
  });
  const bool fit = -std::int64_t{*most} <= row_capacity;
  block.phase([&](const Thread& me) {
    if (me.index != 0 || block.index != 0 || fit) return;
    job.meeting->full_rank = *full;
    job.meeting->full_rows = -*most;
  });
  return fit;
}

// Rows of a block's experts are runs, each of one (expert, class of g, rank), in that order: this many in [begin, end).
struct BlockRuns {
  std::int32_t begin;  // first local expert of the block
  std::int32_t end;
  std::int32_t count;
  std::int32_t* rows;       // [count + 1] prefix sums of their rows
  std::int32_t* positions;  // [count + 1] prefix sums of routes by (rank, expert, class of t)
};

template <typename Block>
MOE_HOST_DEVICE BlockRuns block_runs(const Block& block, const PlanJob& job) {
  const std::int32_t experts = job.shape.local_experts;
  const std::int32_t each = ceil_div32(experts, block.count);
  const std::int32_t begin = min32(experts, std::int64_t{block.index} * each);
  const std::int32_t end = min32(experts, std::int64_t{begin} + each);
  const std::int32_t count = (end - begin) * static_cast<std::int32_t>(kTokenResidues) * job.shape.num_ranks;
  std::int32_t* at = job.scratch.runs + block.index * job.scratch.runs_per_block;
  return {begin, end, count, at, at + count + 1};
}

// Third stage, behind build_in_parallel: sources and row_route. Each block takes some of the experts.
template <typename Block>
MOE_HOST_DEVICE void merge_in_parallel(Block& block, const PlanJob& job, const RankRoutes& routes) {
  const auto classes = static_cast<std::int32_t>(kTokenResidues);
  const std::int32_t num_ranks = job.shape.num_ranks;
  const ExpertSums sums = expert_sums(block, job.shape);
  const BlockRuns runs = block_runs(block, job);
  const std::int32_t experts = runs.end - runs.begin;
  const std::int32_t first_expert = job.shape.first_expert + runs.begin;
  block.phase([&](const Thread& me) {
    me.each(runs.count, [&](std::int32_t i) {
      const std::int32_t rank = i % num_ranks;
      const std::int32_t residue = i / num_ranks % classes;
      const std::int32_t expert = i / num_ranks / classes;
      const auto count = [&](std::int64_t local_residue) {
        return static_cast<std::int32_t>(routes.count(rank, first_expert + expert, local_residue));
      };
      runs.rows[i] = count(routes.local_residue(rank, residue));
      runs.positions[(rank * experts + expert) * classes + residue] = count(residue);
    });
  });
  exclusive_sum(block, runs.rows, runs.count);
  exclusive_sum(block, runs.positions, runs.count);
  block.phase([&](const Thread& me) {
    const std::int32_t first_row = sums.rows[runs.begin];
    me.each(sums.rows[runs.end] - first_row, [&](std::int32_t i) {
      const std::int32_t run = item_at(runs.rows, runs.count, i);
      const std::int32_t rank = run % num_ranks;
      const std::int32_t expert = run / num_ranks / classes;
      const auto local = static_cast<std::int32_t>(routes.local_residue(rank, run / num_ranks % classes));
      const std::int32_t before =
          runs.positions[(rank * experts + expert) * classes + local] - runs.positions[rank * experts * classes];
      const std::int32_t position =
          job.scratch.positions[rank * (routes.num_experts + 1) + first_expert] + before + i - runs.rows[run];
      if (job.sources != nullptr) job.sources[first_row + i] = {rank, position};
      if (job.row_route != nullptr) job.row_route[first_row + i] = job.peer_routes.row_route(rank, position);
    });
  });
}

}  // namespace moe
