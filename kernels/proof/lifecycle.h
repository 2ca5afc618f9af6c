// How launches begin and end on a rank, and what must be true when one has ended. Called by explorer.cpp.
#pragma once

#include "proof/world.h"

namespace moe::proof {

// Begins the next launch of the stream's rank: all its agents may step, knowing what the stream knows.
void start_launch(World& world, Agent& stream);

// The plan task zeroes counters and tickets.
void zero_counters(World& world, const Agent& plan);

// Ends a launch whose agents have all finished: the stream learns what they know. Throws Violation where a task was not
// run exactly once or a counter has not come to its total.
void end_launch(World& world, Agent& stream);

}  // namespace moe::proof
