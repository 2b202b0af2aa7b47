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
inline constexpr int kFirstShift = 32 - kFirstBits;
inline constexpr int kFirstBins = 1 << kFirstBits, kBins = 1 << kDigitBits;

// A CTA's candidates: its tokens whose first digit is the threshold's.
inline constexpr int kMaxCandidates = 1536;

// Tokens of a warp's step: each lane loads four keys.
inline constexpr int kLaneKeys = 4, kWarpKeys = kWarpThreads * kLaneKeys;

struct Candidates {
  uint32_t bins[kBins];
  uint32_t keys[kMaxCandidates];   // their lower 20 bits
  int32_t tokens[kMaxCandidates];  // places in the CTA's span
};

struct WordCounts {
  uint32_t winners, ties;
};

struct DigitFound {
  uint32_t digit;
  uint32_t num_above;  // keys with a higher digit
  uint32_t total;      // keys that were counted
};

// Behind it lie two bitmaps of the CTA's span: winners, and ties.
struct ChooseShared {
  union {  // one after the other
    uint32_t first_bins[kFirstBins];
    Candidates candidates;
    int32_t chosen[kMaxTopk];  // positions
  };
  uint32_t warp_sums[kChooseWarps];
  WordCounts warp_counts[kChooseWarps];
  // Written by every CTA of the group.
  uint32_t slice_totals[kMaxGroupCtas];
  WordCounts cta_counts[kMaxGroupCtas];
  DigitFound found;
  int32_t num_candidates;  // may be more than there is room for
};
static_assert(sizeof(Candidates) <= sizeof(uint32_t) * kFirstBins, "fewer candidates");
static_assert(sizeof(ChooseShared) % 16 == 0, "bitmaps need 16 bytes");

// Tokens of each CTA's span.
constexpr int32_t SpanOf(int32_t num_tokens, int32_t group_size) {
  const int32_t each = (num_tokens + group_size - 1) / group_size;
  return (each + kWarpKeys - 1) / kWarpKeys * kWarpKeys;
}
constexpr int32_t ChooseSharedBytes(int32_t span) {
  return static_cast<int32_t>(sizeof(ChooseShared)) + 2 * (span / 8);
}

}  // namespace jax_mla::index
