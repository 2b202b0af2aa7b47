// The append inside a decode kernel, for a step with one token a sequence. Before the producer
// copies the block that holds a sequence's new row, a warp of its own writes the row to the cache.
// It does so while the producer looks up pages and copies other blocks. Row tiles of a sequence
// each copy that block, so each CTA writes the same bytes, and none waits for another.
//
// Where the call says so, the row is normalised, rotated and stored as codes, as by the append
// kernel (append/encode_token.cuh), and the warp also rotates the queries of every item
// (rotate_queries.cuh).
#pragma once

#include <cstdint>

#include "append/append_token.cuh"
#include "append/ckv_row.cuh"
#include "append/encode_token.cuh"
#include "append/kpe_row.cuh"
#include "append/params.h"
#include "core/divisor.h"
#include "core/kv_format.h"
#include "decode/params.h"
#include "decode/sm90/common/append_task.h"
#include "decode/sm90/common/load/token_source.cuh"
#include "decode/sm90/common/sizes.h"
#include "gpu/codegen.cuh"
#include "gpu/sm90.cuh"
#include "gpu/token_row.cuh"

namespace jax_mla::decode::sm90 {

// The new rows of a step, as kernels take them.
struct NewRows {
  append::AppendParams call;
  float inverse_width;  // 1 / d_ckv
  bool rotates_queries;
};

inline NewRows MakeNewRows(const append::AppendParams* rows) {
  if (rows == nullptr) return {};
  return {.call = *rows,
          .inverse_width = 1.0f / static_cast<float>(rows->d_ckv),
          .rotates_queries = rows->q_pe != nullptr};
}

// Where the new row of a sequence goes.
struct NewRowPlace {
  int32_t given_len;  // of the sequence
  gpu::RowPlace row;  // page: kOutside if the pool does not hold it

  static __device__ __forceinline__ NewRowPlace Find(const DecodeParams& p,
                                                     const OwnedPages& owned_pages,
                                                     const Divisor& page_size,
                                                     const AppendTask& task) {
    const int32_t given_len = __ldg(p.seq_lens + task.seq_idx);
    const TokenSource source{p, page_size};
    const int32_t token = task.seq_len - 1, page_idx = source.PageOf(token);
    const int32_t page =
        owned_pages.Local(p, source.LoadPageId(task.seq_idx, page_idx, /*is_inside=*/true));
    return {given_len, {owned_pages.layer, page, source.InPage(token, page_idx)}};
  }
  // A length that the page table has no room for is a mistake, and its sequence gets no row.
  __device__ __forceinline__ bool IsWritable(const AppendTask& task) const {
    return row.page != kOutside && given_len == task.seq_len;
  }
};

template <class C>
__device__ __forceinline__ bool RotatesQueries(const NewRows& rows) {
  return C::kAppends && rows.rotates_queries;
}

// All threads of a CTA meet, except an appending warp that rotates no queries, which arrives and
// goes on: it uses nothing that the others prepare. A barrier with a number of threads must not be
// mixed with __syncthreads, which is one without: that is an illegal instruction.
template <class C>
__device__ __forceinline__ void SyncThreads(int barrier, int num_threads) {
  if constexpr (C::kAppends) {
    gpu::sm90::NamedBarrierSync(barrier, num_threads);
  } else {
    __syncthreads();
  }
}
template <class C>
__device__ __forceinline__ void SyncAppendWarp(const NewRows& rows, int barrier, int num_threads) {
  if (RotatesQueries<C>(rows)) {
    gpu::sm90::NamedBarrierSync(barrier, num_threads);
  } else {
    gpu::sm90::NamedBarrierArrive(barrier, num_threads);
  }
}

// The position of a sequence's only token of the step.
__device__ __forceinline__ int32_t RotationPosition(const NewRows& rows, int32_t seq_idx) {
  return ClampedPosition(__ldg(rows.call.rope_lens + seq_idx), rows.call.max_seq_len, /*q_end=*/1,
                         /*token=*/0);
}

// By which angle this lane rotates its pair of a query's values. It is that of the row's pair.
template <int kDKpe>
__device__ __forceinline__ float2 QueryAngles(const NewRows& rows, int32_t seq_idx) {
  constexpr int kPairs = kDKpe / 2;
  const float* angles = append::AnglesOf(rows.call, RotationPosition(rows, seq_idx));
  const uint32_t pair = gpu::ThreadIndex() % kPairs;
  return {__ldg(angles + pair), __ldg(angles + kPairs + pair)};
}

// Barriers between the producer and the appending warp. kTold and kDone are the ids of named
// barriers that only these two warps use.
template <int kTold, int kDone>
struct Appender {
  static constexpr int kThreads = 2 * kWarpThreads;

