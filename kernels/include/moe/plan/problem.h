// What the plan is made for: the sizes of one layer, how its GEMMs are tiled, and how the work is scheduled. Plain data
// that host and device share; every other header of the plan takes it. Filled in by the bindings (and by launchers)
// from the op's arguments and from cutlass_configs/.
//
// Legend: T tokens on a rank, K top_k, E experts in the whole group, L experts on this rank, W ranks, H hidden width,
// I expert width, R rows (routes that arrived here). A row tile is up to kRowTile rows of one expert.
#pragma once

#include <cstdint>

#include "moe/host_device.h"

namespace moe {

// Rows of one GEMM tile. Fixed over the plan: padding and row tables are in units of it.
inline constexpr std::int64_t kRowTile = 128;

MOE_HOST_DEVICE constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
MOE_HOST_DEVICE constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// The contiguous split of experts over ranks; earlier ranks hold one more. The twin of moe_megakernel.expert_range.
struct ExpertSplit {
  std::int64_t num_experts;  // E
  std::int64_t num_ranks;    // W

  MOE_HOST_DEVICE constexpr std::int64_t begin(std::int64_t rank) const {
    const std::int64_t extra = num_experts % num_ranks;
    return rank * (num_experts / num_ranks) + (rank < extra ? rank : extra);
  }
  MOE_HOST_DEVICE constexpr std::int64_t count(std::int64_t rank) const { return begin(rank + 1) - begin(rank); }
  MOE_HOST_DEVICE constexpr std::int64_t max_count() const { return ceil_div(num_experts, num_ranks); }
};

struct Problem {
  std::int64_t num_ranks;     // W
  std::int64_t rank;          // this rank
  std::int64_t num_experts;   // E
  std::int64_t top_k;         // K
  std::int64_t hidden;        // H
  std::int64_t width;         // I
  std::int64_t gated;         // 1: w_gate_up has 2I rows (gate, up); 0: I rows
  std::int64_t max_tokens;    // largest T of any rank, agreed by the group
  std::int64_t row_capacity;  // rows a rank can receive, agreed by the group

  MOE_HOST_DEVICE constexpr ExpertSplit split() const { return {num_experts, num_ranks}; }
  MOE_HOST_DEVICE constexpr std::int64_t local_experts() const { return split().count(rank); }
  MOE_HOST_DEVICE constexpr std::int64_t h_columns() const { return gated != 0 ? 2 * width : width; }
  MOE_HOST_DEVICE constexpr std::int64_t max_routes() const { return max_tokens * top_k; }
  // Every expert's last tile may be short: at most one tile more than whole ones for each.
  MOE_HOST_DEVICE constexpr std::int64_t max_row_tiles() const {
    return row_capacity / kRowTile + (local_experts() < row_capacity ? local_experts() : row_capacity);
  }
};

// Column tiles of the GEMMs and sizes of the small tasks. A gate_up tile makes `act_columns` columns of the activation
// (from as many gate and up columns).
struct Tiling {
  std::int64_t act_columns;     // gate_up: columns of a and of h's halves
  std::int64_t hidden_columns;  // down and gate_up dgrad: columns of o and dx
  std::int64_t dgrad_columns;   // down dgrad: columns of da, s*a and dh's halves; whole dS partials
  std::int64_t wgrad_rows;      // weight gradient tiles: rows ...
  std::int64_t wgrad_columns;   // ... and columns of the weight
  std::int64_t piece_rows;      // rows that one dispatch task moves; divides kRowTile
  std::int64_t combine_tokens;  // tokens that one combine task sums

  MOE_HOST_DEVICE constexpr std::int64_t act_tiles(const Problem& p) const { return ceil_div(p.width, act_columns); }
  MOE_HOST_DEVICE constexpr std::int64_t dgrad_tiles(const Problem& p) const {
    return ceil_div(p.width, dgrad_columns);
  }
  MOE_HOST_DEVICE constexpr std::int64_t hidden_tiles(const Problem& p) const {
    return ceil_div(p.hidden, hidden_columns);
  }
};

// How tasks are ordered and how many buffers they share.
struct Schedule {
  std::int64_t num_clusters;   // resident clusters of two blocks that the order is made for; never needed for progress
  std::int64_t waves;          // a minibatch has at least this many gate_up tasks for each cluster (2 or more)
  std::int64_t segment_tiles;  // row tiles of one expert that are worked on together, at most; even
  std::int64_t wgrad_tiles;    // row tiles of one expert's weight gradient that are, at most; even
  std::int64_t lag;            // down tasks of minibatch q follow the gate_up tasks of minibatch q + lag (0: unlagged)
  std::int64_t x_slots;        // row tiles the ring of dispatched rows holds
  std::int64_t a_slots;        // row tiles the ring of activations holds
  std::int64_t separate_stages;  // 1: all gate_up tasks before all down tasks (then a_slots must hold every tile)
};

}  // namespace moe
