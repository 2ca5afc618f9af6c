// The sort of route.h by the blocks of a cluster: same key, same results, in two stages. Every block takes some
// residues t mod 64, every warp a range of t div 64 of one of them, so a route's place is where its class begins, plus
// what earlier warps of its residue have of it, plus its rank in the warp's walk. The ids are read once where shared
// memory keeps what the walk has found out. Run by forward/route.cu; see team.h.
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
  std::int32_t experts_at_once;  // kRoundExperts, or fewer: more are sorted in several rounds of the two stages
  std::int32_t* route_order;     // as in RouteSort
  std::int32_t* class_counts;    // as in RouteSort
  std::int64_t* first_bad;       // [1]: position of the first bad id, or -1; or null
  // see set_walks
  std::int32_t warp_ages;     // t div 64 that a warp walks, at most
  std::int32_t warp_routes;   // numbers of routes that a warp has: as many as it walks at most, in whole steps
  std::int32_t block_routes;  // and a block; kMaxRoutes if there are more
  Divisor by_top_k;
  // A lane goes from (age, slot) to as many routes further as there are lanes: this many slots and as much in memory,
  // or, if there are not so many slots left, top_k slots less and as much as `wrapped`.
  std::int32_t slot_step;
  std::int64_t step;
  std::int64_t wrapped;

  MOE_HOST_DEVICE std::int32_t tokens() const { return static_cast<std::int32_t>(ids.num_tokens); }
  MOE_HOST_DEVICE std::int32_t top_k() const { return static_cast<std::int32_t>(ids.top_k); }
};

// Deals the tokens of `job` to blocks of this many warps. On the host, before the launch: a block that begins with cold
// caches pays for everything that it works out before its first loads.
template <typename Id>
MOE_HOST_DEVICE constexpr void set_walks(SortJob<Id>& job, std::int32_t num_blocks, std::int32_t num_warps,
                                         std::int32_t lanes) {
  const auto residues = static_cast<std::int32_t>(kTokenResidues);
  const RouteIds<Id>& ids = job.ids;
  const auto top_k = static_cast<std::int32_t>(ids.top_k);
  const std::int32_t ages = ceil_div32(static_cast<std::int32_t>(ids.num_tokens), residues);
  job.warp_ages = ceil_div32(ages, num_warps / (residues / num_blocks));
  job.warp_routes = min32(round_up(std::int64_t{job.warp_ages} * top_k, lanes), kMaxRoutes);
  job.block_routes = min32(std::int64_t{num_warps} * job.warp_routes, kMaxRoutes);
  job.by_top_k = divisor(top_k);
  job.slot_step = lanes % top_k;
  job.step = lanes / top_k * kTokenResidues * ids.token_stride + job.slot_step * ids.slot_stride;
  job.wrapped = job.step + kTokenResidues * ids.token_stride - top_k * ids.slot_stride;
}

// What blocks read from each other, at the same place in the shared memory of each. It lasts as long as the kernel.
struct SharedParts {
  std::int32_t* begins;         // [E + 1]: the block's routes to all experts before; then all of them
  std::int32_t* first_bad;      // [1]: position of the first bad id in the block, or kNoBadId
  std::int32_t* all_first_bad;  // [1]: of all blocks
  std::int32_t* done;           // [1]: routes placed in earlier rounds
  std::int32_t* end;            // what is free
};

// `lasting`: words before them that last as well.
MOE_HOST_DEVICE inline SharedParts shared_parts(std::int32_t* shared, std::int32_t lasting, std::int32_t num_experts) {
  SharedParts parts{};
  parts.first_bad = shared + lasting;
  parts.all_first_bad = parts.first_bad + 1;
  parts.done = parts.first_bad + 2;
  parts.begins = parts.first_bad + 3;
  parts.end = parts.begins + num_experts + 1;
  return parts;
}

