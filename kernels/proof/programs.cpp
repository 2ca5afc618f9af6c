// Role programs of the explorer. Every wait and raise comes out of plan/dependencies.h; seeded faults leave some out.
// A cluster's tickets are claimed by the first of its four roles that needs the next one.
#include "proof/programs.h"

#include <algorithm>
#include <utility>

namespace moe::proof {
namespace {

// The value of a flag; a reused one never leaves the first generation.
std::int64_t flag_value(const World& world, Counter counter, std::int64_t generation) {
  return world.fault.is(FaultKind::kReusedFlag) && world.fault.hits(counter) ? 1 : generation;
}

void add_wait(World& world, Agent& agent, const Wait& wait) {
  if (world.fault.skips(wait.counter, agent.role())) return;
  Op op{OpKind::kAcquire, agent.ticket, wait.counter, agent.rank, wait.index, wait.target};
  if (counter_is_flag(wait.counter)) op.value = flag_value(world, wait.counter, wait.target);
  agent.ops.push_back(op);
}

Op raise_step(const World& world, std::int64_t owner, std::int64_t ticket, const Raise& raise) {
  Op op{OpKind::kRelease, ticket, raise.counter, owner, raise.index, raise.amount};
  if (counter_is_flag(raise.counter)) op.value = flag_value(world, raise.counter, raise.amount);
  return op;
}

void add_step(Agent& agent, OpKind kind) { agent.ops.push_back({kind, agent.ticket}); }

void add_flag_waits(World& world, Agent& agent, TaskKind kind) {
  for (std::int64_t peer = 0; peer < world.num_ranks(); ++peer) {
    add_wait(world, agent, flag_wait(world.plan(agent), kind, peer));
  }
}

void add_flag_raises(World& world, Agent& agent, TaskKind kind) {
  for (std::int64_t peer = 0; peer < world.num_ranks(); ++peer) {
    agent.ops.push_back(raise_step(world, peer, agent.ticket, flag_raise(world.plan(agent), kind)));
  }
}

// The cluster's ticket at the agent's position, claimed if nobody has yet.
std::int64_t cluster_ticket(World& world, Agent& agent, const ClaimListener& claimed) {
  Cluster& cluster = world.cluster(agent);
  if (agent.position == static_cast<std::int64_t>(cluster.tickets.size())) {
    const std::int64_t ticket = world.rank(agent).compute_tickets++;
    cluster.tickets.push_back(ticket);
    claimed(agent, 0, ticket);
  }
  return cluster.tickets[static_cast<std::size_t>(agent.position)];
}

void add_task_waits(World& world, Agent& agent, const Task& task) {
  const Waits waits = task_waits(world.plan(agent), task, agent.block % 2, agent.role());
  for (std::int64_t i = 0; i < waits.size; ++i) {
    add_wait(world, agent, waits.items[i]);
  }
}

bool refill_plan(World& world, Agent& agent) {
  if (agent.position++ > 0) {
    agent.finished = true;
    return true;
  }
  add_step(agent, OpKind::kPublish);
  add_flag_raises(world, agent, TaskKind::kPlan);
  add_flag_waits(world, agent, TaskKind::kPlan);
  add_step(agent, OpKind::kBuild);
  agent.ops.push_back(raise_step(world, agent.rank, agent.ticket, start_raise(world.plan(agent))));
  return true;
}

bool refill_load(World& world, Agent& agent, const ClaimListener& claimed) {
  const Cluster& cluster = world.cluster(agent);
  // A stage of shared memory is free when both blocks are through with it: multicast fills both.
  const std::int64_t behind = std::min(cluster.computed[0], cluster.computed[1]);
  if (agent.position > behind + world.options.load_ahead) return false;
  const std::int64_t ticket = cluster_ticket(world, agent, claimed);
  if (ticket >= world.plan(agent).num_tasks) {
    agent.finished = true;
    return true;
  }
  agent.ticket = ticket;
  const Task& task = world.plan(agent).tasks[ticket];
  add_task_waits(world, agent, task);
  if (has_loads(world.plan(agent), task)) add_step(agent, OpKind::kIssueLoads);
  add_step(agent, OpKind::kLandLoads);
  return true;
}

bool refill_compute(World& world, Agent& agent, const ClaimListener& claimed) {
  const std::int64_t ticket = cluster_ticket(world, agent, claimed);
  if (ticket >= world.plan(agent).num_tasks) {
    agent.finished = true;
    return true;
  }
  agent.ticket = ticket;
  const Plan& plan = world.plan(agent);
  const Task& task = plan.tasks[ticket];
  const bool works = plan.work(task, agent.block % 2).valid;
  if (has_loads(plan, task)) add_step(agent, OpKind::kJoinLoads);
  add_task_waits(world, agent, task);
  if (task.kind == TaskKind::kDrain && works) add_flag_waits(world, agent, TaskKind::kDrain);
  add_step(agent, OpKind::kCompute);
  const Raises raises = task_raises(plan, task, agent.block % 2);
  for (std::int64_t i = 0; i < raises.size; ++i) {
    agent.ops.push_back(raise_step(world, agent.rank, ticket, raises.items[i]));
  }
  if (task.kind == TaskKind::kClose && works) add_flag_raises(world, agent, TaskKind::kClose);
  add_step(agent, OpKind::kFinishTask);
  return true;
}

void add_flush(World& world, Agent& agent) {
  for (const Op& op : flush_steps(world, agent)) agent.ops.push_back(op);
}

bool refill_pull(World& world, Agent& agent, const ClaimListener& claimed) {
  const Plan& plan = world.plan(agent);
  const std::int64_t ticket = world.rank(agent).pull_tickets++;
  claimed(agent, 1, ticket);
  if (ticket >= plan.num_pull_tickets()) {
    agent.finished = agent.in_flight.empty();
    add_flush(world, agent);
    return true;
  }
  agent.ticket = ticket;
  const PullTicket pull = plan.pull_task(ticket);
  if (pull.kind == TaskKind::kCombine) {
    add_flush(world, agent);
    add_flag_waits(world, agent, TaskKind::kCombine);
    add_step(agent, OpKind::kCombine);
    return true;
  }
  const Waits waits = piece_waits(plan, pull);
  for (std::int64_t i = 0; i < waits.size; ++i) {
    add_wait(world, agent, waits.items[i]);
  }
  ++world.rank(agent).pulled[static_cast<std::size_t>(ticket)];
  if (piece_raises(plan, pull).size == 0) return true;
  add_step(agent, OpKind::kPullRows);
  add_step(agent, OpKind::kPlaceRows);
  return true;
}

}  // namespace

bool has_loads(const Plan& plan, const Task& task) {
  if (task.kind == TaskKind::kDownDgrad) return plan.needs.da();
  return is_tile_task(task.kind) || is_wgrad(task.kind);
}

std::vector<Op> flush_steps(World& world, Agent& agent) {
  std::vector<Op> steps;
  if (agent.in_flight.empty()) return steps;
  const Plan& plan = world.plan(agent);
  steps.push_back({OpKind::kCompletePulls, agent.ticket});
  for (const std::int64_t ticket : std::exchange(agent.in_flight, {})) {
    const Raises raises = piece_raises(plan, plan.pull_task(ticket));
    for (std::int64_t i = 0; i < raises.size; ++i) {
      steps.push_back(raise_step(world, agent.rank, ticket, raises.items[i]));
    }
  }
  steps.push_back({OpKind::kFinishPulls, agent.ticket});
  return steps;
}

bool refill(World& world, Agent& agent, const ClaimListener& claimed) {
  if (agent.actor == Actor::kPlan) return refill_plan(world, agent);
  if (agent.actor == Actor::kStream) {
    agent.finished = agent.position++ == static_cast<std::int64_t>(world.launches.size());
    if (agent.finished) return true;
    for (const OpKind kind : {OpKind::kPrologue, OpKind::kStart, OpKind::kEnd}) add_step(agent, kind);
    return true;
  }
  // A role first waits for the plan, once a launch; until then there is no ticket to claim.
  if (agent.position < 0) {
    agent.position = 0;
    add_wait(world, agent, start_wait(world.plan(agent)));
    return true;
  }
  if (agent.actor == Actor::kLoad) return refill_load(world, agent, claimed);
  if (agent.actor == Actor::kCompute) return refill_compute(world, agent, claimed);
  return refill_pull(world, agent, claimed);
}

}  // namespace moe::proof
