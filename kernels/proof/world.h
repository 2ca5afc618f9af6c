// The state of an explored system: W ranks with their counters, memory, clusters and agents, and what their knowledge
// of each other is. Owns the sizes of everything and the naming of strands; programs.cpp says what agents do next,
// accesses.cpp what they read and write, explorer.cpp runs them.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "moe/plan/dependencies.h"
#include "moe/plan/log.h"
#include "proof/clocks.h"
#include "proof/faults.h"
#include "proof/launches.h"
#include "proof/memory.h"

namespace moe::proof {

// What went wrong, in words that name rank, block, role, task and place.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Steps of role programs. The first two are the protocol; the rest is what happens between its waits and raises.
enum class OpKind : std::int32_t {
  kAcquire,        // wait for a counter
  kRelease,        // raise a counter
  kPrologue,       // stream: earlier kernels write tokens and weights
  kStart,          // stream: the launch begins
  kEnd,            // stream: all of it has ended
  kPublish,        // plan: routes, class counts and headers
  kBuild,          // plan: tables, row table, counters zeroed
  kIssueLoads,     // load: TMA loads of a task begin
  kLandLoads,      // load: they have all arrived
  kJoinLoads,      // compute: the mbarriers of both blocks' loads have flipped
  kCompute,        // compute: what the task reads and stores itself
  kFinishTask,     // compute: the task is behind
  kPullRows,       // pull: bulk copies from the peers to staging
  kPlaceRows,      // pull: bulk copies from staging to their place
  kCompletePulls,  // pull: wait for the bulk copies in flight
  kFinishPulls,    // pull: all in flight is raised
  kCombine,        // pull: sum the rows of some tokens
};

struct Op {
  OpKind kind;
  std::int64_t ticket = -1;
  Counter counter = Counter::kPlanReady;
  std::int64_t owner = 0;  // rank in whose memory the counter lies
  std::int64_t index = 0;
  std::int64_t value = 0;  // target or amount
};

struct Cell {
  std::int64_t value = 0;
  bool touched = false;
  bool system_scope = false;
  std::int64_t raiser = 0;  // rank
  Clock clock;              // of all raises since it was zeroed, or of the last setting
  std::vector<std::int32_t> waiting;
};

// Asynchronous accesses that have not been waited for; they become known to whoever waits, by a fence of edges.h.
struct Pending {
  Stamp stamp;
  std::int32_t fence;
};

enum class Actor : std::int32_t { kPlan = 0, kPull, kLoad, kCompute, kStream };  // Role, then the stream

struct Agent {
  std::int32_t id;
  std::int64_t rank;
  std::int64_t block;
  Actor actor;
  std::int32_t strand;
  Knowledge knowledge;
  std::vector<Op> ops;
  std::size_t next = 0;
  std::int64_t position = 0;  // load, compute: tickets of the cluster taken; pull: unused; stream: launches begun
  std::int64_t ticket = -1;   // worked on
  bool finished = false;
  std::vector<Pending> pending;
  std::vector<std::int64_t> in_flight;  // pull: tickets of pieces not yet raised
  Epoch first_strand_epoch = 0;         // asynchronous accesses: loads, or reads of peers
  Epoch second_strand_epoch = 0;        // pull: writes