// A block's shared memory during the sort.
struct SortShared {
  SharedParts parts;
  std::int32_t* begins;  // [E + 1]: first position of each expert in route_order
  std::int32_t* shifts;  // [E]: from the block's order to route_order
  // [warps, pitch]: of each expert, the warp's routes; then where they begin in the block. Behind the experts stands
  // what counts the routes to none of them.
  std::int32_t* counters;
  std::int32_t pitch;   // odd, so that the residues of one expert lie in different banks
  std::int32_t* masks;  // [warps, pitch]: what `take` needs beside the counters
  // By the warp's number and the route's in the warp, what the walk has found: expert * 2^16 + rank in the warp.
  std::int32_t* kept;
  // The block's routes in order, by number in the block (number_in_block), so that the way out of here is coalesced.
  std::uint16_t* staged;
  bool keeps;   // whether there is room: else the ids are read again ...
  bool stages;  // ... and routes leave as they come
};

template <typename Id, typename Block>
MOE_HOST_DEVICE SortShared sort_shared(const Block& block, const SortJob<Id>& job, std::int32_t lasting,
                                       std::int32_t num_experts) {
  constexpr std::int32_t kMost = 1 << 16;
  SortShared shared{};
  shared.parts = shared_parts(block.shared(), lasting, num_experts);
  shared.pitch = (num_experts + 1) | 1;
  shared.begins = shared.parts.end;
  shared.shifts = shared.begins + num_experts + 1;
  shared.counters = shared.shifts + num_experts;
  std::int32_t* const free = shared.counters + block.num_warps * shared.pitch;
  const std::int32_t words = block.shared_words - static_cast<std::int32_t>(free - block.shared());
  const std::int32_t routes = job.block_routes;
  const std::int32_t staged_words = routes / 2 + 1;
  const std::int32_t mask_words = block.num_warps * shared.pitch;
  // What the walk has found is kept behind it; then the masks are of no more use.
  shared.keeps = routes <= kMost && routes <= words - (staged_words < mask_words ? mask_words : staged_words);
  shared.stages = shared.keeps || (routes <= kMost && staged_words <= words - mask_words);
  shared.kept = free;
  std::int32_t* const behind = free + (shared.keeps ? routes : 0);
  shared.staged = reinterpret_cast<std::uint16_t*>(behind);
  shared.masks = behind + (shared.stages && !shared.keeps ? staged_words : 0);
  return shared;
}

// The experts of one round: [first, first + count).
struct ExpertRound {
  std::int32_t first;
  std::int32_t count;
  bool last;

  // Which of them `id` is, or `count`.
  template <typename Id>
  MOE_HOST_DEVICE std::int32_t find(Id id) const {
    const std::uint64_t index = static_cast<std::uint64_t>(std::int64_t{id}) - static_cast<std::uint64_t>(first);
    return index < static_cast<std::uint64_t>(count) ? static_cast<std::int32_t>(index) : count;
  }
};

template <typename Id>
MOE_HOST_DEVICE ExpertRound expert_round(const SortJob<Id>& job, std::int32_t first) {
  const std::int32_t left = job.num_experts - first;
  return {first, min32(left, job.experts_at_once), left <= job.experts_at_once};
}

// Routes of one warp: those of tokens t with t mod 64 = residue and t div 64 in [begin, begin + ages), numbered in
// ascending (t div 64, k).
struct WarpRoutes {
  std::int32_t residue;
  std::int32_t begin;
  std::int32_t ages;
};

template <typename Id, typename Block>
MOE_HOST_DEVICE WarpRoutes warp_routes(const Block& block, const SortJob<Id>& job, std::int32_t warp) {
  const auto all = static_cast<std::int32_t>(kTokenResidues);
  const std::int32_t residues = all / block.count;
  const std::int32_t warps = block.num_warps / residues;
  const std::int32_t residue = block.index * residues + warp / warps;
  const std::int32_t ages = (job.tokens() - residue + all - 1) / all;  // of the residue
  const std::int32_t begin = warp % warps * job.warp_ages;
  const std::int32_t left = ages - begin;
  return {residue, begin, left < 0 ? 0 : min32(left, job.warp_ages)};
}

