// Epilogue of the down dgrad, where da meets h: it leaves s a for dW_down, dh for the gate_up dgrad and dW_gate_up, and
// of every row the sums of da * a over groups of 128 columns, which the route gradient adds up. All columns of a row of
// a group lie in four lanes; they are added in a fixed order, so no schedule reaches a bit.
//
// Rows behind a tile's last are stored as zeros, because weight gradients sum over them. h is read 32 columns ahead of
// where it is needed, from the L2 cache (see gradient_operands.h). Where h is recomputed it lies where dh goes: a
// thread reads exactly the columns that it then overwrites.
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
__device__ __forceinline__ void read_route_weights(const BackwardParams& params, std::int32_t row_begin,
                                                   const std::int32_t (&routes)[2], float (&weights)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (routes[half] < 0) continue;
    weights[half] = row_weight(params, row_begin + TilePlace::of_thread().row + 8 * half, routes[half]);
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

// A thread's two rows of a tile, 32 columns of both after each other in a loop that stays rolled: unrolled it is 128 KB
// of instructions that every tile fetches anew. Accumulators move down as they are used up, because registers have no
// index.
template <ActivationForm kForm>
class DgradEpilogue {
  static constexpr bool kGated = kForm != ActivationForm::kRelu2;
  static constexpr int kChunk = 32;          // columns
  static constexpr int kChunkElements = 16;  // accumulators of both rows
  static constexpr int kGroup = static_cast<int>(kPartialColumns) / kChunk;

 public:
  __device__ DgradEpilogue(const BackwardParams& params, const DgradTile& tile)
      : p_(params.activation), quad_(TilePlace::of_thread().quad) {
    width_ = static_cast<std::int32_t>(params.problem.width);
    left_ = width_ - tile.column - 8 * quad_;
    chunks_ = width_ - tile.column < 256 ? (width_ - tile.column + kChunk - 1) / kChunk : 256 / kChunk;
    groups_ = (width_ + static_cast<std::int32_t>(kPartialColumns) - 1) / static_cast<std::int32_t>(kPartialColumns);
    stores_dh_ = params.needs.dh();
    stores_scaled_ = params.needs.w_down;
    stores_partials_ = params.needs.topk_weights && quad_ == 0;
    const std::int32_t column = tile.column + 8 * quad_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = TilePlace::of_thread().row + 8 * half;
      Row& r = rows_[half];
      r.exists = row < tile.rows;
      r.s = tile.weights[half];
      r.h = params.h + (tile.h_row + row) * params.h_columns + column;
      r.dh = params.dh + (tile.tile_row + row) * params.h_columns + column;
      r.scaled = params.scaled + (tile.tile_row + row) * width_ + column;
      r.partials = params.partials + (tile.tile_row + row) * groups_ + tile.column / kPartialColumns;
    }
  }

  // Uses the accumulators up.
  template <typename Accumulators>
  __device__ __forceinline__ void store(Accumulators& acc) {
    load(0);
#pragma unroll 1
    for (std::int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint4 gate[2] = {rows_[0].gate, rows_[1].gate};
      const uint4 up[2] = {rows_[0].up, rows_[1].up};
      if (chunk + 1 < chunks_) load(kChunk * (chunk + 1));
      store_row<0>(acc, kChunk * chunk, gate[0], up[0]);
      store_row<1>(acc, kChunk * chunk, gate[1], up[1]);
      if (chunk % kGroup == kGroup - 1 || chunk + 1 == chunks_) store_partials(chunk / kGroup);
#pragma unroll
      for (int i = 0; i < 128 - kChunkElements; ++i) acc(i) = acc(i + kChunkElements);
    }
  }

 private:
  struct Row {
    bool exists;
    float s;
    const std::uint16_t* h;
    std::uint16_t* dh;
    std::uint16_t* scaled;
    float* partials;
    uint4 gate;  // of the next chunk
    uint4 up;
    float sum = 0.0f;
  };

  __device__ __forceinline__ void load(std::int32_t offset) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Row& r = rows_[half];
      const bool exists = r.exists && offset < left_;
      r.gate = load_h(r.h + offset, exists);
      if constexpr (kGated) r.up = load_h(r.h + width_ + offset, exists);
    }
  }

  template <int kHalf, typename Accumulators>
  __device__ __forceinline__ void store_row(const Accumulators& acc, std::int32_t offset, const uint4& gate_block,
                                            const uint4& up_block) {
    Row& r = rows_[kHalf];
    std::uint32_t gate[4];
    std::uint32_t up[4] = {};
    spread(gate_block, gate);
    if constexpr (kGated) spread(up_block, up);
    std::uint32_t dgate[4];
    std::uint32_t dup[4];
    std::uint32_t scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float da0 = acc(4 * i + 2 * kHalf), da1 = acc(4 * i + 2 * kHalf + 1);
      const ActivationSlopes first = activation_slopes<kForm>(p_, first_of(gate[i]), first_of(up[i]));
      const ActivationSlopes second = activation_slopes<kForm>(p_, second_of(gate[i]), second_of(up[i]));
      const std::uint32_t a = pack_bf16(first.value, second.value);
      r.sum = fmaf(da0, first_of(a), r.sum);
      r.sum = fmaf(da1, second_of(a), r.sum);
      const float d0 = r.s * da0, d1 = r.s * da1;
      scaled[i] = pack_bf16(r.s * first_of(a), r.s * second_of(a));
      dgate[i] = pack_bf16(d0 * first.gate, d1 * second.gate);
      if constexpr (kGated) dup[i] = pack_bf16(d0 * first.up, d1 * second.up);
    }
    // A row that does not exist is zero, whatever stands in its accumulators.
    const std::uint32_t kept = r.exists ? ~0u : 0u;
    const bool inside = offset < left_;
    store_block(r.scaled + offset, stores_scaled_ && inside, scaled, kept);
    store_block(r.dh + offset, stores_dh_ && inside, dgate, kept);
    if constexpr (kGated) store_block(r.dh + width_ + offset, stores_dh_ && inside, dup, kept);
  }

  __device__ __forceinline__ void store_block(std::uint16_t* to, bool wanted, const std::uint32_t (&pairs)[4],
                                              std::uint32_t kept) const {
    uint4 block = gather_block(pairs, quad_);
    block = make_uint4(block.x & kept, block.y & kept, block.z & kept, block.w & kept);
    RowWriter{to, wanted ? 1 : 0}.store<true>(0, block);
  }

  __device__ __forceinline__ void store_partials(std::int32_t group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Row& r = rows_[half];
      r.sum += __shfl_xor_sync(0xffffffffu, r.sum, 1);
      r.sum += __shfl_xor_sync(0xffffffffu, r.sum, 2);
      if (stores_partials_ && r.exists) r.partials[group] = r.sum;
      r.sum = 0.0f;
    }
  }

  // From the 8 columns of block q in lane q to the pairs of all four blocks: gather_block is its own inverse.
  __device__ __forceinline__ void spread(const uint4& block, std::uint32_t (&pairs)[4]) const {
    const std::uint32_t words[4] = {block.x, block.y, block.z, block.w};
    const uint4 spread = gather_block(words, quad_);
    pairs[0] = spread.x;
    pairs[1] = spread.y;
    pairs[2] = spread.z;
    pairs[3] = spread.w;
  }

  const ActivationParams& p_;
  int quad_;
  std::int32_t width_;
  std::int32_t left_;    // columns from this thread's first on
  std::int32_t chunks_;  // of the tile
  std::int32_t groups_;  // of a row's partial sums
  bool stores_dh_;
  bool stores_scaled_;
  bool stores_partials_;
  Row rows_[2];
};

template <typename Accumulators>
__device__ __forceinline__ void down_dgrad_epilogue(Accumulators& acc, const BackwardParams& params,
                                                    const DgradTile& tile) {
  switch (params.activation.form) {
    case ActivationForm::kSilu:
      return DgradEpilogue<ActivationForm::kSilu>(params, tile).store(acc);
    case ActivationForm::kSigmoid:
      return DgradEpilogue<ActivationForm::kSigmoid>(params, tile).store(acc);
    case ActivationForm::kErf:
      return DgradEpilogue<ActivationForm::kErf>(params, tile).store(acc);
    case ActivationForm::kRelu2:
      return DgradEpilogue<ActivationForm::kRelu2>(params, tile).store(acc);
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
