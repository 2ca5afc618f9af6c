// The dispatch: one warp that copies routed rows, piece after piece, to where the GEMMs read them, by bulk copies
// through shared memory: of x into the ring of the forward, or of dy and x into whole buffers of the backward. In the
// layer's kernel it runs beside the tensor cores; the staged dispatch kernel runs many of it.
//
// A row is cut into chunks of up to 4 KB; a batch is as many chunks as fit one half of the staging memory, each owned
// by one lane. While a batch is loaded into one half, the batch before leaves the other. A piece is raised when its
// last batch has landed; the warp never waits for ring space with rows of its own still in flight, since the tasks that
// would free the space may wait for just these.
#pragma once

#include "moe/arch/sm90/barrier.h"
#include "moe/arch/sm90/bulk_copy.h"
#include "moe/stage/layer_params.h"
#include "moe/stage/protocol.h"

namespace moe::sm90 {

struct PullMemory {
  unsigned char* halves[2];
  Barrier* loaded;  // [2], one arrival each
  std::int32_t half_bytes;
};

template <Direction kDirection>
class PullRole {
 public:
  __device__ PullRole(const LayerParams& params, const Plan& plan, const Counters& counters, const PullMemory& memory,
                      std::int32_t block)
      : params_(params), plan_(plan), counters_(counters), memory_(memory), block_(block) {
    lane_ = static_cast<std::int32_t>(threadIdx.x) % 32;
    row_bytes_ = static_cast<std::int32_t>(params.problem.hidden) * 2;
    parts_ = static_cast<std::int32_t>(ceil_div(row_bytes_, kChunkBytes));
    chunk_bytes_ = static_cast<std::int32_t>(round_up(ceil_div(row_bytes_, parts_), kRowAlignment));
    lanes_ = memory.half_bytes / chunk_bytes_;
    if (lanes_ > 32) lanes_ = 32;
  }

