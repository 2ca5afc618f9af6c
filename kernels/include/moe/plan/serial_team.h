// The team of team.h on one thread of the host: blocks, threads and warps one after the other, in an order that a seed
// shuffles anew for every stage and phase, so that a missing barrier shows as a result that depends on the seed. Host
// only; used by tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "moe/plan/plan_scratch.h"
#include "moe/plan/team.h"

namespace moe {

struct SerialTeam {
  std::int32_t num_blocks;
  std::int32_t num_threads;  // of a block
  std::int32_t num_warps;    // of a block; unlike on a device, any number is right for the threads
  std::int32_t shared_words;
  std::uint64_t seed;
};

struct SerialWarp {
  std::int32_t index;
  std::int32_t lane = 0;
  std::int32_t lanes = 1;

  void clear(std::int32_t* values, std::int32_t n) const { std::fill(values, values + n, 0); }
  void exclusive_sum(std::int32_t* values, std::int32_t n) const {
    std::int32_t sum = 0;
    for (std::int32_t i = 0; i <= n; ++i) {
      const std::int32_t before = sum;
      if (i < n) sum += values[i];
      values[i] = before;
    }
  }
  std::int32_t take(std::int32_t* counters, std::int32_t* masks, std::int32_t key) const {
    masks[key] = 0;  // as the device leaves it, whatever else lies there
    return counters[key]++;
  }
};

class SerialBlock {
 public:
  using Memory = std::vector<std::vector<std::int32_t>>;

  SerialBlock(const SerialTeam& team, std::int32_t block, Memory& memory, std::mt19937_64& random)
      : index(block),
        count(team.num_blocks),
        num_warps(team.num_warps),
        shared_words(team.shared_words),
        num_threads_(team.num_threads),
        memory_(memory),
        random_(random) {}

  const std::int32_t index;
  const std::int32_t count;
  const std::int32_t num_warps;
  const std::int32_t shared_words;

  std::int32_t* shared() const { return memory_[static_cast<std::size_t>(index)].data(); }
  const std::int32_t* peer(std::int32_t block) const { return memory_[static_cast<std::size_t>(block)].data(); }

  template <typename Function>
  void phase(Function function) {
    phase(function, [](const SerialWarp&) {});
  }
  template <typename Function>
  void warps(Function function) {
    phase([](const Thread&) {}, function);
  }
  template <typename ThreadFunction, typename WarpFunction>
  void phase(ThreadFunction of_thread, WarpFunction of_warp) {
    for (const std::int32_t i : shuffled(num_threads_ + num_warps, random_)) {
      if (i < num_threads_) {
        of_thread(Thread{i, num_threads_, index * num_threads_ + i, count * num_threads_});
      } else {
        of_warp(SerialWarp{i - num_threads_});
      }
    }
  }
  template <typename Value, typename Put>
  void scan(std::int32_t n, Value value, Put put) {
    std::vector<std::int32_t> before(1, 0);
    for (std::int32_t i = 0; i < n; ++i) before.push_back(before.back() + value(i));
    for (const std::int32_t i : shuffled(n + 1, random_)) put(i, before[static_cast<std::size_t>(i)]);
  }
  void lower(std::int32_t* address, std::int32_t value) { *address = std::min(*address, value); }

  static std::vector<std::int32_t> shuffled(std::int32_t n, std::mt19937_64& random) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    return order;
  }

 private:
  std::int32_t num_threads_;
  Memory& memory_;
  std::mt19937_64& random_;
};

class SerialCluster {
 public:
  explicit SerialCluster(const SerialTeam& team) : team_(team), random_(team.seed) {
    const auto words = static_cast<std::size_t>(team.shared_words);
    for (std::int32_t block = 0; block < team.num_blocks; ++block) shared_.emplace_back(words, -7);
  }

  template <typename Function>
  void stage(Function function) {
    for (const std::int32_t index : SerialBlock::shuffled(team_.num_blocks, random_)) {
      SerialBlock block(team_, index, shared_, random_);
      function(block);
    }
  }

 private:
  SerialTeam team_;
  std::mt19937_64 random_;
  SerialBlock::Memory shared_;
};

}  // namespace moe
