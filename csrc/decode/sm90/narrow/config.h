// Compile-time choices of the narrow Hopper kernel: tile sizes, ring depth, shared-memory plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kv_format.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/split/combine.h"
#include "decode/split/schedule.h"

namespace jax_mla::decode::sm90::narrow {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / kWarpThreads;
inline constexpr int kNumMathWgs = 2;
inline constexpr int kNumMathThreads = kNumMathWgs * kWarpgroupThreads;
inline constexpr int kNumMathWarps = kNumMathThreads / kWarpThreads;

inline constexpr int kBlockN = kScheduleBlock;  // tokens a block: M of every wgmma
inline constexpr int kChunk = 64;               // dims a chunk: one 128-byte swizzled row
inline constexpr int kChunkRowBytes = 128;
inline constexpr int kChunkBytes = kBlockN * kChunkRowBytes;
inline constexpr int kMmaK = 16;       // depth of one wgmma
inline constexpr int kMmaKBytes = 32;  // ... along a K-major row
inline constexpr int kCopyBytes = 16;  // one cp.async or vector store
inline constexpr int kElementBytes = 2;

// Named barriers (0 is __syncthreads).
inline constexpr int kBarrierWg = 1;    // + warpgroup: 1, 2
inline constexpr int kBarrierMath = 3;  // both math warpgroups

// Shared memory of a Hopper SM. The combine kernel has to be resident beside this one:
// kCombineSharedBytes of it are for what the system takes of every CTA.
inline constexpr int kSmSharedBytes = 228 * 1024;
inline constexpr int kSystemSharedBytes = 1024;  // of every CTA

template <DType kDType_, int kDCkv_, int kDKpe_, int kBlockM_, KvLoad kLoad_>
struct Config {
  static constexpr DType kDType = kDType_;
  static constexpr int kDCkv = kDCkv_;
  static constexpr int kDKpe = kDKpe_;
  static constexpr int kBlockM = kBlockM_;  // query rows a tile: N of every wgmma
  static constexpr KvLoad kLoad = kLoad_;

  static constexpr int kCkvChunks = kDCkv / kChunk;
  static constexpr int kChunks = kCkvChunks + 1;               // and the rope chunk
  static constexpr int kOwnChunks = kCkvChunks / kNumMathWgs;  // of one math warpgroup
  static constexpr int kOwnRopeSteps = kDKpe / kMmaK / kNumMathWgs;
  static constexpr int kAccumulators = kBlockM / 2;  // registers a thread of one 64 x kBlockM tile
  static constexpr int kThreadRows = kBlockM / 4;    // distinct query rows a thread holds

  static constexpr int kProducerWarps = kLoad == KvLoad::kTmaBlocks ? 1 : 4;
  static constexpr int kProducerThreads = kProducerWarps * kWarpThreads;
  static constexpr int kThreads = kNumMathThreads + kProducerThreads;
  // kv_full arrivals: every warp announces its bytes; gathering, the leader and all that copy.
  static constexpr int kFullArrivals =
      kLoad == KvLoad::kGather ? 1 + kProducerThreads : kProducerWarps;

  // How many CTAs of the combine kernel (2,560 registers a warp) fit beside this one is decided on
  // the quarter of the SM, 16,384 registers, that has three of these warps: one fits beside 144
  // registers a thread, two beside 104.
  static constexpr int kMaxRegisters = 104;
  static constexpr int kResidentMerges = 2;

  // As deep as fits beside the combine kernel. 10 -> 18 slots: 171 -> 144 us (B128 x 4096, 16 rows,
  // H200), flat from there.
  static constexpr int kKvStages = kBlockM == 8 ? 22 : 18;
  static constexpr int kQueryStages = 2;
  static constexpr int kQueryChunkBytes = kBlockM * kChunkRowBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;

  static_assert(kDCkv % (kChunk * kNumMathWgs) == 0,
                "each math warpgroup owns the same number of latent chunks");
  static_assert(kDKpe <= kChunk && kDKpe % (kMmaK * kNumMathWgs) == 0,
                "the rope part is one chunk, split evenly between the math warpgroups");
  static_assert(kBlockM == 8 || kBlockM == 16, "wgmma N of the P layout");
  static_assert(kKvStages >= kChunks, "a block must fit into the ring");
};

// One work item as the math warpgroups see it; 16 bytes, one shared load.
struct alignas(16) Item {
  int32_t seq_idx;
  int32_t num_blocks;   // kNoMoreItems ends the kernel
  int32_t tokens_left;  // seq_len minus the first token of the item
  int32_t slot;         // of the partial result; kFinal: write out and lse
};
inline constexpr int32_t kNoMoreItems = -1;
inline constexpr int32_t kFinal = -1;

template <class C>
struct SharedMemory {
  alignas(1024) uint8_t kv[C::kKvStages][kChunkBytes];           // [64 tokens][64 dims], 128 B swizzle
  alignas(1024) uint8_t q[C::kQueryStages][C::kQueryBytes];   // [chunks][kBlockM][64], swizzled
  alignas(1024) uint8_t p[kNumMathWgs][C::kQueryChunkBytes];  // [kBlockM][64 tokens], swizzled
  // Partial scores of each warpgroup for the other, double-buffered by block.
  float4 exchange[2][kNumMathWgs][C::kBlockM / 8][kWarpgroupThreads];
  alignas(16) float row_stats[kNumMathWgs][C::kBlockM][kWarpgroupWarps];
  float reference[kNumMathWgs][C::kBlockM];
  Item items[C::kQueryStages];
  uint64_t key_mask[C::kKvStages];  // of the block whose rope chunk the slot holds: bit t = token t
  uint64_t kv_full[C::kKvStages];
  uint64_t kv_empty[C::kKvStages];
  uint64_t q_full[C::kQueryStages];
  uint64_t q_empty[C::kQueryStages];
};

}  // namespace jax_mla::decode::sm90::narrow
