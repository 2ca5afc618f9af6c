// Runs one interleaving. Owns the meaning of the protocol's steps - what a raise publishes and a wait takes over, with
// the fences that edges.h gives them - and the checks when a launch ends. See explorer.h.
#include "proof/explorer.h"

#include <utility>

#include "proof/accesses.h"
#include "proof/programs.h"
#include "proof/totals.h"

namespace moe::proof {
namespace {

class Explorer {
 public:
  Explorer(const RunOptions& options, RunLog* log)
      : options_(options),
        world_(options.config, options.explore, options.launches, options.seed, options.fault),
        scheduler_(options.policy, world_.agents, world_.num_ranks(), options.seed),
        log_(log),
        released_(world_.num_strands()),
        places_(world_.agents.size(), -1) {
    Random random(options.seed ^ 0xA0761D6478BD642Fu);
    raises_before_drop_ = random.below(3);
    claimed_ = [this](const Agent& agent, std::int64_t stream, std::int64_t ticket) {
      const bool compute = stream == 0;
      const Plan& plan = world_.plan(agent);
      if (ticket >= (compute ? plan.num_tasks : plan.num_pull_tickets())) return;
      write_log(agent, LogEvent::kClaim, ticket, stream, ticket, 0);
    };
  }

  Stats run() {
    for (const Agent& agent : world_.agents) {
      if (!agent.finished) wake(agent.id);
    }
    while (!able_.empty()) {
      if (++world_.stats.steps > options_.max_steps) {
        throw Violation("steps: expected the end within " + std::to_string(options_.max_steps) + " steps, " +
                        world_.shape_text());
      }
      Agent& agent = world_.agents[static_cast<std::size_t>(scheduler_.pick(able_))];
      if (!step(agent)) {
        --world_.stats.steps;
        sleep(agent.id);
      } else if (agent.finished) {
        sleep(agent.id);
        leave(agent);
      }
    }
    for (const Agent& agent : world_.agents) {
      if (!agent.finished) throw Violation(deadlock_text());
    }
    return world_.stats;
  }

 private:
  // -- who can step ---------------------------------------------------------------------------------------------------

  void wake(std::int32_t id) {
    std::int32_t& place = places_[static_cast<std::size_t>(id)];
    if (place >= 0) return;
    place = static_cast<std::int32_t>(able_.size());
    able_.push_back(id);
  }
  void sleep(std::int32_t id) {
    const auto place = static_cast<std::size_t>(std::exchange(places_[static_cast<std::size_t>(id)], -1));
    able_[place] = able_.back();
    if (able_[place] != id) places_[static_cast<std::size_t>(able_[place])] = static_cast<std::int32_t>(place);
    able_.pop_back();
  }
  void wake_all(std::vector<std::int32_t>& waiting) {
    for (const std::int32_t id : waiting) wake(id);
    waiting.clear();
  }
  void leave(const Agent& agent) {
    if (agent.actor == Actor::kStream) return;
    if (--world_.rank(agent).running == 0) wake(world_.agent_id(agent.rank, Actor::kStream, 0));
  }

  // -- one step: false where the agent must wait; then nothing has changed --------------------------------------------