// The route with number n of a warp.
template <typename Id>
MOE_HOST_DEVICE std::int32_t route_of(const SortJob<Id>& job, const WarpRoutes& range, std::int32_t n) {
  const auto all = static_cast<std::int32_t>(kTokenResidues);
  const std::int32_t age = job.by_top_k.divide(n);
  return ((range.begin + age) * all + range.residue) * job.top_k() + n - age * job.top_k();
}
// That route's number in the block, in which they are in ascending order too: the tokens of its residues without those
// of the others between them.
template <typename Id, typename Block>
MOE_HOST_DEVICE std::int32_t number_in_block(const Block& block, const SortJob<Id>& job, const WarpRoutes& range,
                                             std::int32_t n) {
  const std::int32_t residues = static_cast<std::int32_t>(kTokenResidues) / block.count;
  const std::int32_t age = job.by_top_k.divide(n);
  return ((range.begin + age) * residues + range.residue - block.index * residues) * job.top_k() + n -
         age * job.top_k();
}
// And back.
template <typename Id, typename Block>
MOE_HOST_DEVICE std::int32_t route_of_number(const Block& block, const SortJob<Id>& job, std::int32_t number) {
  const std::int32_t residues = static_cast<std::int32_t>(kTokenResidues) / block.count;
  const std::int32_t token = job.by_top_k.divide(number);
  const auto age = static_cast<std::int32_t>(static_cast<std::uint32_t>(token) / static_cast<std::uint32_t>(residues));
  return number + (age * (static_cast<std::int32_t>(kTokenResidues) - residues) + block.index * residues) * job.top_k();
}

// Calls visit(id as read(id, n) has it, n) for the routes of a warp, as many at a time as it has lanes. Every lane
// makes the same number of calls; those past the end read id -1, which is that of a dropped route. Ids are loaded
// kAhead steps together and while the ones before are visited, because nothing else hides the memory's latency; start()
// is called behind the first loads.
template <std::int32_t kAhead, typename Id, typename Warp, typename Start, typename Read, typename Visit>
MOE_HOST_DEVICE void walk_routes(const SortJob<Id>& job, const WarpRoutes& range, const Warp& warp, Start start,
                                 Read read, Visit visit) {
  constexpr auto kAge = static_cast<std::int32_t>(kTokenResidues);  // from a token to the next of its residue
  const RouteIds<Id>& ids = job.ids;
  const std::int32_t top_k = job.top_k();
  const std::int32_t num_routes = range.ages * top_k;
  // Beyond the end the sums mean nothing.
  const std::int32_t age = job.by_top_k.divide(warp.lane);
  std::int32_t slot = warp.lane - age * top_k;
  std::int64_t offset =
      ((range.begin + age) * std::int64_t{kAge} + range.residue) * ids.token_stride + slot * ids.slot_stride;
  Id loaded[kAhead] = {};
  std::int32_t found[kAhead] = {};
  MOE_ROLLED
  for (std::int32_t next = 0;; next += kAhead * warp.lanes) {
    const std::int32_t now = next - kAhead * warp.lanes;  // what has been loaded
    if (next > 0) {
      for (std::int32_t i = 0; i < kAhead; ++i) found[i] = read(loaded[i], now + i * warp.lanes + warp.lane);
    }
    const auto load = [&](auto advance) {
      for (std::int32_t i = 0; i < kAhead; ++i) {
        loaded[i] = next + i * warp.lanes + warp.lane < num_routes ? ids.ids[offset] : Id{-1};
        advance();
      }
    };
    if (job.slot_step == 0) {
      load([&] { offset += job.step; });
    } else {
      load([&] {
        slot += job.slot_step;
        const bool wraps = slot >= top_k;
        slot -= wraps ? top_k : 0;
        offset += wraps ? job.wrapped : job.step;
      });
    }
    if (next == 0) {
      start();
    } else {
      for (std::int32_t i = 0; i < kAhead; ++i) {
        if (now + i * warp.lanes < num_routes) visit(found[i], now + i * warp.lanes + warp.lane);
      }
    }
    if (next >= num_routes) return;
  }
}

// Whether route_kind is kBad, in one comparison: only -1 and the valid ids are at most num_experts when one is added.
MOE_HOST_DEVICE constexpr bool is_bad(std::int64_t id, std::int32_t num_experts) {
  return static_cast<std::uint64_t>(id) + 1 > static_cast<std::uint64_t>(num_experts);
}

