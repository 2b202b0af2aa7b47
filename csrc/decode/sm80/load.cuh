// Shared memory of the portable kernel, and the copies into it: KV tiles, token by token from their
// pages, and the queries of the row tile.
#pragma once

#include "decode/params.h"
#include "decode/scales.cuh"
#include "decode/schedule/schedule.h"
#include "decode/sm80/codes.cuh"
#include "decode/sm80/config.h"
#include "decode/sm80/masks.cuh"
#include "gpu/element.h"
#include "gpu/sm80.cuh"

namespace jax_mla::decode::sm80 {

// What turns a row's scores into P. It is read once a tile, so it stays in shared memory.
struct RowLimits {
  float reference;  // m, in log2 units
  // First token that the row may not see; with kHasMasks, the first one behind its own.
  int32_t visible_end;
};

// An item with its tokens.
struct Item {
  WorkItem work;
  int32_t token_begin;
  int32_t token_end;  // at most the sequence's length, unlike the end of its last block
  Unit unit;          // its query rows
  bool exists;        // false: the worker has no more items
  // With an FP8 cache. They lie where padding would be: the tile of 64 rows leaves no room.
  Scales scales;
};

// Shared memory without the ring. The num_stages stages lie after it, each with ckv [kBlockN,
// kDCkv] and kpe [kBlockN, kDKpe], both swizzled.
template <class C>
struct alignas(128) SharedMemoryPlan {
  uint8_t p[C::kBlockM * C::kPRowBytes];  // [kBlockM, kBlockN], swizzled
  // [kBlockM, kDKpe], swizzled.
  uint8_t query_kpe[C::kDKpe == 0 ? 128 : C::kBlockM * C::kKpeRowBytes];
  // [kBlockM, kDCkv], swizzled, unless that part of the query moves to registers.
  uint8_t query_ckv[C::kQueryInRegisters ? 128 : C::kBlockM * C::kCkvRowBytes];
  float row_max[C::kTokenWarps][C::kBlockM];
  float row_sum[C::kTokenWarps][C::kBlockM];
  RowLimits row_limits[C::kBlockM];
  float row_scale[C::kBlockM];
  uint8_t present[kMaxStages][kNumWarps];  // bit i: token i of the warp's tokens is present
  WorkIterator work;                       // only thread 0 uses it
  Item items[2];                           // the item in progress and the next one
};

// The swizzled offset of chunk `first_chunk` + c, given `lane_offset`, the swizzled offset of a
// lane's chunk c. The numbers first_chunk and c must share no bits. In unrolled code the result is
// the lane's offset plus a constant, which becomes an immediate.
__device__ __forceinline__ uint32_t ShiftChunks(uint32_t lane_offset, int first_chunk) {
  return (lane_offset ^ ((first_chunk & 7) << 4)) + (first_chunk >> 3 << 7);
}

// A thread's place in its warp, and its warp's share of the work.
template <class C>
struct Thread {
  int warp = threadIdx.x / kWarpThreads;
  int lane = threadIdx.x % kWarpThreads;
  // Of an mma accumulator, the thread has rows mma_row and mma_row + 8, columns 2 * quad_lane and
  // 2 * quad_lane + 1. The four lanes of a quad have the same rows.
  int mma_row = lane / 4;
  int quad_lane = lane % 4;
  bool has_scores = warp < C::kQkWarps;
  // First row and first token of this warp's share of S.
  int score_row = warp / C::kTokenWarps % C::kRowWarps * C::kQkRows;
  int token_warp = warp % C::kTokenWarps;
  int score_token = token_warp * C::kQkTokens;
};

// Copies KV tiles into stages. Each warp copies kTokensPerWarp consecutive tokens of every tile.
// The lane with a token's number finds where the token lies (Lookup), one tile before it is copied.
template <class C>
struct KvLoader {
  using T = gpu::Element<C::kDType>;
  static constexpr int kAbsent = -1;
  static constexpr int kCkvChunks = C::kCkvRowBytes / kChunkBytes;
  static constexpr int kChunkElements = kChunkBytes / C::kElementBytes;

  const DecodeParams& params;
  const Thread<C>& thread;
  int32_t layer;
  int32_t num_pages;  // 0 if that layer does not exist: then every token is absent
  int32_t page_begin;
  const int32_t* page_ids = nullptr;  // of the item's sequence
  int32_t token_end = 0;
  int32_t window_begin = 0;  // with kHasMasks: tokens before it are absent

