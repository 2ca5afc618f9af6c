// Checks a log against the plan. See check_log.h for what is accepted.
#include "proof/check_log.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "proof/names.h"
#include "proof/totals.h"

namespace moe::proof {
namespace {

// One wait or raise that an agent owes. Those of one `group` other than 0 may come in any order.
struct Due {
  LogEvent event;
  Counter counter;
  std::int64_t index;
  std::int64_t value;
  std::int64_t ticket;
  std::int64_t group;
};

struct Rejected : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void reject(std::int64_t record, const std::string& expected, const std::string& got) {
  throw Rejected("record " + std::to_string(record) + ": expected " + expected + ", got " + got);
}

std::string text(LogEvent event, Counter counter, std::int64_t index, std::int64_t ticket) {
  static constexpr const char* kEvents[] = {"a claim", "a wait for ", "a raise of "};
  return kEvents[static_cast<std::size_t>(event)] + name(counter) + "[" + std::to_string(index) + "] for ticket " +
         std::to_string(ticket);
}
std::string text(const LogRecord& r) {
  return text(static_cast<LogEvent>(r.event), static_cast<Counter>(r.counter), r.index, r.task) + " by block " +
         std::to_string(r.block) + " " + name(static_cast<Role>(r.role));
}

class LogCheck {
 public:
  LogCheck(const Plan& plan, std::int64_t num_blocks, std::int64_t num_combiners, const std::vector<LogRecord>& records)
      : plan_(plan), num_blocks_(num_blocks), num_combiners_(num_combiners), records_(records) {}

  void run() {
    check_fields();
    read_claims();
    for (const LogRecord& r : records_) agents_[{r.block, r.role}].push_back(&r);
    check_agent(0, Role::kPlan, plan_dues());
    for (std::int64_t block = 0; block < num_blocks_; ++block) {
      for (const Role role : {Role::kLoad, Role::kCompute}) check_agent(block, role, compute_dues(block, role));
      check_pull(block);
    }
    for (std::int64_t i = 0; i < num_combiners_; ++i) check_combiner(num_blocks_ + i);
    check_values();
    check_task_times();
  }

 private:
  std::int64_t at(const LogRecord& record) const { return &record - records_.data(); }
  static LogEvent event(const LogRecord& record) { return static_cast<LogEvent>(record.event); }
  bool compute_stream(const LogRecord& record) const {
    return record.role == static_cast<std::int32_t>(Role::kLoad) ||
           record.role == static_cast<std::int32_t>(Role::kCompute);
  }

  // -- single records -------------------------------------------------------------------------------------------------

  void check_fields() const {
    for (const LogRecord& r : records_) {
      const auto within = [&](const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
        if (value >= least && value < most) return;
        reject(at(r), std::string(field) + " in [" + std::to_string(least) + ", " + std::to_string(most) + ")",
               std::to_string(value));
      };
      within("event", r.event, 0, 3);
      within("role", r.role, 0, 4);
      const bool plan = r.role == static_cast<std::int32_t>(Role::kPlan);
      const bool pull = r.role == static_cast<std::int32_t>(Role::kPull);
      within("block", r.block, 0, plan ? 1 : pull ? num_blocks_ + num_combiners_ : num_blocks_);
      const bool claim = event(r) == LogEvent::kClaim;
      within("counter", r.counter, 0, claim ? 2 : kNumCounters);
      within("task", r.task, -1, compute_stream(r) ? plan_.num_tasks : plan ? 0 : plan_.num_pull_tickets());
      if (claim && (plan || (r.counter == 1) == compute_stream(r))) {
        reject(at(r), "a claim by a role of its stream", name(static_cast<Role>(r.role)));
      }
      if (claim && (r.task < 0 || r.index != r.task)) {
        reject(at(r), "a claim of ticket " + std::to_string(r.task), std::to_string(r.index));
      }
    }
  }

