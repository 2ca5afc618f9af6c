// The row mover alone, in both directions, on memory that the ranks of one NVLink domain share: what a launch of
// pulling warps (moe/stage/dispatch.h) would take if nothing else ran, and what the same warps would take if they
// pushed. A library of its own with a plain C interface; loaded by library.py, never part of the package.
//
// Pull: the moves of a rank are the rows of its own buffer, each loaded from its home rank. Push: they are the rank's
// own routes, each stored to its place on the expert's rank. Warps claim pieces of 32 moves; chunks, lanes and halves
// of the staging memory are those of dispatch.h. A launch ends on every rank when all ranks' rows have landed.
#include <cuda_runtime.h>

#include <cstdint>

#include "moe/arch/sm90/barrier.h"
#include "moe/arch/sm90/bulk_copy.h"

namespace {

using moe::sm90::Barrier;

constexpr int kMaxWarps = 6;
constexpr int kHalfBytes = 16384;
constexpr std::int32_t kChunkBytes = 4096;
constexpr std::int32_t kAlignment = 16;  // bytes of a bulk copy are a multiple of it
constexpr std::int32_t kPieceMoves = 32;
constexpr unsigned kAll = 0xffffffffu;
// More than half of what an SM has, so that it holds one block of a process, as in the layer's kernel.
constexpr int kLeastBlockBytes = 120 << 10;

struct Move {
  std::int32_t peer;  // rank of the far row
  std::int32_t row;   // its number there
};

// Words of this rank between launches; zero before the first.
struct Control {
  std::int32_t tickets;
  std::int32_t blocks_done;
  std::int32_t failed;  // a wait ran out of time; stays
};

}  // namespace

extern "C" {

// `library.Params` mirrors it. Buffers of all ranks have one layout: flags at 0, then x and rows at their offsets.
struct RowMoverParams {
  unsigned char* const* buffers;  // [ranks], device memory; flags int64 [ranks], x [T, row_bytes], rows [R, row_bytes]
  std::int64_t x_offset;
  std::int64_t rows_offset;
  const void* moves;       // Move [num_moves]
  std::int64_t num_moves;  // 0: only the flags
  std::int64_t row_bytes;
  void* control;            // Control
  std::int64_t generation;  // of the flags: one more for each launch, the same on all ranks
  std::int64_t timeout_ns;
  std::int32_t ranks;
  std::int32_t rank;
  std::int32_t moves_of_near_row;  // move i concerns this rank's row i / moves_of_near_row: 1 for pull, K for push
  std::int32_t push;
};

}  // extern "C"

namespace {

__device__ inline std::int64_t now_ns() {
  std::int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
// Orders accesses of the async proxy (bulk copies) to global memory and those of the generic proxy.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// As Barrier::wait, but gives up at `deadline`.
__device__ inline bool wait_until(Barrier& barrier, std::uint32_t parity, std::int64_t deadline) {
  while (true) {
    std::uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(moe::sm90::shared_address(&barrier)), "r"(parity)
        : "memory");
    if (done != 0) return true;
    if (now_ns() > deadline) return false;
  }
}

__device__ inline std::int64_t* flags_of(const RowMoverParams& params, std::int32_t rank) {
  return reinterpret_cast<std::int64_t*>(params.buffers[rank]);
}

// Raises this rank's flag on every rank and waits for all of theirs: release, then acquire, at system scope. By all
// threads of one warp; lane i serves rank i. A peer that never comes ends the wait at `deadline`, on every rank.
__device__ void meet(const RowMoverParams& params, std::int64_t deadline) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % 32;
  if (lane >= params.ranks) return;
  __threadfence_system();
  std::int64_t* const theirs = flags_of(params, lane) + params.rank;
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(theirs), "l"(params.generation) : "memory");
  const std::int64_t* const mine = flags_of(params, params.rank) + lane;
  while (true) {
    std::int64_t seen;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(seen) : "l"(mine) : "memory");
    if (seen >= params.generation) return;
    if (now_ns() > deadline) {
      static_cast<Control*>(params.control)->failed = 1;
      return;
    }
  }
}

struct Staging {
  alignas(128) unsigned char halves[2][kHalfBytes];
};

