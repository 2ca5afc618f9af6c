// Writes a built plan out as flat rows of integers, for everything that looks at plans from outside: every wait and
// every raise of every task with who makes it. Host only. Called by bindings/plan.cpp; the rows are made by the very
// functions of dependencies.h that device roles call.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/plan/dependencies.h"
#include "moe/plan/edges.h"
#include "moe/plan/log.h"
#include "moe/plan/tasks.h"

namespace moe {

// A role's wait for the plan, before its first ticket. It stands for that role in every block.
inline constexpr std::int64_t kBeforeTickets = -1;

// Who waits or raises.
struct Agent {
  Stream stream;
  std::int64_t ticket;
  std::int64_t block;  // of the cluster; 0 in the other streams
  Role role;
};

// Rows of kRecordColumns integers: stream, ticket, block, role, counter, index, target or amount. For flags across
// ranks `index` is the rank awaited (waits) or the rank in whose memory the flag is set (raises).
inline constexpr std::int64_t kRecordColumns = 7;
struct Records {
  std::vector<std::int64_t> waits;
  std::vector<std::int64_t> raises;

  static void add(std::vector<std::int64_t>& rows, const Agent& agent, Counter counter, std::int64_t index,
                  std::int64_t value) {
    for (const std::int64_t column :
         {static_cast<std::int64_t>(agent.stream), agent.ticket, agent.block, static_cast<std::int64_t>(agent.role),
          static_cast<std::int64_t>(counter), index, value}) {
      rows.push_back(column);
    }
  }
  void add(const Agent& agent, const Waits& list) {
    for (std::int64_t i = 0; i < list.size; ++i) {
      add(waits, agent, list.items[i].counter, list.items[i].index, list.items[i].target);
    }
  }
  void add(const Agent& agent, const Raises& list) {
    for (std::int64_t i = 0; i < list.size; ++i) {
      add(raises, agent, list.items[i].counter, list.items[i].index, list.items[i].amount);
    }
  }
  void add_flag_waits(const Plan& plan, const Agent& agent, TaskKind kind) {
    for (std::int64_t peer = 0; peer < plan.problem.num_ranks; ++peer) {
      const Wait wait = flag_wait(plan, kind, peer);
      add(waits, agent, wait.counter, wait.index, wait.target);
    }
  }
  void add_flag_raises(const Plan& plan, const Agent& agent, TaskKind kind) {
    for (std::int64_t peer = 0; peer < plan.problem.num_ranks; ++peer) {
      const Raise raise = flag_raise(plan, kind);
      add(raises, agent, raise.counter, peer, raise.amount);
    }
  }
};

inline void record_start(const Plan& plan, Records& out) {
  const Agent planner{Stream::kPlan, 0, 0, Role::kPlan};
  out.add_flag_raises(plan, planner, TaskKind::kPlan);
  out.add_flag_waits(plan, planner, TaskKind::kPlan);
  const Raise raise = start_raise(plan);
  Records::add(out.raises, planner, raise.counter, raise.index, raise.amount);
  const Wait wait = start_wait(plan);
  for (const Role role : {Role::kLoad, Role::kCompute, Role::kPull}) {
    const Stream stream = role == Role::kPull ? Stream::kPull : Stream::kCompute;
    Records::add(out.waits, {stream, kBeforeTickets, 0, role}, wait.counter, wait.index, wait.target);
  }
}

inline void record_compute_stream(const Plan& plan, Records& out) {
  for (std::int64_t ticket = 0; ticket < plan.num_tasks; ++ticket) {
    const Task& task = plan.tasks[ticket];
    for (std::int64_t block = 0; block < 2; ++block) {
      for (const Role role : {Role::kLoad, Role::kCompute}) {
        out.add({Stream::kCompute, ticket, block, role}, task_waits(plan, task, block, role));
      }
      out.add({Stream::kCompute, ticket, block, Role::kCompute}, task_raises(plan, task, block));
    }
    const Agent first{Stream::kCompute, ticket, 0, Role::kCompute};
    if (task.kind == TaskKind::kClose) out.add_flag_raises(plan, first, task.kind);
    if (task.kind == TaskKind::kDrain) out.add_flag_waits(plan, first, task.kind);
  }
}

inline void record_pull_stream(const Plan& plan, Records& out) {
  for (std::int64_t ticket = 0; ticket < plan.num_pull_tickets(); ++ticket) {
    const Agent agent{Stream::kPull, ticket, 0, Role::kPull};
    const PullTicket pull = plan.pull_task(ticket);
    if (pull.kind == TaskKind::kCombine) {
      out.add_flag_waits(plan, agent, pull.kind);
    } else {
      out.add(agent, piece_waits(plan, pull));
      out.add(agent, piece_raises(plan, pull));
    }
  }
}

inline Records record_plan(const Plan& plan) {
  Records out;
  record_start(plan, out);
  record_compute_stream(plan, out);
  record_pull_stream(plan, out);
  return out;
}

}  // namespace moe
