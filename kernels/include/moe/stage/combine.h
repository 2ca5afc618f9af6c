// The combine: y[t] = sum over k, ascending, of weight[t, k] * o[t, k] in fp32, rounded once; in backward dx[t] from
// the rows of dx without weights, and dS to its place. One warp claims a few tokens at a time and starts the loads of
// up to eight rows, some KB of each, before it adds the first. Dropped routes are not read. In the layer's kernel all
// computing warps do this when their tasks are done; the staged combine kernel is nothing else.
#pragma once

#include <cuda_bf16.h>

#include "moe/stage/layer_params.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

class CombineRole {
 public:
  // `agent` is this warp's number in the log.
  __device__ CombineRole(const LayerParams& params, const Plan& plan, const Counters& counters, std::int32_t agent)
      : params_(params), plan_(plan), counters_(counters), agent_(agent) {
    lane_ = static_cast<std::int32_t>(threadIdx.x) % 32;
    top_k_ = static_cast<std::int32_t>(params.problem.top_k);
  }

  __device__ void run() {
    const auto pieces = static_cast<std::int32_t>(plan_.num_pieces());
    const auto end = static_cast<std::int32_t>(plan_.num_pull_tickets());
    const auto group = static_cast<std::int32_t>(plan_.tiling.combine_tokens);
    std::int32_t ticket = pieces + __shfl_sync(kAll, claim_ahead(), 0);
    bool waited = false;
    while (ticket < end) {
      const std::int32_t next = claim_ahead();
      wait(ticket, waited);
      waited = true;
      __syncwarp();
      const bool refused = params_.counters.plan.sizes->refused != 0 || counters_.aborted();
      const std::int64_t first = std::int64_t{ticket - pieces} * group;
      for (std::int64_t t = first; t < first + group && t < params_.tokens; ++t) {
        if (params_.combine.dtopk_weights != nullptr) store_route_grads(t, refused);
        if (params_.combine.rows == nullptr) continue;
        if (refused) {
          store_nan(t);
        } else {
          sum(t);
        }
      }
      ticket = pieces + __shfl_sync(kAll, next, 0);
    }
  }

  // NaN in every column of sums[t].
  __device__ void store_nan(std::int64_t t) const {
    constexpr std::uint32_t kNan = 0x7fc07fc0u;
    std::uint16_t* sums = params_.combine.sums + t * params_.problem.hidden;
    for (std::int64_t column = 8 * lane_; column < params_.problem.hidden; column += 256) {
      store_streaming(sums + column, make_uint4(kNan, kNan, kNan, kNan));
    }
  }

