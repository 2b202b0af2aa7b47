// How a call becomes a call of CUTLASS's kernel, and where its pieces lie in scratch. Plain C++:
// the scratch is sized when a call is lowered, possibly on a machine without a GPU.
//
// CUTLASS's kernel works on entries: 128 query rows that share a sequence. A sequence has one entry
// for every 128 heads. Its keys are cut into tiles of 128 tokens, which are its pages, and its
// tiles into parts, which different clusters compute.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/divisor.h"
#include "decode/params.h"
#include "decode/schedule/plan.h"

namespace jax_mla::decode::sm100 {

inline constexpr int32_t kDCkv = 512, kDKpe = 64;
inline constexpr int32_t kEntryRows = 128;   // query rows of an entry: fixed in CUTLASS's kernel
inline constexpr int32_t kTileTokens = 128;  // and so are the tokens of a tile
inline constexpr int32_t kElementBytes = 2;
// Clusters of two CTAs, one on an SM, that scratch has room for: see kMaxWorkers in
// schedule/plan.cc.
inline constexpr int32_t kMaxClusters = 128;

// What the shape of a call decides.
struct CallPlan {
  int32_t batch;
  int32_t num_heads;
  int32_t entries_per_seq;
  int32_t num_entries;
  int32_t max_tiles;    // of a sequence
  int32_t max_parts;    // of a sequence that scratch has room for; at least 1
  bool has_fixed_cuts;  // the parts of a sequence follow from its own length
  bool pads_heads;      // queries and results pass through arrays with whole entries

  // Parts that the longest sequence gets. By default as many as keep the clusters of a GPU busy if
  // all sequences are long.
  int32_t PartsFor(int32_t num_sms) const {
    return has_fixed_cuts ? max_parts : std::clamp(num_sms / 2 / num_entries, 1, max_parts);
  }
};

inline int64_t CountEntries(const DecodeShape& shape) {
  return int64_t{shape.batch} * CeilDiv(shape.num_heads, kEntryRows);
}

inline CallPlan MakeCallPlan(const DecodeShape& shape) {
  const int32_t num_entries = static_cast<int32_t>(CountEntries(shape));
  const int32_t max_tiles = static_cast<int32_t>(CeilDiv(int64_t{shape.max_seq_len}, kTileTokens));
  const int32_t fixed = FixedSplits(shape);
  // With as many parts as tiles, more parts cut a sequence alike. So a cap by the bound of the
  // lengths changes no bits.
  const int32_t wanted = fixed > 0 ? fixed : kMaxClusters / std::max(num_entries, 1);
  return {.batch = shape.batch,
          .num_heads = shape.num_heads,
          .entries_per_seq = CeilDiv(shape.num_heads, kEntryRows),
          .num_entries = num_entries,
          .max_tiles = max_tiles,
          .max_parts = std::clamp(wanted, 1, std::max(max_tiles, 1)),
          .has_fixed_cuts = fixed > 0,
          .pads_heads = shape.num_heads % kEntryRows != 0};
}

// Where the arrays lie, in bytes from the start of scratch. T is the element type.
struct ScratchLayout {
  int64_t table;      // int32[num_entries, max_tiles], see prepare.cuh
  int64_t lens;       // int32[num_entries], tokens that are present
  int64_t num_parts;  // int32[num_entries], 0 for a sequence without keys
  // With pads_heads:
  int64_t q_nope;  // T[num_entries, 128, 512]
  int64_t q_pe;    // T[num_entries, 128, 64]
  int64_t out;     // T[num_entries, 128, 512], of entries with one part
  int64_t lse;     // float[num_entries, 128]
  // With more than one part:
  int64_t part_out;  // float[num_entries, 128, parts, 512]
  int64_t part_lse;  // float[num_entries, parts, 128]
  // Pages of 128 rows like the pool's, one for each sequence, and room to place them.
  int64_t tails;
  int64_t num_bytes;
};

// `row_width`: elements of a row of the pool, padding included.
inline ScratchLayout MakeScratchLayout(const CallPlan& plan, int64_t row_width) {
  constexpr int64_t kAlignment = 256;
  ScratchLayout layout{};
  int64_t end = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = end;
    end += CeilDiv(bytes, kAlignment) * kAlignment;
    return begin;
  };
  constexpr int64_t kFloat = sizeof(float), kInt = sizeof(int32_t);
  const int64_t entries = plan.num_entries, rows = entries * kEntryRows;
  layout.table = take(entries * plan.max_tiles * kInt);
  layout.lens = take(entries * kInt);
  layout.num_parts = take(entries * kInt);
  if (plan.pads_heads) {
    layout.q_nope = take(rows * kDCkv * kElementBytes);
    layout.q_pe = take(rows * kDKpe * kElementBytes);
    layout.out = take(rows * kDCkv * kElementBytes);
    layout.lse = take(rows * kFloat);
  }
  if (plan.max_parts > 1) {
    layout.part_out = take(rows * plan.max_parts * kDCkv * kFloat);
    layout.part_lse = take(rows * plan.max_parts * kFloat);
  }
  layout.tails = take((int64_t{plan.batch} + 1) * kTileTokens * row_width * kElementBytes);
  layout.num_bytes = end;
  return layout;
}

inline int64_t ScratchBytes(const DecodeShape& shape) {
  return MakeScratchLayout(MakeCallPlan(shape), shape.packed_width).num_bytes;
}

// One range of pages, numbered from 0, that holds the pool's and the tails. CUTLASS's kernel knows
// one base address, and every page is a whole number of pages away from it.
struct PageRange {
  uintptr_t base;
  int64_t first_pool_page;
  int64_t first_tail;
  int64_t num_pages;

  MLA_HOST_DEVICE uintptr_t Address(int64_t page, int64_t page_bytes) const {
    return base + page * page_bytes;
  }
};

// `tails`: where the room for them begins; they lie at most a page behind.
inline PageRange MakePageRange(uintptr_t pool, int64_t num_pool_pages, uintptr_t tails,
                               int64_t num_tails, int64_t page_bytes) {
  PageRange range{};
  if (num_pool_pages == 0) {
    range = {.base = tails, .first_pool_page = 0, .first_tail = 0};
  } else if (tails >= pool) {
    const int64_t distance = static_cast<int64_t>(tails - pool);
    range = {.base = pool, .first_pool_page = 0, .first_tail = CeilDiv(distance, page_bytes)};
  } else {
    const int64_t pages_before = static_cast<int64_t>(pool - tails) / page_bytes;
    range = {
        .base = pool - pages_before * page_bytes, .first_pool_page = pages_before, .first_tail = 0};
  }
  range.num_pages = std::max(range.first_pool_page + num_pool_pages, range.first_tail + num_tails);
  return range;
}

}  // namespace jax_mla::decode::sm100