  void read_claims() {
    const std::int64_t sizes[2] = {plan_.num_tasks, plan_.num_pull_tickets()};
    for (std::size_t stream = 0; stream < 2; ++stream) {
      claims_[stream].assign(static_cast<std::size_t>(sizes[stream]), nullptr);
    }
    for (const LogRecord& r : records_) {
      if (event(r) != LogEvent::kClaim) continue;
      const LogRecord*& claim = claims_[static_cast<std::size_t>(r.counter)][static_cast<std::size_t>(r.index)];
      if (claim != nullptr) {
        reject(at(r), "each ticket claimed once", "ticket " + std::to_string(r.index) + " again");
      }
      claim = &r;
    }
    for (std::size_t stream = 0; stream < 2; ++stream) {
      for (std::size_t ticket = 0; ticket < claims_[stream].size(); ++ticket) {
        if (claims_[stream][ticket] != nullptr) continue;
        reject(-1,
               std::string("a claim of ") + (stream == 0 ? "compute" : "pull") + " ticket " + std::to_string(ticket),
               "none");
      }
    }
  }

  // -- what an agent owes ---------------------------------------------------------------------------------------------

  void add_flags(std::vector<Due>& dues, LogEvent event, Counter counter, std::int64_t ticket) {
    ++groups_;
    for (std::int64_t peer = 0; peer < plan_.problem.num_ranks; ++peer) {
      dues.push_back({event, counter, peer, plan_.generation, ticket, groups_});
    }
  }
  static void add_waits(std::vector<Due>& dues, const Waits& waits, std::int64_t ticket) {
    for (std::int64_t i = 0; i < waits.size; ++i) {
      dues.push_back({LogEvent::kWait, waits.items[i].counter, waits.items[i].index, waits.items[i].target, ticket, 0});
    }
  }
  static void add_raises(std::vector<Due>& dues, const Raises& raises, std::int64_t ticket) {
    for (std::int64_t i = 0; i < raises.size; ++i) {
      const Raise& raise = raises.items[i];
      dues.push_back({LogEvent::kRaise, raise.counter, raise.index, raise.amount, ticket, 0});
    }
  }
  Due start_due() const {
    const Wait wait = start_wait(plan_);
    return {LogEvent::kWait, wait.counter, wait.index, wait.target, -1, 0};
  }

  std::vector<Due> plan_dues() {
    std::vector<Due> dues;
    add_flags(dues, LogEvent::kRaise, flag_raise(plan_, TaskKind::kPlan).counter, -1);
    add_flags(dues, LogEvent::kWait, flag_wait(plan_, TaskKind::kPlan, 0).counter, -1);
    const Raise raise = start_raise(plan_);
    dues.push_back({LogEvent::kRaise, raise.counter, raise.index, raise.amount, -1, 0});
    return dues;
  }

  std::vector<Due> compute_dues(std::int64_t block, Role role) {
    std::vector<Due> dues{start_due()};
    for (std::int64_t ticket = 0; ticket < plan_.num_tasks; ++ticket) {
      if (claims_[0][static_cast<std::size_t>(ticket)]->block / 2 != block / 2) continue;
      const Task& task = plan_.tasks[ticket];
      const bool works = role == Role::kCompute && plan_.work(task, block % 2).valid;
      add_waits(dues, task_waits(plan_, task, block % 2, role), ticket);
      if (works && task.kind == TaskKind::kDrain) {
        add_flags(dues, LogEvent::kWait, flag_wait(plan_, task.kind, 0).counter, ticket);
      }
      if (works) add_raises(dues, task_raises(plan_, task, block % 2), ticket);
      if (works && task.kind == TaskKind::kClose) {
        add_flags(dues, LogEvent::kRaise, flag_raise(plan_, task.kind).counter, ticket);
      }
    }
    return dues;
  }

  // -- agents against what they owe -----------------------------------------------------------------------------------

  std::vector<const LogRecord*> records_of(std::int64_t block, Role role) const {
    const auto found = agents_.find({block, static_cast<std::int32_t>(role)});
    return found == agents_.end() ? std::vector<const LogRecord*>{} : found->second;
  }

  static bool pays(const LogRecord& r, const Due& due) {
    return event(r) == due.event && r.counter == static_cast<std::int32_t>(due.counter) && r.index == due.index &&
           r.task == due.ticket;
  }

