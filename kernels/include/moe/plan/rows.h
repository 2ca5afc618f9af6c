// Merges the routes of all ranks into the row order of one rank's experts, and maps rows to where they come from.
// Second step of the plan, after route.h. Owns the order of rows: (expert, g mod 64, g div 64, k) for the global token
// index g, which no split of the tokens over ranks can change. Called by every rank for its own experts, on host and
// device.
//
// Every rank sorts by its local t. With g = start + t, the routes of one class of g on one rank are one class of t, and
// ranks hold ascending g: so rows are whole blocks (expert, class of g, rank), each a run of that rank's route_order.
#pragma once

#include <cstdint>

#include "moe/host_device.h"
#include "moe/plan/problem.h"
#include "moe/plan/route.h"

namespace moe {

// What all ranks publish: their class counts and where their tokens start in the global order.
struct RankRoutes {
  const std::int32_t* class_counts;  // [W, E, 64], see RouteSort
  const std::int64_t* token_starts;  // [W], sum of T of the ranks before
  std::int64_t num_ranks;            // W
  std::int64_t num_experts;          // E

  // Class of local tokens on `rank` that holds the global class g mod 64 = `residue`.
  MOE_HOST_DEVICE std::int64_t local_residue(std::int64_t rank, std::int64_t residue) const {
    const std::int64_t shifted = (residue - token_starts[rank]) % kTokenResidues;
    return shifted < 0 ? shifted + kTokenResidues : shifted;
  }
  MOE_HOST_DEVICE std::int64_t count(std::int64_t rank, std::int64_t expert, std::int64_t local_residue) const {
    return class_counts[(rank * num_experts + expert) * kTokenResidues + local_residue];
  }
};

// Where one row comes from.
struct RowSource {
  std::int32_t rank;      // home rank of the token
  std::int32_t position;  // index into that rank's route_order
};

// Where merge_rows writes; every element named is written. Does not own the memory.
struct RowMap {
  std::int64_t* expert_offsets;  // [L + 1]: first row of each local expert, then R
  RowSource* sources;            // [row_capacity], first R written; may be null
  std::int64_t* send_rows;       // [W]: rows that this rank sends to each rank
  std::int64_t* receive_rows;    // [W]: rows that this rank gets from each rank
};

// Rows that `reader` gets: the sum over its experts and all ranks. Every rank can work this out for every other, so all
// of them take the same decision about overflow.
MOE_HOST_DEVICE inline std::int64_t rows_of_rank(const RankRoutes& routes, std::int64_t reader) {
  const ExpertSplit split{routes.num_experts, routes.num_ranks};
  std::int64_t rows = 0;
  for (std::int64_t rank = 0; rank < routes.num_ranks; ++rank) {
    for (std::int64_t e = split.begin(reader); e < split.begin(reader + 1); ++e) {
      for (std::int64_t c = 0; c < kTokenResidues; ++c) rows += routes.count(rank, e, c);
    }
  }
  return rows;
}

// Position in `rank`'s route_order of its first route to `expert` of local class 0.
MOE_HOST_DEVICE inline std::int64_t first_position(const RankRoutes& routes, std::int64_t rank, std::int64_t expert) {
  std::int64_t position = 0;
  for (std::int64_t e = 0; e < expert; ++e) {
    for (std::int64_t c = 0; c < kTokenResidues; ++c) position += routes.count(rank, e, c);
  }
  return position;
}

// Builds the row map of `reader`. `class_begins` is scratch of [W, 64]. Requires rows_of_rank(reader) to fit the
// capacity of `out.sources`.
MOE_HOST_DEVICE inline void merge_rows(const RankRoutes& routes, std::int64_t reader, std::int64_t* class_begins,
                                       const RowMap& out) {
  const ExpertSplit split{routes.num_experts, routes.num_ranks};
  for (std::int64_t rank = 0; rank < routes.num_ranks; ++rank) {
    out.receive_rows[rank] = 0;
    out.send_rows[rank] = 0;
    for (std::int64_t e = split.begin(rank); e < split.begin(rank + 1); ++e) {
      for (std::int64_t c = 0; c < kTokenResidues; ++c) out.send_rows[rank] += routes.count(reader, e, c);
    }
    class_begins[rank * kTokenResidues] = first_position(routes, rank, split.begin(reader));
  }
  std::int64_t row = 0;
  for (std::int64_t e = split.begin(reader); e < split.begin(reader + 1); ++e) {
    out.expert_offsets[e - split.begin(reader)] = row;
    // Begin of every class of this expert in each rank's route_order; slot 0 carries over from the expert before.
    for (std::int64_t rank = 0; rank < routes.num_ranks; ++rank) {
      std::int64_t* begins = class_begins + rank * kTokenResidues;
      for (std::int64_t c = 1; c < kTokenResidues; ++c) begins[c] = begins[c - 1] + routes.count(rank, e, c - 1);
    }
    for (std::int64_t residue = 0; residue < kTokenResidues; ++residue) {
      for (std::int64_t rank = 0; rank < routes.num_ranks; ++rank) {
        const std::int64_t local = routes.local_residue(rank, residue);
        const std::int64_t count = routes.count(rank, e, local);
        const std::int64_t begin = class_begins[rank * kTokenResidues + local];
        for (std::int64_t i = 0; i < count && out.sources != nullptr; ++i) {
          out.sources[row + i] = {static_cast<std::int32_t>(rank), static_cast<std::int32_t>(begin + i)};
        }
        row += count;
        out.receive_rows[rank] += count;
      }
    }
    for (std::int64_t rank = 0; rank < routes.num_ranks; ++rank) {
      std::int64_t* begins = class_begins + rank * kTokenResidues;
      begins[0] = begins[kTokenResidues - 1] + routes.count(rank, e, kTokenResidues - 1);
    }
  }
  out.expert_offsets[split.count(reader)] = row;
}

}  // namespace moe
