// Assertions for the stand-alone C++ tests: a failed one prints file, line and both values, and the program goes on and
// exits with 1. Needs no test library, so that the plan headers are tested with a bare compiler. Included by every
// tests/cpp/test_*.cpp.
#pragma once

#include <iostream>

namespace moe_test {

inline int num_failures = 0;

template <typename A, typename B>
void check_equal(const A& got, const B& expected, const char* text, const char* file, int line) {
  if (got == expected) return;
  ++num_failures;
  std::cerr << file << ":" << line << ": " << text << ": expected " << expected << ", got " << got << "\n";
}

inline int exit_status() { return num_failures == 0 ? 0 : 1; }

}  // namespace moe_test

#define MOE_CHECK_EQUAL(got, expected) moe_test::check_equal((got), (expected), #got, __FILE__, __LINE__)
