// Waits and raises on the device, as plan/edges.h and plan/dependencies.h define them: acquire and release at the
// edge's scope, with the edge's fences, bounded in time, and written to the log of a test run. Every role of the
// layer's kernel goes through this file and through nothing else.
//
// A wait that runs out of time reports itself once and sets PlanSizes::aborted. From then on no wait of the launch
// waits: roles keep walking their tasks, so that shared-memory pipelines stay balanced, and the launch ends with NaN
// outputs.
#pragma once

#include <cstdint>

#include "moe/forward/plan_memory.h"
#include "moe/forward/status.h"
#include "moe/peer/memory.h"
#include "moe/plan/edges.h"
#include "moe/plan/log.h"
#include "moe/sync/access.h"
#include "moe/sync/report.h"

namespace moe {

// Where counters and flags of this rank lie, and what a test wants of them.
struct CounterMemory {
  PlanMemory plan;
  PeerMemory peers;
  std::int64_t* flag_done;         // [W] generation in this rank's memory, see Region::kFlagDone
  const std::int64_t* abort_word;  // see Region::kAbort; null with one rank
  StepStatus* status;
  std::int64_t timeout_ns;
  std::int32_t skip_counter;  // raises of this counter's element skip_index are left out, or -1
  std::int64_t skip_index;
  LaunchLog log;
};

// Who waits or raises, for the log and for error messages.
struct Site {
  std::int32_t block;  // of the launch; further pulling agents of a block have numbers behind the last block
  Role role;
  TaskKind task;
  std::int32_t ticket;
};

class Counters {
 public:
  // `offsets` is counter_offset of every counter, in shared memory.
  __device__ Counters(const CounterMemory& memory, const std::int32_t* offsets, const Problem& problem,
                      std::int64_t generation)
      : memory_(memory), offsets_(offsets), problem_(problem), generation_(generation) {}

  __device__ std::int64_t generation() const { return generation_; }
  __device__ bool aborted() const { return load_relaxed(&memory_.plan.sizes->aborted) != 0; }

  // The wait that every role starts with; its fence is the pulling role's, harmless for the others.
  __device__ void wait_start(const Site& site) const {
    const std::int64_t* flag = &memory_.plan.launch->plan_ready;
    const std::int64_t seen = spin(site, Counter::kPlanReady, 0, generation_, [&] { return load_acquire_gpu(flag); });
    write_log(LogEvent::kWait, site, Counter::kPlanReady, 0, seen);
    if (site.role == Role::kPull) fence_proxy_async();
  }

  // One wait of task_waits or piece_waits, with the fence of its edge. By one thread.
  template <Role kRole>
  __device__ void wait(const Site& site, const Wait& wait) const {
    const std::int32_t* counter = address(wait.counter, wait.index);
    const std::int64_t seen =
        spin(site, wait.counter, wait.index, wait.target, [&] { return std::int64_t{load_acquire_gpu(counter)}; });
    write_log(LogEvent::kWait, site, wait.counter, wait.index, seen);
    // All counters that the load and pull roles wait for guard memory of the async proxy; see the table.
    static_assert(kRole != Role::kLoad || (wait_fences(Counter::kXReady, Role::kLoad) & kProxyFence) != 0);
    static_assert(kRole != Role::kPull || (wait_fences(Counter::kXRead, Role::kPull) & kProxyFence) != 0);
    if (kRole != Role::kCompute) fence_proxy_async();
  }
  // Whether a wait would pass at once. A pulling warp that gets false must complete what it has in flight first.
  __device__ bool is_met(const Wait& wait) const {
    return load_acquire_gpu(address(wait.counter, wait.index)) >= wait.target || aborted();
  }

  // One raise of task_raises or piece_raises. The caller has executed raise_fences of the counter.
  __device__ void raise(const Site& site, const Raise& raise) const {
    if (is_skipped(raise.counter, raise.index)) return;
    write_log(LogEvent::kRaise, site, raise.counter, raise.index, raise.amount);
    add_release_gpu(address(raise.counter, raise.index), static_cast<std::int32_t>(raise.amount));
  }

