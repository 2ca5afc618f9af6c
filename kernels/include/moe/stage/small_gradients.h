// The gradients that are no GEMM: of the routing weights, from the partial sums of the down dgrad, and of the biases,
// sums over an expert's rows. All of a block's computing warps work on one task; every sum has a fixed order.
#pragma once

#include "moe/arch/sm90/gemm_traits.h"
#include "moe/backward/kernel_params.h"
#include "moe/stage/tile_rows.h"

namespace moe::sm90 {

inline constexpr int kComputeWarps = kComputeThreads / 32;

__device__ inline int compute_warp() { return static_cast<int>(threadIdx.x - 128) / 32; }

// <dy, bias> of one row by a warp: lanes take columns in turn, then a tree of lanes.
__device__ inline float dot_bias(const std::uint16_t* dy, const std::uint16_t* bias, std::int32_t columns) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  float sum = 0.0f;
  for (std::int32_t column = 2 * lane; column < columns; column += 64) {
    const std::uint32_t d = *reinterpret_cast<const std::uint32_t*>(dy + column);
    const std::uint32_t b = __ldg(reinterpret_cast<const unsigned int*>(bias + column));
    sum = fmaf(first_of(d), first_of(b), sum);
    sum = fmaf(second_of(d), second_of(b), sum);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

// dS of the rows of a tile, to the places of their routes. `dy` was stored by bulk copies, which the load role of the
// tile's down dgrad has waited for, and this task for that one.
__device__ inline void route_gradients(const BackwardParams& params, std::int32_t expert, std::int64_t tile_row,
                                       std::int32_t row_begin, std::int32_t rows) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const auto hidden = static_cast<std::int32_t>(params.problem.hidden);
  const auto groups = static_cast<std::int32_t>(ceil_div(params.problem.width, kPartialColumns));
  const std::int32_t* routes = params.counters.plan.row_route + row_begin;
  const std::int32_t first = 16 * compute_warp();
  float grad = 0.0f;
  if (lane < 16 && first + lane < rows) {
    const float* partials = params.partials + (tile_row + first + lane) * groups;
    for (std::int32_t group = 0; group < groups; ++group) grad += partials[group];
  }
  if (params.bias_down != nullptr) {
    const std::uint16_t* bias = params.bias_down + std::int64_t{expert} * hidden;
    for (std::int32_t i = 0; i < 16 && first + i < rows; ++i) {
      const float dot = dot_bias(params.dy_tiles + (tile_row + first + i) * hidden, bias, hidden);
      if (lane == i) grad += dot;
    }
  }
  if (lane < 16 && first + lane < rows) {
    *home_row(params.counters.peers, params.route_grads, params.counters.peers.route_grads, 1, routes[first + lane]) =
        grad;
  }
}

// Sums 256 columns of an expert's rows, 32 of them a warp: four lanes share a row, 8 columns each, and eight rows are
// under way at once. A lane adds every eighth row in ascending order; then the eight are added in a tree. `scale(row)`
// is the factor of a row.
template <typename Scale>
__device__ inline void sum_columns(const std::uint16_t* rows, std::int64_t pitch, std::int32_t num_rows,
                                   std::int32_t columns, std::uint16_t* sums, Scale scale) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int32_t column = 32 * compute_warp() + lane % 4 * 8;
  float sum[8] = {};
  if (column < columns) {
    for (std::int32_t row = lane / 4; row < num_rows; row += 8) {
      const float factor = scale(row);
      const uint4 words = *reinterpret_cast<const uint4*>(rows + row * pitch + column);
      const std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * i] = fmaf(factor, first_of(pairs[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(factor, second_of(pairs[i]), sum[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
  }
  if (lane < 4 && column < columns) {
    *reinterpret_cast<uint4*>(sums + column) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                                          pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
  }
}

// 256 columns of the gradient of a bias, of one expert whose rows begin at `tile_row` of the row buffers and at
// `row_begin` of the compact ones.
__device__ inline void bias_gradient(const BackwardParams& params, bool down, std::int32_t expert, std::int32_t column,
                                     std::int64_t tile_row, std::int64_t row_begin, std::int32_t rows, bool refused) {
  const std::int32_t width = down ? static_cast<std::int32_t>(params.problem.hidden) : params.h_columns;
  std::uint16_t* to = (down ? params.dbias_down : params.dbias_gate_up) + std::int64_t{expert} * width + column;
  const std::int32_t columns = width - column < 256 ? width - column : 256;
  if (refused) {
    const auto i = static_cast<std::int32_t>(threadIdx.x) - 128;
    if (i < columns) to[i] = 0x7fc0;
    return;
  }
  const std::uint16_t* from = (down ? params.dy_tiles : params.dh) + tile_row * width + column;
  if (down) {
    const std::int32_t* routes = params.counters.plan.row_route + row_begin;
    sum_columns(from, width, rows, columns, to,
                [&](std::int32_t row) { return row_weight(params, row_begin + row, routes[row]); });
  } else {
    sum_columns(from, width, rows, columns, to, [](std::int32_t) { return 1.0f; });
  }
}

}  // namespace moe::sm90
