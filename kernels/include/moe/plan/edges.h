// The dependency table: every counter of the protocol with who raises it, who waits for it, and which fences order the
// memory it guards. Owns the memory-ordering argument; `edge_is_fenced` states the rules, and a test takes fences away
// one by one to see each edge rejected. dependencies.h says which counters a task awaits and raises; device roles take
// both from there.
//
// Two proxies reach memory on Hopper: generic (ordinary loads and stores) and async (TMA and bulk copies). A raise is a
// release, a wait an acquire, at the edge's scope. That orders generic accesses. Accesses of the async proxy need more:
//  - a bulk copy's writes are complete after `cp.async.bulk.wait_group 0` (not .read) by the thread that issued it;
//  - the reads of a TMA load or of a bulk copy into shared memory are complete when its mbarrier has flipped;
//  - between a generic write and an async access of the same memory stands `fence.proxy.async`, by the writing thread
//    before its release or by the reading thread after its acquire.
//
// Device code looks edges up in constant expressions only (`constexpr auto fences = raise_fences(...)`): the table is a
// host object. An edge carries no more fences than it needs. Inside a block, what one role has acquired is passed to
// the others by the shared-memory barriers between them: a compute role reads behind the waits of the load role of its
// task.
#pragma once

#include <cstdint>

#include "moe/host_device.h"

