// Seeded faults: departures from the plan, by name, that the explorer must catch. Owns their names, and the table of
// edges as a run executes it: a fault in fences or scopes is a change of that table and of nothing else.
//
//   drop_raise:COUNTER            one raise is left out
//   skip_wait:COUNTER:ROLE        a role never waits for a counter
//   ring_below_minimum:x | :a     a ring with one slot less than ring_minimum
//   reused_flag[:COUNTER]         flags (or one of them) keep the generation of the first launch
//   missing_fence:COUNTER:raiser:FENCE     the fence before the raises of a counter is left out
//   missing_fence:COUNTER:ROLE:FENCE       ... after a role's waits for it
//   gpu_scope_across_ranks[:COUNTER]       flags between ranks at gpu scope
//   pull_without_flush            a pulling warp waits with pieces in flight that it has not raised
//
// Words for waits whose loss has a meaning of its own:
//   skip_slot_wait                dispatch does not wait for its ring slot
//   skip_read_wait                gate_up does not wait for its slot in the ring of activations
//   done_before_last_pull         "done" is raised before the last pull is complete
//   done_before_stored            ... before the last row is stored
//   early_next_launch             the launch ends before "done" of all ranks
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "moe/plan/edges.h"
#include "proof/names.h"

namespace moe::proof {

enum class FaultKind : std::int32_t {
  kNone = 0,
  kDropRaise,
  kSkipWait,
  kRingBelowMinimum,
  kReusedFlag,
  kMissingFence,
  kGpuScopeAcrossRanks,
  kPullWithoutFlush,
};
inline constexpr const char* kFaultNames[] = {"none",
                                              "drop_raise",
                                              "skip_wait",
                                              "ring_below_minimum",
                                              "reused_flag",
                                              "missing_fence",
                                              "gpu_scope_across_ranks",
                                              "pull_without_flush"};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  std::int64_t counter = -1;  // Counter, or -1: all that the fault is about
  std::int64_t role = -1;     // Role whose waits are meant; missing fence: -1 for the raiser
  std::int32_t fence = kNoFence;
  bool a_ring = false;

  bool is(FaultKind other) const { return kind == other; }
  bool hits(Counter c) const { return counter < 0 || counter == static_cast<std::int64_t>(c); }
  bool drops(Counter c) const { return is(FaultKind::kDropRaise) && hits(c); }
  bool skips(Counter c, Role waiter) const {
    return is(FaultKind::kSkipWait) && hits(c) && role == static_cast<std::int64_t>(waiter);
  }
};

inline std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char letter : text) {
    if (letter == ':') {
      words.emplace_back();
    } else {
      words.back() += letter;
    }
  }
  return words;
}

template <std::size_t kSize>
std::int64_t index_of(const std::string& word, const char* const (&names)[kSize]) {
  for (std::size_t i = 0; i < kSize; ++i) {
    if (word == names[i]) return static_cast<std::int64_t>(i);
  }
  return -1;
}

inline constexpr const char* kWaiterNames[] = {"kPlan", "kPull", "kLoad", "kCompute"};
inline constexpr const char* kFenceNames[] = {"kBulkWait", "kLoadsDone", "kProxyFence"};

// The waits with words of their own.
inline std::string spell_out(const std::string& text) {
  static constexpr const char* kWords[][2] = {{"skip_slot_wait", "skip_wait:kXRead:kPull"},
                                              {"skip_read_wait", "skip_wait:kARead:kCompute"},
                                              {"done_before_last_pull", "skip_wait:kPulled:kCompute"},
                                              {"done_before_stored", "skip_wait:kStored:kCompute"},
                                              {"early_next_launch", "skip_wait:kPeerDone:kCompute"}};
  for (const auto& word : kWords) {
    if (text == word[0]) return word[1];
  }
  return text;
}