  // dS of the token's routes; 0 of those that were dropped, NaN of a refused step.
  __device__ void store_route_grads(std::int64_t t, bool refused) const {
    for (std::int32_t k = lane_; k < top_k_; k += 32) {
      const std::int64_t route = t * top_k_ + k;
      float grad = read_route(t, k).valid ? load_generic(params_.combine.route_grads + route) : 0.0f;
      if (refused) grad = __int_as_float(0x7fc00000);
      params_.combine.dtopk_weights[route] = grad;
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ std::int32_t claim_ahead() const {
    return lane_ == 0 ? atomicAdd(params_.counters.plan.tickets + kCombineTickets * kTicketStride, 1) : 0;
  }

  // "Done" of all ranks, once, each lane those of some; the log of a test wants to see it for every ticket.
  __device__ void wait(std::int32_t ticket, bool waited) const {
    const Site site{agent_, Role::kPull, TaskKind::kCombine, ticket};
    const bool logs = params_.counters.log.records != nullptr;
    if (lane_ == 0) counters_.log_claim(site, Stream::kPull);
    if (logs) __syncwarp();
    if (waited && !logs) return;
    for (std::int64_t peer = lane_; peer < params_.problem.num_ranks; peer += 32) counters_.wait_done_of(site, peer);
  }

  // Lane k of a group of 32 routes knows the k-th: its weight, and whether it counts.
  struct Route {
    float weight;
    bool valid;
  };
  __device__ Route read_route(std::int64_t t, std::int32_t k) const {
    if (k >= top_k_) return {0.0f, false};
    const TopkIds& ids = params_.combine.topk_idx;
    const std::int64_t at = t * ids.token_stride + k * ids.slot_stride;
    const std::int64_t id = ids.wide ? __ldg(static_cast<const long long*>(ids.ids) + at)
                                     : std::int64_t{__ldg(static_cast<const int*>(ids.ids) + at)};
    const TopkWeights& weights = params_.combine.topk_weights;
    if (weights.weights == nullptr) return {1.0f, id >= 0};
    return {__ldg(weights.weights + t * weights.token_stride + k * weights.slot_stride), id >= 0};
  }

  // The more a lane has under way, the closer the combine comes to the memory's rate: rows, and 16-byte columns of
  // each, in 96 to 128 registers.
  __device__ void sum(std::int64_t t) const {
    if (top_k_ <= 4) {
      sum_token<4, 6>(t);
    } else {
      sum_token<8, 4>(t);
    }
  }

  // Starts the loads of kBatch rows and kColumns columns of a lane together.
  template <int kBatch, int kColumns>
  __device__ void sum_token(std::int64_t t) const {
    const std::int64_t hidden = params_.problem.hidden;
    const std::uint16_t* rows = params_.combine.rows + t * top_k_ * hidden;
    const Route first = read_route(t, lane_);
    for (std::int64_t column = 8 * lane_; column - 8 * lane_ < hidden; column += 256 * kColumns) {
      float sums[kColumns][8] = {};
      for (std::int32_t group = 0; group < top_k_; group += 32) {
        const Route route = group == 0 ? first : read_route(t, group + lane_);
        const unsigned valid = __ballot_sync(kAll, route.valid);
        const std::int32_t end = top_k_ - group < 32 ? top_k_ - group : 32;
        for (std::int32_t k = 0; k < end; k += kBatch) {
          add_batch<kBatch>(rows + (group + k) * hidden + column, hidden, hidden - column, valid >> k, route.weight, k,
                            sums);
        }
      }
      store(t, column, sums);
    }
  }

  // Adds rows k to k + kBatch - 1 of the group that are valid.
  template <int kBatch, int kColumns>
  __device__ void add_batch(const std::uint16_t* from, std::int64_t hidden, std::int64_t left, unsigned valid,
                            float weight, std::int32_t k, float (&sums)[kColumns][8]) const {
    uint4 loaded[kBatch][kColumns];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool wanted = (valid >> i & 1u) != 0 && 256 * c < left;
        loaded[i][c] = wanted ? load_row(from + i * hidden + 256 * c) : uint4{};
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __shfl_sync(kAll, weight, (k + i) & 31);
      if ((valid >> i & 1u) == 0) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) add(loaded[i][c], w, sums[c]);
    }
  }

  __device__ static void add(const uint4& row, float w, float (&sum)[8]) {
    const std::uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A product is rounded before it is added, as in the reference.
      sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(w, first_of(words[i])));
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(w, second_of(words[i])));
    }
  }

  template <int kColumns>
  __device__ void store(std::int64_t t, std::int64_t column, const float (&sums)[kColumns][8]) const {
    const std::int64_t hidden = params_.problem.hidden;
    std::uint16_t* to = params_.combine.sums + t * hidden;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::int64_t at = column + 256 * c;
      if (at >= hidden) continue;
      const float* s = sums[c];
      store_streaming(to + at, make_uint4(pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
                                          pack_bf16(s[6], s[7])));
    }
  }

  // Not through the read-only path: other blocks of this launch have written the rows.
  __device__ static uint4 load_row(const std::uint16_t* address) {
    uint4 value;
    asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
  }

  // Likewise.
  __device__ static float load_generic(const float* address) {
    float value;
    asm volatile("ld.global.cs.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
  }

  const LayerParams& params_;
  const Plan& plan_;
  const Counters& counters_;
  std::int32_t agent_;
  std::int32_t lane_;
  std::int32_t top_k_;
};

}  // namespace moe::sm90
