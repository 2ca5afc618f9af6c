// Sizes and names of an explored system. See world.h.
#include "proof/world.h"

#include <algorithm>

namespace moe::proof {
namespace {

// Draws with a stream of its own, so that the same seed gives the same routings under every scheduler and fault.
std::vector<Launch> make_launches(const PlanConfig& config, const ExploreOptions& options, std::int64_t num_launches,
                                  std::uint64_t seed, const Fault& fault) {
  Random random(seed ^ 0xD1B54A32D192ED03u);
  std::vector<Launch> launches = draw_launches(config, options, num_launches, random);
  if (!fault.is(FaultKind::kRingBelowMinimum)) return launches;
  for (Launch& launch : launches) {
    for (RankLaunch& side : launch.ranks) {
      Schedule& schedule = side.owned.plan.schedule;
      std::int64_t& slots = fault.a_ring ? schedule.a_slots : schedule.x_slots;
      slots -= 1 + (fault.a_ring ? options.a_spare : options.x_spare);
      if (slots < 1) throw std::invalid_argument("expected a case whose ring needs two slots, got one");
    }
  }
  return launches;
}

}  // namespace

World::World(const PlanConfig& given, const ExploreOptions& chosen, std::int64_t num_launches, std::uint64_t seed,
             const Fault& seeded)
    : config(given),
      options(chosen),
      fault(seeded),
      protocol(seeded),
      launches(make_launches(given, chosen, num_launches, seed, seeded)),
      published(num_strands()) {
  ranks.resize(static_cast<std::size_t>(num_ranks()));
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    make_rank(r);
    const auto add = [&](Actor actor, std::int64_t block, std::int64_t strand) {
      Agent agent;
      agent.id = static_cast<std::int32_t>(agents.size());
      agent.rank = r;
      agent.block = block;
      agent.actor = actor;
      agent.strand = static_cast<std::int32_t>(r * strands_per_rank() + strand);
      agent.knowledge = {Clock(num_strands()), Clock(num_strands())};
      agent.clock().tick(agent.strand);
      agent.finished = actor != Actor::kStream;
      agents.push_back(agent);
    };
    add(Actor::kStream, -1, 0);
    add(Actor::kPlan, 0, 1);
    for (std::int64_t b = 0; b < num_blocks(); ++b) {
      add(Actor::kPull, b, 2 + 6 * b);
      add(Actor::kLoad, b, 2 + 6 * b + 3);
      add(Actor::kCompute, b, 2 + 6 * b + 5);
    }
  }
  for (const Launch& launch : launches) {
    for (const RankLaunch& side : launch.ranks) stats.row_tiles += side.plan().counts.tiles;
  }
  stats.x_slots = launches.front().ranks.front().plan().schedule.x_slots;
  stats.a_slots = launches.front().ranks.front().plan().schedule.a_slots;
}

