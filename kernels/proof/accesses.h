// What the steps of role programs read and write: the model of the device code between its waits and raises.
#pragma once

#include "proof/world.h"

namespace moe::proof {

// Does the accesses of one step, and throws Violation where one is not ordered after an access that it conflicts with,
// or does not find what it must find. Does nothing for steps without accesses.
void do_accesses(World& world, Agent& agent, const Op& op);

}  // namespace moe::proof