  bool step(Agent& agent) {
    if (agent.next == agent.ops.size()) {
      agent.ops.clear();
      agent.next = 0;
      if (agent.block >= 0 && agent.actor != Actor::kPlan && agent.position >= 0) check_planned(agent, "a ticket");
      const bool able = refill(world_, agent, claimed_);
      if (!able) world_.cluster(agent).waiting.push_back(agent.id);
      return able;
    }
    const Op op = agent.ops[agent.next];
    Cluster* cluster = agent.block >= 0 && agent.actor != Actor::kPlan ? &world_.cluster(agent) : nullptr;
    const auto block = static_cast<std::size_t>(agent.block >= 0 ? agent.block % 2 : 0);
    switch (op.kind) {
      case OpKind::kAcquire:
        if (!acquire(agent, op)) return false;
        break;
      case OpKind::kRelease:
        release(agent, op);
        break;
      case OpKind::kStart:
        start(agent);
        break;
      case OpKind::kEnd:
        if (world_.rank(agent).running > 0) return false;
        end(agent);
        break;
      case OpKind::kBuild:
        zero_counters(agent);
        do_accesses(world_, agent, op);
        break;
      case OpKind::kIssueLoads: {
        do_accesses(world_, agent, op);
        Arrival& arrival = arrival_at(*cluster, block, agent.position);
        arrival.clock = agent.clock();
        arrival.loads = {world_.first_strand(agent), agent.first_strand_epoch};
        agent.clock().tick(agent.strand);  // the barrier's arrival releases
        break;
      }
      case OpKind::kLandLoads:
        cluster->loaded[block] = ++agent.position;
        wake_all(cluster->waiting);
        break;
      case OpKind::kJoinLoads:
        if (cluster->loaded[0] <= agent.position || cluster->loaded[1] <= agent.position) {
          cluster->waiting.push_back(agent.id);
          return false;
        }
        join_loads(agent, *cluster, block);
        break;
      case OpKind::kFinishTask:
        fold(agent);
        count_computed(agent);
        cluster->computed[block] = ++agent.position;
        wake_all(cluster->waiting);
        break;
      case OpKind::kPlaceRows:
        do_accesses(world_, agent, op);
        agent.in_flight.push_back(agent.ticket);
        ++world_.stats.pieces;
        if (static_cast<std::int64_t>(agent.in_flight.size()) >= world_.options.pull_batch) flush(agent, 1);
        break;
      case OpKind::kCompletePulls:
        agent.pending.push_back({{world_.first_strand(agent), agent.first_strand_epoch}, kLoadsDone});
        agent.pending.push_back({{world_.second_strand(agent), agent.second_strand_epoch}, kBulkWait});
        break;
      case OpKind::kFinishPulls:
        fold(agent);
        break;
      case OpKind::kCombine:
        do_accesses(world_, agent, op);
        ++world_.rank(agent).pulled[static_cast<std::size_t>(op.ticket)];
        ++world_.stats.combines;
        break;
      default:
        do_accesses(world_, agent, op);
    }
    ++agent.next;
    return true;
  }

  Arrival& arrival_at(Cluster& cluster, std::size_t block, std::int64_t position) {
    std::vector<Arrival>& arrivals = cluster.arrivals[block];
    return arrivals[static_cast<std::size_t>(position) % arrivals.size()];
  }

  // Both blocks' copies have landed in this block's shared memory; the knowledge of its own load role came with the
  // barrier.
  void join_loads(Agent& agent, Cluster& cluster, std::size_t block) {
    agent.clock().merge(arrival_at(cluster, block, agent.position).clock);
    for (std::size_t b = 0; b < 2; ++b) {
      agent.pending.push_back({arrival_at(cluster, b, agent.position).loads, kLoadsDone});
    }
  }

  void flush(Agent& agent, std::size_t after) {
    const std::vector<Op> steps = flush_steps(world_, agent);
    agent.ops.insert(agent.ops.begin() + static_cast<std::ptrdiff_t>(agent.next + after), steps.begin(), steps.end());
  }

  void fold(Agent& agent) {
    for (const Pending& pending : agent.pending) agent.clock().note(pending.stamp);
    agent.pending.clear();
  }

  // -- the protocol ---------------------------------------------------------------------------------------------------

  // Tickets, tables and counters are touched only after the plan task has made or zeroed them for this launch.
  void check_planned(const Agent& agent, const char* what) {
    const Location& tables = world_.grid(agent.rank, PlaceKind::kTables).at(0, 0);
    if (tables.tag == make_tag(world_.generation(agent), 0, 0) && agent.knowledge.ordered(tables.written, false))
      return;
    throw Violation("race: rank " + std::to_string(agent.rank) + " block " + std::to_string(agent.block) + " " +
                    kRoleNames[static_cast<std::size_t>(agent.actor)] + " (launch " +
                    std::to_string(world_.generation(agent)) + ") touches " + what +
                    ", which is not ordered after the plan task has set it up");
  }

  bool acquire(Agent& agent, const Op& op) {
    Cell& cell = world_.cell(op.owner, op.counter, op.index);
    if (cell.value < op.value) {
      // A pulling warp completes and raises what it has in flight before it waits.
      if (!agent.in_flight.empty() && !world_.fault.is(FaultKind::kPullWithoutFlush)) {
        flush(agent, 0);
        --agent.next;  // step() moves on to the first of the steps put in
        return true;
      }
      cell.waiting.push_back(agent.id);
      return false;
    }
    const Edge* edge = world_.protocol.edge(op.counter, agent.role());
    if (edge == nullptr)
      throw Violation("edge: " + world_.who(agent) + " waits for " + name(op.counter) + " without one");
    if (!counter_is_flag(op.counter)) check_planned(agent, kCounterNames[static_cast<std::size_t>(op.counter)]);
    const bool reaches = (cell.system_scope && edge->scope == Scope::kSystem) || cell.raiser == agent.rank;
    if (cell.touched && reaches) agent.clock().merge(cell.clock);
    if ((edge->waiter_fences & kProxyFence) != 0) agent.knowledge.fence();
    write_log(agent, LogEvent::kWait, op.ticket, static_cast<std::int64_t>(op.counter), op.index, cell.value);
    return true;
  }

