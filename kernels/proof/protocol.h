// What waits and raises mean: which knowledge a raise publishes and a wait takes over, with the fences and scopes that
// the edges of the run give them. Called by explorer.cpp for the steps kAcquire and kRelease.
#pragma once

#include "proof/world.h"

namespace moe::proof {

// Throws Violation unless the plan task's work for this launch - tables, tickets, zeroed counters - comes before.
void check_planned(World& world, const Agent& agent, const char* what);

bool is_met(World& world, const Op& wait);

// Takes over what the raises so far have published. Requires is_met.
void acquire(World& world, Agent& agent, const Op& wait);

// Publishes what the agent knows and sets or adds to the counter. Throws Violation where the counter passes its total.
void release(World& world, Agent& agent, const Op& raise);

}  // namespace moe::proof
