// The sort of route.h by the blocks of a cluster: same key, same results, in two stages. Every block takes some
// residues t mod 64, every warp a range of t div 64 of one of them, so a route's place is where its class begins, plus
// what earlier warps of its residue have of it, plus its rank in the warp's walk. Run by forward/route.cu; see team.h.
#pragma once

#include <cstdint>
#include <limits>

#include "moe/host_device.h"
#include "moe/plan/plan_scratch.h"
#include "moe/plan/route.h"
#include "moe/plan/team.h"

namespace moe {

inline constexpr std::int32_t kNoBadId = std::numeric_limits<std::int32_t>::max();

template <typename Id>
struct SortJob {
  RouteIds<Id> ids;
  std::int32_t num_experts;      // E
  std::int32_t experts_at_once;  // kMaxRouteExperts, or fewer: more are sorted in several rounds of the two stages
  std::int32_t* route_order;     // as in RouteSort
  std::int32_t* class_counts;    // as in RouteSort
  std::int32_t* part_counts;     // [blocks, E]: valid routes of each block's residues
  std::int32_t* part_first_bad;  // [blocks]: position of the first bad id among them, or kNoBadId

  MOE_HOST_DEVICE std::int32_t tokens() const { return static_cast<std::int32_t>(ids.num_tokens); }
  MOE_HOST_DEVICE std::int32_t top_k() const { return static_cast<std::int32_t>(ids.top_k); }
};

// A block's shared memory during the sort.
struct SortShared {
  std::int32_t* done;          // [1]: routes placed in earlier rounds
  std::int32_t* counters;      // [warps, pitch]: of each expert, the warp's routes; then those of earlier warps
  std::int32_t pitch;          // odd, so that the residues of one expert lie in different banks
  std::int32_t* class_begins;  // [E, residues of the block] + 1: prefix sums in the block's own order
  std::int32_t* begins;        // [E + 1]: first position of each expert in route_order
  std::int32_t* shifts;        // [E]: from the block's order to route_order
  std::int32_t* first_bad;     // [1]
  std::int32_t* staged;        // the block's routes in order, where they fit: the way out of here is then coalesced
  std::int32_t staged_size;
};

template <typename Block>
MOE_HOST_DEVICE SortShared sort_shared(const Block& block, std::int32_t num_experts) {
  const auto residues = static_cast<std::int32_t>(kTokenResidues) / block.count;
  SortShared shared{};
  shared.pitch = num_experts | 1;
  shared.done = block.shared;
  shared.counters = shared.done + 1;
  shared.class_begins = shared.counters + block.num_warps * shared.pitch;
  shared.begins = shared.class_begins + num_experts * residues + 1;
  shared.shifts = shared.begins + num_experts + 1;
  shared.first_bad = shared.shifts + num_experts;
  shared.staged = shared.first_bad + 1;
  shared.staged_size = block.shared_words - static_cast<std::int32_t>(shared.staged - block.shared);
  return shared;
}

// The experts of one round: [first, first + count).
struct ExpertRound {
  std::int32_t first;
  std::int32_t count;
  bool last;

