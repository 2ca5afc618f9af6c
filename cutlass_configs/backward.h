// The backward's choice of configuration, tiling and schedule for a layer: a pure function, as that of the forward,
// from the same configurations. Plain C++17, tested without a GPU.
#pragma once

#include "cutlass_configs/forward.h"

namespace moe {

struct BackwardChoice {
  int config;
  Tiling tiling;
  Schedule schedule;
};

// Never looks at the number of ranks, at T of this rank alone or at the routes: the choice cannot change a result.
// gate_up is tiled as in the forward, so that h computed again has the same bits.
constexpr BackwardChoice choose_backward(const Problem& p, bool staged, std::int64_t num_sms) {
  const ForwardChoice forward = choose_forward(p, staged, num_sms);
  BackwardChoice choice{forward.config, forward.tiling, forward.schedule};
  choice.tiling.dgrad_columns = kForwardConfigs[forward.config].tile_columns;
  // There are no rings: row buffers are whole.
  choice.schedule.x_slots = 1;
  choice.schedule.a_slots = 1;
  return choice;
}

}  // namespace moe
