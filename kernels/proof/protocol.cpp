// Release and acquire with vector clocks. See protocol.h, and clocks.h for what knowledge is.
#include "proof/protocol.h"

#include <cstddef>
#include <string>

#include "proof/totals.h"

namespace moe::proof {

void check_planned(World& world, const Agent& agent, const char* what) {
  const Location& tables = world.grid(agent.rank, PlaceKind::kTables).at(0, 0);
  if (tables.tag == make_tag(world.generation(agent), 0, 0) && agent.knowledge.ordered(tables.written, false)) return;
  // The agent's task cannot be named: there may be no table to read it from.
  throw Violation("race: rank " + std::to_string(agent.rank) + " block " + std::to_string(agent.block) + " " +
                  kRoleNames[static_cast<std::size_t>(agent.actor)] + " (launch " +
                  std::to_string(world.generation(agent)) + ") touches " + what +
                  ", which is not ordered after the plan task has set it up");
}

bool is_met(World& world, const Op& wait) {
  return world.cell(wait.owner, wait.counter, wait.index).value >= wait.value;
}

void acquire(World& world, Agent& agent, const Op& wait) {
  const Edge* edge = world.protocol.edge(wait.counter, agent.role());
  if (edge == nullptr)
    throw Violation("edge: " + world.who(agent) + " waits for " + name(wait.counter) + " without one");
  if (!counter_is_flag(wait.counter)) {
    check_planned(world, agent, kCounterNames[static_cast<std::size_t>(wait.counter)]);
  }
  const Cell& cell = world.cell(wait.owner, wait.counter, wait.index);
  const bool reaches = (cell.system_scope && edge->scope == Scope::kSystem) || cell.raiser == agent.rank;
  if (cell.touched && reaches) agent.clock().merge(cell.clock);
  if ((edge->waiter_fences & kProxyFence) != 0) agent.knowledge.fence();
}

void release(World& world, Agent& agent, const Op& raise) {
  const Role role = agent.role();
  if (!world.protocol.raises(raise.counter, role)) {
    throw Violation("edge: " + world.who(agent) + " raises " + name(raise.counter) + " without one");
  }
  const bool flag = counter_is_flag(raise.counter);
  if (!flag) check_planned(world, agent, kCounterNames[static_cast<std::size_t>(raise.counter)]);
  // Fences stand for this raise alone: a kernel may raise by several threads at once.
  const std::int32_t fences = world.protocol.raise_fences(raise.counter, role);
  Clock& published = world.published;
  published = agent.clock();
  for (const Pending& pending : agent.pending) {
    if ((pending.fence & fences) != 0) published.note(pending.stamp);
  }
  if ((fences & kProxyFence) != 0) published.fence_writes(agent.strand);
  agent.clock().tick(agent.strand);

  Cell& cell = world.cell(raise.owner, raise.counter, raise.index);
  cell.system_scope = world.protocol.raises_at_system_scope(raise.counter, role);
  cell.raiser = agent.rank;
  cell.touched = true;
  if (flag) {
    cell.value = raise.value;
    cell.clock = published;
    return;
  }
  cell.value += raise.value;
  cell.clock.merge(published);
  const std::int64_t total = expected_total(world.plan(agent), raise.counter, raise.index);
  if (cell.value > total) {
    throw Violation("counter: " + world.who(agent) + " raises " +
                    world.cell_text(raise.owner, raise.counter, raise.index) + " to " + std::to_string(cell.value) +
                    ", above its total " + std::to_string(total));
  }
}

}  // namespace moe::proof
