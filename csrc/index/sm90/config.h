// Sizes and shared memory of Hopper's score kernel.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "index/params.h"
#include "index/slab_work.cuh"

namespace jax_mla::index::sm90 {

inline constexpr int kWarpThreads = 32;
inline constexpr int kGroupThreads = 128, kGroupWarps = kGroupThreads / kWarpThreads;
inline constexpr int kNumMathGroups = 3;
inline constexpr int kNumMathWarps = kNumMathGroups * kGroupWarps;
inline constexpr int kKeyWarp = kNumMathWarps, kQueryWarp = kKeyWarp + 1;
inline constexpr int kNumThreads = (kQueryWarp + 1) * kWarpThreads;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

inline constexpr int kRowBytes = 128;         // of the swizzle: a row of a TMA box
inline constexpr int kColumns = 64;           // heads of a chunk: N of a wgmma
inline constexpr int kSlots = 2;              // windows whose queries are in shared memory
inline constexpr int kQueryBytes = 64 << 10;  // of all slots

// kKeys: what keys and queries are stored in. kHeads: 32 or 64, the heads of a query with those
// that pad them.
template <DType kKeys, int kNumHeads>
struct Config {
  static constexpr DType kKeyType = kKeys;
  static constexpr int kHeads = kNumHeads;
  static constexpr bool kHasCodes = kKeys == DType::kE4m3;
  static constexpr bool kHasPairs = kHasCodes;  // products of two chunks at once
  static constexpr int kElementBytes = kHasCodes ? 1 : 2;
  static constexpr int kHalves = kDim * kElementBytes / kRowBytes;  // boxes a row
  static constexpr int kTileBytes = kTileTokens * kRowBytes;        // of a half
  // A multiple of the warpgroups, so that a stage is always read by the same one. With another
  // number a warpgroup could wait for a stage whose phase before has not ended, since copies may
  // end out of order, and a wait passes if it is two phases ahead.
  static constexpr int kStages = kHasCodes ? 15 : 6;
  static_assert(kStages % kNumMathGroups == 0, "see above");
  static constexpr int kChunkBytes = kHalves * kColumns * kRowBytes;
  static constexpr int kChunks = kQueryBytes / kSlots / kChunkBytes;  // of a window
  static constexpr int kChunkQueries = kColumns / kHeads;
  static constexpr int kMaxQueries = kChunks * kChunkQueries;  // of a window
  static constexpr int kSteps = kDim * kElementBytes / 32;     // wgmmas a chunk
};

template <class C>
struct alignas(1024) SharedMemory {
  uint8_t keys[C::kStages][C::kHalves][C::kTileBytes];  // [64 tokens, 128 bytes], swizzled
  uint8_t queries[kSlots][C::kChunks][C::kHalves][kColumns * kRowBytes];  // [64 heads, 128 bytes]
  float scales[C::kHasCodes ? C::kStages : 1][kTileTokens];
  // As a thread of a quad needs them: of a chunk [4][thread of the quad][4], see Math.
  alignas(16) float weights[kSlots][C::kChunks][kColumns];
  uint32_t boxes_present[C::kStages];  // bit b: the page of box b is in the pool
  uint64_t keys_full[C::kStages], keys_empty[C::kStages];
  uint64_t queries_full[kSlots], queries_empty[kSlots];
  alignas(16) SlabWork work;
};

}  // namespace jax_mla::index::sm90
