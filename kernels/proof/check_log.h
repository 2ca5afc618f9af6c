// Reads what a debug build of the kernels (or the explorer) wrote down and says whether it is what the plan prescribes:
// the proof is then about the kernel, and not about a model of it. Called by bindings/proof.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moe/plan/dependencies.h"
#include "moe/plan/log.h"

namespace moe::proof {

// Accepts the records of one rank and launch with an empty string, or returns "record N: expected ..., got ..." (N is
// -1 where something is missing). `num_blocks` is the number of blocks of the launch, even. `num_combiners` further
// agents may pull as well, with block numbers from num_blocks on: warps of block (number % num_blocks) that claim
// combine tickets alone, behind that block's own wait for the plan. Checked are:
//  - claims: every ticket of both streams once, by a role of the stream, before any other record of the ticket;
//  - each agent's waits and raises: exactly those of dependencies.h for its tickets in ascending order. Flags to or
//  from
//    all ranks are raised and awaited in any order; a pulling warp may raise a piece after it has gone on to others,
//    but before it combines;
//  - values: what a wait has seen reaches its target and no more than the total, raises add what they should;
//  - time: a wait saw no more than had been raised by then, and no raise of a task is older than the waits of its
//  cluster
//    for it.
std::string check_log(const Plan& plan, std::int64_t num_blocks, std::int64_t num_combiners,
                      const std::vector<LogRecord>& records);

}  // namespace moe::proof