// First stage: parts, and in shared memory what place_routes needs. Writes no other memory, so that the cluster's
// barrier has nothing to wait for.
template <typename Id, typename Block>
MOE_HOST_DEVICE void count_in_parallel(Block& block, const SortJob<Id>& job, const SortShared& shared,
                                       const ExpertRound& round) {
  const std::int32_t residues = static_cast<std::int32_t>(kTokenResidues) / block.count;
  const std::int32_t warps = block.num_warps / residues;
  block.phase([&](const Thread& me) {
    if (me.index != 0) return;
    *shared.parts.first_bad = kNoBadId;
    if (round.first == 0) *shared.parts.done = 0;
  });
  block.warps([&](const auto& warp) {
    std::int32_t* counters = shared.counters + warp.index * shared.pitch;
    std::int32_t* masks = shared.masks + warp.index * shared.pitch;
    const WarpRoutes range = warp_routes(block, job, warp.index);
    std::int32_t* const kept = shared.kept + warp.index * job.warp_routes;
    std::int32_t first_bad = kNoBadId;
    walk_routes<8>(
        job, range, warp,
        [&] {
          warp.clear(counters, round.count + 1);
          warp.clear(masks, round.count + 1);
        },
        [&](Id id, std::int32_t n) {
          const std::int32_t expert = round.find(id);
          if (is_bad(id, job.num_experts) && n < first_bad) first_bad = n;
          return expert;
        },
        [&](std::int32_t expert, std::int32_t n) {
          const std::int32_t rank = warp.take(counters, masks, expert);
          if (shared.keeps) kept[n] = expert << 16 | rank;
        });
    if (first_bad != kNoBadId) block.lower(shared.parts.first_bad, route_of(job, range, first_bad));
  });
  block.scan(
      round.count * residues,
      [&](std::int32_t i) {
        const std::int32_t* counter = shared.counters + i % residues * warps * shared.pitch + i / residues;
        std::int32_t sum = 0;
        for (std::int32_t w = 0; w < warps; ++w) sum += counter[w * shared.pitch];
        return sum;
      },
      [&](std::int32_t i, std::int32_t before) {
        if (i % residues == 0) shared.parts.begins[i / residues] = before;
        if (i == round.count * residues) return;
        std::int32_t* counter = shared.counters + i % residues * warps * shared.pitch + i / residues;
        for (std::int32_t w = 0; w < warps; ++w) {
          const std::int32_t count = counter[w * shared.pitch];
          counter[w * shared.pitch] = before;
          before += count;
        }
      });
}

// Second stage: class_counts, and from the parts of all blocks where a block's share of each expert begins.
template <typename Id, typename Block>
MOE_HOST_DEVICE void join_parts(const Thread& me, const Block& block, const SortJob<Id>& job, const SortShared& shared,
                                const ExpertRound& round, std::int32_t lasting) {
  const auto all = static_cast<std::int32_t>(kTokenResidues);
  const std::int32_t residues = all / block.count;
  const std::int32_t warps = block.num_warps / residues;
  me.each(round.count + 1, [&](std::int32_t e) {
    std::int32_t begin = *shared.parts.done;
    std::int32_t earlier = 0;  // of this expert, from earlier blocks
    for (std::int32_t b = 0; b < block.count; ++b) {
      const std::int32_t* begins = block.peer(b) + (shared.parts.begins - block.shared());
      const std::int32_t of_block = begins[e];
      begin += of_block;
      if (b < block.index && e < round.count) earlier += begins[e + 1] - of_block;
    }
    shared.begins[e] = begin;
    if (e < round.count) shared.shifts[e] = begin + earlier - shared.parts.begins[e];
  });
  if (me.index == me.count - 1) {
    std::int32_t first = kNoBadId;
    for (std::int32_t b = 0; b < block.count; ++b) {
      const std::int32_t of_block = *shared_parts(const_cast<std::int32_t*>(block.peer(b)), lasting, 0).first_bad;
      if (of_block < first) first = of_block;
    }
    *shared.parts.all_first_bad = first;
    if (block.index == 0 && job.first_bad != nullptr) *job.first_bad = first == kNoBadId ? -1 : first;
  }
  // Its first warp has the begin of a class.
  me.each(residues * round.count, [&](std::int32_t i) {
    const std::int32_t expert = i / residues, residue = i % residues;
    const std::int32_t* begin = shared.counters + residue * warps * shared.pitch + expert;
    const std::int32_t end = residue + 1 < residues ? begin[warps * shared.pitch] : shared.parts.begins[expert + 1];
    job.class_counts[(round.first + expert) * all + block.index * residues + residue] = end - *begin;
  });
}

