// Sizes and shared memory of the choice kernel.
#pragma once

#include <cstdint>

#include "index/params.h"

namespace jax_mla::index {

inline constexpr int kChooseThreads = 512;
inline constexpr int kWarpThreads = 32;
inline constexpr int kChooseWarps = kChooseThreads / kWarpThreads;
inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr int kMaxGroupCtas = 8;  // a cluster's size that every Hopper GPU can launch

// A key's digits: 12 bits, 10 and 10.
inline constexpr int kFirstBits = 12, kDigitBits = 10;
inline constexpr int kLowerBits = 32 - kFirstBits;
inline constexpr int kFirstBins = 1 << kFirstBits, kBins = 1 << kDigitBits;

// Candidates: tokens whose first digit is the threshold's. A CTA lists its own, and CTAs of a group
// list all that the group has.
inline constexpr int kMaxCandidates = 2048;

// Tokens of a warp's step: each lane takes four keys.
inline constexpr int kLaneKeys = 4, kWarpKeys = kWarpThreads * kLaneKeys;

struct Candidates {
  uint32_t keys[kMaxCandidates];   // their lower bits
  int32_t tokens[kMaxCandidates];  // places in the CTA's span; of a group, positions
};

struct WordCounts {
  uint32_t winners, ties;
};

struct DigitFound {
  uint32_t digit;
  uint32_t num_above;  // keys with a higher digit
  uint32_t num_equal;  // with this one
  uint32_t total;      // keys that were counted
};

struct Histograms {
  union {  // one after the other
    uint32_t first[kFirstBins];
    Candidates candidates;
    int32_t chosen[kMaxTopk];  // positions
  };
  uint32_t others[2][kBins];
};
static_assert(sizeof(Histograms) == (kFirstBins + 2 * kBins) * sizeof(uint32_t),
              "fewer candidates, or fewer entries a row");

// What a group knows of all its CTAs.
struct GroupShared {
  Histograms merged;
  Candidates candidates;
};

// Behind it lie two bitmaps of the CTA's span: winners, and ties; in a group GroupShared; and, if
// they are kept, the keys of the span.
struct ChooseShared {
  Histograms own;
  int32_t page_ids[kChooseThreads];  // of the span's first pages
  uint32_t warp_sums[kChooseWarps];
  WordCounts warp_counts[kChooseWarps];
  WordCounts cta_counts[kMaxGroupCtas];  // written by every CTA of the group
  DigitFound found;
  int32_t num_candidates;     // may be more than there is room for
  uint32_t num_winners;       // by the first digit
  int32_t slab_row, seq_idx;  // of the query
  // With a list of the whole group.
  int32_t num_listed;       // in the group's first CTA: entries that CTAs have taken
  int32_t first_listed;     // the CTA's first entry
  WordCounts listed_below;  // candidates that were chosen before the CTA's span
  WordCounts listed;        // and in all spans
  int32_t unused[2];
};
static_assert(sizeof(ChooseShared) % 16 == 0, "bitmaps need 16 bytes");

// Tokens of each CTA's span.
constexpr int32_t SpanOf(int32_t num_tokens, int32_t group_size) {
  const int32_t each = (num_tokens + group_size - 1) / group_size;
  return (each + kWarpKeys - 1) / kWarpKeys * kWarpKeys;
}
constexpr int64_t ChooseSharedBytes(int32_t span, int32_t group_size, bool keeps_keys) {
  return static_cast<int64_t>(sizeof(ChooseShared)) + 2 * (span / 8) +
         (group_size > 1 ? static_cast<int64_t>(sizeof(GroupShared)) : 0) +
         (keeps_keys ? int64_t{span} * static_cast<int64_t>(sizeof(uint32_t)) : 0);
}

}  // namespace jax_mla::index