  __device__ KvLoader(const DecodeParams& p, const Thread<C>& t) : params(p), thread(t) {
    layer = __ldg(p.layer);
    const bool has_layer = layer >= 0 && layer < p.num_layers;
    num_pages = has_layer ? p.num_pages : 0;
    layer = has_layer ? layer : 0;
    page_begin = __ldg(p.page_begin);
  }

  __device__ void Begin(const Item& item) {
    page_ids =
        params.page_table + static_cast<int64_t>(item.unit.seq_idx) * params.max_pages_per_seq;
    token_end = item.token_end;
    if constexpr (C::kHasMasks) {
      page_ids += item.unit.first_page;
      window_begin = WindowBegin(params, item.unit);
    }
  }

  // The row of the layer in which a token lies, counted over all pages, or kAbsent. The token is
  // the one with this lane's number among the warp's tokens of the tile at `tile_token`.
  __device__ int32_t Lookup(int32_t tile_token) const {
    const int32_t token = tile_token + thread.warp * C::kTokensPerWarp + thread.lane;
    if (thread.lane >= C::kTokensPerWarp || token >= token_end) return kAbsent;
    if (C::kHasMasks && token < window_begin) return kAbsent;
    const int32_t page_idx = static_cast<int32_t>(static_cast<uint32_t>(token) /
                                                  static_cast<uint32_t>(params.page_size));
    const int64_t page = int64_t{__ldg(page_ids + page_idx)} - page_begin;  // the id may be wild
    if (page < 0 || page >= num_pages) return kAbsent;
    // Fits in 32 bits: Run (backend.cc) refuses pools of more rows.
    return static_cast<int32_t>(page) * params.page_size + (token - page_idx * params.page_size);
  }

  // Copies this warp's tokens of a tile. `lane_row` is what Lookup found. Absent tokens become
  // zeros.
  __device__ void Copy(int32_t lane_row, uint32_t stage, uint8_t* present) const {
    const uint32_t present_bits = __ballot_sync(kAllLanes, lane_row != kAbsent);
    if (thread.lane == 0) present[thread.warp] = static_cast<uint8_t>(present_bits);
    if constexpr (C::kStorage == KvStorage::kFp8) {
      CodeTile<C>(stage).Copy(params, layer, lane_row);
    } else {
      CopyPlain(lane_row, stage);
    }
  }

 private:
  __device__ __forceinline__ void CopyPlain(int32_t lane_row, uint32_t stage) const {
    const T* ckv = static_cast<const T*>(params.ckv.base) + layer * params.ckv.layer_stride;
    const T* kpe = static_cast<const T*>(params.kpe.base) + layer * params.kpe.layer_stride;
    if constexpr (kCkvChunks < kWarpThreads) {
      CopyShortRows<C::kCkvRowBytes>(ckv, params.ckv.token_stride, lane_row, stage);
    } else {
      CopyLongRows(ckv, lane_row, stage);
    }
    if constexpr (C::kDKpe > 0) {
      CopyShortRows<C::kKpeRowBytes>(kpe, params.kpe.token_stride, lane_row,
                                     stage + C::kBlockN * C::kCkvRowBytes);
    }
  }

  // ckv of this warp's tokens, one after the other.
  __device__ __forceinline__ void CopyLongRows(const T* ckv, int32_t lane_row,
                                               uint32_t stage) const {
    const int first_token = thread.warp * C::kTokensPerWarp;
#pragma unroll 2
    for (int i = 0; i < C::kTokensPerWarp; ++i) {
      const int32_t row = __shfl_sync(kAllLanes, lane_row, i);
      const T* source =
          ckv + MaxI32(row, 0) * params.ckv.token_stride + thread.lane * kChunkElements;
#pragma unroll
      for (int chunk = 0; chunk < kCkvChunks; chunk += kWarpThreads) {
        gpu::CopyAsync16(
            stage + gpu::SwizzledOffset<C::kCkvRowBytes>(first_token + i, chunk + thread.lane),
            source + chunk * kChunkElements, row != kAbsent);
      }
    }
  }

