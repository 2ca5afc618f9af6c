// How the ranks of a group meet at the begin of a step: each tells all others what it is about to do and that its
// tokens, routes and weights are readable ("ready"), waits for all of them, and decides with them whether the step is
// done. All decide from the same headers, so they decide alike. By the first block of the plan's cluster; bounded in
// time. Included by forward/route.cu and backward/plan.cu.
#pragma once

#include <cstdint>

#include "moe/forward/plan_memory.h"
#include "moe/forward/status.h"
#include "moe/peer/abort.h"
#include "moe/peer/memory.h"
#include "moe/plan/edges.h"
#include "moe/plan/log.h"
#include "moe/sync/access.h"
#include "moe/sync/report.h"

namespace moe {

struct Meeting {
  PeerMemory peers;  // not shared: one rank, nobody to meet
  RankHeader header;
  MeetingResult* result;
  std::int64_t* token_starts;  // [W], written
  LaunchState* launch;
  StepStatus* status;
  std::int64_t timeout_ns;
  LaunchLog log;
};

// Why a step is refused, the worst first; of several ranks the first is named, of too many tokens the most.
enum class Refusal : std::int32_t { kArguments = 0, kMismatch, kBadId, kTokens };

// Refusals are compared as numbers: kind, then what comes first among those of a kind, then the rank.
inline constexpr int kRankBits = 12;  // see kConfigFields
__device__ inline unsigned long long refusal_key(Refusal kind, std::int64_t order, std::int64_t rank) {
  return static_cast<unsigned long long>(kind) << 60 | static_cast<unsigned long long>(order) << kRankBits |
         static_cast<unsigned long long>(rank);
}
inline constexpr unsigned long long kNoRefusal = ~0ULL;

// What block 0 shares while the ranks meet.
struct MeetingState {
  unsigned long long refusal;
  int late;                    // a rank that has not come, or W
  unsigned long long culprit;  // 1 + the rank because of which another one has given up, or 0
};

__device__ inline void write_log(const Meeting& m, LogEvent event, std::int64_t peer, std::int64_t value) {
  write_record(m.log, {0, static_cast<std::int32_t>(Role::kPlan), static_cast<std::int32_t>(event), -1,
                       static_cast<std::int32_t>(Counter::kPeerReady), static_cast<std::int32_t>(peer), value, 0});
}

// By one thread: the wait for "ready" of one rank.
__device__ inline void wait_ready(const Meeting& m, std::int64_t peer, std::int64_t generation, MeetingState& state) {
  const std::int64_t* flag = m.peers.at<std::int64_t>(m.peers.rank, m.peers.flag_ready) + peer;
  const std::int64_t* word = m.peers.at<std::int64_t>(m.peers.rank, m.peers.abort);
  const std::int64_t begin = global_ns();
  std::int64_t seen = load_acquire_system(flag);
  std::int64_t culprit = load_relaxed_system(word);
  while (seen < generation && culprit == 0) {
    __nanosleep(100);
    seen = load_acquire_system(flag);
    culprit = load_relaxed_system(word);
    if (seen < generation && global_ns() - begin > m.timeout_ns) {
      atomicMin(&state.late, static_cast<int>(peer));
      return;
    }
  }
  if (culprit != 0) atomicExch(&state.culprit, static_cast<unsigned long long>(culprit));
  write_log(m, LogEvent::kWait, peer, seen);
}

// By one thread for each rank: what its header gives reason to refuse.
__device__ inline void judge(const RankHeader* headers, std::int64_t rank, MeetingState& state) {
  const RankHeader& header = headers[rank];
  const auto refuse = [&](Refusal kind, std::int64_t order) {
    atomicMin(&state.refusal, refusal_key(kind, order, rank));
  };
  if (header.refuses != 0) return refuse(Refusal::kArguments, 0);
  for (std::int64_t field = 0; field < kHeaderFields; ++field) {
    if (header.fields[field] != headers[0].fields[field]) return refuse(Refusal::kMismatch, field);
  }
  if (header.bad_route >= 0) refuse(Refusal::kBadId, 0);
  const std::int64_t most = header.fields[static_cast<int>(HeaderField::kMaxTokens)];
  if (header.tokens > most) refuse(Refusal::kTokens, kMaxRoutes - header.tokens);
}

// By one thread: a rank's flag has not come in time, to the host.
__device__ inline void report_late(const Meeting& m, Counter flag, std::int64_t peer, std::int64_t generation,
                                   std::int64_t seen) {
  report_status(*m.status, StatusCode::kTimeout,
                {0, static_cast<std::int64_t>(Role::kPlan), static_cast<std::int64_t>(TaskKind::kPlan), -1,
                 static_cast<std::int64_t>(flag), peer, generation, seen, m.timeout_ns});
}

// By one thread: why the step is refused, to the host.
__device__ inline void report_refusal(const Meeting& m, const RankHeader* headers, unsigned long long refusal) {
  const auto kind = static_cast<Refusal>(refusal >> 60);
  const auto rank = static_cast<std::int64_t>(refusal & ((1ULL << kRankBits) - 1));
  const auto order = static_cast<std::int64_t>(refusal << 4 >> (4 + kRankBits));
  const RankHeader& header = headers[rank];
  const auto field = [&](HeaderField f) { return header.fields[static_cast<int>(f)]; };
  switch (kind) {
    case Refusal::kArguments:
      if (rank == m.peers.rank) return;  // it has raised an error of its own
      return report_status(*m.status, StatusCode::kPeerRefused, {rank});
    case Refusal::kMismatch:
      return report_status(*m.status, StatusCode::kMismatch,
                           {order, headers[0].fields[order], rank, header.fields[order]});
    case Refusal::kBadId:
      return report_status(
          *m.status, StatusCode::kBadId,
          {header.bad_route, header.bad_id, field(HeaderField::kTopK), field(HeaderField::kNumExperts), rank});
    case Refusal::kTokens:
      return report_status(*m.status, StatusCode::kManyTokens, {rank, header.tokens, field(HeaderField::kMaxTokens)});
  }
}

// By all threads of block 0, behind a barrier of the cluster that orders what its blocks have published.
__device__ inline void meet(const Meeting& m, const RankHeader& own) {
  __shared__ MeetingState state;
  const auto num_ranks = m.peers.num_ranks;
  const std::int64_t generation = m.launch->generation + 1;
  if (threadIdx.x == 0) state = {kNoRefusal, static_cast<int>(num_ranks), 0};
  __syncthreads();
  for (std::int64_t peer = threadIdx.x; peer < num_ranks; peer += blockDim.x) {
    m.peers.at<RankHeader>(peer, m.peers.headers)[m.peers.rank] = own;
    __threadfence_system();
    write_log(m, LogEvent::kRaise, peer, generation);
    store_release_system(m.peers.at<std::int64_t>(peer, m.peers.flag_ready) + m.peers.rank, generation);
  }
  for (std::int64_t peer = threadIdx.x; peer < num_ranks; peer += blockDim.x) wait_ready(m, peer, generation, state);
  __syncthreads();
  const bool aborted = state.late < num_ranks || state.culprit != 0;
  const RankHeader* headers = m.peers.at<RankHeader>(m.peers.rank, m.peers.headers);
  if (!aborted) {
    for (std::int64_t rank = threadIdx.x; rank < num_ranks; rank += blockDim.x) judge(headers, rank, state);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool refused = aborted || state.refusal != kNoRefusal;
  const std::int64_t culprit = state.culprit != 0 ? static_cast<std::int64_t>(state.culprit) - 1 : state.late;
  *m.result = {refused ? 1 : 0, aborted ? 1 : 0, culprit, -1, 0};
  if (state.culprit != 0) {
    report_status(*m.status, StatusCode::kPeerAborted, {culprit});
  } else if (aborted) {
    abort_peers(m.peers, state.late);
    const std::int64_t seen =
        load_relaxed_system(m.peers.at<std::int64_t>(m.peers.rank, m.peers.flag_ready) + state.late);
    report_late(m, Counter::kPeerReady, state.late, generation, seen);
  } else if (refused) {
    report_refusal(m, headers, state.refusal);
  } else {
    std::int64_t start = 0;
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
      m.token_starts[rank] = start;
      start += headers[rank].tokens;
    }
  }
}

// By one thread, behind the plan and before "plan ready": what the plan has found out that the meeting could not, and
// that no wait of this launch waits where a rank has given up.
__device__ inline void end_meeting(const Meeting& m, PlanSizes& sizes, std::int64_t row_capacity) {
  if (m.result->aborted != 0) sizes.aborted = 1 + m.result->culprit;
  if (m.result->full_rank < 0) return;
  report_status(*m.status, StatusCode::kFull, {m.result->full_rank, m.result->full_rows, row_capacity});
}

}  // namespace moe