  void release(Agent& agent, const Op& op) {
    if (world_.fault.is(FaultKind::kDropRaise) && world_.fault.hits(op.counter) && raises_before_drop_-- == 0) return;
    const Role role = agent.role();
    if (!world_.protocol.raises(op.counter, role)) {
      throw Violation("edge: " + world_.who(agent) + " raises " + name(op.counter) + " without one");
    }
    if (!counter_is_flag(op.counter)) check_planned(agent, kCounterNames[static_cast<std::size_t>(op.counter)]);
    // Fences stand for this raise alone: a kernel may raise by several threads at once.
    const std::int32_t fences = world_.protocol.raise_fences(op.counter, role);
    released_ = agent.clock();
    for (const Pending& pending : agent.pending) {
      if ((pending.fence & fences) != 0) released_.note(pending.stamp);
    }
    if ((fences & kProxyFence) != 0) released_.fence_writes(agent.strand);
    agent.clock().tick(agent.strand);

    Cell& cell = world_.cell(op.owner, op.counter, op.index);
    cell.system_scope = world_.protocol.raises_at_system_scope(op.counter, role);
    cell.raiser = agent.rank;
    cell.touched = true;
    if (counter_is_flag(op.counter)) {
      cell.value = op.value;
      cell.clock = released_;
    } else {
      cell.value += op.value;
      cell.clock.merge(released_);
      const std::int64_t total = expected_total(world_.plan(agent), op.counter, op.index);
      if (cell.value > total) {
        throw Violation("counter: " + world_.who(agent) + " raises " +
                        world_.cell_text(op.owner, op.counter, op.index) + " to " + std::to_string(cell.value) +
                        ", above its total " + std::to_string(total));
      }
    }
    const std::int64_t logged = counter_crosses_ranks(op.counter) ? op.owner : op.index;
    write_log(agent, LogEvent::kRaise, op.ticket, static_cast<std::int64_t>(op.counter), logged, op.value);
    wake_all(cell.waiting);
  }

  // -- launches -------------------------------------------------------------------------------------------------------

  // All agents of the rank begin, knowing what the stream knows: a kernel boundary orders everything, proxies too.
  void start(Agent& stream) {
    RankState& rank = world_.rank(stream);
    ++rank.launch;
    rank.running = 1 + 3 * world_.num_blocks();
    for (Cluster& cluster : rank.clusters) {
      cluster.tickets.clear();
      cluster.loaded = {0, 0};
      cluster.computed = {0, 0};
    }
    for (std::int64_t i = 1; i <= rank.running; ++i) {
      Agent& agent = world_.agents[static_cast<std::size_t>(stream.id + i)];
      agent.knowledge = {stream.clock(), stream.clock()};
      agent.clock().tick(agent.strand);
      agent.position = agent.actor == Actor::kPlan ? 0 : -1;
      agent.ticket = -1;
      agent.finished = false;
      wake(agent.id);
    }
    stream.clock().tick(stream.strand);
    start_log(stream);
  }

  void end(Agent& stream) {
    check_totals(stream);
    const std::int64_t agents = 1 + 3 * world_.num_blocks();
    for (std::int64_t i = 1; i <= agents; ++i) {
      const Agent& agent = world_.agents[static_cast<std::size_t>(stream.id + i)];
      stream.clock().merge(agent.clock());
      if (agent.first_strand_epoch > 0) stream.clock().note({world_.first_strand(agent), agent.first_strand_epoch});
      if (agent.second_strand_epoch > 0) stream.clock().note({world_.second_strand(agent), agent.second_strand_epoch});
    }
    ++world_.stats.launches;
  }

  void zero_counters(const Agent& plan) {
    RankState& rank = world_.rank(plan);
    for (std::size_t c = 0; c < rank.cells.size(); ++c) {
      if (counter_is_flag(static_cast<Counter>(c))) continue;
      for (Cell& cell : rank.cells[c]) {
        cell.value = 0;
        if (std::exchange(cell.touched, false)) cell.clock.clear();
      }
    }
    rank.compute_tickets = 0;
    rank.pull_tickets = 0;
    rank.computed.assign(static_cast<std::size_t>(2 * world_.plan(plan).num_tasks), 0);
    rank.pulled.assign(static_cast<std::size_t>(world_.plan(plan).num_pull_tickets()), 0);
  }

