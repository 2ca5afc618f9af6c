// Registers the CPU kernels of torch.ops.moe.plan_tables, plan_layout and plan_edges, which show plans to Python: to
// the simulator, to tests and to the documentation. Checks arguments, builds the plan with the headers of plan/ and
// copies it out as integers. Schemas and fakes live in src/moe_megakernel/plan_ops.py.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "moe/plan/build.h"
#include "moe/plan/layout.h"
#include "moe/plan/records.h"
#include "plan_arguments.h"

namespace moe {
namespace {

constexpr const char* kTables = "plan_tables";
constexpr std::int64_t kGeneration = 1;  // of the flags in the records

// See src/moe_megakernel/plan.py, PlanTables, for what each result holds.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_tables(
    const Tensor& class_counts, const Tensor& tokens, const Tensor& config, std::int64_t direction,
    std::int64_t needs) {
  const PlanConfig read = read_config(kTables, config);
  STD_TORCH_CHECK(direction == 0 || direction == 1,
                  "moe::plan_tables: direction: expected 0 (forward) or 1 (backward), got ", direction);
  STD_TORCH_CHECK(needs >= 0 && needs < 1 << kNumGradNeeds, "moe::plan_tables: needs: expected a mask of ",
                  kNumGradNeeds, " bits, got ", needs);
  const Numbers starts = token_starts(kTables, read, class_counts, tokens);
  const RankRoutes routes = rank_routes(class_counts, starts.data());
  check_capacity(kTables, read, routes);
  const Numbers offsets = offsets_of_experts(read, routes);
  const std::int64_t own_tokens = tokens.const_data_ptr<std::int64_t>()[read.problem.rank];
  const GradNeeds grads = needs_of_mask(needs);
  const OwnedPlan owned =
      build_plan(read, offsets.data(), own_tokens, static_cast<Direction>(direction), grads, kGeneration);
  const Plan& plan = owned.plan;
  if (plan.direction == Direction::kForward) {
    const std::string fault = ring_fault(read.schedule, owned.ring_minimum);
    STD_TORCH_CHECK(fault.empty(), "moe::plan_tables: config: ", fault);
  }

  std::vector<PullTicket> pulls;
  for (std::int64_t ticket = 0; ticket < plan.num_pull_tickets(); ++ticket) pulls.push_back(plan.pull_task(ticket));
  const Records records = record_plan(plan);
  const auto widen = [](const std::vector<std::int32_t>& v, std::int64_t n) {
    return Numbers(v.begin(), v.begin() + n);
  };
  return {
      to_tensor(tokens, owned.expert_offsets, 0),
      rows_to_tensor(tokens, owned.tiles.data(), plan.counts.tiles, kTileColumns, numbers_of_tile),
      rows_to_tensor(tokens, owned.segments.data(), plan.counts.segments, kSegmentColumns, numbers_of_segment),
      to_tensor(tokens, widen(owned.minibatch_ends, plan.counts.minibatches), 0),
      to_tensor(tokens, widen(owned.expert_tiles, read.problem.local_experts() + 1), 0),
      to_tensor(tokens, widen(owned.expert_pieces, read.problem.local_experts() + 1), 0),
      rows_to_tensor(tokens, owned.tasks.data(), plan.num_tasks, kTaskColumns, numbers_of_task),
      rows_to_tensor(
          tokens, pulls.data(), static_cast<std::int64_t>(pulls.size()), 4,
          [](const PullTicket& t) { return Numbers{static_cast<std::int64_t>(t.kind), t.source, t.tile, t.piece}; }),
      to_tensor(tokens, records.waits, kRecordColumns),
      to_tensor(tokens, records.raises, kRecordColumns),
      to_tensor(tokens, {owned.ring_minimum.x_slots, owned.ring_minimum.a_slots}, 0),
  };
}

// -> int64 [regions, 3]: offset, bytes, 1 if shared. Rings must hold every routing; slots of 0 are filled in so.
Tensor plan_layout(const Tensor& config, std::int64_t element) {
  PlanConfig read = read_config("plan_layout", config);
  STD_TORCH_CHECK(element == 1 || element == 2 || element == 4 || element == 8,
                  "moe::plan_layout: element: expected 1, 2, 4 or 8 bytes, got ", element);
  const RingSizes bound = ring_bound(read.problem, read.tiling, read.schedule);
  const std::string fault = ring_fault(read.schedule, bound);
  STD_TORCH_CHECK(fault.empty(), "moe::plan_layout: config: ", fault);
  read.schedule = with_rings(read.schedule, bound);
  std::vector<std::int64_t> rows;
  for (std::int64_t r = 0; r < kNumRegions; ++r) {
    const auto region = static_cast<Region>(r);
    rows.push_back(region_offset(region, read.problem, read.tiling, read.schedule, element));
    rows.push_back(region_bytes(region, read.problem, read.tiling, read.schedule, element));
    rows.push_back(r < kFirstLocalRegion ? 1 : 0);
  }
  return to_tensor(config, rows, 3);
}

// `like` gives the device -> int64 [edges, 10]: the fields of Edge in order.
Tensor plan_edges(const Tensor& like) {
  return rows_to_tensor(like, kEdges, kNumEdges, 10, [](const Edge& e) {
    return Numbers{static_cast<std::int64_t>(e.counter),
                   static_cast<std::int64_t>(e.raiser),
                   static_cast<std::int64_t>(e.waiter),
                   static_cast<std::int64_t>(e.raiser_proxy),
                   static_cast<std::int64_t>(e.waiter_proxy),
                   e.overwrites ? 1 : 0,
                   e.crosses_ranks ? 1 : 0,
                   static_cast<std::int64_t>(e.scope),
                   e.raiser_fences,
                   e.waiter_fences};
  });
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL(moe, CPU, m) {
  m.impl("plan_tables", TORCH_BOX(&moe::plan_tables));
  m.impl("plan_layout", TORCH_BOX(&moe::plan_layout));
  m.impl("plan_edges", TORCH_BOX(&moe::plan_edges));
}