void World::make_rank(std::int64_t r) {
  RankState& state = rank(r);
  Problem problem = config.problem;
  problem.rank = r;
  problem.row_capacity = 0;
  for (const Launch& launch : launches) {
    const auto rows = static_cast<std::int64_t>(launch.ranks[static_cast<std::size_t>(r)].sources.size());
    problem.row_capacity = std::max(problem.row_capacity, rows);
  }
  const std::int64_t tiles = problem.max_row_tiles();
  const Tiling& tiling = config.tiling;
  const Schedule& schedule = launches.front().ranks[static_cast<std::size_t>(r)].plan().schedule;
  for (std::size_t c = 0; c < state.cells.size(); ++c) {
    const auto counter = static_cast<Counter>(c);
    const std::int64_t flags = counter_crosses_ranks(counter) ? num_ranks() : 1;
    const std::int64_t size = counter_is_flag(counter) ? flags : counter_size(counter, problem);
    state.cells[c].resize(static_cast<std::size_t>(size));
    for (Cell& cell : state.cells[c]) cell.clock = Clock(num_strands());
  }
  const auto make = [&](PlaceKind kind, std::int64_t rows, std::int64_t columns) {
    state.grids[static_cast<std::size_t>(kind)] = Grid(kind, r, rows, columns);
  };
  const std::int64_t pieces = pieces_of_tile(tiling);
  make(PlaceKind::kTokens, 2, 1);
  make(PlaceKind::kWeights, 1, 1);
  make(PlaceKind::kClassCounts, 1, 1);
  make(PlaceKind::kRouteOrder, 1, 1);
  make(PlaceKind::kHeader, num_ranks(), 1);
  make(PlaceKind::kTables, 1, 1);
  make(PlaceKind::kRowTable, 1, 1);
  make(PlaceKind::kXRing, schedule.x_slots, pieces);
  make(PlaceKind::kARing, schedule.a_slots, tiling.act_tiles(problem));
  for (const PlaceKind kind : {PlaceKind::kDyRows, PlaceKind::kXRows}) make(kind, tiles, pieces);
  make(PlaceKind::kDh, tiles, ceil_div(problem.width, kPartialColumns));
  for (const PlaceKind kind : {PlaceKind::kScaledA, PlaceKind::kPartials}) {
    make(kind, tiles, tiling.dgrad_tiles(problem));
  }
  make(PlaceKind::kHomeRows, problem.max_routes(), tiling.hidden_tiles(problem));
  make(PlaceKind::kHomeGrads, problem.max_routes(), 1);
  state.clusters.resize(static_cast<std::size_t>(options.clusters));
  for (Cluster& cluster : state.clusters) {
    for (std::vector<Arrival>& arrivals : cluster.arrivals) {
      arrivals.resize(static_cast<std::size_t>(options.load_ahead + 2), Arrival{Clock(num_strands()), {-1, 0}});
    }
  }
}

std::int32_t World::agent_id(std::int64_t r, Actor actor, std::int64_t block) const {
  const std::int64_t first = r * (2 + 3 * num_blocks());
  if (actor == Actor::kStream) return static_cast<std::int32_t>(first);
  if (actor == Actor::kPlan) return static_cast<std::int32_t>(first + 1);
  return static_cast<std::int32_t>(first + 2 + 3 * block + static_cast<std::int64_t>(actor) - 1);
}

std::string World::task_text(const Agent& agent) {
  if (agent.actor == Actor::kStream) return "between launches";
  if (agent.ticket < 0) return "before its first task";
  std::string text = "ticket " + std::to_string(agent.ticket);
  if (agent.actor == Actor::kPull) {
    const PullTicket pull = plan(agent).pull_task(agent.ticket);
    text += " " + name(pull.kind) + " " + std::to_string(pull.tile);
    if (pull.kind == TaskKind::kDispatch) {
      text += " piece " + std::to_string(pull.piece) + " of source " + std::to_string(pull.source);
    }
    return text;
  }
  const Task& task = plan(agent).tasks[agent.ticket];
  return text + " " + name(task.kind) + " expert " + std::to_string(task.expert) + " tile " +
         std::to_string(task.tile) + " column " + std::to_string(task.column);
}

std::string World::who(const Agent& agent) {
  std::string text = "rank " + std::to_string(agent.rank);
  if (agent.block >= 0) text += " block " + std::to_string(agent.block);
  text += std::string(" ") + kRoleNames[static_cast<std::size_t>(agent.actor)];
  return text + " (launch " + std::to_string(generation(agent)) + ", " + task_text(agent) + ")";
}

std::string World::who(const Stamp& stamp) {
  if (stamp.strand < 0) return "nobody";
  const std::int64_t r = stamp.strand / strands_per_rank();
  const std::int64_t strand = stamp.strand % strands_per_rank();
  static constexpr const char* kStrands[] = {"pull", "bulk reads of pull", "bulk writes of pull",
                                             "load", "TMA loads of load",  "compute"};
  std::string text = "rank " + std::to_string(r);
  if (strand < 2) return text + (strand == 0 ? " stream" : " plan");
  return text + " block " + std::to_string((strand - 2) / 6) + " " + kStrands[(strand - 2) % 6];
}

std::string World::cell_text(std::int64_t owner, Counter counter, std::int64_t index) {
  return name(counter) + "[" + std::to_string(index) + "] of rank " + std::to_string(owner);
}

std::string World::shape_text() const {
  return "W = " + std::to_string(num_ranks()) + ", C = " + std::to_string(options.clusters) +
         ", x_slots = " + std::to_string(stats.x_slots) + ", a_slots = " + std::to_string(stats.a_slots);
}

}  // namespace moe::proof
