// The kernel in front of CUTLASS's. That one trusts its page table and its lengths, reads whole
// pages of 128 rows, and multiplies the values of rows behind a sequence's end by 0, which keeps a
// NaN. So it gets a table, lengths and last pages for which all of this is right:
//
//   * The table has only pages that are present, close together: with one query token, the place of
//     a key in its sequence means nothing. What the page table says behind a sequence's end is not
//     read.
//   * Lengths are clamped, and count the tokens of present pages only.
//   * A page that a sequence fills in part is replaced by a copy, the tail, whose other rows are 0.
//   * No part of a sequence is empty, and a sequence without keys has no parts: then no cluster
//     touches it.
//
// Nothing here needs Blackwell: tests/cuda/sm100_arguments.cu runs it on any GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "decode/sm100/buffers.h"

namespace jax_mla::decode::sm100 {

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPrepareCtas = 8;  // of a sequence: copies are shared, one writes the table
inline constexpr int kVectorBytes = 16;

// The pages of one sequence.
struct SequencePages {
  const int32_t* ids;  // its row of the page table
  int32_t len;         // tokens
  int32_t num_pages;   // up to its end
  int32_t layer;
  int32_t page_begin;

  __device__ SequencePages(const DecodeParams& p, int32_t seq_idx)
      : ids(p.page_table + int64_t{seq_idx} * p.max_pages_per_seq),
        len(min(max(p.seq_lens[seq_idx], 0), p.max_seq_len)),
        num_pages((len + p.page_size - 1) / p.page_size),
        layer(*p.layer),
        page_begin(*p.page_begin) {}

  // The number of a page in the whole pool, or -1 if it is absent. Ids, page_begin and layer may
  // have any value: their difference has 64 bits.
  __device__ int64_t PoolPage(const DecodeParams& p, int32_t page_idx) const {
    const int64_t page = int64_t{ids[page_idx]} - page_begin;
    const bool is_present = page >= 0 && page < p.num_pages && layer >= 0 && layer < p.num_layers;
    return is_present ? int64_t{layer} * p.num_pages + page : -1;
  }
};

struct Rank {
  int32_t before;  // threads before this one whose flag is set
  int32_t total;
};

// Called by all threads of the CTA.
__device__ inline Rank RankInCta(bool flag) {
  constexpr int kWarps = kPrepareThreads / 32;
  __shared__ int32_t counts[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t flags = __ballot_sync(0xffffffffu, flag);
  if (lane == 0) counts[warp] = __popc(flags);
  __syncthreads();
  Rank rank{__popc(flags & ((1u << lane) - 1)), 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) rank.before += counts[w];
    rank.total += counts[w];
  }
  __syncthreads();  // before the counts of the next call
  return rank;
}

// The most parts, up to `max_parts`, such that none is empty if each gets as many tiles as the
// first. CUTLASS's kernel cuts `tiles` into so many parts of the same sizes.
MLA_HOST_DEVICE int32_t CountFullParts(int32_t tiles, int32_t max_parts) {
  if (tiles == 0) return 0;
  const int32_t tiles_per_part = (tiles + max_parts - 1) / max_parts;
  return (tiles + tiles_per_part - 1) / tiles_per_part;
}

// Table, length and number of parts of a sequence, for all its entries.
__device__ inline void WriteTable(const DecodeParams& p, const CallPlan& plan, const Buffers& b,
                                  const SequencePages& pages, int32_t seq_idx) {
  const int32_t tiles_per_page = p.page_size / kTileTokens;
  const int64_t first_entry = int64_t{seq_idx} * plan.entries_per_seq;
  int32_t num_present = 0;
  for (int32_t first = 0; first < pages.num_pages; first += kPrepareThreads) {
    const int32_t page_idx = first + static_cast<int32_t>(threadIdx.x);
    const int64_t pool_page =
        page_idx < pages.num_pages ? pages.PoolPage(p, page_idx) : int64_t{-1};
    const Rank rank = RankInCta(pool_page >= 0);
    const int32_t tokens = pool_page < 0 ? 0 : min(p.page_size, pages.len - page_idx * p.page_size);
    for (int32_t tile = 0; tile * kTileTokens < tokens; ++tile) {
      const bool is_full = (tile + 1) * kTileTokens <= tokens;
      const int64_t id = is_full ? b.pages.first_pool_page + pool_page * tiles_per_page + tile
                                 : b.pages.first_tail + seq_idx;
      const int64_t place = int64_t{num_present + rank.before} * tiles_per_page + tile;
      for (int32_t e = 0; e < plan.entries_per_seq; ++e) {
        b.table[(first_entry + e) * plan.max_tiles + place] = static_cast<int32_t>(id);
      }
    }
    num_present += rank.total;
  }
  if (threadIdx.x != 0) return;
  int32_t len = num_present * p.page_size;
  if (pages.num_pages > 0 && pages.PoolPage(p, pages.num_pages - 1) >= 0) {
    len -= pages.num_pages * p.page_size - pages.len;
  }
  const int32_t tiles = (len + kTileTokens - 1) / kTileTokens;
  for (int32_t e = 0; e < plan.entries_per_seq; ++e) {
    b.lens[first_entry + e] = len;
    b.num_parts[first_entry + e] = CountFullParts(tiles, b.max_parts);
  }
}

// Copies `num_rows` rows of `row_bytes`, which lie `from_stride` and `to_stride` bytes apart, and
// fills up to `all_rows` rows with 0. All CTAs of a sequence share the work.
__device__ inline void CopyRows(const void* from, int64_t from_stride, int32_t num_rows, void* to,
                                int64_t to_stride, int32_t all_rows, int32_t row_bytes) {
  const int32_t vectors = row_bytes / kVectorBytes;
  for (int32_t i = blockIdx.y * kPrepareThreads + threadIdx.x; i < all_rows * vectors;
       i += gridDim.y * kPrepareThreads) {
    const int32_t row = i / vectors, vector = i % vectors;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < num_rows) {
      value = reinterpret_cast<const uint4*>(static_cast<const char*>(from) +
                                             row * from_stride)[vector];
    }
    reinterpret_cast<uint4*>(static_cast<char*>(to) + row * to_stride)[vector] = value;
  }
}

