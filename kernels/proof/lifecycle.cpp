// Launches of one rank follow each other in stream order, which orders everything, proxies too; only flags order those
// of different ranks. See lifecycle.h.
#include "proof/lifecycle.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "proof/totals.h"

namespace moe::proof {
namespace {

void check_counts(const std::vector<std::int32_t>& counts, std::size_t blocks, const std::string& what,
                  const std::string& where) {
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 1) continue;
    throw Violation("task: " + what + " " + std::to_string(i / blocks) + " block " + std::to_string(i % blocks) +
                    where + " ran " + std::to_string(counts[i]) + " times");
  }
}

void check_totals(World& world, const Agent& stream) {
  const RankState& rank = world.rank(stream);
  const std::string where =
      " of rank " + std::to_string(stream.rank) + ", launch " + std::to_string(world.generation(stream));
  check_counts(rank.computed, 2, "compute ticket", where);
  check_counts(rank.pulled, 1, "pull ticket", where);
  const Plan& plan = world.plan(stream);
  for (std::size_t c = 0; c < rank.cells.size(); ++c) {
    const auto counter = static_cast<Counter>(c);
    for (std::size_t i = 0; i < rank.cells[c].size() && !counter_is_flag(counter); ++i) {
      const std::int64_t total = expected_total(plan, counter, static_cast<std::int64_t>(i));
      if (rank.cells[c][i].value == total) continue;
      throw Violation("counter: " + name(counter) + "[" + std::to_string(i) + "]" + where + " ends at " +
                      std::to_string(rank.cells[c][i].value) + ", expected " + std::to_string(total));
    }
  }
}

}  // namespace

void start_launch(World& world, Agent& stream) {
  RankState& rank = world.rank(stream);
  ++rank.launch;
  rank.running = world.agents_per_launch();
  for (Cluster& cluster : rank.clusters) {
    cluster.tickets.clear();
    cluster.loaded = {0, 0};
    cluster.computed = {0, 0};
  }
  for (std::int64_t i = 1; i <= rank.running; ++i) {
    Agent& agent = world.agents[static_cast<std::size_t>(stream.id + i)];
    agent.knowledge = {stream.clock(), stream.clock()};
    agent.clock().tick(agent.strand);
    agent.position = agent.actor == Actor::kPlan ? 0 : -1;
    agent.ticket = -1;
    agent.finished = false;
  }
  stream.clock().tick(stream.strand);
}

void zero_counters(World& world, const Agent& plan) {
  RankState& rank = world.rank(plan);
  for (std::size_t c = 0; c < rank.cells.size(); ++c) {
    if (counter_is_flag(static_cast<Counter>(c))) continue;
    for (Cell& cell : rank.cells[c]) {
      cell.value = 0;
      if (std::exchange(cell.touched, false)) cell.clock.clear();
    }
  }
  rank.compute_tickets = 0;
  rank.pull_tickets = 0;
  rank.computed.assign(static_cast<std::size_t>(2 * world.plan(plan).num_tasks), 0);
  rank.pulled.assign(static_cast<std::size_t>(world.plan(plan).num_pull_tickets()), 0);
}

void end_launch(World& world, Agent& stream) {
  check_totals(world, stream);
  for (std::int64_t i = 1; i <= world.agents_per_launch(); ++i) {
    const Agent& agent = world.agents[static_cast<std::size_t>(stream.id + i)];
    stream.clock().merge(agent.clock());
    if (agent.first_strand_epoch > 0) stream.clock().note({world.first_strand(agent), agent.first_strand_epoch});
    if (agent.second_strand_epoch > 0) stream.clock().note({world.second_strand(agent), agent.second_strand_epoch});
  }
  ++world.stats.launches;
}

}  // namespace moe::proof