template <bool kPush>
class MoveRole {
 public:
  __device__ MoveRole(const RowMoverParams& params, Staging& staging, Barrier* loaded, std::int64_t deadline)
      : params_(params), staging_(staging), loaded_(loaded), deadline_(deadline) {
    lane_ = static_cast<std::int32_t>(threadIdx.x) % 32;
    row_bytes_ = static_cast<std::int32_t>(params.row_bytes);
    parts_ = (row_bytes_ + kChunkBytes - 1) / kChunkBytes;
    const std::int32_t part = (row_bytes_ + parts_ - 1) / parts_;
    chunk_bytes_ = (part + kAlignment - 1) / kAlignment * kAlignment;
    lanes_ = kHalfBytes / chunk_bytes_;
    if (lanes_ > 32) lanes_ = 32;
  }

  // Claims and moves pieces until there are none left, or a load did not come in time. All threads of the warp.
  __device__ void run() {
    const auto pieces = static_cast<std::int32_t>((params_.num_moves + kPieceMoves - 1) / kPieceMoves);
    std::int32_t ticket = __shfl_sync(kAll, claim(), 0);
    while (ticket < pieces && !__any_sync(kAll, static_cast<int>(failed_))) {
      const std::int32_t next = claim();
      move(ticket);
      ticket = __shfl_sync(kAll, next, 0);
    }
    finish_batch();
    moe::sm90::wait_bulk_groups<0>();  // landed
    if (failed_) control().failed = 1;
  }

 private:
  __device__ Control& control() const { return *static_cast<Control*>(params_.control); }
  __device__ std::int32_t claim() const { return lane_ == 0 ? atomicAdd(&control().tickets, 1) : 0; }

  // Lane r knows where the far row of move r of the piece is.
  __device__ void move(std::int32_t ticket) {
    const std::int64_t first = std::int64_t{ticket} * kPieceMoves;
    const std::int64_t left_moves = params_.num_moves - first;
    const std::int32_t rows = left_moves < kPieceMoves ? static_cast<std::int32_t>(left_moves) : kPieceMoves;
    unsigned long long far = 0;
    if (lane_ < rows) {
      const Move move = static_cast<const Move*>(params_.moves)[first + lane_];
      unsigned char* const base = params_.buffers[move.peer] + (kPush ? params_.rows_offset : params_.x_offset);
      far = reinterpret_cast<unsigned long long>(base + std::int64_t{move.row} * row_bytes_);
    }
    unsigned char* const near = params_.buffers[params_.rank] + (kPush ? params_.x_offset : params_.rows_offset);
    const std::int32_t chunks = rows * parts_;
    for (std::int32_t begin = 0; begin < chunks; begin += lanes_) {
      const std::int32_t chunk = begin + lane_;
      const bool owns = lane_ < lanes_ && chunk < chunks;
      const std::int32_t row = owns ? chunk / parts_ : 0;
      const std::int32_t offset = owns ? chunk % parts_ * chunk_bytes_ : 0;
      const std::int32_t left = row_bytes_ - offset;
      const std::int32_t bytes = owns ? (left < chunk_bytes_ ? left : chunk_bytes_) : 0;
      auto* const far_chunk = reinterpret_cast<unsigned char*>(__shfl_sync(kAll, far, row)) + offset;
      const std::int64_t near_row = static_cast<std::int32_t>(first + row) / params_.moves_of_near_row;
      unsigned char* const near_chunk = near + near_row * row_bytes_ + offset;
      if constexpr (kPush) {
        start_batch(near_chunk, far_chunk, bytes);
      } else {
        start_batch(far_chunk, near_chunk, bytes);
      }
    }
  }

  // Begins to load a batch, then sends off the batch before.
  __device__ void start_batch(const unsigned char* from, unsigned char* to, std::int32_t bytes) {
    const std::uint32_t half = batches_ & 1;
    moe::sm90::wait_bulk_groups_read<0>();  // the batch that was in this half, the last one stored, has left
    const std::int32_t total = __reduce_add_sync(kAll, bytes);
    if (lane_ == 0) loaded_[half].expect_bytes(static_cast<std::uint32_t>(total));
    __syncwarp();
    if (bytes > 0) moe::sm90::bulk_load(place(half), from, static_cast<std::uint32_t>(bytes), loaded_[half]);
    finish_batch();
    open_to_ = to;
    open_bytes_ = bytes;
    is_open_ = true;
    ++batches_;
  }

