// Tests cutlass_configs/forward.h and the workspace that is laid out for its choice: which configurations are refused
// as not fitting a block, and that neither ranks nor tokens reach a tile. What plans make of a choice is tested from
// Python, tests/plan/test_forward_config.py. Compiled and run by test_headers.py.
#include <cstdint>

#include "check.h"
#include "cutlass_configs/forward.h"
#include "moe/forward/workspace.h"

namespace {

using moe::ForwardConfig;
using moe::Problem;
using moe::Tiling;

constexpr ForwardConfig changed(int ForwardConfig::* field, int value) {
  ForwardConfig config = moe::kForwardConfigs[0];
  config.*field = value;
  return config;
}

static_assert(is_valid(moe::kForwardConfigs[0]));
static_assert(is_valid(changed(&ForwardConfig::stages, 3)));
static_assert(!is_valid(changed(&ForwardConfig::stages, 5)), "more shared memory than a block has");
static_assert(!is_valid(changed(&ForwardConfig::stages, 1)), "nothing is loaded ahead");
static_assert(!is_valid(changed(&ForwardConfig::staging_bytes, 32768)), "more shared memory than a block has");
static_assert(!is_valid(changed(&ForwardConfig::consumer_registers, 224)), "more registers than an SM has");
static_assert(!is_valid(changed(&ForwardConfig::consumer_registers, 212)), "setmaxnreg takes multiples of 8");
static_assert(!is_valid(changed(&ForwardConfig::producer_registers, 88)), "more registers than an SM has");
static_assert(!is_valid(changed(&ForwardConfig::tile_rows, 64)), "the plan's row tiles");
static_assert(!is_valid(changed(&ForwardConfig::tile_columns, 128)));
static_assert(!is_valid(changed(&ForwardConfig::tile_depth, 32)));

constexpr Problem problem_of(std::int64_t ranks, std::int64_t tokens, bool gated = true) {
  return {ranks, 0, 64, 4, 1536, 512, gated ? 1 : 0, tokens, tokens * 4};
}

void check_same(const Tiling& got, const Tiling& expected) {
  MOE_CHECK_EQUAL(got.act_columns, expected.act_columns);
  MOE_CHECK_EQUAL(got.hidden_columns, expected.hidden_columns);
  MOE_CHECK_EQUAL(got.dgrad_columns, expected.dgrad_columns);
  MOE_CHECK_EQUAL(got.wgrad_rows, expected.wgrad_rows);
  MOE_CHECK_EQUAL(got.wgrad_columns, expected.wgrad_columns);
  MOE_CHECK_EQUAL(got.piece_rows, expected.piece_rows);
  MOE_CHECK_EQUAL(got.combine_tokens, expected.combine_tokens);
}

// Bits follow from the configuration and the tiles alone.
void test_ranks_tokens_and_sms_reach_no_tile() {
  for (const bool gated : {false, true}) {
    const moe::ForwardChoice expected = choose_forward(problem_of(1, 1000, gated), false, 132);
    for (const std::int64_t ranks : {1, 2, 4, 8, 72}) {
      for (const std::int64_t tokens : {0, 1, 127, 5000, 100000}) {
        for (const std::int64_t num_sms : {2, 64, 132}) {
          for (const bool staged : {false, true}) {
            const moe::ForwardChoice found = choose_forward(problem_of(ranks, tokens, gated), staged, num_sms);
            MOE_CHECK_EQUAL(found.config, expected.config);
            check_same(found.tiling, expected.tiling);
          }
        }
      }
    }
  }
}

void test_a_thread_holds_gate_and_up_of_its_columns() {
  for (const bool gated : {false, true}) {
    const moe::ForwardChoice choice = choose_forward(problem_of(1, 1000, gated), false, 132);
    const int columns = moe::kForwardConfigs[choice.config].tile_columns;
    MOE_CHECK_EQUAL(choice.tiling.act_columns * (gated ? 2 : 1), columns);
    MOE_CHECK_EQUAL(choice.tiling.hidden_columns, columns);
    MOE_CHECK_EQUAL(choice.tiling.dgrad_columns, columns);
  }
}

// A workspace of more tokens serves fewer, and what launches hand on stands before what depends on sizes.
void test_workspaces() {
  for (const bool staged : {false, true}) {
    std::int64_t before = 0;
    for (std::int64_t tokens = 1; tokens < 20000; tokens += 1 + tokens / 7) {
      const Problem problem = problem_of(1, tokens);
      const moe::ForwardWorkspace workspace(problem, choose_forward(problem, staged, 132));
      MOE_CHECK_EQUAL(workspace.bytes() >= before, true);
      before = workspace.bytes();
      MOE_CHECK_EQUAL(workspace.offset(moe::Region::kCounters) <= moe::kZeroedBytes, true);
      MOE_CHECK_EQUAL(workspace.bytes() >= moe::kZeroedBytes, true);
    }
  }
}

}  // namespace

int main() {
  test_ranks_tokens_and_sms_reach_no_tile();
  test_a_thread_holds_gate_and_up_of_its_columns();
  test_workspaces();
  return moe_test::exit_status();
}
