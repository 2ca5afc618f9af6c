// Tests plan/route.h with nothing but a C++17 compiler: strides, duplicates, dropped and bad ids, no tokens, and that
// no element outside the outputs is touched. Compiled and run by test_headers.py, with and without sanitizers.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "check.h"
#include "moe/plan/route.h"

namespace {

constexpr std::int32_t kGuard = 0x5A5A5A5A;
constexpr std::int64_t kGuardLength = 4;

// An output array between two guards.
struct Guarded {
  explicit Guarded(std::int64_t length) : values(static_cast<std::size_t>(length + 2 * kGuardLength), kGuard) {}
  std::int32_t* data() { return values.data() + kGuardLength; }
  std::vector<std::int32_t> body() const { return {values.begin() + kGuardLength, values.end() - kGuardLength}; }
  bool guards_intact() const {
    const auto is_guard = [](std::int32_t value) { return value == kGuard; };
    return std::all_of(values.begin(), values.begin() + kGuardLength, is_guard) &&
           std::all_of(values.end() - kGuardLength, values.end(), is_guard);
  }
  std::vector<std::int32_t> values;
};

struct Sorted {
  std::vector<std::int32_t> route_order;
  std::vector<std::int32_t> class_counts;
  std::vector<std::int32_t> class_ends;
  std::int64_t first_bad;
};

template <typename Id>
Sorted sort(const moe::RouteIds<Id>& ids, std::int64_t num_experts) {
  Guarded order(ids.num_tokens * ids.top_k);
  Guarded counts(num_experts * moe::kTokenResidues);
  Guarded cursors(num_experts * moe::kTokenResidues);
  const std::int64_t first_bad = moe::sort_routes(ids, num_experts, {order.data(), counts.data(), cursors.data()});
  MOE_CHECK_EQUAL(order.guards_intact(), true);
  MOE_CHECK_EQUAL(counts.guards_intact(), true);
  MOE_CHECK_EQUAL(cursors.guards_intact(), true);
  return {order.body(), counts.body(), cursors.body(), first_bad};
}

// The definition: a comparison sort of the valid routes by (expert, t mod 64, t div 64, k).
template <typename Id>
Sorted sort_by_definition(const moe::RouteIds<Id>& ids, std::int64_t num_experts) {
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int32_t>;
  Sorted expected{std::vector<std::int32_t>(static_cast<std::size_t>(ids.num_tokens * ids.top_k), -1),
                  std::vector<std::int32_t>(static_cast<std::size_t>(num_experts * moe::kTokenResidues), 0),
                  {},
                  -1};
  std::vector<Key> keys;
  for (std::int64_t t = 0; t < ids.num_tokens; ++t) {
    for (std::int64_t k = 0; k < ids.top_k; ++k) {
      const std::int64_t id = ids.at(t, k);
      const std::int64_t route = t * ids.top_k + k;
      if (id >= 0 && id < num_experts) {
        keys.emplace_back(id, t % 64, t / 64, k, static_cast<std::int32_t>(route));
        ++expected.class_counts[static_cast<std::size_t>(id * 64 + t % 64)];
      } else if (id != -1 && expected.first_bad < 0) {
        expected.first_bad = route;
      }
    }
  }
  std::sort(keys.begin(), keys.end());
  for (std::size_t i = 0; i < keys.size(); ++i) expected.route_order[i] = std::get<4>(keys[i]);
  std::int32_t end = 0;
  for (const std::int32_t count : expected.class_counts) expected.class_ends.push_back(end += count);
  return expected;
}

template <typename Id>
void check_sort(const moe::RouteIds<Id>& ids, std::int64_t num_experts) {
  const Sorted got = sort(ids, num_experts);
  const Sorted expected = sort_by_definition(ids, num_experts);
  MOE_CHECK_EQUAL(got.route_order == expected.route_order, true);
  MOE_CHECK_EQUAL(got.class_counts == expected.class_counts, true);
  MOE_CHECK_EQUAL(got.class_ends == expected.class_ends, true);
  MOE_CHECK_EQUAL(got.first_bad, expected.first_bad);
}

// Random ids, a tenth of them -1 and a few bad, read with every kind of stride.
template <typename Id>
void test_random_ids_and_strides() {
  std::mt19937_64 random(1);
  const std::int64_t num_tokens = 150, top_k = 3, num_experts = 7;
  std::vector<Id> memory(static_cast<std::size_t>(4 * num_tokens * top_k));
  for (Id& id : memory) {
    const std::uint64_t draw = random() % 40;
    id = draw < 4 ? Id{-1} : draw == 4 ? static_cast<Id>(random()) : static_cast<Id>(random() % 7);
  }
  const std::int64_t strides[][2] = {{top_k, 1}, {1, num_tokens}, {2 * top_k, 1}, {2 * top_k, 2},
                                     {0, 1},     {1, 0},          {0, 0}};
  for (const auto& stride : strides) {
    check_sort(moe::RouteIds<Id>{memory.data(), num_tokens, top_k, stride[0], stride[1]}, num_experts);
  }
  const Id* last = memory.data() + memory.size() - 1;
  check_sort(moe::RouteIds<Id>{last, num_tokens, top_k, -top_k, -1}, num_experts);
}

// Two slots of one token that name the same expert are two routes, in slot order.
void test_duplicates() {
  const std::vector<std::int32_t> ids{1, 1, 0, 1};
  const Sorted got = sort(moe::RouteIds<std::int32_t>{ids.data(), 2, 2, 2, 1}, 2);
  MOE_CHECK_EQUAL((got.route_order == std::vector<std::int32_t>{2, 0, 1, 3}), true);
  MOE_CHECK_EQUAL(got.class_counts[64], 2);
  MOE_CHECK_EQUAL(got.class_counts[65], 1);
}

void test_all_dropped() {
  const std::vector<std::int64_t> ids(12, -1);
  const Sorted got = sort(moe::RouteIds<std::int64_t>{ids.data(), 6, 2, 2, 1}, 3);
  MOE_CHECK_EQUAL((got.route_order == std::vector<std::int32_t>(12, -1)), true);
  MOE_CHECK_EQUAL(got.first_bad, -1);
}

// An id that would be valid, or -1, after a cut to 32 bits is bad; so are both limits.
void test_wide_bad_ids() {
  const std::int64_t low = std::numeric_limits<std::int64_t>::min(), high = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t bad :
       {(std::int64_t{1} << 32) + 1, (std::int64_t{1} << 32) - 1, low, high, std::int64_t{-2}, std::int64_t{4}}) {
    const std::vector<std::int64_t> ids{0, 3, bad, 1, bad, -1};
    const Sorted got = sort(moe::RouteIds<std::int64_t>{ids.data(), 3, 2, 2, 1}, 4);
    MOE_CHECK_EQUAL(got.first_bad, 2);
    MOE_CHECK_EQUAL((got.route_order == std::vector<std::int32_t>{0, 3, 1, -1, -1, -1}), true);
  }
}

