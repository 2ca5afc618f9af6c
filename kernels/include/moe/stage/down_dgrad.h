// Epilogue of the down dgrad, where da meets h: it leaves s a for dW_down, dh for the gate_up dgrad and dW_gate_up, and
// of every row the sums of da * a over groups of 128 columns, which the route gradient adds up. All columns of a row of
// a group lie in four lanes; they are added in a fixed order, so no schedule reaches a bit.
//
// Rows behind a tile's last are stored as zeros, because weight gradients sum over them. h is read 32 columns ahead of
// where it is needed. Where h is recomputed it lies where dh goes: a thread reads exactly the columns that it then
// overwrites.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/backward/kernel_params.h"
#include "moe/stage/activation_gradient.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

struct DgradTile {
  std::int32_t column;    // first column of da
  std::int32_t rows;      // of the tile
  std::int64_t h_row;     // first row of h
  std::int64_t tile_row;  // first row of the row buffers
  float weights[2];       // of this thread's two rows
};

// The routing weights of a thread's rows, 0 behind the last. Asked for before the K loop, so that the answer is there
// after it.
__device__ __forceinline__ void read_route_weights(const BackwardParams& params, const std::int32_t (&routes)[2],
                                                   float (&weights)[2]) {
  const auto top_k = static_cast<std::uint32_t>(params.problem.top_k);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (routes[half] < 0) continue;
    const auto route = static_cast<std::uint32_t>(routes[half]);
    const std::uint32_t t = route / top_k;
    const TopkWeights& w = params.topk_weights;
    weights[half] = __ldg(w.weights + t * w.token_stride + (route - t * top_k) * w.slot_stride);
  }
}

// Brings a block's part of h to the L2 cache while the products run; two rows a thread.
__device__ __forceinline__ void prefetch_h(const BackwardParams& params, const DgradTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  const auto width = static_cast<std::int32_t>(params.problem.width);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t row = place.row + 8 * half;
    const std::int32_t column = tile.column + 64 * place.quad;  // a line of 128 bytes each
    if (row >= tile.rows || column >= width) continue;
    const std::uint16_t* gate = params.h + (tile.h_row + row) * params.h_columns + column;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(gate));
    if (params.problem.gated != 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(gate + width));
  }
}

// 16 bytes of h, zeros where there are none. Not through the read-only path: this launch may have written them.
__device__ inline uint4 load_h(const std::uint16_t* address, bool exists) {
  uint4 value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address), "r"(exists ? 1 : 0)
      : "memory");
  return value;
}

// One row of a thread.
template <ActivationForm kForm, int kHalf>
class DgradRow {
  static constexpr bool kGated = kForm != ActivationForm::kRelu2;
  static constexpr int kChunks = 8;  // of 32 columns

 public:
  __device__ DgradRow(const BackwardParams& params, const DgradTile& tile, const TilePlace& place)
      : p_(params.activation), quad_(place.quad), s_(tile.weights[kHalf]) {
    const std::int32_t row = place.row + 8 * kHalf;
    const auto width = static_cast<std::int32_t>(params.problem.width);
    const std::int32_t column = tile.column + 8 * quad_;
    exists_ = row < tile.rows;
    width_ = width;
    left_ = width - column;
    h_ = params.h + (tile.h_row + row) * params.h_columns + column;
    std::uint16_t* dh = params.dh + (tile.tile_row + row) * params.h_columns + column;
    const std::int32_t dh_columns = params.needs.dh() ? left_ : 0;
    dgate_ = {dh, dh_columns};
    dup_ = {dh + width, dh_columns};
    const std::int32_t scaled_columns = params.needs.w_down ? left_ : 0;
    scaled_ = {params.scaled + (tile.tile_row + row) * width + column, scaled_columns};
    const std::int32_t groups = (width + kPartialColumns - 1) / kPartialColumns;
    group_ = tile.column / kPartialColumns;
    groups_left_ = exists_ && params.needs.topk_weights ? groups - group_ : 0;
    partials_ = params.partials + (tile.tile_row + row) * groups + group_;
  }

  template <typename Accumulators>
  __device__ __forceinline__ void store(const Accumulators& acc) {
    load<0>();
    store_group<0>(acc);
    store_group<1>(acc);
  }

 private:
  static constexpr std::int32_t kPartialColumns = 128;

  template <int kChunk>
  __device__ __forceinline__ void load() {
    const bool exists = exists_ && 32 * kChunk < left_;
    next_gate_ = load_h(h_ + 32 * kChunk, exists);
    if constexpr (kGated) next_up_ = load_h(h_ + width_ + 32 * kChunk, exists);
  }

  template <int kGroup, typename Accumulators>
  __device__ __forceinline__ void store_group(const Accumulators& acc) {
    float sum = 0.0f;
    store_chunk<4 * kGroup>(acc, sum);
    store_chunk<4 * kGroup + 1>(acc, sum);
    store_chunk<4 * kGroup + 2>(acc, sum);
    store_chunk<4 * kGroup + 3>(acc, sum);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (quad_ == 0 && kGroup < groups_left_) partials_[kGroup] = sum;
  }

