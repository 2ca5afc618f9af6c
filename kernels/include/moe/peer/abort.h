// How a rank that gives up tells the others: one word in the memory of each, which every wait of theirs looks at. The
// word stays until the group's memory is made anew.
#pragma once

#include <cstdint>

#include "moe/peer/memory.h"

namespace moe {

// To every rank, this one too: 1 + the rank because of which it was, unless another rank has been named there before.
__device__ inline void abort_peers(const PeerMemory& peers, std::int64_t culprit) {
#pragma unroll 1
  for (std::int64_t peer = 0; peer < peers.num_ranks; ++peer) {
    [[maybe_unused]] std::int64_t before;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(peers.at<std::int64_t>(peer, peers.abort)), "l"(std::int64_t{0}), "l"(culprit + 1)
                 : "memory");
  }
}

}  // namespace moe