// Throws std::invalid_argument with "expected ..., got ..." where the text names no fault.
inline Fault parse_fault(const std::string& text) {
  const std::vector<std::string> words = split_words(spell_out(text));
  const auto require = [&](bool met, const std::string& expected) {
    if (!met) throw std::invalid_argument("expected " + expected + ", got '" + text + "'");
  };
  Fault fault;
  const std::int64_t kind = index_of(words[0], kFaultNames);
  require(kind >= 0, "a fault of kernels/proof/faults.h, or none");
  fault.kind = static_cast<FaultKind>(kind);
  if (fault.is(FaultKind::kRingBelowMinimum)) {
    require(words.size() == 2 && (words[1] == "x" || words[1] == "a"), "ring_below_minimum:x or ring_below_minimum:a");
    fault.a_ring = words[1] == "a";
    return fault;
  }
  const bool whole = fault.is(FaultKind::kReusedFlag) || fault.is(FaultKind::kGpuScopeAcrossRanks);
  const bool none = fault.is(FaultKind::kNone) || fault.is(FaultKind::kPullWithoutFlush);
  const std::size_t most = none ? 1 : fault.is(FaultKind::kMissingFence) ? 4 : fault.is(FaultKind::kSkipWait) ? 3 : 2;
  require(words.size() == most || (whole && words.size() == 1), words[0] + " with its arguments");
  if (words.size() > 1) {
    fault.counter = index_of(words[1], kCounterNames);
    require(fault.counter >= 0, "the name of a counter");
  }
  if (words.size() > 2) {
    fault.role = index_of(words[2], kWaiterNames);
    require(fault.role >= 0 || (words[2] == "raiser" && fault.is(FaultKind::kMissingFence)), "the name of a role");
  }
  if (words.size() > 3) {
    const std::int64_t fence = index_of(words[3], kFenceNames);
    require(fence >= 0, "kBulkWait, kLoadsDone or kProxyFence");
    fault.fence = 1 << fence;
  }
  return fault;
}

// The edges that a run executes.
class Protocol {
 public:
  explicit Protocol(const Fault& fault) {
    for (std::size_t i = 0; i < edges_.size(); ++i) {
      Edge& edge = edges_[i];
      edge = kEdges[i];
      if (fault.is(FaultKind::kGpuScopeAcrossRanks) && edge.crosses_ranks && fault.hits(edge.counter)) {
        edge.scope = Scope::kGpu;
      }
      if (!fault.is(FaultKind::kMissingFence) || !fault.hits(edge.counter)) continue;
      if (fault.role < 0) edge.raiser_fences &= ~fault.fence;
      if (fault.role == static_cast<std::int64_t>(edge.waiter)) edge.waiter_fences &= ~fault.fence;
    }
  }

  // Null where the table has no such edge.
  const Edge* edge(Counter counter, Role waiter) const {
    const std::int64_t index = find_edge(counter, waiter);
    return index < 0 ? nullptr : &edges_[static_cast<std::size_t>(index)];
  }
  std::int32_t raise_fences(Counter counter, Role raiser) const {
    std::int32_t fences = kNoFence;
    for (const Edge& edge : edges_) {
      if (edge.counter == counter && edge.raiser == raiser) fences |= edge.raiser_fences;
    }
    return fences;
  }
  bool raises_at_system_scope(Counter counter, Role raiser) const {
    for (const Edge& edge : edges_) {
      if (edge.counter == counter && edge.raiser == raiser && edge.scope == Scope::kSystem) return true;
    }
    return false;
  }
  bool raises(Counter counter, Role raiser) const {
    for (const Edge& edge : edges_) {
      if (edge.counter == counter && edge.raiser == raiser) return true;
    }
    return false;
  }

 private:
  std::array<Edge, static_cast<std::size_t>(kNumEdges)> edges_;
};

// Every fault that leaves out one thing of the table: the raises of a counter, the waits of an edge, a fence.
inline std::vector<std::string> table_faults() {
  std::vector<std::string> faults;
  for (const Edge& edge : kEdges) {
    const std::string counter = name(edge.counter);
    const std::string waiter = kWaiterNames[static_cast<std::size_t>(edge.waiter)];
    const bool first = &edge == &kEdges[0] || (&edge - 1)->counter != edge.counter;
    if (first) faults.push_back("drop_raise:" + counter);
    faults.push_back("skip_wait:" + counter + ":" + waiter);
    for (std::size_t f = 0; f < 3; ++f) {
      const std::int32_t fence = 1 << f;
      if (first && (raise_fences(edge.counter, edge.raiser) & fence) != 0) {
        faults.push_back("missing_fence:" + counter + ":raiser:" + kFenceNames[f]);
      }
      if ((edge.waiter_fences & fence) != 0) {
        faults.push_back("missing_fence:" + counter + ":" + waiter + ":" + kFenceNames[f]);
      }
    }
  }
  return faults;
}

}  // namespace moe::proof
