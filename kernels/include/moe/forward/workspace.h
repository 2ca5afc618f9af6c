// Where everything lies in the one piece of device memory that a forward launch of one rank works in. Host only. The
// first bytes, which hand the generation from launch to launch, stand at the same place for every size of layer; so one
// workspace can serve layers of any shape that fits, one after the other.
#pragma once

#include <cstdint>

#include "cutlass_configs/forward.h"
#include "moe/forward/plan_memory.h"
#include "moe/plan/layout.h"

namespace moe {

inline constexpr std::int64_t kElementBytes = 2;  // bf16

class ForwardWorkspace {
 public:
  ForwardWorkspace(const Problem& problem, const ForwardChoice& choice)
      : problem_(problem), tiling_(choice.tiling), schedule_(choice.schedule) {}

  // Flags, the local regions of the forward, and the rows of o, which one rank shares with nobody.
  std::int64_t bytes() const { return o_rows_offset() + size(Region::kRows); }

  std::int64_t flag_done_offset() const { return 0; }
  std::int64_t offset(Region region) const {
    return size(Region::kFlagDone) + region_offset(region, problem_, tiling_, schedule_, kElementBytes);
  }
  std::int64_t o_rows_offset() const { return offset(Region::kDyRows); }

  // The plan's memory at `base`; `row_route` is the op's output, which with one rank is the row order itself.
  PlanMemory plan_memory(unsigned char* base, std::int32_t* row_route) const {
    PlanMemory memory = local_plan_memory(base + size(Region::kFlagDone), problem_, tiling_, schedule_);
    memory.route_order = row_route;
    return memory;
  }

 private:
  std::int64_t size(Region region) const {
    return round_up(region_bytes(region, problem_, tiling_, schedule_, kElementBytes), kRegionAlignment);
  }

  Problem problem_;
  Tiling tiling_;
  Schedule schedule_;
};

}  // namespace moe
