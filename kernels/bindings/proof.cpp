// Registers the CPU kernels of torch.ops.moe.explore, explore_log, explore_faults and check_log, which tests call to
// explore the plan's protocol and to check logs of it. Part of libmoe_proof, which is built beside the package's
// library and not installed; schemas are defined by tests/proof/library.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "moe/plan/build.h"
#include "plan_arguments.h"
#include "proof/check_log.h"
#include "proof/explorer.h"

namespace moe {
namespace {

using proof::ExploreOptions;
using proof::kNumExploreOptions;
using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kLogColumns = 8;    // fields of LogRecord
constexpr std::int64_t kLaunchFields = 4;  // direction, needs, tokens, generation

ExploreOptions read_options(const char* op, const Tensor& options) {
  struct Field {
    const char* name;
    std::int64_t least;
    std::int64_t most;
  };
  constexpr std::int64_t kMany = 64;
  static constexpr Field kFields[kNumExploreOptions] = {{"clusters", 1, kMany},
                                                        {"load_ahead", 0, kMany},
                                                        {"pull_batch", 1, kMany},
                                                        {"x_spare", 0, kMany},
                                                        {"a_spare", 0, kMany},
                                                        {"directions", 0, 3},
                                                        {"needs", -1, (1 << kNumGradNeeds) - 1},
                                                        {"routing", -1, proof::kNumRoutings - 1},
                                                        {"tokens", -1, proof::kNumTokenCounts - 1}};
  check_vector(op, "options", options, kNumExploreOptions);
  const auto* values = options.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < kNumExploreOptions; ++i) {
    STD_TORCH_CHECK(values[i] >= kFields[i].least && values[i] <= kFields[i].most, "moe::", op, ": options: expected ",
                    kFields[i].name, " in [", kFields[i].least, ", ", kFields[i].most, "], got ", values[i]);
  }
  ExploreOptions read;
  std::memcpy(&read, values, sizeof(read));
  return read;
}

proof::RunOptions read_run(const char* op, const Tensor& config, const Tensor& options, std::int64_t seed,
                           std::int64_t launches, const std::string& scheduler, const std::string& fault) {
  proof::RunOptions run{};
  run.config = read_config(op, config);
  run.explore = read_options(op, options);
  run.seed = static_cast<std::uint64_t>(seed);
  const std::int64_t most = run.config.problem.num_ranks * run.config.problem.max_routes();
  STD_TORCH_CHECK(run.config.problem.row_capacity >= most, "moe::", op,
                  ": config: expected row_capacity >= num_ranks * max_tokens * top_k = ", most, ", got ",
                  run.config.problem.row_capacity);
  STD_TORCH_CHECK(launches >= 1 && launches <= 1000, "moe::", op, ": launches: expected 1 to 1000, got ", launches);
  run.launches = launches;
  const char* argument = "scheduler";
  try {
    run.policy = proof::parse_policy(scheduler);
    argument = "fault";
    run.fault = proof::parse_fault(fault);
  } catch (const std::invalid_argument& error) {
    STD_TORCH_CHECK(false, "moe::", op, ": ", argument, ": ", error.what());
  }
  return run;
}

proof::Stats run_explorer(const char* op, const proof::RunOptions& run, proof::RunLog* log) {
  try {
    return proof::explore(run, log);
  } catch (const std::invalid_argument& error) {
    STD_TORCH_CHECK(false, "moe::", op, ": fault: ", error.what());
  } catch (const proof::Violation& violation) {
    STD_TORCH_CHECK(false, "moe::", op, ": violation: ", violation.what());
  }
  return {};
}

// config [24] as plan_tables takes it, the rank unread; options [9] of ExploreOptions; slots of 0 are what the launches
// need at least, plus the spare ones. -> int64: steps, launches of all ranks, tasks, pieces, combines, accesses, row
// tiles, slots of both rings, pieces and activations that took over a slot.
Tensor explore(const Tensor& config, const Tensor& options, std::int64_t seed, std::int64_t launches,
               std::int64_t max_steps, const std::string& scheduler, const std::string& fault) {
  proof::RunOptions run = read_run("explore", config, options, seed, launches, scheduler, fault);
  STD_TORCH_CHECK(max_steps >= 1, "moe::explore: max_steps: expected 1 or more, got ", max_steps);
  run.max_steps = max_steps;
  const proof::Stats stats = run_explorer("explore", run, nullptr);
  return to_tensor(config,
                   {stats.steps, stats.launches, stats.tasks, stats.pieces, stats.combines, stats.accesses,
                    stats.row_tiles, stats.x_slots, stats.a_slots, stats.x_reuses, stats.a_reuses},
                   0);
}

// A run without fault, with the log of one rank and launch -> what check_log takes: records [N, 8], config [24], launch
// [4], expert_offsets [L + 1].
std::tuple<Tensor, Tensor, Tensor, Tensor> explore_log(const Tensor& config, const Tensor& options, std::int64_t seed,
                                                       std::int64_t launches, const std::string& scheduler,
                                                       std::int64_t launch, std::int64_t rank) {
  proof::RunOptions run = read_run("explore_log", config, options, seed, launches, scheduler, "none");
  STD_TORCH_CHECK(launch >= 0 && launch < launches, "moe::explore_log: launch: expected 0 to ", launches - 1, ", got ",
                  launch);
  STD_TORCH_CHECK(rank >= 0 && rank < run.config.problem.num_ranks, "moe::explore_log: rank: expected 0 to ",
                  run.config.problem.num_ranks - 1, ", got ", rank);
  run.max_steps = std::numeric_limits<std::int64_t>::max();
  run.log_launch = launch;
  run.log_rank = rank;
  proof::RunLog log;
  run_explorer("explore_log", run, &log);
  Numbers records;
  for (const LogRecord& r : log.records) {
    for (const std::int64_t field :
         {std::int64_t{r.block}, std::int64_t{r.role}, std::int64_t{r.event}, std::int64_t{r.task},
          std::int64_t{r.counter}, std::int64_t{r.index}, r.value, r.time}) {
      records.push_back(field);
    }
  }
  Numbers fields(static_cast<std::size_t>(kNumConfigFields));
  std::memcpy(fields.data(), &log.config, sizeof(log.config));
  const Numbers ran{static_cast<std::int64_t>(log.direction), mask_of_needs(log.needs), log.tokens, log.generation};
  return {to_tensor(config, records, kLogColumns), to_tensor(config, fields, 0), to_tensor(config, ran, 0),
          to_tensor(config, log.expert_offsets, 0)};
}

// Every fault that leaves out one thing of the dependency table, a line each. `like` gives the device.
std::string explore_faults(const Tensor& like) {
  static_cast<void>(like);
  std::string text;
  for (const std::string& fault : proof::table_faults()) text += fault + "\n";
  return text;
}

LogRecord read_record(std::int64_t row, const std::int64_t* fields) {
  for (std::int64_t i = 0; i < 6; ++i) {
    STD_TORCH_CHECK(fields[i] >= -1 && fields[i] <= kMaxIndex, "moe::check_log: records: expected fields in [-1, ",
                    kMaxIndex, "], got ", fields[i], " in row ", row);
  }
  const auto narrow = [&](std::int64_t i) { return static_cast<std::int32_t>(fields[i]); };
  return {narrow(0), narrow(1), narrow(2), narrow(3), narrow(4), narrow(5), fields[6], fields[7]};
}

Numbers read_offsets(const PlanConfig& config, const Tensor& expert_offsets) {
  const std::int64_t size = config.problem.local_experts() + 1;
  check_vector("check_log", "expert_offsets", expert_offsets, size);
  const auto* values = expert_offsets.const_data_ptr<std::int64_t>();
  for (std::int64_t e = 0; e < size; ++e) {
    const std::int64_t least = e == 0 ? 0 : values[e - 1];
    const std::int64_t most = e == 0 ? 0 : config.problem.row_capacity;
    STD_TORCH_CHECK(values[e] >= least && values[e] <= most, "moe::check_log: expert_offsets: expected ", least, " to ",
                    most, " for expert ", e, ", got ", values[e]);
  }
  return Numbers(values, values + size);
}

// records int64 [N, 8] of LogRecord; config [24] of the rank, its rings as they were; launch [4]: direction, mask of
// needs, tokens of the rank and generation; expert_offsets [L + 1]; num_combiners of proof/check_log.h. Returns why the
// log is rejected, or "".
std::string check_log(const Tensor& records, const Tensor& config, const Tensor& launch, const Tensor& expert_offsets,
                      std::int64_t num_blocks, std::int64_t num_combiners) {
  STD_TORCH_CHECK(records.dim() == 2 && records.size(1) == kLogColumns && records.scalar_type() == ScalarType::Long &&
                      records.is_contiguous(),
                  "moe::check_log: records: expected a contiguous int64 tensor of shape [N, ", kLogColumns, "], got ",
                  records.dim(), " dimension(s) of ", torch::headeronly::toString(records.scalar_type()));
  const PlanConfig read = read_config("check_log", config);
  check_vector("check_log", "launch", launch, kLaunchFields);
  const auto* ran = launch.const_data_ptr<std::int64_t>();
  STD_TORCH_CHECK(ran[0] == 0 || ran[0] == 1, "moe::check_log: launch: expected direction 0 or 1, got ", ran[0]);
  STD_TORCH_CHECK(ran[1] >= 0 && ran[1] < 1 << kNumGradNeeds, "moe::check_log: launch: expected needs of ",
                  kNumGradNeeds, " bits, got ", ran[1]);
  STD_TORCH_CHECK(ran[2] >= 0 && ran[2] <= read.problem.max_tokens, "moe::check_log: launch: expected tokens in [0, ",
                  read.problem.max_tokens, "], got ", ran[2]);
  const Numbers offsets = read_offsets(read, expert_offsets);
  STD_TORCH_CHECK(num_blocks >= 2 && num_blocks % 2 == 0 && num_blocks <= kMaxIndex,
                  "moe::check_log: num_blocks: expected an even number from 2 on, got ", num_blocks);
  STD_TORCH_CHECK(num_combiners >= 0 && num_combiners <= kMaxIndex - num_blocks,
                  "moe::check_log: num_combiners: expected 0 to ", kMaxIndex - num_blocks, ", got ", num_combiners);
  const GradNeeds needs = needs_of_mask(ran[1]);
  const OwnedPlan owned = build_plan(read, offsets.data(), ran[2], static_cast<Direction>(ran[0]), needs, ran[3]);
  std::vector<LogRecord> log;
  const auto* fields = records.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < records.size(0); ++row) log.push_back(read_record(row, fields + row * kLogColumns));
  return proof::check_log(owned.plan, num_blocks, num_combiners, log);
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CPU, m) {
  m.impl("explore", TORCH_BOX(&moe::explore));
  m.impl("explore_log", TORCH_BOX(&moe::explore_log));
  m.impl("explore_faults", TORCH_BOX(&moe::explore_faults));
  m.impl("check_log", TORCH_BOX(&moe::check_log));
}