namespace moe {

enum class Counter : std::int32_t {
  kPlanReady = 0,  // flag of this rank alone: tables and row table are built, counters zeroed; generation
  kXReady,         // pieces of a row tile of x, per row tile (backward: where h is recomputed)
  kXRead,          // column tiles that have read a row tile's ring slot, per row tile
  kAReady,         // act column tiles of a row tile whose a (backward: recomputed h) is stored, per row tile
  kARead,          // hidden column tiles that have read a row tile's activations, per row tile
  kDyReady,        // pieces of a row tile of dy, per row tile
  kDhReady,        // dgrad column tiles of a row tile whose dh, s*a and dS partials are stored, per row tile
  kExpertDh,       // the same, summed over an expert's row tiles, per expert
  kExpertDy,       // pieces of dy of an expert, per expert
  kExpertX,        // pieces of x of an expert, per expert
  kStored,         // tasks whose rows or dS have been stored to the home ranks (one counter)
  kPulled,         // pieces whose reads of peers are complete (one counter)
  kPeerReady,      // flag 1: a peer's tokens, class counts, routes and weights are readable; generation, per rank
  kPeerDone,       // flag 2: a peer has stored all rows for here and read all it needs from here; generation, per rank
};
inline constexpr std::int64_t kNumCounters = 14;

enum class Role : std::int32_t { kPlan = 0, kPull = 1, kLoad = 2, kCompute = 3 };
enum class Proxy : std::int32_t { kGeneric = 0, kAsync = 1 };
enum class Scope : std::int32_t { kGpu = 0, kSystem = 1 };

// Fences, as bits.
inline constexpr std::int32_t kNoFence = 0;
inline constexpr std::int32_t kBulkWait = 1;    // cp.async.bulk.wait_group 0 before the release
inline constexpr std::int32_t kLoadsDone = 2;   // the loads' mbarriers have flipped before the release
inline constexpr std::int32_t kProxyFence = 4;  // fence.proxy.async, before the release or after the acquire

struct Edge {
  Counter counter;
  Role raiser;
  Role waiter;
  Proxy raiser_proxy;  // of the accesses that the raise publishes
  Proxy waiter_proxy;  // of the accesses that the wait protects
  bool overwrites;     // the waiter writes what the raiser has read; else it reads what the raiser has written
  bool crosses_ranks;
  Scope scope;
  std::int32_t raiser_fences;
  std::int32_t waiter_fences;
};

// Whether the accesses on both sides of an edge are ordered.
MOE_HOST_DEVICE constexpr bool edge_is_fenced(const Edge& e) {
  if (e.crosses_ranks && e.scope != Scope::kSystem) return false;
  const bool proxy_fence = ((e.raiser_fences | e.waiter_fences) & kProxyFence) != 0;
  if (e.raiser_proxy == Proxy::kAsync) {
    const std::int32_t complete = e.overwrites ? kLoadsDone : kBulkWait;
    if ((e.raiser_fences & complete) == 0) return false;
    // What the raiser did is complete and released; a waiter of the async proxy must still leave the generic proxy's
    // order.
    if (e.waiter_proxy == Proxy::kAsync && (e.waiter_fences & kProxyFence) == 0) return false;
    return true;
  }
  return e.waiter_proxy == Proxy::kGeneric || proxy_fence;
}

// clang-format off
inline constexpr Edge kEdges[] = {
    // counter              raiser          waiter          raiser's         waiter's         overwr crosses scope           raiser's     waiter's
    // Weights and x (or dy) are written by earlier kernels, class counts and routes by them or by the plan task itself;
    // every rank's plan task waits for all ranks, and then reads their counts and routes (backward: weights).
    {Counter::kPeerReady,   Role::kPlan,    Role::kPlan,    Proxy::kGeneric, Proxy::kGeneric, false, true,  Scope::kSystem, kNoFence,    kNoFence},
    // Tables, the row table among them, and behind them the peers' tokens that bulk copies read. The plan task's own
    // reads of peers come before this release, so the closing task, which has acquired it, passes them on with "done".
    {Counter::kPlanReady,   Role::kPlan,    Role::kPull,    Proxy::kGeneric, Proxy::kAsync,   false, false, Scope::kGpu,    kNoFence,    kProxyFence},
    {Counter::kPlanReady,   Role::kPlan,    Role::kLoad,    Proxy::kGeneric, Proxy::kGeneric, false, false, Scope::kGpu,    kNoFence,    kNoFence},
    {Counter::kPlanReady,   Role::kPlan,    Role::kCompute, Proxy::kGeneric, Proxy::kGeneric, false, false, Scope::kGpu,    kNoFence,    kNoFence},
    // Pulled rows: bulk copies from staging into the ring or the row buffers, then TMA.
    {Counter::kXReady,      Role::kPull,    Role::kLoad,    Proxy::kAsync,   Proxy::kAsync,   false, false, Scope::kGpu,    kBulkWait,   kProxyFence},
    {Counter::kDyReady,     Role::kPull,    Role::kLoad,    Proxy::kAsync,   Proxy::kAsync,   false, false, Scope::kGpu,    kBulkWait,   kProxyFence},
    {Counter::kExpertDy,    Role::kPull,    Role::kLoad,    Proxy::kAsync,   Proxy::kAsync,   false, false, Scope::kGpu,    kBulkWait,   kProxyFence},
    // Bias gradients read rows by ordinary loads, which a release behind the bulk wait orders.
    {Counter::kExpertDy,    Role::kPull,    Role::kCompute, Proxy::kAsync,   Proxy::kGeneric, false, false, Scope::kGpu,    kBulkWait,   kNoFence},
    {Counter::kExpertX,     Role::kPull,    Role::kLoad,    Proxy::kAsync,   Proxy::kAsync,   false, false, Scope::kGpu,    kBulkWait,   kProxyFence},
    // A ring slot's last reader, then the next bulk copy into it.
    {Counter::kXRead,       Role::kCompute, Role::kPull,    Proxy::kAsync,   Proxy::kAsync,   true,  false, Scope::kGpu,    kLoadsDone,  kProxyFence},
    // Epilogue stores, then TMA: each storing thread fences before the block's release.
    {Counter::kAReady,      Role::kCompute, Role::kLoad,    Proxy::kGeneric, Proxy::kAsync,   false, false, Scope::kGpu,    kProxyFence, kNoFence},
    // Backward: recomputed h, which the epilogue of the down dgrad reads.
    {Counter::kAReady,      Role::kCompute, Role::kCompute, Proxy::kGeneric, Proxy::kGeneric, false, false, Scope::kGpu,    kNoFence,    kNoFence},
    {Counter::kARead,       Role::kCompute, Role::kCompute, Proxy::kAsync,   Proxy::kGeneric, true,  false, Scope::kGpu,    kLoadsDone,  kNoFence},
    {Counter::kDhReady,     Role::kCompute, Role::kLoad,    Proxy::kGeneric, Proxy::kAsync,   false, false, Scope::kGpu,    kProxyFence, kNoFence},
    {Counter::kDhReady,     Role::kCompute, Role::kCompute, Proxy::kGeneric, Proxy::kGeneric, false, false, Scope::kGpu,    kNoFence,    kNoFence},
    {Counter::kExpertDh,    Role::kCompute, Role::kLoad,    Proxy::kGeneric, Proxy::kAsync,   false, false, Scope::kGpu,    kProxyFence, kNoFence},
    {Counter::kExpertDh,    Role::kCompute, Role::kCompute, Proxy::kGeneric, Proxy::kGeneric, false, false, Scope::kGpu,    kNoFence,    kNoFence},
    // Rows and dS stored to the home ranks, and pulls that have finished reading peers: the closing task passes both on
    // (release and acquire are transitive, also from gpu to system scope).
    {Counter::kStored,      Role::kCompute, Role::kCompute, Proxy::kGeneric, Proxy::kGeneric, false, false, Scope::kGpu,    kNoFence,    kNoFence},
    {Counter::kPulled,      Role::kPull,    Role::kCompute, Proxy::kAsync,   Proxy::kGeneric, true,  false, Scope::kGpu,    kLoadsDone,  kNoFence},
    // Rows of all ranks, then the combine; and permission to overwrite x, dy and rows in the next launch.
    {Counter::kPeerDone,    Role::kCompute, Role::kPull,    Proxy::kGeneric, Proxy::kGeneric, false, true,  Scope::kSystem, kNoFence,    kNoFence},
    {Counter::kPeerDone,    Role::kCompute, Role::kCompute, Proxy::kGeneric, Proxy::kGeneric, true,  true,  Scope::kSystem, kNoFence,    kNoFence},
};
// clang-format on
inline constexpr std::int64_t kNumEdges = static_cast<std::int64_t>(sizeof(kEdges) / sizeof(kEdges[0]));

MOE_HOST_DEVICE constexpr bool all_edges_are_fenced() {
  for (std::int64_t i = 0; i < kNumEdges; ++i) {
    if (!edge_is_fenced(kEdges[i])) return false;
  }
  return true;
}
static_assert(all_edges_are_fenced(), "an edge of the dependency table lacks a fence");

// Index in kEdges of the edge from a counter to a waiting role, or -1.
MOE_HOST_DEVICE constexpr std::int64_t find_edge(Counter counter, Role waiter) {
  for (std::int64_t i = 0; i < kNumEdges; ++i) {
    if (kEdges[i].counter == counter && kEdges[i].waiter == waiter) return i;
  }
  return -1;
}

// Fences that a role must have executed before it raises a counter, and after a wait for it: those of all its edges.
MOE_HOST_DEVICE constexpr std::int32_t raise_fences(Counter counter, Role raiser) {
  std::int32_t fences = kNoFence;
  for (std::int64_t i = 0; i < kNumEdges; ++i) {
    if (kEdges[i].counter == counter && kEdges[i].raiser == raiser) fences |= kEdges[i].raiser_fences;
  }
  return fences;
}
MOE_HOST_DEVICE constexpr std::int32_t wait_fences(Counter counter, Role waiter) {
  const std::int64_t edge = find_edge(counter, waiter);
  return edge < 0 ? kNoFence : kEdges[edge].waiter_fences;
}

// Flags are set to the generation of their launch and never zeroed; the other counters are zeroed by the plan task and
// added to.
MOE_HOST_DEVICE constexpr bool counter_is_flag(Counter counter) {
  return counter == Counter::kPlanReady || counter == Counter::kPeerReady || counter == Counter::kPeerDone;
}
MOE_HOST_DEVICE constexpr bool counter_crosses_ranks(Counter counter) {
  return counter == Counter::kPeerReady || counter == Counter::kPeerDone;
}

}  // namespace moe
