// Cuts the experts' rows into row tiles, tiles into segments and segments into minibatches. Third step of the plan.
// Owns the padding (every expert's last tile may be short; only tile indices are padded, h stays compact) and the
// tables that make every later look-up O(1). Called once per launch, by one block on the device.
//
// A segment is a run of tiles of one expert that gate_up and down work on together, so that its weights are read once
// for all of them. A minibatch is a run of segments with at least `waves` gate_up tasks for every cluster, the unit of
// lag.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/problem.h"

namespace moe {

struct RowTile {
  std::int32_t expert;     // local expert
  std::int32_t row_begin;  // first row, in compact rows
  std::int32_t rows;       // 1 ... kRowTile
};

struct Segment {
  std::int32_t expert;      // local expert
  std::int32_t tile_begin;  // first row tile
  std::int32_t tiles;       // 1 ... Schedule::segment_tiles
  std::int32_t minibatch;   // the minibatch it belongs to
};

// Two blocks of a cluster work on two row tiles of a segment and share the weight tile, or, for an odd last tile, on
// two column tiles and share the row tile.
MOE_HOST_DEVICE constexpr std::int64_t tasks_of_segment(std::int64_t tiles, std::int64_t column_tiles) {
  return tiles / 2 * column_tiles + tiles % 2 * ceil_div(column_tiles, 2);
}

// Rows of one piece, the share of a row tile that one dispatch task moves; a short tile's last pieces are empty.
MOE_HOST_DEVICE constexpr std::int64_t pieces_of_tile(const Tiling& t) { return kRowTile / t.piece_rows; }
MOE_HOST_DEVICE constexpr std::int64_t rows_of_piece(const RowTile& tile, std::int64_t piece, const Tiling& t) {
  const std::int64_t left = tile.rows - piece * t.piece_rows;
  return left <= 0 ? 0 : (left < t.piece_rows ? left : t.piece_rows);
}
MOE_HOST_DEVICE constexpr std::int64_t filled_pieces(const RowTile& tile, const Tiling& t) {
  return ceil_div(tile.rows, t.piece_rows);
}

// Rows behind the tile's last that the mover of a piece clears in backward: all of them, with the last filled piece.
// Weight gradients sum over whole tiles, so x and dy must be zero there, as the compute role makes dh and s*a.
MOE_HOST_DEVICE constexpr std::int64_t rows_to_clear(const RowTile& tile, std::int64_t piece, const Tiling& t) {
  return piece == filled_pieces(tile, t) - 1 ? kRowTile - tile.rows : 0;
}

struct TileCounts {
  std::int64_t tiles;
  std::int64_t segments;
  std::int64_t minibatches;
};

// Where cut_rows writes. Does not own the memory.
struct TileTables {
  RowTile* tiles;                // [Problem::max_row_tiles()]
  Segment* segments;             // [Problem::max_row_tiles()]
  std::int32_t* minibatch_ends;  // [Problem::max_row_tiles()]: one past the last segment of each minibatch
  std::int32_t* expert_tiles;    // [L + 1]: first row tile of each local expert, then the number of tiles
  std::int32_t* expert_pieces;   // [L + 1]: filled pieces of all experts before, then of all
};

// Cuts the rows given by expert_offsets [L + 1]. A last minibatch of less than `waves` waves is joined to the one
// before.
MOE_HOST_DEVICE inline TileCounts cut_rows(const Problem& problem, const Tiling& tiling, const Schedule& schedule,
                                           const std::int64_t* expert_offsets, const TileTables& out) {
  TileCounts n{0, 0, 0};
  const std::int64_t enough = schedule.waves * schedule.num_clusters;
  std::int64_t tasks = 0;  // gate_up tasks of the open minibatch
  std::int64_t open = 0;   // its first segment
  std::int64_t pieces = 0;
  for (std::int64_t e = 0; e < problem.local_experts(); ++e) {
    const std::int64_t begin = expert_offsets[e];
    const std::int64_t expert_tiles = ceil_div(expert_offsets[e + 1] - begin, kRowTile);
    out.expert_tiles[e] = static_cast<std::int32_t>(n.tiles);
    out.expert_pieces[e] = static_cast<std::int32_t>(pieces);
    for (std::int64_t t = 0; t < expert_tiles; ++t) {
      const std::int64_t row = begin + t * kRowTile;
      const std::int64_t left = expert_offsets[e + 1] - row;
      out.tiles[n.tiles + t] = {static_cast<std::int32_t>(e), static_cast<std::int32_t>(row),
                                static_cast<std::int32_t>(left < kRowTile ? left : kRowTile)};
      pieces += filled_pieces(out.tiles[n.tiles + t], tiling);
    }
    for (std::int64_t t = 0; t < expert_tiles; t += schedule.segment_tiles) {
      const std::int64_t left = expert_tiles - t;
      const std::int64_t tiles = left < schedule.segment_tiles ? left : schedule.segment_tiles;
      out.segments[n.segments++] = {static_cast<std::int32_t>(e), static_cast<std::int32_t>(n.tiles + t),
                                    static_cast<std::int32_t>(tiles), static_cast<std::int32_t>(n.minibatches)};
      tasks += tasks_of_segment(tiles, tiling.act_tiles(problem));
      if (tasks >= enough) {
        out.minibatch_ends[n.minibatches++] = static_cast<std::int32_t>(n.segments);
        open = n.segments;
        tasks = 0;
      }
    }
    n.tiles += expert_tiles;
  }
  out.expert_tiles[problem.local_experts()] = static_cast<std::int32_t>(n.tiles);
  out.expert_pieces[problem.local_experts()] = static_cast<std::int32_t>(pieces);
  if (open < n.segments) {
    if (n.minibatches == 0) n.minibatches = 1;
    out.minibatch_ends[n.minibatches - 1] = static_cast<std::int32_t>(n.segments);
    for (std::int64_t s = open; s < n.segments; ++s) {
      out.segments[s].minibatch = static_cast<std::int32_t>(n.minibatches - 1);
    }
  }
  return n;
}

// Row tiles of minibatches [first, last), counted through the tables.
MOE_HOST_DEVICE inline std::int64_t tiles_of_minibatches(const TileTables& tables, std::int64_t first,
                                                         std::int64_t last) {
  if (first >= last) return 0;
  const std::int64_t begin = first == 0 ? 0 : tables.minibatch_ends[first - 1];
  const Segment& head = tables.segments[begin];
  const Segment& tail = tables.segments[tables.minibatch_ends[last - 1] - 1];
  return tail.tile_begin + tail.tiles - head.tile_begin;
}

// Ring sizes, in row tiles. Only the forward has rings.
struct RingSizes {
  std::int64_t x_slots;
  std::int64_t a_slots;
};

// The least sizes with which ticketed execution by any number of clusters gets through these tables; with one slot less
// a single cluster waits for itself. Tasks run over all row tiles of a segment before they return to the first for the
// next column, so a segment's rows are alive together (with a single column tile: a pair of row tiles). Activations of
// minibatches q ... q + lag are alive before the down tasks of q free the first.
MOE_HOST_DEVICE inline RingSizes ring_minimum(const Problem& problem, const Tiling& tiling, const Schedule& schedule,
                                              const TileTables& tables, const TileCounts& n) {
  RingSizes least{0, 0};
  const bool returns = tiling.act_tiles(problem) > 1;
  for (std::int64_t s = 0; s < n.segments; ++s) {
    const std::int64_t tiles = tables.segments[s].tiles;
    const std::int64_t together = returns || tiles < 2 ? tiles : 2;
    if (together > least.x_slots) least.x_slots = together;
  }
  for (std::int64_t q = 0; q < n.minibatches; ++q) {
    const std::int64_t last = schedule.separate_stages != 0 ? n.minibatches : q + schedule.lag + 1;
    const std::int64_t tiles = tiles_of_minibatches(tables, q, last < n.minibatches ? last : n.minibatches);
    if (tiles > least.a_slots) least.a_slots = tiles;
  }
  return least;
}

// Sizes with which every routing gets through, for allocation: rings are sized before routes are known. A segment of n
// tiles has at least n * act_tiles / 2 tasks, so the segments before the one that closes a minibatch hold at most
// `before` tiles, and so does what is joined to the last.
MOE_HOST_DEVICE constexpr RingSizes ring_bound(const Problem& problem, const Tiling& tiling, const Schedule& schedule) {
  const std::int64_t all = problem.max_row_tiles();
  const std::int64_t before = 2 * (schedule.waves * schedule.num_clusters - 1) / tiling.act_tiles(problem);
  const std::int64_t alive = (schedule.lag + 1) * (before + schedule.segment_tiles) + before;
  const std::int64_t together = tiling.act_tiles(problem) > 1 ? schedule.segment_tiles : 2;
  return {together < all ? together : all, schedule.separate_stages == 0 && alive < all ? alive : all};
}

}  // namespace moe
