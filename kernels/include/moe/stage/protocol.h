// The waits and raises of plan/dependencies.h for a direction that a kernel knows when it is compiled, so that no
// kernel carries the other one's. Taken by the roles that both directions share.
#pragma once

#include "moe/plan/dependencies.h"

namespace moe {

template <Direction kDirection>
struct Protocol {
  static constexpr bool kForward = kDirection == Direction::kForward;

  MOE_HOST_DEVICE static Waits waits(const Plan& plan, const Task& task, std::int64_t block, Role role) {
    if constexpr (kForward) return forward_waits(plan, task, block, role);
    return backward_waits(plan, task, block, role);
  }
  MOE_HOST_DEVICE static Raises raises(const Plan& plan, const Task& task, std::int64_t block) {
    if constexpr (kForward) return forward_raises(plan, task, block);
    return backward_raises(plan, task, block);
  }
  MOE_HOST_DEVICE static PullTicket pull_task(const Plan& plan, std::int64_t ticket) {
    if constexpr (kForward) return forward_pull_ticket(ticket, plan.counts.tiles, plan.tiling);
    return plan.pull_task(ticket);
  }
  // Backward fills whole buffers: a piece waits for nothing.
  MOE_HOST_DEVICE static Waits piece_waits(const Plan& plan, const PullTicket& pull) {
    if constexpr (kForward) return forward_piece_waits(plan, pull);
    return {};
  }
  MOE_HOST_DEVICE static Raises piece_raises(const Plan& plan, const PullTicket& pull) {
    if constexpr (kForward) return forward_piece_raises(plan, pull);
    return backward_piece_raises(plan, pull);
  }
};

}  // namespace moe