  // Compares in order, but for groups; notes which due each record pays.
  void match(const std::vector<const LogRecord*>& own, std::vector<Due> dues) {
    for (std::size_t i = 0; i < dues.size(); ++i) {
      if (i >= own.size()) {
        reject(-1, text(dues[i].event, dues[i].counter, dues[i].index, dues[i].ticket),
               "the end of the agent's records");
      }
      std::size_t found = i;
      while (found < dues.size() && !pays(*own[i], dues[found]) && dues[found].group != 0 && found + 1 < dues.size() &&
             dues[found + 1].group == dues[i].group) {
        ++found;
      }
      if (!pays(*own[i], dues[found])) {
        reject(at(*own[i]), text(dues[i].event, dues[i].counter, dues[i].index, dues[i].ticket), text(*own[i]));
      }
      std::swap(dues[i], dues[found]);
      paid_[own[i]] = dues[i].value;
    }
    if (own.size() > dues.size())
      reject(at(*own[dues.size()]), "no further record of the agent", text(*own[dues.size()]));
  }

  void check_agent(std::int64_t block, Role role, const std::vector<Due>& dues) {
    std::vector<const LogRecord*> own = records_of(block, role);
    own.erase(std::remove_if(own.begin(), own.end(), [](const LogRecord* r) { return event(*r) == LogEvent::kClaim; }),
              own.end());
    match(own, dues);
  }

  // Pieces stay in flight while others are begun: waits and raises are each in order of tickets, a raise after the
  // claim and the waits of its ticket, and a combine after all raises.
  void check_pull(std::int64_t block) {
    std::vector<Due> waits{start_due()};
    std::vector<Due> raises;
    std::vector<const LogRecord*> waited;
    std::vector<const LogRecord*> raised;
    std::map<std::int64_t, const LogRecord*> last;  // claim or wait of each ticket
    bool combines = false;
    std::int64_t latest = -1;
    for (const LogRecord* r : records_of(block, Role::kPull)) {
      const bool raise = event(*r) == LogEvent::kRaise;
      if (event(*r) == LogEvent::kClaim) {
        if (r->task < latest) reject(at(*r), "tickets claimed in ascending order", std::to_string(r->task));
        latest = r->task;
        add_pull_dues(r->task, waits, raises);
      } else if (r->task >= 0 && last.count(r->task) == 0) {
        reject(at(*r), "the claim of ticket " + std::to_string(r->task) + " before", text(*r));
      } else {
        (raise ? raised : waited).push_back(r);
      }
      if (raise && r->task < 0) reject(at(*r), "a raise for a ticket", text(*r));
      const bool combine = r->task >= 0 && plan_.pull_task(r->task).kind == TaskKind::kCombine;
      combines = combines || (combine && event(*r) == LogEvent::kWait);
      if (raise && combines) reject(at(*r), "all pieces raised before a combine", text(*r));
      if (raise && r->time < last[r->task]->time) reject(at(*r), "a raise after the waits of its piece", text(*r));
      if (!raise) last[r->task] = r;
      if (event(*r) == LogEvent::kWait && r->task >= 0 && raised_tickets(raised, r->task)) {
        reject(at(*r), "no wait after the raises of its piece", text(*r));
      }
    }
    match(waited, waits);
    match(raised, raises);
  }

  // Claims combine tickets alone, in ascending order, and makes the waits of each before it claims the next. Its block
  // has waited for the plan.
  void check_combiner(std::int64_t agent) {
    const std::vector<const LogRecord*> own = records_of(agent, Role::kPull);
    if (own.empty()) return;
    const LogRecord* start = records_of(agent % num_blocks_, Role::kPull).front();
    std::vector<Due> dues;
    std::vector<Due> none;
    std::vector<const LogRecord*> rest;
    std::int64_t latest = -1;
    for (const LogRecord* r : own) {
      if (r->time < start->time) reject(at(*r), "the wait of its block for the plan before", text(*r));
      if (event(*r) != LogEvent::kClaim) {
        if (r->task != latest) reject(at(*r), "a record of ticket " + std::to_string(latest), text(*r));
        rest.push_back(r);
        continue;
      }
      if (plan_.pull_task(r->task).kind != TaskKind::kCombine) {
        reject(at(*r), "a combine ticket claimed by a combining agent", std::to_string(r->task));
      }
      if (r->task < latest) reject(at(*r), "tickets claimed in ascending order", std::to_string(r->task));
      latest = r->task;
      add_pull_dues(r->task, dues, none);
    }
    match(rest, dues);
  }