// Then the block's routes go to their places, by way of shared memory if there is room.
template <typename Id, typename Block, typename Warp>
MOE_HOST_DEVICE void place_routes(const Warp& warp, const Block& block, const SortJob<Id>& job,
                                  const SortShared& shared, const ExpertRound& round) {
  std::int32_t* counters = shared.counters + warp.index * shared.pitch;
  const WarpRoutes range = warp_routes(block, job, warp.index);
  const std::int32_t begin = warp.index * job.warp_routes;
  const auto put = [&](std::int32_t expert, std::int32_t place, std::int32_t n) {
    if (shared.stages) {
      shared.staged[place] = static_cast<std::uint16_t>(number_in_block(block, job, range, n));
    } else {
      job.route_order[place + shared.shifts[expert]] = route_of(job, range, n);
    }
  };
  if (shared.keeps) {
    MOE_ROLLED
    for (std::int32_t n = warp.lane; n < range.ages * job.top_k(); n += warp.lanes) {
      const std::int32_t found = shared.kept[begin + n];
      if (found >> 16 < round.count) put(found >> 16, counters[found >> 16] + (found & 0xffff), n);
    }
    return;
  }
  std::int32_t* masks = shared.masks + warp.index * shared.pitch;
  walk_routes<4>(
      job, range, warp, [&] { warp.clear(masks, round.count + 1); },
      [&](Id id, std::int32_t) { return round.find(id); },
      [&](std::int32_t expert, std::int32_t n) {
        const std::int32_t place = warp.take(counters, masks, expert);
        if (expert < round.count) put(expert, place, n);
      });
}

// And from there to route_order: each warp a range of places, expert after expert.
template <typename Id, typename Block, typename Warp>
MOE_HOST_DEVICE void store_staged(const Warp& warp, const Block& block, const SortJob<Id>& job,
                                  const SortShared& shared, const ExpertRound& round) {
  if (!shared.stages) return;
  const std::int32_t* begins = shared.parts.begins;
  const std::int32_t staged = begins[round.count];
  const std::int32_t each = ceil_div32(staged, block.num_warps);
  const std::int32_t begin = min32(staged, std::int64_t{warp.index} * each);
  const std::int32_t end = min32(staged, std::int64_t{begin} + each);
  std::int32_t expert = begin < end ? item_at(begins, round.count, begin) : 0;
  std::int32_t expert_end = begins[expert + 1];
  std::int32_t shift = shared.shifts[expert];
  MOE_ROLLED
  for (std::int32_t place = begin + warp.lane; place < end; place += warp.lanes) {
    if (expert_end <= place) {  // mostly the next; a search only where experts without routes lie between
      ++expert;
      if (begins[expert + 1] <= place) expert = item_at(begins, round.count, place);
      expert_end = begins[expert + 1];
      shift = shared.shifts[expert];
    }
    job.route_order[place + shift] = route_of_number(block, job, shared.staged[place]);
  }
}

// Behind the last round: -1 in the places that no valid route takes.
template <typename Id>
MOE_HOST_DEVICE void fill_rest(const Thread& me, const SortJob<Id>& job, const SortShared& shared,
                               const ExpertRound& round) {
  if (!round.last) return;
  const std::int32_t valid = shared.begins[round.count];
  const std::int64_t rest = job.ids.num_tokens * job.ids.top_k - valid;
  me.each_of_cluster(rest, [&](std::int64_t i) { job.route_order[valid + i] = -1; });
}

}  // namespace moe
