// From accumulators to rows in memory: which rows and columns of a tile a thread holds, rounding to bf16, biases, and
// 16-byte stores. Shared by the epilogues of gate_up and down, which spend one instruction where they can: everything
// that a tile's columns do not change is worked out once per row.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace moe::sm90 {

// Two neighbouring columns as a word, the first in the low half; rounded to nearest even.
__device__ inline std::uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ inline float first_of(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float second_of(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Place of a computing thread in its block's tile: it holds row `row` and the one 8 further on, and of every block of 8
// columns the pair 2 quad, 2 quad + 1.
struct TilePlace {
  std::int32_t row;
  int quad;  // lane % 4

  __device__ static TilePlace of_thread() {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int lane = thread % 32;
    return {thread / 32 * 16 + lane / 4, lane % 4};
  }
};

// Lane q of four neighbouring lanes holds columns 2 q, 2 q + 1 of blocks 0 to 3 (8 columns each). Afterwards it holds
// all 8 columns of block q, ready for one 16-byte store.
__device__ inline uint4 gather_block(const std::uint32_t (&pairs)[4], int quad) {
  const bool odd = (quad & 1) != 0;
  const std::uint32_t r0 = __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1);
  const std::uint32_t r1 = __shfl_xor_sync(0xffffffffu, odd ? pairs[2] : pairs[3], 1);
  // Blocks 0 and 2 on even lanes, 1 and 3 on odd ones; two pairs of each.
  const std::uint32_t low0 = odd ? r0 : pairs[0];
  const std::uint32_t low1 = odd ? pairs[1] : r0;
  const std::uint32_t high0 = odd ? r1 : pairs[2];
  const std::uint32_t high1 = odd ? pairs[3] : r1;
  const bool upper = (quad & 2) != 0;
  const std::uint32_t s0 = __shfl_xor_sync(0xffffffffu, upper ? low0 : high0, 2);
  const std::uint32_t s1 = __shfl_xor_sync(0xffffffffu, upper ? low1 : high1, 2);
  return upper ? make_uint4(s0, s1, high0, high1) : make_uint4(low0, low1, s0, s1);
}

// 32 columns of one of a thread's rows, from block `block` of 8 columns on: rounded, and for one store.
template <int kHalf, typename Accumulators>
__device__ inline uint4 gather_columns(const Accumulators& acc, int block, int quad) {
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 4 * (block + i) + 2 * kHalf;
    pairs[i] = pack_bf16(acc(at), acc(at + 1));
  }
  return gather_block(pairs, quad);
}

// A row's columns from a thread's first block on, and how many of them there are (0: the row does not exist). Stores
// are predicated, not branched around, so that the four lanes of a gather stay together.
struct RowWriter {
  std::uint16_t* begin;
  std::int32_t columns;

  // `offset` in columns. kKeep: this launch reads the row again; otherwise it leaves the caches first.
  template <bool kKeep>
  __device__ void store(std::int32_t offset, const uint4& value) const {
    const std::int32_t exists = offset < columns ? 1 : 0;
    if constexpr (kKeep) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(
                       begin + offset),
                   "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(exists)
                   : "memory");
    } else {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(
                       begin + offset),
                   "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(exists)
                   : "memory");
    }
  }
};

__device__ inline void store_streaming(std::uint16_t* address, const uint4& value) {
  RowWriter{address, 1}.store<false>(0, value);
}

// Adds a bias to blocks [0, kBlocks) of a thread's accumulators that begin at element kFirst; both rows. `bias` points
// to the first of `columns` columns.
template <int kFirst, int kBlocks, typename Accumulators>
__device__ inline void add_bias(Accumulators& acc, const std::uint16_t* bias, std::int32_t columns, int quad) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const std::int32_t column = 8 * block + 2 * quad;
    if (column >= columns) continue;
    const std::uint32_t pair = __ldg(reinterpret_cast<const unsigned int*>(bias + column));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      acc(kFirst + 4 * block + 2 * half) += first_of(pair);
      acc(kFirst + 4 * block + 2 * half + 1) += second_of(pair);
    }
  }
}

}  // namespace moe::sm90
