// The form in which the plan is built in parallel. parallel_*.h are written once for the device, where the blocks of
// one cluster run them, and for the host, where a test runs the same steps thread after thread in a shuffled order and
// compares with the serial functions. Owns the words for this and the searches that the steps share.
//
// A step is a function of a Block. Its phases are functions of a Thread; a barrier of the block stands behind each, and
// nothing but memory goes from one phase to the next. Blocks see each other's writes only from one stage to the next: a
// stage is a run of phases with a barrier of the cluster behind it. A Block has
//  - index, count: which of the cluster's blocks it is, and of how many; count divides 64
//  - num_warps: a multiple of 64 / count
//  - shared(), shared_words: int32 memory of the block
//  - peer(b): the same of another block; what it held at the last barrier of the cluster may be read until the next
//  - phase(f): f(Thread) by every thread
//  - warps(f): f(Warp) by every warp, all of its lanes together
//  - phase(f, g): both in one phase, f(Thread) and g(Warp)
//  - scan(n, value, put): put(i, sum of value(j) for j < i) for every i in [0, n]. value(i) may be called again after
//    puts of other items
//  - lower(address, value): atomic minimum
// and a Warp has index, lane, lanes, and
//  - clear(values, n): zeroes n values for what the warp does next
//  - exclusive_sum(values, n): puts exclusive prefix sums in the place of n values, and their total behind them, at [n]
//  - take(counters, masks, key): counters[key] as this lane finds it when the lanes increment it one after the other.
//    Both arrays are this warp's alone; the masks are zero before and after
#pragma once

#include <cstdint>

#include "moe/host_device.h"

namespace moe {

// Loops stay rolled: a launch of some microseconds that begins with cold instruction caches pays for every line of
// code.
#if defined(__CUDA_ARCH__)
#define MOE_ROLLED _Pragma("unroll 1")
#else
#define MOE_ROLLED
#endif

struct Thread {
  std::int32_t index;          // in its block ...
  std::int32_t count;          // ... of this many threads
  std::int32_t cluster_index;  // in the cluster, block after block ...
  std::int32_t cluster_count;  // ... of this many

  // f(i) for this thread's share of [0, n): among the threads of its block, or among all of the cluster.
  template <typename Function>
  MOE_HOST_DEVICE void each(std::int32_t n, Function f) const {
    MOE_ROLLED
    for (std::int32_t i = index; i < n; i += count) f(i);
  }
  template <typename Index, typename Function>
  MOE_HOST_DEVICE void each_of_cluster(Index n, Function f) const {
    MOE_ROLLED
    for (Index i = cluster_index; i < n; i += cluster_count) f(i);
  }
};

// First i in [0, n) with holds(i), or n; `holds` is false up to some place and true from there on.
template <typename Holds>
MOE_HOST_DEVICE std::int32_t first_where(std::int32_t n, Holds holds) {
  std::int32_t begin = 0;
  MOE_ROLLED
  while (n > 0) {
    const std::int32_t half = n / 2;
    if (holds(begin + half)) {
      n = half;
    } else {
      begin += half + 1;
      n -= half + 1;
    }
  }
  return begin;
}

// The item that contains `position`, for the prefix sums begins [n + 1] of items' lengths: the last whose begin is not
// behind it. For the total it is n.
MOE_HOST_DEVICE inline std::int32_t item_at(const std::int32_t* begins, std::int32_t n, std::int32_t position) {
  return first_where(n + 1, [&](std::int32_t i) { return begins[i] > position; }) - 1;
}

MOE_HOST_DEVICE constexpr std::int32_t ceil_div32(std::int32_t a, std::int32_t b) { return a / b + (a % b != 0); }
MOE_HOST_DEVICE constexpr std::int32_t min32(std::int64_t a, std::int64_t b) {
  return static_cast<std::int32_t>(a < b ? a : b);
}

// Puts exclusive prefix sums in the place of n values, and their total behind them, at [n].
template <typename Block>
MOE_HOST_DEVICE void exclusive_sum(Block& block, std::int32_t* values, std::int32_t n) {
  block.scan(
      n, [&](std::int32_t i) { return values[i]; }, [&](std::int32_t i, std::int32_t before) { values[i] = before; });
}

// n / d for 0 <= n < 2^31 as a product and a shift: the divisor is known before the launch, and a division costs more
// than what it is needed for. With 2^(k - 1) < d <= 2^k the factor exceeds 2^(31 + k) / d by at most 1, which adds less
// than n / 2^(31 + k) < 1 / d to the quotient.
struct Divisor {
  std::uint32_t factor;
  std::int32_t shift;

  MOE_HOST_DEVICE constexpr std::int32_t divide(std::int32_t n) const {
    return static_cast<std::int32_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * factor >> shift);
  }
};

// Requires 1 <= d < 2^31.
MOE_HOST_DEVICE constexpr Divisor divisor(std::int32_t d) {
  std::int32_t shift = 31;
  while (std::int64_t{1} << (shift - 31) < d) ++shift;
  const std::uint64_t factor = (std::uint64_t{1} << shift) / static_cast<std::uint64_t>(d) + 1;
  return {static_cast<std::uint32_t>(factor), shift};
}

}  // namespace moe
