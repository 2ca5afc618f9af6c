// The role programs: what each agent does next, step by step, taken from the plan's headers and from nowhere else.
#pragma once

#include <cstdint>
#include <functional>

#include "proof/world.h"

namespace moe::proof {

// Called with each claim of a ticket: the agent, the stream (0 compute, 1 pull) and the ticket.
using ClaimListener = std::function<void(const Agent&, std::int64_t, std::int64_t)>;

// Appends the steps of the agent's next piece of work to its empty list, claiming a ticket where it needs one, or marks
// it as finished with the launch. Returns false where it must first wait for its cluster; then nothing has changed.
bool refill(World& world, Agent& agent, const ClaimListener& claimed);

// Steps by which a pulling warp completes and raises all pieces that it has in flight; they are not in flight then.
std::vector<Op> flush_steps(World& world, Agent& agent);

// Whether load fetches operands in a task.
bool has_loads(const Plan& plan, const Task& task);

}  // namespace moe::proof