  void count_computed(const Agent& agent) {
    ++world_.rank(agent).computed[static_cast<std::size_t>(2 * agent.ticket + agent.block % 2)];
    world_.stats.tasks += agent.block % 2 == 0 ? 1 : 0;
  }

  void check_totals(const Agent& stream) {
    const RankState& rank = world_.rank(stream);
    const std::string where =
        " of rank " + std::to_string(stream.rank) + ", launch " + std::to_string(world_.generation(stream));
    for (std::size_t i = 0; i < rank.computed.size(); ++i) {
      if (rank.computed[i] == 1) continue;
      throw Violation("task: ticket " + std::to_string(i / 2) + " block " + std::to_string(i % 2) + where + " ran " +
                      std::to_string(rank.computed[i]) + " times");
    }
    for (std::size_t i = 0; i < rank.pulled.size(); ++i) {
      if (rank.pulled[i] == 1) continue;
      throw Violation("task: pull ticket " + std::to_string(i) + where + " ran " + std::to_string(rank.pulled[i]) +
                      " times");
    }
    const Plan& plan = world_.plan(stream);
    for (std::size_t c = 0; c < rank.cells.size(); ++c) {
      const auto counter = static_cast<Counter>(c);
      if (counter_is_flag(counter)) continue;
      for (std::size_t i = 0; i < rank.cells[c].size(); ++i) {
        const std::int64_t total = expected_total(plan, counter, static_cast<std::int64_t>(i));
        if (rank.cells[c][i].value == total) continue;
        throw Violation("counter: " + name(counter) + "[" + std::to_string(i) + "]" + where + " ends at " +
                        std::to_string(rank.cells[c][i].value) + ", expected " + std::to_string(total));
      }
    }
  }

  std::string deadlock_text() {
    std::string text = "deadlock after " + std::to_string(world_.stats.steps) + " steps, " + world_.shape_text() + ":";
    std::int64_t listed = 0;
    for (const Agent& agent : world_.agents) {
      if (agent.finished || agent.next >= agent.ops.size()) continue;
      const Op& op = agent.ops[agent.next];
      if (op.kind != OpKind::kAcquire) continue;
      if (++listed > kListedAgents) return text + " ...";
      text += "\n  " + world_.who(agent) + " waits for " + world_.cell_text(op.owner, op.counter, op.index) +
              " >= " + std::to_string(op.value) + ", which is " +
              std::to_string(world_.cell(op.owner, op.counter, op.index).value);
    }
    return text;
  }

  // -- the log --------------------------------------------------------------------------------------------------------

  bool logs(const Agent& agent) {
    return log_ != nullptr && agent.rank == options_.log_rank && world_.rank(agent).launch == options_.log_launch;
  }

  void write_log(const Agent& agent, LogEvent event, std::int64_t ticket, std::int64_t counter, std::int64_t index,
                 std::int64_t value) {
    if (!logs(agent)) return;
    log_->records.push_back({static_cast<std::int32_t>(agent.block), static_cast<std::int32_t>(agent.actor),
                             static_cast<std::int32_t>(event), static_cast<std::int32_t>(ticket),
                             static_cast<std::int32_t>(counter), static_cast<std::int32_t>(index), value,
                             world_.stats.steps});
  }

  void start_log(const Agent& stream) {
    if (!logs(stream)) return;
    const RankLaunch& side = world_.side(stream);
    log_->config = {side.plan().problem, side.plan().tiling, side.plan().schedule};
    log_->expert_offsets = side.owned.expert_offsets;
    log_->direction = side.plan().direction;
    log_->needs = side.plan().needs;
    log_->tokens = side.plan().tokens;
    log_->generation = side.plan().generation;
  }

  static constexpr std::int64_t kListedAgents = 8;

  const RunOptions options_;
  World world_;
  Scheduler scheduler_;
  RunLog* log_;
  Clock released_;
  ClaimListener claimed_;
  std::int64_t raises_before_drop_ = 0;
  std::vector<std::int32_t> able_;
  std::vector<std::int32_t> places_;  // in able_, or -1
};

}  // namespace

Stats explore(const RunOptions& options, RunLog* log) { return Explorer(options, log).run(); }

}  // namespace moe::proof
