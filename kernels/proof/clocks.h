// Vector clocks: what every agent of the explorer knows to have happened. Owns the rules by which a release, an acquire
// and a proxy fence pass that knowledge on; memory.h asks it whether two accesses are ordered. With clocks a missing
// fence shows in every interleaving, not only in one where the data happens to be late.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe::proof {

using Epoch = std::uint32_t;

// One access: the strand it belongs to and its time there. An agent is a strand; so are the asynchronous copies that it
// starts, which end at a time of their own.
struct Stamp {
  std::int32_t strand;
  Epoch epoch;
};

// For each strand, up to which epoch its accesses come before what the owner does next (`seen`), and up to which epoch
// the strand itself has fenced its writes for the async proxy (`fenced`). Both travel with releases.
class Clock {
 public:
  Clock() = default;
  explicit Clock(std::int64_t num_strands) : size_(static_cast<std::size_t>(num_strands)), epochs_(2 * size_, 0) {}

  Epoch seen(std::int32_t strand) const { return epochs_[static_cast<std::size_t>(strand)]; }
  Epoch fenced(std::int32_t strand) const { return epochs_[size_ + static_cast<std::size_t>(strand)]; }

  void merge(const Clock& other) {
    Epoch* mine = epochs_.data();
    const Epoch* theirs = other.epochs_.data();
    for (std::size_t i = 0; i < 2 * size_; ++i) mine[i] = std::max(mine[i], theirs[i]);
  }
  void note(const Stamp& stamp) {
    Epoch& epoch = epochs_[static_cast<std::size_t>(stamp.strand)];
    epoch = std::max(epoch, stamp.epoch);
  }
  // fence.proxy.async by the writer: the strand's own writes so far.
  void fence_writes(std::int32_t strand) { epochs_[size_ + static_cast<std::size_t>(strand)] = seen(strand); }
  // What the owner does from now on is not part of what it has released.
  void tick(std::int32_t strand) { ++epochs_[static_cast<std::size_t>(strand)]; }
  void clear() { std::fill(epochs_.begin(), epochs_.end(), 0); }

 private:
  std::size_t size_ = 0;
  std::vector<Epoch> epochs_;  // [2, size]: seen, fenced
};

// What an agent knows: its clock, and what it knew at its own last fence.proxy.async. An async access comes after
// another access if that one's writer has fenced it, or if the agent itself has fenced after it learned of it; the
// fence of a third agent is not relied on, though the memory model of PTX might allow it.
struct Knowledge {
  Clock clock;
  Clock at_fence;

  bool ordered(const Stamp& stamp, bool async) const {
    if (!async) return clock.seen(stamp.strand) >= stamp.epoch;
    return clock.fenced(stamp.strand) >= stamp.epoch || at_fence.seen(stamp.strand) >= stamp.epoch;
  }
  void fence() { at_fence = clock; }
};

}  // namespace moe::proof