  // Which of them `id` is, or -1.
  template <typename Id>
  MOE_HOST_DEVICE std::int32_t find(Id id) const {
    return id >= first && id - first < count ? static_cast<std::int32_t>(id - first) : -1;
  }
};

template <typename Id>
MOE_HOST_DEVICE ExpertRound expert_round(const SortJob<Id>& job, std::int32_t first) {
  const std::int32_t left = job.num_experts - first;
  return {first, min32(left, job.experts_at_once), left <= job.experts_at_once};
}

// Routes of one warp: those of tokens t with t mod 64 = residue and t div 64 in [begin, end).
struct WarpRoutes {
  std::int32_t residue;
  std::int32_t block_residue;  // counted within the block
  std::int32_t begin;
  std::int32_t end;
};

template <typename Block>
MOE_HOST_DEVICE WarpRoutes warp_routes(const Block& block, std::int32_t warp, std::int32_t tokens) {
  const auto all = static_cast<std::int32_t>(kTokenResidues);
  const std::int32_t residues = all / block.count;
  const std::int32_t warps = block.num_warps / residues;
  const std::int32_t block_residue = warp / warps;
  const std::int32_t residue = block.index * residues + block_residue;
  const std::int32_t ages = residue < tokens ? (tokens - residue - 1) / all + 1 : 0;
  const std::int32_t each = (ages + warps - 1) / warps;
  const std::int32_t begin = min32(ages, warp % warps * std::int64_t{each});
  return {residue, block_residue, begin, min32(ages, std::int64_t{begin} + each)};
}

// Calls visit(id, route) in ascending (t div 64, k), as many routes at a time as the warp has lanes. Every lane makes
// the same number of calls; those past the end get id -1, which is that of a dropped route. Ids are loaded kAhead steps
// together, because nothing else hides the memory's latency.
template <std::int32_t kAhead, typename Id, typename Warp, typename Visit>
MOE_HOST_DEVICE void walk_routes(const RouteIds<Id>& ids, const WarpRoutes& range, const Warp& warp, Visit visit) {
  constexpr auto kAge = static_cast<std::int32_t>(kTokenResidues);  // from a token to the next of its residue
  const auto top_k = static_cast<std::int32_t>(ids.top_k);
  const std::int32_t num_routes = (range.end - range.begin) * top_k;
  // A lane goes from (age, slot) to as many routes further as there are lanes, in steps that need no product; beyond
  // the end the sums mean nothing.
  const std::int32_t ages = warp.lanes / top_k, slots = warp.lanes % top_k;
  const std::int64_t step = ages * kAge * ids.token_stride + slots * ids.slot_stride;
  const std::int64_t wrap = kAge * ids.token_stride - top_k * ids.slot_stride;
  const auto route_step = static_cast<std::uint32_t>(ages * kAge * top_k + slots);
  const auto route_wrap = static_cast<std::uint32_t>((kAge - 1) * top_k);
  const std::int64_t token = (range.begin + warp.lane / top_k) * std::int64_t{kAge} + range.residue;
  std::int32_t slot = warp.lane % top_k;
  std::int64_t offset = token * ids.token_stride + slot * ids.slot_stride;
  auto route = static_cast<std::uint32_t>(token * top_k + slot);
  MOE_ROLLED
  for (std::int32_t done = 0; done < num_routes; done += kAhead * warp.lanes) {
    Id loaded[kAhead];
    std::int32_t routes[kAhead];
    for (std::int32_t i = 0; i < kAhead; ++i) {
      loaded[i] = done + i * warp.lanes + warp.lane < num_routes ? ids.ids[offset] : Id{-1};
      routes[i] = static_cast<std::int32_t>(route);
      const bool wraps = slot + slots >= top_k;
      slot += slots - (wraps ? top_k : 0);
      offset += step + (wraps ? wrap : 0);
      route += route_step + (wraps ? route_wrap : 0);
    }
    for (std::int32_t i = 0; i < kAhead; ++i) {
      if (done + i * warp.lanes < num_routes) visit(loaded[i], routes[i]);
    }
  }
}

// First stage: class_counts, part_counts and part_first_bad. Leaves in shared memory what place_in_parallel needs.
template <typename Id, typename Block>
MOE_HOST_DEVICE void count_in_parallel(Block& block, const SortJob<Id>& job, const ExpertRound& round) {
  const std::int32_t num_experts = round.count;
  const auto all = static_cast<std::int32_t>(kTokenResidues);
  const std::int32_t residues = all / block.count;
  const std::int32_t warps = block.num_warps / residues;
  const SortShared shared = sort_shared(block, num_experts);
  block.phase([&](const Thread& me) {
    me.each(block.num_warps * shared.pitch, [&](std::int32_t i) { shared.counters[i] = 0; });
    if (me.index != 0) return;
    *shared.first_bad = kNoBadId;
    if (round.first == 0) *shared.done = 0;
  });
  block.warps([&](const auto& warp) {
    std::int32_t* counters = shared.counters + warp.index * shared.pitch;
    std::int32_t first_bad = kNoBadId;
    walk_routes<8>(job.ids, warp_routes(block, warp.index, job.tokens()), warp, [&](Id id, std::int32_t route) {
      const std::int32_t expert = round.find(id);
      if (expert >= 0) {
        warp.add(counters + expert);
      } else if (route_kind(id, job.num_experts) == RouteKind::kBad && route < first_bad) {
        first_bad = route;
      }
    });
    if (first_bad != kNoBadId) block.lower(shared.first_bad, first_bad);
  });
  block.phase([&](const Thread& me) {
    me.each(residues * num_experts, [&](std::int32_t i) {
      const std::int32_t expert = i / residues;
      const std::int32_t residue = i % residues;
      std::int32_t sum = 0;
      MOE_ROLLED
      for (std::int32_t w = 0; w < warps; ++w) {
        std::int32_t& counter = shared.counters[(residue * warps + w) * shared.pitch + expert];
        const std::int32_t count = counter;
        counter = sum;
        sum += count;
      }
      shared.class_begins[i] = sum;
      job.class_counts[(round.first + expert) * all + block.index * residues + residue] = sum;
    });
    if (me.index == 0) job.part_first_bad[block.index] = *shared.first_bad;
  });
  block.exclusive_sum(shared.class_begins, residues * num_experts);
  block.phase([&](const Thread& me) {
    me.each(num_experts, [&](std::int32_t e) {
      job.part_counts[std::int64_t{block.index} * job.num_experts + round.first + e] =
          shared.class_begins[(e + 1) * residues] - shared.class_begins[e * residues];
    });
  });
}

// Sends the block's staged routes to their places: each warp a range of them, expert after expert.
template <typename Id, typename Block>
MOE_HOST_DEVICE void store_staged(Block& block, const SortJob<Id>& job, const SortShared& shared,
                                  std::int32_t num_experts) {
  const std::int32_t residues = static_cast<std::int32_t>(kTokenResidues) / block.count;
  const std::int32_t staged = shared.class_begins[num_experts * residues];
  const std::int32_t each = ceil_div32(staged, block.num_warps);
  const auto end_of = [&](std::int32_t expert) { return shared.class_begins[(expert + 1) * residues]; };
  const auto search = [&](std::int32_t from, std::int32_t place) {
    return from + first_where(num_experts - from, [&](std::int32_t i) { return end_of(from + i) > place; });
  };
  block.warps([&](const auto& warp) {
    const std::int32_t begin = min32(staged, std::int64_t{warp.index} * each);
    const std::int32_t end = min32(staged, std::int64_t{begin} + each);
    std::int32_t expert = search(0, begin + warp.lane);
    MOE_ROLLED
    for (std::int32_t place = begin + warp.lane; place < end; place += warp.lanes) {
      // Mostly the same expert or the next; a search only where experts without routes lie between.
      if (end_of(expert) <= place) ++expert;
      if (end_of(expert) <= place) expert = search(expert, place);
      job.route_order[place + shared.shifts[expert]] = shared.staged[place];
    }
  });
}

// Second stage: route_order. The part counts of all blocks say where a block's share of each expert begins.
template <typename Id, typename Block>
MOE_HOST_DEVICE void place_in_parallel(Block& block, const SortJob<Id>& job, const ExpertRound& round) {
  const std::int32_t num_experts = round.count;
  const std::int32_t residues = static_cast<std::int32_t>(kTokenResidues) / block.count;
  const SortShared shared = sort_shared(block, num_experts);
  block.phase([&](const Thread& me) {
    me.each(num_experts, [&](std::int32_t e) {
      std::int32_t sum = 0;
      std::int32_t before = 0;
      for (std::int32_t part = 0; part < block.count; ++part) {
        const std::int32_t count = job.part_counts[std::int64_t{part} * job.num_experts + round.first + e];
        sum += count;
        if (part < block.index) before += count;
      }
      shared.begins[e] = sum;
      shared.shifts[e] = before - shared.class_begins[e * residues];
    });
  });
  block.exclusive_sum(shared.begins, num_experts);
  block.phase([&](const Thread& me) {
    me.each(num_experts, [&](std::int32_t e) { shared.shifts[e] += *shared.done + shared.begins[e]; });
  });
  const bool staged = shared.class_begins[num_experts * residues] <= shared.staged_size;
  block.warps([&](const auto& warp) {
    std::int32_t* counters = shared.counters + warp.index * shared.pitch;
    const WarpRoutes range = warp_routes(block, warp.index, job.tokens());
    walk_routes<4>(job.ids, range, warp, [&](Id id, std::int32_t route) {
      const std::int32_t expert = round.find(id);
      const std::int32_t taken = warp.take(counters, expert);
      if (expert < 0) return;
      const std::int32_t place = shared.class_begins[expert * residues + range.block_residue] + taken;
      if (staged) {
        shared.staged[place] = route;
      } else {
        job.route_order[place + shared.shifts[expert]] = route;
      }
    });
  });
  if (staged) store_staged(block, job, shared, num_experts);
  block.phase([&](const Thread& me) {
    if (!round.last) return;
    const std::int32_t valid = *shared.done + shared.begins[num_experts];
    const std::int64_t rest = job.ids.num_tokens * job.ids.top_k - valid;
    me.each_of_cluster(rest, [&](std::int64_t i) { job.route_order[valid + i] = -1; });
  });
  block.phase([&](const Thread& me) {
    if (me.index == 0 && !round.last) *shared.done += shared.begins[num_experts];
  });
}

// After the first stage of any round: the position of the first bad id of all blocks, or kNoBadId.
MOE_HOST_DEVICE inline std::int32_t first_bad_of(const std::int32_t* part_first_bad, std::int32_t blocks) {
  std::int32_t first = kNoBadId;
  for (std::int32_t i = 0; i < blocks; ++i) {
    if (part_first_bad[i] < first) first = part_first_bad[i];
  }
  return first;
}

}  // namespace moe
