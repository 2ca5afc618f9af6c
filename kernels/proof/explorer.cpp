// Runs one interleaving. Owns the meaning of the protocol's steps - what a raise publishes and a wait takes over, with
// the fences that edges.h gives them - and the checks when a launch ends. See explorer.h.
#include "proof/explorer.h"

#include <utility>

#include "proof/accesses.h"
#include "proof/lifecycle.h"
#include "proof/programs.h"
#include "proof/protocol.h"

namespace moe::proof {
namespace {

class Explorer {
 public:
  Explorer(const RunOptions& options, RunLog* log)
      : options_(options),
        world_(options.config, options.explore, options.launches, options.seed, options.fault),
        scheduler_(options.policy, world_.agents, world_.num_ranks(), options.seed),
        log_(log),
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
    if (agent.next == agent.ops.size()) return take_work(agent);
    const Op op = agent.ops[agent.next];
    if (op.kind == OpKind::kAcquire && !is_met(world_, op)) {
      // A pulling warp completes and raises what it has in flight before it waits.
      const bool flushes = !agent.in_flight.empty() && !world_.fault.is(FaultKind::kPullWithoutFlush);
      if (flushes) insert_flush(agent, 0);
      if (!flushes) world_.cell(op.owner, op.counter, op.index).waiting.push_back(agent.id);
      return flushes;
    }
    if (op.kind == OpKind::kJoinLoads && !loads_landed(agent)) {
      world_.cluster(agent).waiting.push_back(agent.id);
      return false;
    }
    if (op.kind == OpKind::kEnd && world_.rank(agent).running > 0) return false;
    do_accesses(world_, agent, op);
    do_step(agent, op);
    ++agent.next;
    return true;
  }

  bool take_work(Agent& agent) {
    agent.ops.clear();
    agent.next = 0;
    if (agent.block >= 0 && agent.actor != Actor::kPlan && agent.position >= 0) {
      check_planned(world_, agent, "a ticket");
    }
    const bool able = refill(world_, agent, claimed_);
    if (!able) world_.cluster(agent).waiting.push_back(agent.id);
    return able;
  }

  // What a step does beside its accesses.
  void do_step(Agent& agent, const Op& op) {
    const auto block = static_cast<std::size_t>(agent.block % 2);
    switch (op.kind) {
      case OpKind::kAcquire:
        acquire(world_, agent, op);
        write_log(agent, LogEvent::kWait, op, world_.cell(op.owner, op.counter, op.index).value);
        break;
      case OpKind::kRelease:
        if (world_.fault.drops(op.counter) && raises_before_drop_-- == 0) break;
        release(world_, agent, op);
        write_log(agent, LogEvent::kRaise, op, op.value);
        wake_all(world_.cell(op.owner, op.counter, op.index).waiting);
        break;
      case OpKind::kStart:
        start_launch(world_, agent);
        for (std::int32_t i = 1; i <= world_.agents_per_launch(); ++i) wake(agent.id + i);
        start_log(agent);
        break;
      case OpKind::kEnd:
        end_launch(world_, agent);
        break;
      case OpKind::kBuild:
        zero_counters(world_, agent);
        break;
      case OpKind::kIssueLoads:
        arrive(agent);
        break;
      case OpKind::kLandLoads:
        world_.cluster(agent).loaded[block] = ++agent.position;
        wake_all(world_.cluster(agent).waiting);
        break;
      case OpKind::kJoinLoads:
        join_loads(agent);
        break;
      case OpKind::kFinishTask:
        fold(agent);
        ++world_.rank(agent).computed[static_cast<std::size_t>(2 * agent.ticket + agent.block % 2)];
        world_.stats.tasks += agent.block % 2 == 0 ? 1 : 0;
        world_.cluster(agent).computed[block] = ++agent.position;
        wake_all(world_.cluster(agent).waiting);
        break;
      case OpKind::kPlaceRows:
        agent.in_flight.push_back(agent.ticket);
        ++world_.stats.pieces;
        if (static_cast<std::int64_t>(agent.in_flight.size()) >= world_.options.pull_batch) insert_flush(agent, 1);
        break;
      case OpKind::kCompletePulls:
        agent.pending.push_back({{world_.first_strand(agent), agent.first_strand_epoch}, kLoadsDone});
        agent.pending.push_back({{world_.second_strand(agent), agent.second_strand_epoch}, kBulkWait});
        break;
      case OpKind::kFinishPulls:
        fold(agent);
        break;
      case OpKind::kCombine:
        ++world_.rank(agent).pulled[static_cast<std::size_t>(op.ticket)];
        ++world_.stats.combines;
        break;
      default:
        break;
    }
  }

  // -- between the roles of a block -----------------------------------------------------------------------------------

  Arrival& arrival_at(const Agent& agent, std::size_t block) {
    std::vector<Arrival>& arrivals = world_.cluster(agent).arrivals[block];
    return arrivals[static_cast<std::size_t>(agent.position) % arrivals.size()];
  }

  // Load arrives at the barrier of its block, which releases; its copies arrive later.
  void arrive(Agent& agent) {
    Arrival& arrival = arrival_at(agent, static_cast<std::size_t>(agent.block % 2));
    arrival.clock = agent.clock();
    arrival.loads = {world_.first_strand(agent), agent.first_strand_epoch};
    agent.clock().tick(agent.strand);
  }

  bool loads_landed(const Agent& agent) {
    const Cluster& cluster = world_.cluster(agent);
    return cluster.loaded[0] > agent.position && cluster.loaded[1] > agent.position;
  }

  // Both blocks' copies have landed in this block's shared memory; what its own load role knew came with the barrier.
  void join_loads(Agent& agent) {
    agent.clock().merge(arrival_at(agent, static_cast<std::size_t>(agent.block % 2)).clock);
    for (std::size_t b = 0; b < 2; ++b) agent.pending.push_back({arrival_at(agent, b).loads, kLoadsDone});
  }

  // Puts the completion and the raises of all pieces in flight `after` steps from here.
  void insert_flush(Agent& agent, std::size_t after) {
    const std::vector<Op> steps = flush_steps(world_, agent);
    agent.ops.insert(agent.ops.begin() + static_cast<std::ptrdiff_t>(agent.next + after), steps.begin(), steps.end());
  }

  void fold(Agent& agent) {
    for (const Pending& pending : agent.pending) agent.clock().note(pending.stamp);
    agent.pending.clear();
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

  // Raised flags of peers are logged with the rank that they are set on.
  void write_log(const Agent& agent, LogEvent event, const Op& op, std::int64_t value) {
    const bool set = event == LogEvent::kRaise && counter_crosses_ranks(op.counter);
    write_log(agent, event, op.ticket, static_cast<std::int64_t>(op.counter), set ? op.owner : op.index, value);
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
  ClaimListener claimed_;
  std::int64_t raises_before_drop_ = 0;
  std::vector<std::int32_t> able_;
  std::vector<std::int32_t> places_;  // in able_, or -1
};

}  // namespace

Stats explore(const RunOptions& options, RunLog* log) { return Explorer(options, log).run(); }

}  // namespace moe::proof