  // Stores the batch whose loads were begun last.
  __device__ void finish_batch() {
    if (!is_open_) return;
    const std::uint32_t half = (batches_ - 1) & 1;
    if (!wait_until(loaded_[half], ((batches_ - 1) >> 1) & 1, deadline_)) failed_ = true;
    if (open_bytes_ > 0) moe::sm90::bulk_store(open_to_, place(half), static_cast<std::uint32_t>(open_bytes_));
    moe::sm90::commit_bulk_group();
    is_open_ = false;
  }

  __device__ unsigned char* place(std::uint32_t half) const { return staging_.halves[half] + lane_ * chunk_bytes_; }

  const RowMoverParams& params_;
  Staging& staging_;
  Barrier* loaded_;
  std::int64_t deadline_;
  std::int32_t lane_;
  std::int32_t row_bytes_;
  std::int32_t parts_;  // chunks of a row
  std::int32_t chunk_bytes_;
  std::int32_t lanes_;         // chunks of a batch
  std::uint32_t batches_ = 0;  // begun so far
  unsigned char* open_to_ = nullptr;
  std::int32_t open_bytes_ = 0;
  bool is_open_ = false;
  bool failed_ = false;
};

// The last block of the rank to get here meets the other ranks. Nobody waits for a block of its own launch, so a launch
// needs no particular number of resident blocks; blocks of other processes end by themselves too.
__device__ void leave(const RowMoverParams& params, std::int64_t deadline) {
  fence_proxy_async();
  __threadfence_system();  // rows of this thread, before what the block says below
  __syncthreads();
  if (threadIdx.x >= 32) return;
  auto& control = *static_cast<Control*>(params.control);
  std::int32_t done = 0;
  if (threadIdx.x == 0) {
    __threadfence_system();
    done = atomicAdd(&control.blocks_done, 1) + 1;
    __threadfence_system();
  }
  __syncwarp();
  if (__shfl_sync(kAll, done, 0) != static_cast<std::int32_t>(gridDim.x)) return;
  const bool failed = static_cast<volatile Control&>(control).failed != 0;
  if (threadIdx.x == 0) {
    control.tickets = 0;
    control.blocks_done = 0;
  }
  if (!failed) meet(params, deadline);  // else the other ranks run out of time too
}

template <bool kPush>
__global__ void __launch_bounds__(32 * kMaxWarps) move_kernel(const __grid_constant__ RowMoverParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  // The staging memory of every warp, then their barriers, two of one arrival each.
  auto* const staging = reinterpret_cast<Staging*>(shared_bytes);
  const int warps = static_cast<int>(blockDim.x) / 32;
  auto* const loaded = reinterpret_cast<Barrier*>(staging + warps);
  const std::int64_t deadline = now_ns() + params.timeout_ns;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * warps; ++i) loaded[i].init(1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  MoveRole<kPush>(params, staging[warp], loaded + 2 * warp, deadline).run();
  leave(params, deadline);
}

__global__ void __launch_bounds__(32) meet_kernel(const __grid_constant__ RowMoverParams params) {
  meet(params, now_ns() + params.timeout_ns);
}

template <bool kPush>
cudaError_t launch(const RowMoverParams& params, int blocks, int warps, cudaStream_t stream) {
  const auto kernel = move_kernel<kPush>;
  const int needed = warps * static_cast<int>(sizeof(Staging) + 2 * sizeof(Barrier));
  const int bytes = needed < kLeastBlockBytes ? kLeastBlockBytes : needed;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, 32 * warps, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

extern "C" {

// Both return a cudaError_t. The device memory that `params` names must live until the launch has ended.

// Moves the rows, then meets the other ranks. blocks >= 1, 1 <= warps <= 6 of each.
__attribute__((visibility("default"))) int row_mover_move(const RowMoverParams* params, int blocks, int warps,
                                                          void* stream) {
  const bool fits = params->ranks >= 1 && params->ranks <= 32 && blocks >= 1 && warps >= 1 && warps <= kMaxWarps &&
                    params->row_bytes > 0 && params->row_bytes % kAlignment == 0 && params->moves_of_near_row >= 1;
  if (!fits) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return params->push != 0 ? launch<true>(*params, blocks, warps, on) : launch<false>(*params, blocks, warps, on);
}

// Meets the other ranks: a common start.
__attribute__((visibility("default"))) int row_mover_meet(const RowMoverParams* params, void* stream) {
  if (params->ranks < 1 || params->ranks > 32) return cudaErrorInvalidValue;
  meet_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

__attribute__((visibility("default"))) const char* row_mover_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