// The copy of the page that the sequence fills in part, if there is one and it is present.
__device__ inline void WriteTail(const DecodeParams& p, const Buffers& b,
                                 const SequencePages& pages, int32_t seq_idx) {
  const int32_t rows = pages.len % kTileTokens;
  if (rows == 0) return;
  const int64_t pool_page = pages.PoolPage(p, pages.num_pages - 1);
  if (pool_page < 0) return;
  const int64_t row_bytes = p.ckv.token_stride * kElementBytes;
  const int64_t first_row = pool_page * p.page_size + (pages.len - rows) % p.page_size;
  const char* from = static_cast<const char*>(p.ckv.base) + first_row * row_bytes;
  void* to = reinterpret_cast<void*>(b.pages.Address(b.pages.first_tail + seq_idx, b.page_bytes));
  CopyRows(from, row_bytes, rows, to, row_bytes, kTileTokens, (kDCkv + kDKpe) * kElementBytes);
}

// The queries of a sequence, filled up to whole entries with heads whose queries are 0.
__device__ inline void PadQueries(const DecodeParams& p, const CallPlan& plan, const Buffers& b,
                                  int32_t seq_idx) {
  const int32_t padded_heads = plan.entries_per_seq * kEntryRows;
  const auto pad = [&](const void* from, void* to, int32_t row_bytes) {
    CopyRows(static_cast<const char*>(from) + int64_t{seq_idx} * plan.num_heads * row_bytes,
             row_bytes, plan.num_heads,
             static_cast<char*>(to) + int64_t{seq_idx} * padded_heads * row_bytes, row_bytes,
             padded_heads, row_bytes);
  };
  pad(p.q_nope, b.q_nope, kDCkv * kElementBytes);
  pad(p.q_pe, b.q_pe, kDKpe * kElementBytes);
}

// Grid (batch, kPrepareCtas).
static __global__ void __launch_bounds__(kPrepareThreads)
    Prepare(const __grid_constant__ DecodeParams p, const __grid_constant__ CallPlan plan,
            const __grid_constant__ Buffers b) {
  const int32_t seq_idx = blockIdx.x;
  const SequencePages pages(p, seq_idx);
  if (blockIdx.y == 0) WriteTable(p, plan, b, pages, seq_idx);
  WriteTail(p, b, pages, seq_idx);
  if (plan.pads_heads) PadQueries(p, plan, b, seq_idx);
}

}  // namespace jax_mla::decode::sm100
