// Sizes of Hopper's prefill kernel.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "gpu/element.h"

namespace jax_mla::prefill::sm90 {

inline constexpr int kBlockM = 128;       // queries of an item
inline constexpr int kRowsPerGroup = 64;  // queries of a math warpgroup (wgmma's M)
inline constexpr int kStages = 2;         // blocks in the ring
inline constexpr int kMmaDepth = 16;      // wgmma's K

inline constexpr int kWarpThreads = 32;
inline constexpr int kGroupThreads = 128;
inline constexpr int kNumMathGroups = kBlockM / kRowsPerGroup;
inline constexpr int kNumMathThreads = kNumMathGroups * kGroupThreads;
inline constexpr int kNumThreads = kNumMathThreads + kGroupThreads;
inline constexpr int kProducerWarp = kNumMathThreads / kWarpThreads;
inline constexpr int kPaddingWarp = kProducerWarp + 1;
// setmaxnreg, per thread: 256 * 232 + 128 * 40 registers of 65,536.
inline constexpr int kMathRegisters = 232;
inline constexpr int kProducerRegisters = 40;

// A chunk is 64 dims of the rows of an item or of a block, in the 128-byte swizzle.
inline constexpr int kChunkDims = 64;
inline constexpr int kElementBytes = 2;
inline constexpr int kChunkRowBytes = kChunkDims * kElementBytes;

constexpr int NumChunks(int dims) { return (dims + kChunkDims - 1) / kChunkDims; }

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

// `block_n`: keys of a block.
template <DType dtype, int d_nope, int d_kpe, int d_v, int block_n>
struct Config {
  static constexpr DType kDType = dtype;
  using T = gpu::Element<dtype>;
  static constexpr int kDNope = d_nope, kDKpe = d_kpe, kDV = d_v, kBlockN = block_n;
  // A rotary chunk of fewer dims is filled with zeros, which are not multiplied.
  static constexpr int kNopeChunks = NumChunks(kDNope), kKeyChunks = kNopeChunks + NumChunks(kDKpe);
  static constexpr int kValueChunks = NumChunks(kDV);
  static constexpr int kKeySteps = (kDNope + kDKpe) / kMmaDepth;  // of Q K^T
  static constexpr int kValueSteps = kBlockN / kMmaDepth;         // of P V
  static constexpr int kQueryChunkBytes = kBlockM * kChunkRowBytes;
  static constexpr int kChunkBytes = kBlockN * kChunkRowBytes;
  // Whether at most one block of an item holds keys that one of its queries sees and another does
  // not.
  static constexpr bool kMasksOneBlock = kBlockN % kBlockM == 0;
  static_assert(kDNope % kChunkDims == 0 && kDKpe <= kChunkDims && kDKpe % kMmaDepth == 0,
                "keys are whole chunks and one rotary chunk, in steps of an instruction");
  static_assert(kDV % kChunkDims == 0 && kBlockN % kMmaDepth == 0,
                "values are whole chunks, and a block is multiplied in whole steps");
};

template <class C>
struct SharedMemory {
  alignas(1024) uint8_t q[C::kKeyChunks][C::kQueryChunkBytes];
  alignas(1024) uint8_t k[kStages][C::kKeyChunks][C::kChunkBytes];
  alignas(1024) uint8_t v[kStages][C::kValueChunks][C::kChunkBytes];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  Item item;
};

}  // namespace jax_mla::prefill::sm90
