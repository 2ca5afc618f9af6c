// Where everything lies in the one piece of device memory that a backward launch of one rank works in; the twin of
// forward/workspace.h, with the same first bytes, so that one memory serves both directions one after the other. Host
// only.
#pragma once

#include <cstdint>

#include "cutlass_configs/backward.h"
#include "moe/forward/workspace.h"

namespace moe {

class BackwardWorkspace {
 public:
  BackwardWorkspace(const Problem& problem, const BackwardChoice& choice)
      : problem_(problem), tiling_(choice.tiling), schedule_(choice.schedule) {}

  // Flags, the local regions without the forward's rings, then dx rows and dS by route, which one rank shares with
  // nobody.
  std::int64_t bytes() const {
    return problem_.num_ranks == 1 ? offset(Region::kRouteGrads) + size(Region::kRouteGrads) : local(kNumRegions);
  }

  std::int64_t flag_done_offset() const { return 0; }
  std::int64_t offset(Region region) const {
    if (region == Region::kRows) return local(kNumRegions);
    if (region == Region::kRouteGrads) return offset(Region::kRows) + size(Region::kRows);
    return local(static_cast<std::int64_t>(region));
  }

  // The plan's memory at `base`; `row_route` is the forward's output.
  PlanMemory plan_memory(unsigned char* base, const std::int32_t* row_route) const {
    PlanMemory memory = local_plan_memory(base + kOwnFlagBytes, problem_, tiling_, schedule_);
    memory.row_route = const_cast<std::int32_t*>(row_route);  // the backward only reads it
    return memory;
  }

 private:
  static constexpr std::int64_t kElement = kElementBytes;

  std::int64_t size(Region region) const {
    return round_up(region_bytes(region, problem_, tiling_, schedule_, kElement), kRegionAlignment);
  }
  std::int64_t local(std::int64_t region) const {
    std::int64_t offset = kOwnFlagBytes;
    for (std::int64_t r = kFirstLocalRegion; r < region; ++r) {
      const auto before = static_cast<Region>(r);
      if (before != Region::kXRing && before != Region::kARing) offset += size(before);
    }
    return offset;
  }

  Problem problem_;
  Tiling tiling_;
  Schedule schedule_;
};

}  // namespace moe
