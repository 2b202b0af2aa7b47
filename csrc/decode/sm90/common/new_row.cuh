// The append inside a decode kernel, for a step with one token a sequence. Before the producer
// copies the block that holds a sequence's new row, a warp of its own writes the row to the cache.
// It does so while the producer looks up pages and copies other blocks. Row tiles of a sequence
// each copy that block, so each CTA writes the same bytes, and none waits for another.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "decode/params.h"
#include "decode/sm90/common/append_task.h"
#include "decode/sm90/common/owned_pages.cuh"
#include "decode/sm90/common/sizes.h"
#include "gpu/sm90.cuh"
#include "gpu/token_row.cuh"

namespace jax_mla::decode::sm90 {

// NewRows, as kernels take it.
struct NewRowStreams {
  gpu::RowStream<uint4> ckv, kpe;
};

inline NewRowStreams MakeNewRowStreams(const DecodeParams& p, const NewRows* rows) {
  if (rows == nullptr) return {};
  return {
      gpu::MakeRowStream<uint4>(rows->ckv, rows->ckv_pages, p.d_ckv, kElementBytes),
      gpu::MakeRowStream<uint4>(rows->kpe, rows->kpe_pages, p.d_kpe, kElementBytes),
  };
}

// All threads of a CTA meet, except an appending warp, which arrives and goes on: it uses nothing
// that the others prepare. A barrier with a number of threads must not be mixed with
// __syncthreads, which is one without: that is an illegal instruction.
template <class C>
__device__ __forceinline__ void SyncThreads(int barrier, int num_threads) {
  if constexpr (C::kAppends) {
    gpu::sm90::NamedBarrierSync(barrier, num_threads);
  } else {
    __syncthreads();
  }
}

// Barriers between the producer and the appending warp: `told` and `done` are ids of named
// barriers, of which no others know.
template <int kTold, int kDone>
struct Appender {
  static constexpr int kThreads = 2 * kWarpThreads;

  // Whether an item ends with its sequence's last block, and so holds the new row.
  template <class Item>
  static __device__ __forceinline__ bool HasNewRow(const Item& item) {
    return item.block_begin < item.block_end && item.seq_len > 0 &&
           item.block_end * kBlockN >= item.seq_len;
  }

  // The producer's side, called by its whole warp: for each item with a new row first Tell, then
  // WaitWritten; TellEnd when there are no more items.
  static __device__ __forceinline__ void Tell(AppendTask& task, int32_t seq_idx, int32_t seq_len) {
    if (threadIdx.x % kWarpThreads == 0) task = {seq_idx, seq_len};
    __syncwarp();
    gpu::sm90::NamedBarrierArrive(kTold, kThreads);
  }
  static __device__ __forceinline__ void TellEnd(AppendTask& task) { Tell(task, 0, 0); }
  static __device__ __forceinline__ void WaitWritten() {
    gpu::sm90::NamedBarrierSync(kDone, kThreads);
  }

  // The appending warp. Behind WaitWritten, TMA reads what it wrote.
  static __device__ __forceinline__ void Run(const DecodeParams& p, const NewRowStreams& rows,
                                             const Divisor& page_size, const AppendTask& task) {
    const int lane = threadIdx.x % kWarpThreads;
    const OwnedPages owned_pages = PendingOwnedPages::Load(p).Get();
#pragma unroll 1
    while (true) {
      gpu::sm90::NamedBarrierSync(kTold, kThreads);
      const auto [seq_idx, seq_len] = task;
      if (seq_len == 0) return;
      uint4 ckv[2], kpe[1];
      gpu::LoadRow(rows.ckv, seq_idx, lane, ckv);
      gpu::LoadRow(rows.kpe, seq_idx, lane, kpe);
      const int32_t given_len = __ldg(p.seq_lens + seq_idx);
      const int32_t page_idx = page_size.Floor(seq_len - 1);
      const int32_t page =
          owned_pages.Local(p, LoadPageId(p, seq_idx, page_idx, /*is_inside=*/true));
      // A length that the page table has no room for is a mistake, and its sequence gets no row.
      if (page != kOutside && given_len == seq_len) {
        const gpu::RowPlace place{owned_pages.layer, page, seq_len - 1 - page_idx * p.page_size};
        gpu::StoreRow(rows.ckv, seq_idx, place, lane, ckv);
        gpu::StoreRow(rows.kpe, seq_idx, place, lane, kpe);
        gpu::sm90::FenceProxyAsyncGlobal();
      }
      __syncwarp();
      gpu::sm90::NamedBarrierArrive(kDone, kThreads);
    }
  }
};

}  // namespace jax_mla::decode::sm90
