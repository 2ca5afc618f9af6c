// Where everything lies in the one piece of device memory that a rank's forward launch works in. Host only. The
// first bytes, which hand the generation from launch to launch, stand at the same place for every size of layer; so one
// workspace can serve layers of any shape that fits, one after the other. They alone must be zero before the first
// launch; everything behind is written by a launch before it is read.
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
  std::int64_t bytes() const { return o_rows_offset() + (problem_.num_ranks == 1 ? size(Region::kRows) : 0); }

  std::int64_t flag_done_offset() const { return 0; }
  std::int64_t offset(Region region) const {
    return kOwnFlagBytes + region_offset(region, problem_, tiling_, schedule_, kElementBytes);
  }
  std::int64_t o_rows_offset() const { return offset(Region::kDyRows); }

  // The plan's memory at `base`; `row_route` is the op's output, which with one rank is the row order itself. `shared`
  // is this rank's part of a group's memory.
  PlanMemory plan_memory(unsigned char* base, std::int32_t* row_route, unsigned char* shared) const {
    PlanMemory memory = local_plan_memory(base + kOwnFlagBytes, problem_, tiling_, schedule_);
    memory.row_route = row_route;
    memory.route_order = row_route;
    if (problem_.num_ranks == 1) return memory;
    const std::int64_t order = region_offset(Region::kRouteOrder, problem_, tiling_, schedule_, kElementBytes);
    memory.route_order = reinterpret_cast<std::int32_t*>(shared + order);
    memory.sources = nullptr;
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

// None of the regions up to the tickets depends on the sizes of a layer.
static_assert(kRegionAlignment + region_offset(Region::kCounters, Problem{1, 0, 1, 1, 1, 1, 0, 1, 1},
                                               Tiling{128, 128, 128, 128, 128, 32, 1}, Schedule{}, kElementBytes) <=
                  kZeroedBytes,
              "what launches hand on stands in the bytes that are zeroed");

}  // namespace moe