  // Claims and moves pieces until there are none left. All threads of the warp.
  __device__ void run() {
    const auto pieces = static_cast<std::int32_t>(plan_.num_pieces());
    std::int32_t ticket = claim();
    while (ticket < pieces) {
      const std::int32_t next = claim_ahead();
      move(ticket);
      ticket = __shfl_sync(kAll, next, 0);
    }
    flush();
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr std::int32_t kChunkBytes = 4096;

  __device__ std::int32_t claim_ahead() const {
    return lane_ == 0 ? atomicAdd(params_.counters.plan.tickets + kDispatchTickets * kTicketStride, 1) : 0;
  }
  __device__ std::int32_t claim() const { return __shfl_sync(kAll, claim_ahead(), 0); }
  __device__ Site site(std::int32_t ticket) const { return {block_, Role::kPull, TaskKind::kDispatch, ticket}; }

  // Rows of one piece: lane r knows where the token of row r lies.
  __device__ void move(std::int32_t ticket) {
    const PullTicket pull = Protocol<kDirection>::pull_task(plan_, ticket);
    if (lane_ == 0) counters_.log_claim(site(ticket), Stream::kPull);
    const RowTile tile = plan_.tables.tiles[pull.tile];
    const auto rows = static_cast<std::int32_t>(rows_of_piece(tile, pull.piece, plan_.tiling));
    if (rows == 0) return;
    const auto first = static_cast<std::int32_t>(pull.piece * plan_.tiling.piece_rows);
    const PullSource& source = params_.sources[pull.source];
    const unsigned char* from = source.rows;
    if (lane_ < rows) from = token_row(source, pull.source, tile.row_begin + first + lane_);
    wait_for_slot(pull, ticket);
    unsigned char* const tile_rows = source.tiles + pull.tile % source.slots * kRowTile * row_bytes_;
    unsigned char* const to = tile_rows + std::int64_t{first} * row_bytes_;
    if constexpr (kDirection == Direction::kBackward) {
      const auto clear = static_cast<std::int32_t>(rows_to_clear(tile, pull.piece, plan_.tiling));
      clear_rows(tile_rows + std::int64_t{tile.rows} * row_bytes_, clear);
    }
    const std::int32_t chunks = rows * parts_;
    for (std::int32_t begin = 0; begin < chunks; begin += lanes_) {
      const std::int32_t chunk = begin + lane_;
      const bool owns = lane_ < lanes_ && chunk < chunks;
      const std::int32_t row = owns ? chunk / parts_ : 0;
      const std::int32_t offset = owns ? chunk % parts_ * chunk_bytes_ : 0;
      const std::int32_t left = row_bytes_ - offset;
      const std::int32_t bytes = owns ? (left < chunk_bytes_ ? left : chunk_bytes_) : 0;
      const auto row_address = __shfl_sync(kAll, reinterpret_cast<unsigned long long>(from), row);
      start_batch(reinterpret_cast<const unsigned char*>(row_address) + offset,
                  to + std::int64_t{row} * row_bytes_ + offset, bytes, begin + lanes_ >= chunks ? ticket : -1);
    }
  }

  // The row of the token that row `row` is one of.
  __device__ const unsigned char* token_row(const PullSource& source, std::int32_t number, std::int64_t row) const {
    const PeerMemory& peers = params_.counters.peers;
    const std::int32_t row_route = params_.counters.plan.row_route[row];
    const std::int32_t token = peers.route(row_route) / static_cast<std::int32_t>(plan_.problem.top_k);
    const unsigned char* rows =
        peers.shared() ? peers.at<unsigned char>(peers.home(row_route), peers.tokens[number]) : source.rows;
    return rows + token * source.token_bytes;
  }

  // Zeroes rows behind the last of a tile. The fence lets the loads of others see it, which the async proxy makes; what
  // follows, up to the raise of the piece, comes behind it.
  __device__ void clear_rows(unsigned char* begin, std::int32_t rows) const {
    if (rows == 0) return;
    auto* const words = reinterpret_cast<uint4*>(begin);
    const std::int64_t size = std::int64_t{rows} * row_bytes_ / 16;
    for (std::int64_t i = lane_; i < size; i += 32) words[i] = uint4{};
    fence_proxy_async();
  }

  __device__ void wait_for_slot(const PullTicket& pull, std::int32_t ticket) {
    const Waits waits = Protocol<kDirection>::piece_waits(plan_, pull);
    if (waits.size == 0) return;
    bool met = true;
    if (lane_ == 0) met = counters_.is_met(waits.items[0]);
    if (!__shfl_sync(kAll, static_cast<int>(met), 0)) flush();
    if (lane_ == 0) counters_.wait<Role::kPull>(site(ticket), waits.items[0]);
    __syncwarp();
    fence_proxy_async();  // in every lane that issues copies
  }

  // Begins to load a batch, then sends off the batch before. `ends` is the ticket whose last batch this is, or -1.
  __device__ void start_batch(const unsigned char* from, unsigned char* to, std::int32_t bytes, std::int32_t ends) {
    const std::uint32_t half = batches_ & 1;
    wait_bulk_groups_read<0>();  // the batch that was in this half, the last one stored, has left
    const std::int32_t total = __reduce_add_sync(kAll, bytes);
    if (lane_ == 0) memory_.loaded[half].expect_bytes(static_cast<std::uint32_t>(total));
    __syncwarp();
    if (bytes > 0) bulk_load(place(half), from, static_cast<std::uint32_t>(bytes), memory_.loaded[half]);
    finish_batch();
    open_to_ = to;
    open_bytes_ = bytes;
    open_ends_ = ends;
    is_open_ = true;
    ++batches_;
  }

  // Stores the batch whose loads were begun last; raises the piece that ended one batch earlier.
  __device__ void finish_batch() {
    if (!is_open_) return;
    const std::uint32_t half = (batches_ - 1) & 1;
    memory_.loaded[half].wait(((batches_ - 1) >> 1) & 1);
    if (open_bytes_ > 0) bulk_store(open_to_, place(half), static_cast<std::uint32_t>(open_bytes_));
    commit_bulk_group();
    if (landing_ >= 0) {
      wait_bulk_groups<1>();
      raise(landing_);
    }
    landing_ = open_ends_;
    is_open_ = false;
  }

  __device__ void flush() {
    finish_batch();
    wait_bulk_groups<0>();
    if (landing_ >= 0) raise(landing_);
    landing_ = -1;
  }

  // After every lane has waited for its copies.
  __device__ void raise(std::int32_t ticket) {
    __syncwarp();
    if (lane_ == 0) {
      const PullTicket pull = Protocol<kDirection>::pull_task(plan_, ticket);
      const Raises raises = Protocol<kDirection>::piece_raises(plan_, pull);
      for (std::int64_t i = 0; i < raises.size; ++i) counters_.raise(site(ticket), raises.items[i]);
    }
  }

  __device__ unsigned char* place(std::uint32_t half) const { return memory_.halves[half] + lane_ * chunk_bytes_; }

  const LayerParams& params_;
  const Plan& plan_;
  const Counters& counters_;
  PullMemory memory_;
  std::int32_t block_;
  std::int32_t lane_;
  std::int32_t row_bytes_;
  std::int32_t parts_;  // chunks of a row
  std::int32_t chunk_bytes_;
  std::int32_t lanes_;         // chunks of a batch
  std::uint32_t batches_ = 0;  // begun so far
  unsigned char* open_to_ = nullptr;
  std::int32_t open_bytes_ = 0;
  std::int32_t open_ends_ = -1;
  bool is_open_ = false;
  std::int32_t landing_ = -1;  // ticket of a piece whose stores are all under way
};

}  // namespace moe::sm90
