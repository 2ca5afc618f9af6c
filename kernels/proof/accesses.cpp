// The reads and writes of every step, by proxy. A claim here about device code is a promise that the kernels must keep:
// whoever touches memory in another way, or by another proxy, changes this file and sees whether the edges still hold.
//
// Conservative choices: a task reads its operands whole, block 1 too where a pair has a single column; a combine of any
// token of a rank is ordered against every row it sums; class counts are published and read in backward as well, which
// has its expert offsets saved; nothing that a peer may write is read twice.
#include "proof/accesses.h"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::proof {
namespace {

// Accesses of one agent by one proxy under one stamp.
class Accesses {
 public:
  Accesses(World& world, const Agent& agent, bool async, const Stamp& stamp)
      : world_(world), agent_(agent), by_{agent.knowledge, async, stamp} {}

  void read(std::int64_t owner, PlaceKind kind, std::int64_t row, std::int64_t column, Tag expected) {
    Grid& grid = world_.grid(owner, kind);
    Location& location = grid.at(row, column);
    const Tag found = location.tag;
    const Verdict verdict = read_location(location, by_, expected);
    if (verdict.conflict == Conflict::kNone) {
      ++world_.stats.accesses;
      return;
    }
    const std::string text = world_.who(agent_) + proxy() + " reads " + grid.place(row, column);
    if (verdict.conflict == Conflict::kWrongContent) {
      throw Violation("wrong content: " + text + ": expected " + tag_text(expected) + ", got " + tag_text(found) +
                      " written by " + world_.who(verdict.other));
    }
    throw Violation("race: " + text + " while the write by " + world_.who(verdict.other) + " is not ordered before");
  }

  void write(std::int64_t owner, PlaceKind kind, std::int64_t row, std::int64_t column, Tag tag) {
    Grid& grid = world_.grid(owner, kind);
    Location& location = grid.at(row, column);
    const Verdict verdict = write_location(location, by_, tag);
    if (verdict.conflict == Conflict::kNone) {
      ++world_.stats.accesses;
      return;
    }
    const char* what = verdict.conflict == Conflict::kUnorderedRead ? "read" : "write";
    throw Violation("race: " + world_.who(agent_) + proxy() + " overwrites " + grid.place(row, column) + " while the " +
                    what + " by " + world_.who(verdict.other) + " is not ordered before");
  }

 private:
  std::string proxy() const { return by_.async ? ", async proxy," : ", generic proxy,"; }