void test_no_tokens() {
  const Sorted got = sort(moe::RouteIds<std::int32_t>{nullptr, 0, 8, 8, 1}, 2);
  MOE_CHECK_EQUAL(got.route_order.empty(), true);
  MOE_CHECK_EQUAL((got.class_counts == std::vector<std::int32_t>(128, 0)), true);
  MOE_CHECK_EQUAL(got.first_bad, -1);
}

void test_limit_of_routes() {
  static_assert(moe::routes_fit(0, 1) && moe::routes_fit(moe::kMaxRoutes, 1) &&
                !moe::routes_fit(moe::kMaxRoutes + 1, 1));
  static_assert(moe::routes_fit((std::int64_t{1} << 28) - 1, 8) && !moe::routes_fit(std::int64_t{1} << 28, 8));
  static_assert(!moe::routes_fit(std::numeric_limits<std::int64_t>::max(), 8));
  static_assert(!moe::routes_fit(1, moe::kMaxRoutes + 1) && moe::routes_fit(0, moe::kMaxRoutes + 1));
}

}  // namespace

int main() {
  test_random_ids_and_strides<std::int32_t>();
  test_random_ids_and_strides<std::int64_t>();
  test_duplicates();
  test_all_dropped();
  test_wide_bad_ids();
  test_no_tokens();
  test_limit_of_routes();
  return moe_test::exit_status();
}