  // Rows of fewer chunks than a warp has lanes: as many at a time as give each lane one. `source`:
  // where row 0 is; `target`: shared, row 0 of the stage.
  template <int kRowBytes>
  __device__ __forceinline__ void CopyShortRows(const T* source, int64_t token_stride,
                                                int32_t lane_row, uint32_t target) const {
    constexpr int kChunks = kRowBytes / kChunkBytes;
    constexpr int kTokensPerCopy = kWarpThreads / kChunks;
    const int first_token = thread.warp * C::kTokensPerWarp;
    const int chunk = thread.lane % kChunks;
#pragma unroll
    for (int i = 0; i < C::kTokensPerWarp; i += kTokensPerCopy) {
      const int token = i + thread.lane / kChunks;
      const int32_t row = __shfl_sync(kAllLanes, lane_row, token);
      if (token >= C::kTokensPerWarp) continue;
      gpu::CopyAsync16(target + gpu::SwizzledOffset<kRowBytes>(first_token + token, chunk),
                       source + MaxI32(row, 0) * token_stride + chunk * kChunkElements,
                       row != kAbsent);
    }
  }
};

// The queries of the row tile for one item. They are copied to shared memory. With
// kQueryInRegisters, the ckv part then moves to registers, as the A fragments of mma: a warp needs
// all of it for every tile. Otherwise it is read again from shared memory.
template <class C>
struct Query {
  uint32_t ckv, kpe;  // shared addresses: [kBlockM, kDCkv] and [kBlockM, kDKpe], swizzled
  uint32_t ckv_lane_offset, kpe_lane_offset;
  uint32_t fragments[C::kQueryInRegisters ? C::kCkvSteps : 1][4];

  __device__ Query(uint32_t ckv_shared, uint32_t kpe_shared, const Thread<C>& thread)
      : ckv(ckv_shared), kpe(kpe_shared) {
    const int row = thread.score_row + thread.lane % kMmaM, chunk = thread.lane / kMmaM;
    ckv_lane_offset = gpu::SwizzledOffset<C::kCkvRowBytes>(row, chunk);
    if constexpr (C::kDKpe > 0) kpe_lane_offset = gpu::SwizzledOffset<C::kKpeRowBytes>(row, chunk);
  }

  // Rows past the last query row become zeros. Nothing is read for them, and their results are not
  // written.
  template <int kRowBytes>
  static __device__ void CopyRows(uint32_t target, const void* source, int64_t first_row,
                                  int num_rows) {
    constexpr int kChunks = kRowBytes / kChunkBytes;
#pragma unroll 1
    for (int i = threadIdx.x; i < C::kBlockM * kChunks; i += kNumThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool present = row < num_rows;
      const char* from = static_cast<const char*>(source) +
                         (first_row + (present ? row : 0)) * kRowBytes + chunk * kChunkBytes;
      gpu::CopyAsync16(target + gpu::SwizzledOffset<kRowBytes>(row, chunk), from, present);
    }
  }

  // The rows of a unit from `first_row` on. Rows that the unit does not have become 0.
  __device__ void Copy(const DecodeParams& p, const Unit& unit, int first_row) const {
    const int64_t row = int64_t{unit.row_begin} + first_row;
    CopyRows<C::kCkvRowBytes>(ckv, p.q_nope, row, unit.num_rows - first_row);
    if constexpr (C::kDKpe > 0) {
      CopyRows<C::kKpeRowBytes>(kpe, p.q_pe, row, unit.num_rows - first_row);
    }
  }

  // Loads a fragment of 16 rows x 16 dimensions. Steps count first over ckv, then over kpe.
  __device__ void Load(uint32_t (&fragment)[4], int step, int m_tile) const {
    if (step < C::kCkvSteps) {
      gpu::LoadMatrix(fragment, ckv + ShiftChunks(ckv_lane_offset, 2 * step) +
                                    m_tile * kMmaM * C::kCkvRowBytes);
    } else {
      gpu::LoadMatrix(fragment, kpe + ShiftChunks(kpe_lane_offset, 2 * (step - C::kCkvSteps)) +
                                    m_tile * kMmaM * C::kKpeRowBytes);
    }
  }

  __device__ void LoadFragments() {
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < C::kCkvSteps; ++step) Load(fragments[step], step, 0);
    }
  }
};

}  // namespace jax_mla::decode::sm80