  // Whether the warp has to do something for an item.
  template <class C, class Item>
  static __device__ __forceinline__ bool HasTask(const NewRows& rows, const Item& item) {
    return item.block_begin < item.block_end && item.seq_len > 0 &&
           (HasNewRow(item) || RotatesQueries<C>(rows));
  }

  // The producer's side, called by its whole warp: for each item with a task first Tell, then
  // WaitWritten; TellEnd when there are no more items.
  template <class Item>
  static __device__ __forceinline__ void Tell(AppendTask& task, const Item& item, int query_stage,
                                              uint32_t query_parity) {
    Tell(task, {.seq_idx = item.seq_idx,
                .seq_len = item.seq_len,
                .has_new_row = HasNewRow(item),
                .query_stage = static_cast<uint8_t>(query_stage),
                .query_parity = static_cast<uint8_t>(query_parity)});
  }
  static __device__ __forceinline__ void TellEnd(AppendTask& task) {
    Tell(task, {.seq_idx = 0, .seq_len = kNoMoreTasks});
  }
  static __device__ __forceinline__ void WaitWritten() {
    gpu::sm90::NamedBarrierSync(kDone, kThreads);
  }

  // The appending warp. Behind WaitWritten, TMA reads what it wrote. `rotate` rotates the queries
  // of a task. The warp does nothing before its first task: that would delay the producer's cold
  // code. Rows that were made for a guess of the first sequence cost 0.1 to 1.3 us a call.
  template <class C, class Rotate>
  static __device__ __forceinline__ void Run(const DecodeParams& p, const NewRows& rows,
                                             const Divisor& page_size, const AppendTask& next_task,
                                             Rotate rotate) {
    const OwnedPages owned_pages = PendingOwnedPages::Load(p).Get();
#pragma unroll 1
    while (true) {
      gpu::sm90::NamedBarrierSync(kTold, kThreads);
      const AppendTask task = next_task;
      if (task.seq_len == kNoMoreTasks) return;
      const float2 cos_sin = task.has_new_row ? WriteRow<C>(p, rows, owned_pages, page_size, task)
                                              : QueryAngles<C::kDKpe>(rows, task.seq_idx);
      gpu::sm90::FenceProxyAsyncGlobal();
      __syncwarp();
      gpu::sm90::NamedBarrierArrive(kDone, kThreads);
      if (RotatesQueries<C>(rows)) rotate(task, cos_sin);
    }
  }

 private:
  // Whether an item with blocks ends with its sequence's last one, and so holds the new row.
  template <class Item>
  static __device__ __forceinline__ bool HasNewRow(const Item& item) {
    return item.block_end * kBlockN >= item.seq_len;
  }
  static __device__ __forceinline__ void Tell(AppendTask& task, const AppendTask& told) {
    if (threadIdx.x % kWarpThreads == 0) task = told;
    __syncwarp();
    gpu::sm90::NamedBarrierArrive(kTold, kThreads);
  }

  // Returns the angles of this lane's pair, if the row is rotated. All loads that wait for no other
  // are issued before the first one that does.
  template <class C>
  static __device__ __forceinline__ float2 WriteRow(const DecodeParams& p, const NewRows& rows,
                                                    const OwnedPages& owned_pages,
                                                    const Divisor& page_size,
                                                    const AppendTask& task) {
    const append::AppendParams& call = rows.call;
    append::CkvRow<C::kDType, /*kIsVector=*/true, C::kDCkv> ckv(call, task.seq_idx);
    append::KpeRow<C::kDType, C::kDKpe> kpe(call, task.seq_idx);
    const auto place = NewRowPlace::Find(p, owned_pages, page_size, task);
    if (call.rope_table != nullptr) kpe.LoadAngles(RotationPosition(rows, task.seq_idx));
    const float2 inverse = append::InverseScales(call, task.seq_idx);
    if (call.norm_weight != nullptr) ckv.FindFactor(rows.inverse_width);
    if (place.IsWritable(task)) {
      const DType ckv_type = CkvType(call.kv_format, C::kDType);
      const DType kpe_type = KpeType(call.kv_format, C::kDType);
      ckv.Store(append::RowAddress(call.ckv_pages, place.row, ElementBytes(ckv_type)), inverse.x);
      kpe.Store(append::RowAddress(call.kpe_pages, place.row, ElementBytes(kpe_type)), inverse.y);
    }
    return kpe.angles();
  }
};

}  // namespace jax_mla::decode::sm90
