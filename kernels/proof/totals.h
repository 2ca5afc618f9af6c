// What every counter must have come to when a launch has ended, counted from the plan's tiles and not from its waits.
#pragma once

#include <cstdint>

#include "moe/plan/dependencies.h"

namespace moe::proof {

// Total of element `index` of a counter over one launch; for flags the generation that they are set to.
inline std::int64_t expected_total(const Plan& plan, Counter counter, std::int64_t index) {
  const bool forward = plan.direction == Direction::kForward;
  const bool makes_h = forward || plan.needs.recomputes();
  const bool makes_dh = !forward && plan.needs.act();
  const bool per_tile = counter == Counter::kXReady || counter == Counter::kXRead || counter == Counter::kAReady ||
                        counter == Counter::kARead || counter == Counter::kDyReady || counter == Counter::kDhReady;
  if (per_tile && index >= plan.counts.tiles) return 0;
  switch (counter) {
    case Counter::kXReady:
      return makes_h ? filled_pieces(plan.tables.tiles[index], plan.tiling) : 0;
    case Counter::kXRead:
      return forward ? plan.columns(TaskKind::kGateUp) : 0;
    case Counter::kAReady:
      return makes_h ? plan.columns(TaskKind::kGateUp) : 0;
    case Counter::kARead:
      return forward ? plan.columns(TaskKind::kDown) : 0;
    case Counter::kDyReady:
      return forward || !plan.needs.pulls_dy() ? 0 : filled_pieces(plan.tables.tiles[index], plan.tiling);
    case Counter::kDhReady:
      return makes_dh ? plan.columns(TaskKind::kDownDgrad) : 0;
    case Counter::kExpertDh:
      return makes_dh ? expert_tiles(plan, index) * plan.columns(TaskKind::kDownDgrad) : 0;
    case Counter::kExpertDy:
      return !forward && (plan.needs.w_down || plan.needs.bias_down) ? expert_pieces(plan, index) : 0;
    case Counter::kExpertX:
      return !forward && plan.needs.w_gate_up ? expert_pieces(plan, index) : 0;
    case Counter::kStored:
      return total_stored(plan);
    case Counter::kPulled:
      return total_pieces(plan);
    default:
      return plan.generation;
  }
}

}  // namespace moe::proof