  World& world_;
  const Agent& agent_;
  Accessor by_;
};

Accesses generic(World& world, const Agent& agent) {
  return {world, agent, false, {agent.strand, agent.clock().seen(agent.strand)}};
}

// What a launch's tags are made of; the expert is counted over all ranks, so that a row tells who made it.
Tag tile_tag(World& world, const Agent& agent, std::int64_t tile, std::int64_t part) {
  return make_tag(world.generation(agent), tile, part);
}
std::int64_t global_expert(const Plan& plan, std::int64_t local) {
  return plan.problem.split().begin(plan.problem.rank) + local;
}

void read_tables(World& world, const Agent& agent, Accesses& access) {
  access.read(agent.rank, PlaceKind::kTables, 0, 0, make_tag(world.generation(agent), 0, 0));
}

// Home rank, route number and, in backward, weight of rows. Route numbers of a backward come saved from an earlier
// launch of the rank; here the whole table is the plan task's.
void read_row_table(World& world, const Agent& agent, Accesses& access) {
  access.read(agent.rank, PlaceKind::kRowTable, 0, 0, make_tag(world.generation(agent), 0, 0));
}

// Weights of rows in backward: from the row table, where the only rank may as well read its own.
void read_row_weights(World& world, const Agent& agent, Accesses& access) {
  read_row_table(world, agent, access);
  if (world.num_ranks() > 1) return;
  access.read(agent.rank, PlaceKind::kWeights, 0, 0, make_tag(world.generation(agent), 0, 0));
}

// -- stream and plan --------------------------------------------------------------------------------------------------

// Earlier kernels of the stream fill the buffers that peers will read. The rank's launch index still is the last one's.
void write_inputs(World& world, const Agent& agent) {
  Accesses access = generic(world, agent);
  const Launch& next = world.launches[static_cast<std::size_t>(world.rank(agent).launch + 1)];
  const Tag tag = make_tag(world.generation(agent) + 1, 0, 0);
  access.write(agent.rank, PlaceKind::kTokens, 0, 0, tag);
  if (next.direction == Direction::kBackward) access.write(agent.rank, PlaceKind::kTokens, 1, 0, tag);
  access.write(agent.rank, PlaceKind::kWeights, 0, 0, tag);
}

void publish(World& world, const Agent& agent) {
  Accesses access = generic(world, agent);
  const Tag tag = make_tag(world.generation(agent), 0, 0);
  access.write(agent.rank, PlaceKind::kClassCounts, 0, 0, tag);
  if (world.plan(agent).direction == Direction::kForward) access.write(agent.rank, PlaceKind::kRouteOrder, 0, 0, tag);
  for (std::int64_t peer = 0; peer < world.num_ranks(); ++peer) {
    access.write(peer, PlaceKind::kHeader, agent.rank, 0, tag);
  }
}

// Behind flag 1 of all ranks. The row table is made of the peers' route orders in forward, of their weights in
// backward: no other role reads either from a peer.
void build(World& world, const Agent& agent) {
  Accesses access = generic(world, agent);
  const Tag tag = make_tag(world.generation(agent), 0, 0);
  const bool forward = world.plan(agent).direction == Direction::kForward;
  for (std::int64_t peer = 0; peer < world.num_ranks(); ++peer) {
    access.read(agent.rank, PlaceKind::kHeader, peer, 0, tag);
    access.read(peer, PlaceKind::kClassCounts, 0, 0, tag);
    access.read(peer, forward ? PlaceKind::kRouteOrder : PlaceKind::kWeights, 0, 0, tag);
  }
  access.write(agent.rank, PlaceKind::kTables, 0, 0, tag);
  access.write(agent.rank, PlaceKind::kRowTable, 0, 0, tag);
}

// -- load -------------------------------------------------------------------------------------------------------------

void read_pieces(World& world, const Agent& agent, Accesses& access, PlaceKind kind, std::int64_t tile,
                 std::int64_t row) {
  const Plan& plan = world.plan(agent);
  for (std::int64_t p = 0; p < filled_pieces(plan.tables.tiles[tile], plan.tiling); ++p) {
    access.read(agent.rank, kind, row, p, tile_tag(world, agent, tile, p));
  }
}

// A weight gradient sums over the rows of whole tiles, also over those behind the last: they must be there, as zeros.
void read_whole_tile(World& world, const Agent& agent, Accesses& access, PlaceKind kind, std::int64_t tile) {
  for (std::int64_t p = 0; p < pieces_of_tile(world.config.tiling); ++p) {
    access.read(agent.rank, kind, tile, p, tile_tag(world, agent, tile, p));
  }
}

// What all column tiles of `writer` have stored of a row tile.
void read_columns(World& world, const Agent& agent, Accesses& access, PlaceKind kind, TaskKind writer,
                  std::int64_t tile, std::int64_t row) {
  const std::int64_t columns = world.plan(agent).columns(writer);
  for (std::int64_t c = 0; c < columns; ++c) access.read(agent.rank, kind, row, c, tile_tag(world, agent, tile, c));
}

// Columns of one tile in units of kPartialColumns, of which tiles of every width are whole numbers.
struct Units {
  std::int64_t begin;
  std::int64_t end;
};
Units units_of(std::int64_t column, std::int64_t tile_columns, const Problem& p) {
  const std::int64_t each = tile_columns / kPartialColumns;
  const std::int64_t all = ceil_div(p.width, kPartialColumns);
  return {column * each, (column + 1) * each < all ? (column + 1) * each : all};
}

// Of a unit of recomputed h, where dh will be.
Tag h_tag(World& world, const Agent& agent, std::int64_t tile, std::int64_t unit) {
  return tile_tag(world, agent, tile, unit + (1 << 19));
}

void read_dh(World& world, const Agent& agent, Accesses& access, std::int64_t tile) {
  for (std::int64_t u = 0; u < ceil_div(world.config.problem.width, kPartialColumns); ++u) {
    access.read(agent.rank, PlaceKind::kDh, tile, u, tile_tag(world, agent, tile, u));
  }
}

// TMA loads; descriptors and coordinates come from the tables by the generic proxy.
void issue_loads(World& world, Agent& agent) {
  Accesses tables = generic(world, agent);
  read_tables(world, agent, tables);
  const Plan& plan = world.plan(agent);
  const Task& task = plan.tasks[agent.ticket];
  const std::int64_t tile = plan.work(task, agent.block % 2).tile;
  Accesses access(world, agent, true, {world.first_strand(agent), ++agent.first_strand_epoch});
  switch (task.kind) {
    case TaskKind::kGateUp:
      if (plan.direction == Direction::kBackward) {
        read_pieces(world, agent, access, PlaceKind::kXRows, tile, tile);
      } else {
        read_pieces(world, agent, access, PlaceKind::kXRing, tile, tile % plan.schedule.x_slots);
      }
      break;
    case TaskKind::kDown:
      read_columns(world, agent, access, PlaceKind::kARing, TaskKind::kGateUp, tile, tile % plan.schedule.a_slots);
      break;
    case TaskKind::kDownDgrad:
      read_pieces(world, agent, access, PlaceKind::kDyRows, tile, tile);
      break;
    case TaskKind::kGateUpDgrad:
      read_dh(world, agent, access, tile);
      break;
    case TaskKind::kWgradDown:
    case TaskKind::kWgradGateUp:
      for (std::int64_t t = plan.tables.expert_tiles[task.expert]; t < plan.tables.expert_tiles[task.expert + 1]; ++t) {
        const bool down = task.kind == TaskKind::kWgradDown;
        read_whole_tile(world, agent, access, down ? PlaceKind::kDyRows : PlaceKind::kXRows, t);
        if (down) read_columns(world, agent, access, PlaceKind::kScaledA, TaskKind::kDownDgrad, t, t);
        if (!down) read_dh(world, agent, access, t);
      }
      break;
    default:
      break;
  }
}

// -- compute ----------------------------------------------------------------------------------------------------------

// Rows of a tile, or their dS, to where their tokens live.
void store_home(World& world, const Agent& agent, Accesses& access, PlaceKind kind, std::int64_t tile,
                std::int64_t column) {
  const RankLaunch& side = world.side(agent);
  const std::vector<RankLaunch>& ranks = world.launch(agent).ranks;
  const RowTile& rows = side.plan().tables.tiles[tile];
  const std::int64_t expert = global_expert(side.plan(), rows.expert);
  read_row_table(world, agent, access);
  for (std::int64_t row = rows.row_begin; row < rows.row_begin + rows.rows; ++row) {
    const std::int64_t home = side.sources[static_cast<std::size_t>(row)].rank;
    access.write(home, kind, side.route(row, ranks), column, make_tag(world.generation(agent), expert, column));
  }
}

// h, or the a of the forward.
void store_gate_up(World& world, const Agent& agent, Accesses& access, const BlockWork& work) {
  const Plan& plan = world.plan(agent);
  if (plan.direction == Direction::kForward) {
    if (work.tile >= plan.schedule.a_slots) ++world.stats.a_reuses;
    access.write(agent.rank, PlaceKind::kARing, work.tile % plan.schedule.a_slots, work.column,
                 tile_tag(world, agent, work.tile, work.column));
    return;
  }
  const Units units = units_of(work.column, plan.tiling.act_columns, plan.problem);
  for (std::int64_t u = units.begin; u < units.end; ++u) {
    access.write(agent.rank, PlaceKind::kDh, work.tile, u, h_tag(world, agent, work.tile, u));
  }
}

void down_dgrad(World& world, const Agent& agent, Accesses& access, const BlockWork& work) {
  const Plan& plan = world.plan(agent);
  read_row_weights(world, agent, access);
  const Units units = units_of(work.column, plan.tiling.dgrad_columns, plan.problem);
  for (std::int64_t u = units.begin; u < units.end; ++u) {
    if (plan.needs.recomputes()) {
      access.read(agent.rank, PlaceKind::kDh, work.tile, u, h_tag(world, agent, work.tile, u));
    }
    access.write(agent.rank, PlaceKind::kDh, work.tile, u, tile_tag(world, agent, work.tile, u));
  }
  for (const PlaceKind kind : {PlaceKind::kScaledA, PlaceKind::kPartials}) {
    access.write(agent.rank, kind, work.tile, work.column, tile_tag(world, agent, work.tile, work.column));
  }
}

void compute(World& world, const Agent& agent) {
  Accesses access = generic(world, agent);
  read_tables(world, agent, access);
  const Plan& plan = world.plan(agent);
  const Task& task = plan.tasks[agent.ticket];
  const BlockWork work = plan.work(task, agent.block % 2);
  if (!work.valid) return;
  switch (task.kind) {
    case TaskKind::kGateUp:
      store_gate_up(world, agent, access, work);
      break;
    case TaskKind::kDown:
    case TaskKind::kGateUpDgrad:
      store_home(world, agent, access, PlaceKind::kHomeRows, work.tile, work.column);
      break;
    case TaskKind::kDownDgrad:
      down_dgrad(world, agent, access, work);
      break;
    case TaskKind::kRouteGrad:
      read_columns(world, agent, access, PlaceKind::kPartials, TaskKind::kDownDgrad, work.tile, work.tile);
      read_pieces(world, agent, access, PlaceKind::kDyRows, work.tile, work.tile);  // for the bias in dS
      store_home(world, agent, access, PlaceKind::kHomeGrads, work.tile, 0);
      break;
    case TaskKind::kBiasDown:
    case TaskKind::kBiasGateUp:
      if (task.kind == TaskKind::kBiasDown) read_row_weights(world, agent, access);
      for (std::int64_t t = plan.tables.expert_tiles[task.expert]; t < plan.tables.expert_tiles[task.expert + 1]; ++t) {
        if (task.kind == TaskKind::kBiasDown) read_pieces(world, agent, access, PlaceKind::kDyRows, t, t);
        if (task.kind == TaskKind::kBiasGateUp) read_dh(world, agent, access, t);
      }
      break;
    default:
      break;
  }
}

// -- pull -------------------------------------------------------------------------------------------------------------

// The rows' tokens, by bulk copies into staging. Where each lies is in the row table.
void pull_rows(World& world, Agent& agent) {
  const RankLaunch& side = world.side(agent);
  const Plan& plan = side.plan();
  const PullTicket pull = plan.pull_task(agent.ticket);
  const RowTile& tile = plan.tables.tiles[pull.tile];
  const std::int64_t begin = tile.row_begin + pull.piece * plan.tiling.piece_rows;
  const std::int64_t end = begin + rows_of_piece(tile, pull.piece, plan.tiling);
  const Tag tag = make_tag(world.generation(agent), 0, 0);
  Accesses tables = generic(world, agent);
  Accesses rows(world, agent, true, {world.first_strand(agent), ++agent.first_strand_epoch});
  read_tables(world, agent, tables);
  read_row_table(world, agent, tables);
  std::vector<bool> seen(static_cast<std::size_t>(world.num_ranks()), false);
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t home = side.sources[static_cast<std::size_t>(row)].rank;
    if (seen[static_cast<std::size_t>(home)]) continue;
    seen[static_cast<std::size_t>(home)] = true;
    rows.read(home, PlaceKind::kTokens, pull.source, 0, tag);
  }
}