  Clock& clock() { return knowledge.clock; }
  const Clock& clock() const { return knowledge.clock; }
  Role role() const { return static_cast<Role>(actor); }
};

// What load hands to compute through a shared-memory barrier: its knowledge when it issued the loads.
struct Arrival {
  Clock clock;
  Stamp loads{-1, 0};
};

struct Cluster {
  std::vector<std::int64_t> tickets;             // claimed, in order; the last may be past the end
  std::array<std::int64_t, 2> loaded{};          // tickets whose loads have landed, by block
  std::array<std::int64_t, 2> computed{};        // tickets computed, by block
  std::array<std::vector<Arrival>, 2> arrivals;  // by block, a ring over positions
  std::vector<std::int32_t> waiting;
};

struct RankState {
  std::int64_t launch = -1;  // index; -1 before the first
  std::int64_t running = 0;  // agents that have not finished it
  std::int64_t compute_tickets = 0;
  std::int64_t pull_tickets = 0;
  std::array<std::vector<Cell>, static_cast<std::size_t>(kNumCounters)> cells;
  std::array<Grid, static_cast<std::size_t>(kNumPlaceKinds)> grids;
  std::vector<Cluster> clusters;
  std::vector<std::int32_t> computed;  // times each (ticket, block) was computed in this launch
  std::vector<std::int32_t> pulled;    // times each pull ticket was done
};

struct Stats {
  std::int64_t steps = 0;
  std::int64_t launches = 0;
  std::int64_t tasks = 0;
  std::int64_t pieces = 0;
  std::int64_t combines = 0;
  std::int64_t accesses = 0;
  std::int64_t row_tiles = 0;
  std::int64_t x_slots = 0;
  std::int64_t a_slots = 0;
  std::int64_t x_reuses = 0;  // pieces that took a slot over from another tile
  std::int64_t a_reuses = 0;
};

class World {
 public:
  World(const PlanConfig& config, const ExploreOptions& options, std::int64_t num_launches, std::uint64_t seed,
        const Fault& fault);

  const PlanConfig config;
  const ExploreOptions options;
  const Fault fault;
  const Protocol protocol;
  std::vector<Launch> launches;
  std::vector<RankState> ranks;
  std::vector<Agent> agents;
  Stats stats;
  Clock published;  // scratch of a raise

  std::int64_t num_ranks() const { return config.problem.num_ranks; }
  std::int64_t num_blocks() const { return 2 * options.clusters; }
  std::int64_t agents_per_launch() const { return 1 + 3 * num_blocks(); }
  RankState& rank(std::int64_t r) { return ranks[static_cast<std::size_t>(r)]; }
  RankState& rank(const Agent& agent) { return rank(agent.rank); }
  Cluster& cluster(const Agent& agent) { return rank(agent).clusters[static_cast<std::size_t>(agent.block / 2)]; }
  Cell& cell(std::int64_t owner, Counter counter, std::int64_t index) {
    return rank(owner).cells[static_cast<std::size_t>(counter)].at(static_cast<std::size_t>(index));
  }
  Grid& grid(std::int64_t owner, PlaceKind kind) { return rank(owner).grids[static_cast<std::size_t>(kind)]; }
  const Launch& launch(const Agent& agent) { return launches[static_cast<std::size_t>(rank(agent).launch)]; }
  const RankLaunch& side(const Agent& agent) { return launch(agent).ranks[static_cast<std::size_t>(agent.rank)]; }
  const Plan& plan(const Agent& agent) { return side(agent).plan(); }
  std::int64_t generation(const Agent& agent) { return rank(agent).launch + 1; }

  // Agents of one rank: the stream, the plan, then pull, load and compute of each block.
  std::int32_t agent_id(std::int64_t r, Actor actor, std::int64_t block) const;
  std::int32_t num_strands() const { return static_cast<std::int32_t>(num_ranks() * strands_per_rank()); }
  // Strands of the asynchronous accesses of an agent; pull has two, reads of peers and writes.
  std::int32_t first_strand(const Agent& agent) const { return agent.strand + 1; }
  std::int32_t second_strand(const Agent& agent) const { return agent.strand + 2; }

  std::string who(const Agent& agent);
  std::string who(const Stamp& stamp);
  std::string task_text(const Agent& agent);
  std::string cell_text(std::int64_t owner, Counter counter, std::int64_t index);
  std::string shape_text() const;

 private:
  std::int64_t strands_per_rank() const { return 2 + 6 * num_blocks(); }
  void make_rank(std::int64_t r);
};

}  // namespace moe::proof