  // "Done" of this rank to every rank, and the wait for every rank's. With one rank both concern its own flag. A rank
  // that has given up is not done: what it has stored may be wrong.
  __device__ void raise_done(const Site& site) const {
    const PeerMemory& peers = memory_.peers;
    if (peers.shared() && aborted()) return;
    for (std::int64_t peer = 0; peer < problem_.num_ranks; ++peer) {
      if (is_skipped(Counter::kPeerDone, peer)) continue;
      write_log(LogEvent::kRaise, site, Counter::kPeerDone, peer, generation_);
      std::int64_t* flags = peers.shared() ? peers.at<std::int64_t>(peer, peers.flag_done) : memory_.flag_done;
      store_release_system(flags + problem_.rank, generation_);
    }
  }
  __device__ void wait_done(const Site& site) const {
    for (std::int64_t peer = 0; peer < problem_.num_ranks; ++peer) wait_done_of(site, peer);
  }
  __device__ void wait_done_of(const Site& site, std::int64_t peer) const {
    const std::int64_t* flag = memory_.flag_done + peer;
    const std::int64_t seen =
        spin(site, Counter::kPeerDone, peer, generation_, [&] { return load_acquire_system(flag); });
    write_log(LogEvent::kWait, site, Counter::kPeerDone, peer, seen);
  }

  __device__ void log_claim(const Site& site, Stream stream) const {
    write_log(LogEvent::kClaim, site, static_cast<Counter>(stream), site.ticket, 0);
  }

 private:
  __device__ std::int32_t* address(Counter counter, std::int64_t index) const {
    return memory_.plan.counters + offsets_[static_cast<int>(counter)] + index;
  }
  __device__ bool is_skipped(Counter counter, std::int64_t index) const {
    return memory_.skip_counter == static_cast<std::int32_t>(counter) && memory_.skip_index == index;
  }

  // Tasks that wait for all others, or for all of an expert's. They are a little more patient, so that of two waits
  // that begin together the one at the root of a failure is reported.
  __device__ static bool ends_launch(TaskKind task) {
    return task == TaskKind::kClose || task == TaskKind::kDrain || task == TaskKind::kCombine || is_wgrad(task) ||
           is_bias_grad(task);
  }

  // Reads until the target is reached; returns what was seen last.
  template <typename Read>
  __device__ std::int64_t spin(const Site& site, Counter counter, std::int64_t index, std::int64_t target,
                               Read read) const {
    std::int64_t seen = read();
    if (seen >= target) return seen;
    const std::int64_t begin = global_ns();
    const std::int64_t patience = memory_.timeout_ns + (ends_launch(site.task) ? memory_.timeout_ns / 8 : 0);
    while (seen < target) {
      __nanosleep(40);
      seen = read();
      if (seen >= target || aborted()) break;
      if (memory_.abort_word != nullptr) {
        const std::int64_t culprit = load_relaxed_system(memory_.abort_word) - 1;
        if (culprit >= 0) {
          follow_abort(culprit);
          break;
        }
      }
      if (global_ns() - begin > patience) {
        report_timeout(site, counter, index, target, seen);
        break;
      }
    }
    return seen;
  }

  __device__ __noinline__ void report_timeout(const Site& site, Counter counter, std::int64_t index,
                                              std::int64_t expected, std::int64_t seen) const {
    // Only flags are raised by peers.
    if (!abort_launch(counter_crosses_ranks(counter) ? index : problem_.rank)) return;
    const std::int64_t values[] = {site.block,
                                   static_cast<std::int64_t>(site.role),
                                   static_cast<std::int64_t>(site.task),
                                   site.ticket,
                                   static_cast<std::int64_t>(counter),
                                   index,
                                   expected,
                                   seen,
                                   memory_.timeout_ns};
    report_status(*memory_.status, StatusCode::kTimeout, values);
  }

  __device__ __noinline__ void follow_abort(std::int64_t culprit) const {
    if (abort_launch(culprit)) report_status(*memory_.status, StatusCode::kPeerAborted, {culprit});
  }

  // Whether this is the first to do so. The end of the launch tells the other ranks because of whom.
  __device__ bool abort_launch(std::int64_t culprit) const {
    auto* aborted = reinterpret_cast<unsigned long long*>(&memory_.plan.sizes->aborted);
    return atomicCAS(aborted, 0ULL, static_cast<unsigned long long>(culprit + 1)) == 0ULL;
  }

  // A raise is stamped before the access, a wait after it.
  __device__ void write_log(LogEvent event, const Site& site, Counter counter, std::int64_t index,
                            std::int64_t value) const {
    write_record(memory_.log,
                 {site.block, static_cast<std::int32_t>(site.role), static_cast<std::int32_t>(event), site.ticket,
                  static_cast<std::int32_t>(counter), static_cast<std::int32_t>(index), value, 0});
  }

  const CounterMemory& memory_;
  const std::int32_t* offsets_;
  const Problem& problem_;
  std::int64_t generation_;
};

}  // namespace moe
