// The kernel configurations of the forward, as data: what kernels are instantiated from, and a pure function that picks
// configuration, tiling and schedule for a layer. Plain C++17, tested without a GPU. Who adds a row here adds one file
// to kernels/forward/instances; docs/adding-a-config.md says how.
#pragma once

#include <cstdint>

#include "moe/plan/problem.h"
#include "moe/plan/tiles.h"

namespace moe {

struct ForwardConfig {
  const char* name;
  int tile_rows;      // of a block; two warpgroups take half of them each
  int tile_columns;   // of a block: of o, or of gate and up together
  int tile_depth;     // columns of both operands in one stage
  int stages;         // of the operands' ring in shared memory
  int staging_bytes;  // of one half of the pulling warp's shared memory
  int producer_registers;
  int consumer_registers;
};

inline constexpr ForwardConfig kForwardConfigs[] = {
    // 128 x 256 beat ping-pong 128 x 128 at every named shape, and ping-pong 128 x 192 at A, C and F (D: equal); two
    // blocks that share a weight tile beat one (H200, 2026-12). 4 stages of 48 KB and 32 KB of staging fill the 227 KB
    // of a block.
    {"bf16_128x256x64", 128, 256, 64, 4, 16384, 72, 216},
};
inline constexpr int kNumForwardConfigs = static_cast<int>(sizeof(kForwardConfigs) / sizeof(kForwardConfigs[0]));

constexpr bool is_valid(const ForwardConfig& c) {
  const int stage_bytes = (c.tile_rows + c.tile_columns) * c.tile_depth * 2;
  const bool fits = c.stages * stage_bytes + 2 * c.staging_bytes + 3072 <= 232448;  // of one block, in bytes
  const bool registers = (c.producer_registers + 2 * c.consumer_registers) * 128 <= 65536 &&
                         c.producer_registers % 8 == 0 && c.consumer_registers % 8 == 0;
  return c.tile_rows == kRowTile && c.tile_columns == 256 && c.tile_depth == 64 && c.stages >= 2 && fits && registers;
}
constexpr bool all_valid() {
  for (const ForwardConfig& config : kForwardConfigs) {
    if (!is_valid(config)) return false;
  }
  return true;
}
static_assert(all_valid(), "a forward configuration does not fit a block");

// Of L2 for dispatched rows.
inline constexpr std::int64_t kRingBytes = std::int64_t{40} << 20;
// Blocks whose rows those are.
inline constexpr std::int64_t kRingSms = 128;

constexpr std::int64_t ring_sms(std::int64_t num_sms) { return num_sms < kRingSms ? num_sms : kRingSms; }

// Bytes of L2 for the dispatched rows of so many blocks.
constexpr std::int64_t ring_bytes(std::int64_t num_sms) { return kRingBytes * ring_sms(num_sms) / kRingSms; }

constexpr std::int64_t row_tile_bytes(std::int64_t hidden) { return kRowTile * hidden * 2; }

// Row tiles that are worked on together: what the blocks work on at one time is about as many rows as columns, so that
// they read the least through L2 (a tile is twice as broad as high). 16 for all SMs of an H200; 8 were 2 % faster on
// 32 SMs of a device that four ranks share (D, 2026-12).
constexpr std::int64_t square_tiles(std::int64_t num_sms) {
  std::int64_t tiles = 2;
  while ((tiles + 2) * (tiles + 2) <= 2 * num_sms) tiles += 2;
  return tiles;
}

// The same of a segment, whose rows are read again for every column: no more than L2 keeps meanwhile (6 instead of 8 on
// 32 SMs: D 1 % faster; 4, where all fit but the weights are read once more: no faster, A 2 % slower; 2026-12).
constexpr std::int64_t segment_tiles_for(std::int64_t hidden, std::int64_t num_sms) {
  const std::int64_t square = square_tiles(num_sms);
  const std::int64_t fitting = 2 * ceil_div(ring_bytes(num_sms), 2 * row_tile_bytes(hidden));
  return fitting < square ? fitting : square;
}

struct ForwardChoice {
  int config;
  Tiling tiling;
  Schedule schedule;
};

// Never looks at the number of ranks, at T of this rank alone or at the routes: the choice cannot change a result.
// `num_sms` only sets how many clusters the order is made for.
constexpr ForwardChoice choose_forward(const Problem& p, bool staged, std::int64_t num_sms) {
  ForwardChoice choice{};
  choice.config = 0;
  const std::int64_t columns = kForwardConfigs[0].tile_columns;
  Tiling& t = choice.tiling;
  t.act_columns = p.gated != 0 ? columns / 2 : columns;
  t.hidden_columns = columns;
  t.dgrad_columns = columns;
  t.wgrad_rows = 128;
  t.wgrad_columns = columns;
  // Pieces of at most 64 KB: small ones start the first tiles early, large ones cost fewer tickets.
  t.piece_rows = 32;
  while (t.piece_rows > 4 && t.piece_rows * p.hidden * 2 > 65536) t.piece_rows /= 2;
  t.combine_tokens = 2;
  Schedule& s = choice.schedule;
  s.num_clusters = num_sms / 2;
  s.waves = 2;
  s.segment_tiles = segment_tiles_for(p.hidden, num_sms);
  s.wgrad_tiles = square_tiles(num_sms);
  s.lag = 1;
  s.separate_stages = staged ? 1 : 0;
  const std::int64_t all = p.max_row_tiles() > 0 ? p.max_row_tiles() : 1;
  // Three segments, so that a new one arrives while the oldest is still read; more where rows are short, since pieces
  // come in bursts (F: 9 % faster with 64 slots than with 48; H200, 2026-12).
  // Fewer blocks take rows out more slowly, so that fewer need be there, down to what the longest segment needs; and
  // where they are some of several ranks' on one device, the rings of all share its L2.
  const std::int64_t fitting = ring_bytes(num_sms) / row_tile_bytes(p.hidden);
  const std::int64_t scaled = 3 * s.segment_tiles * ring_sms(num_sms) / kRingSms;
  const std::int64_t least = scaled < s.segment_tiles + 8 ? s.segment_tiles + 8 : scaled;
  const std::int64_t ring = fitting < least ? least : fitting > 8 * s.segment_tiles ? 8 * s.segment_tiles : fitting;
  s.x_slots = staged || all < ring ? all : ring;
  const std::int64_t bound = ring_bound(p, t, s).a_slots;
  s.a_slots = bound > 0 ? bound : 1;
  return choice;
}

}  // namespace moe