  template <int kChunk, typename Accumulators>
  __device__ __forceinline__ void store_chunk(const Accumulators& acc, float& sum) {
    std::uint32_t gate[4];
    std::uint32_t up[4] = {};
    spread(next_gate_, gate);
    if constexpr (kGated) spread(next_up_, up);
    if constexpr (kChunk + 1 < kChunks) load<kChunk + 1>();
    std::uint32_t dgate[4];
    std::uint32_t dup[4];
    std::uint32_t scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (4 * kChunk + i) + 2 * kHalf;
      const float da0 = acc(at), da1 = acc(at + 1);
      const ActivationSlopes first = activation_slopes<kForm>(p_, first_of(gate[i]), first_of(up[i]));
      const ActivationSlopes second = activation_slopes<kForm>(p_, second_of(gate[i]), second_of(up[i]));
      const std::uint32_t a = pack_bf16(first.value, second.value);
      sum = fmaf(da0, first_of(a), sum);
      sum = fmaf(da1, second_of(a), sum);
      const float d0 = s_ * da0, d1 = s_ * da1;
      scaled[i] = keep(pack_bf16(s_ * first_of(a), s_ * second_of(a)));
      dgate[i] = keep(pack_bf16(d0 * first.gate, d1 * second.gate));
      if constexpr (kGated) dup[i] = keep(pack_bf16(d0 * first.up, d1 * second.up));
    }
    scaled_.template store<true>(32 * kChunk, gather_block(scaled, quad_));
    dgate_.template store<true>(32 * kChunk, gather_block(dgate, quad_));
    if constexpr (kGated) dup_.template store<true>(32 * kChunk, gather_block(dup, quad_));
  }

  // A row that does not exist is zero, whatever stands in its accumulators.
  __device__ std::uint32_t keep(std::uint32_t pair) const { return exists_ ? pair : 0u; }

  // From the 8 columns of block q in lane q to the pairs of all four blocks: gather_block is its own inverse.
  __device__ void spread(const uint4& block, std::uint32_t (&pairs)[4]) const {
    const std::uint32_t words[4] = {block.x, block.y, block.z, block.w};
    const uint4 spread = gather_block(words, quad_);
    pairs[0] = spread.x;
    pairs[1] = spread.y;
    pairs[2] = spread.z;
    pairs[3] = spread.w;
  }

  const ActivationParams& p_;
  int quad_;
  float s_;
  bool exists_;
  std::int32_t width_;
  std::int32_t left_;  // columns from this thread's first on
  const std::uint16_t* h_;
  RowWriter dgate_;
  RowWriter dup_;
  RowWriter scaled_;
  std::int32_t group_;
  std::int32_t groups_left_;
  float* partials_;
  uint4 next_gate_;
  uint4 next_up_;
};

template <ActivationForm kForm, typename Accumulators>
__device__ __forceinline__ void store_dgrad_tile(const Accumulators& acc, const BackwardParams& params,
                                                 const DgradTile& tile, const TilePlace& place) {
  DgradRow<kForm, 0>(params, tile, place).store(acc);
  DgradRow<kForm, 1>(params, tile, place).store(acc);
}

template <typename Accumulators>
__device__ __forceinline__ void down_dgrad_epilogue(const Accumulators& acc, const BackwardParams& params,
                                                    const DgradTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  switch (params.activation.form) {
    case ActivationForm::kSilu:
      return store_dgrad_tile<ActivationForm::kSilu>(acc, params, tile, place);
    case ActivationForm::kSigmoid:
      return store_dgrad_tile<ActivationForm::kSigmoid>(acc, params, tile, place);
    case ActivationForm::kErf:
      return store_dgrad_tile<ActivationForm::kErf>(acc, params, tile, place);
    case ActivationForm::kRelu2:
      return store_dgrad_tile<ActivationForm::kRelu2>(acc, params, tile, place);
  }
}

template <ActivationForm kForm>
__device__ __forceinline__ void store_scaled_activation(const BackwardParams& params, const DgradTile& tile) {
  const TilePlace place = TilePlace::of_thread();
  const auto width = static_cast<std::int32_t>(params.problem.width);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t row = place.row + 8 * half;
    const bool exists = row < tile.rows;
    const std::uint16_t* h = params.h + (tile.h_row + row) * params.h_columns;
    std::uint16_t* to = params.scaled + (tile.tile_row + row) * width;
    for (std::int32_t c = tile.column + 8 * place.quad; c < tile.column + 256 && c < width; c += 32) {
      const uint4 gate = load_h(h + c, exists);
      const uint4 up = kForm == ActivationForm::kRelu2 ? uint4{} : load_h(h + width + c, exists);
      const std::uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w};
      const std::uint32_t ups[4] = {up.x, up.y, up.z, up.w};
      std::uint32_t scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t a =
            pack_bf16(activation_slopes<kForm>(params.activation, first_of(gates[i]), first_of(ups[i])).value,
                      activation_slopes<kForm>(params.activation, second_of(gates[i]), second_of(ups[i])).value);
        const float s = tile.weights[half];
        scaled[i] = exists ? pack_bf16(s * first_of(a), s * second_of(a)) : 0u;
      }
      RowWriter{to + c, 1}.store<true>(0, make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
    }
  }
}

// Where only dW_down is asked for there is no da: s a alone.
__device__ __forceinline__ void scaled_activation_tile(const BackwardParams& params, const DgradTile& tile) {
  switch (params.activation.form) {
    case ActivationForm::kSilu:
      return store_scaled_activation<ActivationForm::kSilu>(params, tile);
    case ActivationForm::kSigmoid:
      return store_scaled_activation<ActivationForm::kSigmoid>(params, tile);
    case ActivationForm::kErf:
      return store_scaled_activation<ActivationForm::kErf>(params, tile);
    case ActivationForm::kRelu2:
      return store_scaled_activation<ActivationForm::kRelu2>(params, tile);
  }
}

}  // namespace moe::sm90