// From staging to the ring or the row buffers, by bulk copies. In backward the last piece of a tile also clears the
// rows behind it, see read_whole_tile; nothing else waits for those.
void place_rows(World& world, Agent& agent) {
  const Plan& plan = world.plan(agent);
  const PullTicket pull = plan.pull_task(agent.ticket);
  Accesses rows(world, agent, true, {world.second_strand(agent), ++agent.second_strand_epoch});
  if (plan.direction == Direction::kForward) {
    if (pull.tile >= plan.schedule.x_slots) ++world.stats.x_reuses;
    rows.write(agent.rank, PlaceKind::kXRing, pull.tile % plan.schedule.x_slots, pull.piece,
               tile_tag(world, agent, pull.tile, pull.piece));
    return;
  }
  const bool last = pull.piece + 1 == filled_pieces(plan.tables.tiles[pull.tile], plan.tiling);
  for (std::int64_t p = pull.piece; p < (last ? pieces_of_tile(plan.tiling) : pull.piece + 1); ++p) {
    rows.write(agent.rank, pull.source == 0 ? PlaceKind::kDyRows : PlaceKind::kXRows, pull.tile, p,
               tile_tag(world, agent, pull.tile, p));
  }
}

// Every row of a token must have come from the expert that its route names, in this launch. Weights are those of this
// rank's own tokens; rows of dx are summed without.
void combine(World& world, const Agent& agent) {
  const RankLaunch& side = world.side(agent);
  const Plan& plan = side.plan();
  const std::int64_t top_k = plan.problem.top_k;
  const bool forward = plan.direction == Direction::kForward;
  Accesses access = generic(world, agent);
  read_tables(world, agent, access);
  if (forward) access.read(agent.rank, PlaceKind::kWeights, 0, 0, make_tag(world.generation(agent), 0, 0));
  const std::int64_t begin = plan.pull_task(agent.ticket).tile * plan.tiling.combine_tokens * top_k;
  const std::int64_t last = begin + plan.tiling.combine_tokens * top_k;
  const std::int64_t end = last < plan.tokens * top_k ? last : plan.tokens * top_k;
  for (std::int64_t route = begin; route < end; ++route) {
    const std::int64_t expert = side.experts[static_cast<std::size_t>(route)];
    if (expert < 0) continue;
    for (std::int64_t c = 0; (forward || plan.needs.x) && c < plan.columns(TaskKind::kDown); ++c) {
      access.read(agent.rank, PlaceKind::kHomeRows, route, c, make_tag(world.generation(agent), expert, c));
    }
    if (!forward && plan.needs.topk_weights) {
      access.read(agent.rank, PlaceKind::kHomeGrads, route, 0, make_tag(world.generation(agent), expert, 0));
    }
  }
}

}  // namespace

void do_accesses(World& world, Agent& agent, const Op& op) {
  switch (op.kind) {
    case OpKind::kPrologue:
      return write_inputs(world, agent);
    case OpKind::kPublish:
      return publish(world, agent);
    case OpKind::kBuild:
      return build(world, agent);
    case OpKind::kIssueLoads:
      return issue_loads(world, agent);
    case OpKind::kCompute:
      return compute(world, agent);
    case OpKind::kPullRows:
      return pull_rows(world, agent);
    case OpKind::kPlaceRows:
      return place_rows(world, agent);
    case OpKind::kCombine:
      return combine(world, agent);
    default:
      return;
  }
}

}  // namespace moe::proof
