// Sizes of Hopper's prefill kernel.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "gpu/element.h"

namespace jax_mla::prefill::sm90 {

inline constexpr int kDNope = 128, kDKpe = 64, kDV = 128;

inline constexpr int kBlockM = 128;       // queries of an item
inline constexpr int kBlockN = 128;       // keys of a block
inline constexpr int kRowsPerGroup = 64;  // queries of a math warpgroup (wgmma's M)
inline constexpr int kStages = 2;         // blocks in the ring

inline constexpr int kWarpThreads = 32;
inline constexpr int kGroupThreads = 128;
inline constexpr int kNumMathGroups = kBlockM / kRowsPerGroup;
inline constexpr int kNumMathThreads = kNumMathGroups * kGroupThreads;
inline constexpr int kNumThreads = kNumMathThreads + kGroupThreads;
inline constexpr int kProducerWarp = kNumMathThreads / kWarpThreads;
inline constexpr int kFillWarp = kProducerWarp + 1;
// setmaxnreg, per thread: 256 * 232 + 128 * 40 registers of 65,536.
inline constexpr int kMathRegisters = 232;
inline constexpr int kProducerRegisters = 40;

// A chunk is 128 rows x 64 dims in the 128-byte swizzle.
inline constexpr int kChunkDims = 64;
inline constexpr int kChunkRows = 128;
inline constexpr int kChunkElements = kChunkRows * kChunkDims;
inline constexpr int kChunkBytes = kChunkElements * 2;
inline constexpr int kNopeChunks = kDNope / kChunkDims;
inline constexpr int kKeyChunks = (kDNope + kDKpe) / kChunkDims;
inline constexpr int kValueChunks = kDV / kChunkDims;
static_assert(kBlockM == kChunkRows && kBlockN == kChunkRows && kDKpe == kChunkDims);

// One row tile of one head of one sequence.
struct Item {
  int32_t head;
  int32_t q_row;       // its first query
  int32_t num_rows;    // at most kBlockM; 0: there are no more items
  int32_t k_row;       // the sequence's first key
  int32_t num_keys;    // keys of the sequence
  int32_t num_blocks;  // blocks of keys that a query of the tile sees
  int32_t place;       // the tile's first query, counted in its sequence
};

struct SharedMemory {
  alignas(1024) uint16_t q[kKeyChunks][kChunkElements];
  alignas(1024) uint16_t k[kStages][kKeyChunks][kChunkElements];
  alignas(1024) uint16_t v[kStages][kValueChunks][kChunkElements];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  Item item;
};

template <DType kTheDType>
struct Config {
  static constexpr DType kDType = kTheDType;
  using T = gpu::Element<kDType>;
};

}  // namespace jax_mla::prefill::sm90