  static bool raised_tickets(const std::vector<const LogRecord*>& raised, std::int64_t ticket) {
    return std::any_of(raised.begin(), raised.end(), [&](const LogRecord* r) { return r->task == ticket; });
  }

  void add_pull_dues(std::int64_t ticket, std::vector<Due>& waits, std::vector<Due>& raises) {
    const PullTicket pull = plan_.pull_task(ticket);
    if (pull.kind == TaskKind::kCombine) {
      add_flags(waits, LogEvent::kWait, flag_wait(plan_, pull.kind, 0).counter, ticket);
      return;
    }
    add_waits(waits, piece_waits(plan_, pull), ticket);
    add_raises(raises, piece_raises(plan_, pull), ticket);
  }

  // -- values and time ------------------------------------------------------------------------------------------------

  void check_values() {
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<const LogRecord*>> raises;
    for (const LogRecord& r : records_) {
      if (event(r) == LogEvent::kRaise) raises[{r.counter, r.index}].push_back(&r);
    }
    for (const LogRecord& r : records_) {
      if (event(r) == LogEvent::kClaim) continue;
      const std::int64_t due = paid_.at(&r);
      const auto counter = static_cast<Counter>(r.counter);
      if (event(r) == LogEvent::kRaise) {
        if (r.value != due) reject(at(r), text(r) + " by " + std::to_string(due), std::to_string(r.value));
        continue;
      }
      const std::int64_t total = expected_total(plan_, counter, r.index);
      if (r.value < due || r.value > total) {
        reject(at(r), text(r) + " that sees " + std::to_string(due) + " to " + std::to_string(total),
               std::to_string(r.value));
      }
      // Peers' flags are raised in other ranks' logs.
      if (counter_crosses_ranks(counter) && r.index != plan_.problem.rank) continue;
      std::int64_t raised = 0;
      for (const LogRecord* raise : raises[{r.counter, r.index}]) {
        if (raise->time > r.time) continue;
        raised = counter_is_flag(counter) ? raise->value : raised + raise->value;
      }
      if (raised < r.value) {
        reject(at(r), text(r) + " that sees no more than the " + std::to_string(raised) + " raised by then",
               std::to_string(r.value));
      }
    }
  }

  // Claims come before all else of a ticket, and the raises of a task after the waits of both loads and the block's
  // own.
  void check_task_times() const {
    constexpr std::int64_t kAnyBlock = -1;
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> waited;  // by ticket and block
    for (const LogRecord& r : records_) {
      if (event(r) == LogEvent::kClaim || r.task < 0) continue;
      const LogRecord* claim = claims_[compute_stream(r) ? 0 : 1][static_cast<std::size_t>(r.task)];
      if (r.time < claim->time) reject(at(r), "the claim of its ticket before", text(r));
      if (event(r) != LogEvent::kWait || !compute_stream(r)) continue;
      const bool load = r.role == static_cast<std::int32_t>(Role::kLoad);
      std::int64_t& latest = waited[{r.task, load ? kAnyBlock : r.block}];
      latest = std::max(latest, r.time);
    }
    for (const LogRecord& r : records_) {
      if (event(r) != LogEvent::kRaise || !compute_stream(r)) continue;
      for (const std::int64_t block : {kAnyBlock, static_cast<std::int64_t>(r.block)}) {
        const auto latest = waited.find({r.task, block});
        if (latest != waited.end() && r.time < latest->second) {
          reject(at(r), "raises after the waits of their task", text(r));
        }
      }
    }
  }

  const Plan& plan_;
  const std::int64_t num_blocks_;
  const std::int64_t num_combiners_;
  const std::vector<LogRecord>& records_;
  std::map<std::pair<std::int64_t, std::int32_t>, std::vector<const LogRecord*>> agents_;  // by block and role
  std::vector<const LogRecord*> claims_[2];
  std::map<const LogRecord*, std::int64_t> paid_;  // value that each wait or raise owed
  std::int64_t groups_ = 0;
};

}  // namespace

std::string check_log(const Plan& plan, std::int64_t num_blocks, std::int64_t num_combiners,
                      const std::vector<LogRecord>& records) {
  try {
    LogCheck(plan, num_blocks, num_combiners, records).run();
  } catch (const Rejected& rejection) {
    return rejection.what();
  }
  return "";
}

}  // namespace moe::proof
