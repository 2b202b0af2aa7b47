// Sizes of the wide Hopper decode kernel and its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kv_format.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/split/schedule.h"
#include "gpu/element.h"

namespace jax_mla::decode::sm90::wide {

inline constexpr int kBlockM = 64;              // query rows of a tile: wgmma's M
inline constexpr int kBlockN = kScheduleBlock;  // KV tokens of a block
inline constexpr int kChunkDims = 64;           // columns of a chunk: one 128-byte swizzle atom
inline constexpr int kElementBytes = 2;
inline constexpr int kBlocksPerPair = 2;  // the lead warpgroup's block and the follower's
inline constexpr int kNumItems = 2;    // the item in work and the next one

inline constexpr int kMaxSharedBytes = 227 * 1024;

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kNumMathWarpgroups = 2;
inline constexpr int kNumMathThreads = kNumMathWarpgroups * kWarpgroupThreads;
inline constexpr int kNumMathWarps = kNumMathThreads / kWarpThreads;
inline constexpr int kNumProducerThreads = kWarpgroupThreads;
inline constexpr int kNumThreads = kNumMathThreads + kNumProducerThreads;
inline constexpr int kProducerWarp = kNumMathThreads / kWarpThreads;

inline constexpr int kMaxMergeParts = 144;  // of a sequence, if this kernel merges them
// Who merges the partial results of split sequences.
enum class Merge : uint8_t {
  kInside,   // this kernel, behind a grid barrier: all CTAs run at once; automatic schedule only
  kCombine,  // the combine kernel: many parts, or a fixed number, which may need more CTAs
};

template <DType kDType_, int kDCkv_, int kDKpe_, KvLoad kLoad_, Merge kMerge_ = Merge::kInside>
struct Config {
  using T = gpu::Element<kDType_>;
  static constexpr DType kDType = kDType_;
  static constexpr int kDCkv = kDCkv_;
  static constexpr int kDKpe = kDKpe_;
  static constexpr KvLoad kLoad = kLoad_;
  static constexpr Merge kMerge = kMerge_;
  // Warps that copy KV, together all of the producer's warpgroup where one would take too long.
  static constexpr int kCopyWarps =
      kLoad == KvLoad::kTmaBlocks ? 1 : kNumProducerThreads / kWarpThreads;

  static constexpr int kHalfDims = kDCkv / 2;  // columns of O that a math warpgroup owns
  static constexpr int kCkvChunks = kDCkv / kChunkDims;
  static constexpr int kChunks = kCkvChunks + 1;  // the last one is rope, filled up with zeros
  static constexpr int kKpeChunk = kCkvChunks;
  static constexpr int kHalfChunks = kCkvChunks / 2;
  // Latent chunks that share a pair of barriers: TMA copies two at a time, threads a whole half, to
  // wait, look rows up and fence but once for it.
  static constexpr int kChunksPerCopyGroup = kLoad == KvLoad::kGather ? kHalfChunks : 2;
  static constexpr int kCkvCopyGroups = kCkvChunks / kChunksPerCopyGroup;
  static constexpr int kHalfCopyGroups = kCkvCopyGroups / 2;
  static constexpr int kKpeCopyGroup = kCkvCopyGroups;
  static constexpr int kNumCopyGroups = kCkvCopyGroups + 1;

  // Order in which the groups of the lead's and the follower's block are copied and scored: as they
  // become free. The follower's P lies in its rope chunk, which is therefore the last.
  static constexpr __host__ __device__ int LeadCopyGroup(int i) { return i == 0 ? kKpeCopyGroup : i - 1; }
  static constexpr __host__ __device__ int FollowCopyGroup(int i) {
    return i == kCkvCopyGroups ? kKpeCopyGroup : (i + kHalfCopyGroups) % kCkvCopyGroups;
  }

  // The same, four bits a group, the first one lowest.
  static constexpr uint32_t PackCopyGroups(int (*group)(int)) {
    uint32_t order = 0;
    for (int i = 0; i < kNumCopyGroups; ++i) order |= static_cast<uint32_t>(group(i)) << (4 * i);
    return order;
  }
  static __host__ __device__ constexpr uint32_t CopyGroupOrder(int block) {
    constexpr uint32_t kLeadOrder = PackCopyGroups(LeadCopyGroup), kFollowOrder = PackCopyGroups(FollowCopyGroup);
    return block == 0 ? kLeadOrder : kFollowOrder;
  }

  static constexpr int kMmaK = 16;  // wgmma's K for 16-bit elements
  static constexpr int kKSteps = kChunkDims / kMmaK;
  static constexpr int kKpeKSteps = kDKpe / kMmaK;
  static constexpr int kChunkElements = kBlockN * kChunkDims;
  static constexpr int kChunkBytes = kChunkElements * kElementBytes;
  static constexpr int kRowBytes = kChunkDims * kElementBytes;
  static constexpr int kQueryBytes = kChunks * kChunkBytes;

  // Pairs of blocks in flight: as many as there is room for, up to two. One of 512 dims, two of
  // 256, with which one alone would be too few bytes on their way (128 x 4096: 84 -> 74 us).
  static constexpr int kBlockPairBytes = kBlocksPerPair * kChunks * kChunkBytes;
  static constexpr int kRestBytes = 2 * kChunkBytes;  // P, and what is small
  static constexpr int kBlockPairs =
      kQueryBytes + 2 * kBlockPairBytes + kRestBytes <= kMaxSharedBytes ? 2 : 1;
  static constexpr int kRingBlocks = kBlockPairs * kBlocksPerPair;
  // Pairs are numbered modulo this: the producer is at most kBlockPairs + 1 ahead of the math.
  static constexpr int kBlockPairNumbers = 2 * kBlockPairs;
  static constexpr __host__ __device__ int NextBlockPair(int block_pair) {
    return (block_pair + 1) & (kBlockPairNumbers - 1);
  }
  // Where a pair, and its block 0 or 1, lie in the ring.
  static constexpr __host__ __device__ int RingBlockPair(int block_pair) {
    return block_pair & (kBlockPairs - 1);
  }
  static constexpr __host__ __device__ int RingBlock(int block_pair, int block) {
    return RingBlockPair(block_pair) * kBlocksPerPair + block;
  }

  // Registers a thread: the launch gives every thread 168 (65,536 / 384), setmaxnreg moves them to
  // the math warpgroups. With boxes, three warps of the producer's warpgroup are idle and exist for
  // this: with one producer warp alone, 9 warps also cap the launch at 168, as three of them share
  // a quarter of the SM. The gather takes all of its 72: with 56 it is 2 % slower.
  static constexpr int kMathRegisters = kHalfDims > 128 ? 216 : 200;
  static constexpr int kProducerRegisters = 3 * 168 - 2 * kMathRegisters;

  // Arrivals of a full barrier besides the copied bytes: the leader's. Where threads copy, every
  // warp's leader's, and one of each thread.
  static constexpr int kFullArrivals =
      kLoad == KvLoad::kGather ? kCopyWarps + kNumProducerThreads : 1;
  // One bit a box, or a token.
  using OwnedMask = std::conditional_t<kLoad == KvLoad::kGather, uint64_t, uint32_t>;

  static_assert(ElementBytes(kDType) == kElementBytes, "wgmma here takes 16-bit elements");
  static_assert(kBlockM == kBlockN, "query and KV chunks share one layout");
  static_assert(kDCkv % (4 * kChunkDims) == 0, "each half of O needs whole groups of chunks");
  static_assert(kDKpe % kMmaK == 0 && kDKpe <= kChunkDims, "rope has one chunk");
};

// What a CTA merges of a split sequence, once all parts are there: a share of its row tile. None if
// num_shares is 0.
struct MergeTask {
  int32_t seq_idx;
  int32_t num_parts;
  int32_t slot_base;  // see WorkItem
  int32_t share_idx;
  int32_t num_shares;
};

// What becomes of an item's result.
enum class ItemEnd : int32_t {
  kWhole,      // the sequence's
  kPart,       // written to a slot of the partials
  kExchanged,  // merged with that of the cluster's other CTA
  kKept,       // merged with the sequence's other part, which another CTA writes to a slot
};

// What a CTA knows of an item, a part of one sequence.
struct Item {
  int32_t seq_idx;
  int32_t seq_len;  // clamped
  int32_t block_begin;
  int32_t block_end;
  int32_t slot;  // kPart: its own; kKept: of the other part
  ItemEnd end;
};

template <class C>
struct alignas(1024) SharedMemory {
  uint16_t q[C::kChunks][C::kChunkElements];  // 128 B swizzle, all
  uint16_t kv[C::kRingBlocks][C::kChunks][C::kChunkElements];
  uint16_t p[C::kChunkElements];  // the lead's P; the follower's lies in its rope chunk
  uint64_t kv_full[C::kRingBlocks][C::kNumCopyGroups];
  uint64_t kv_empty[C::kRingBlocks][C::kNumCopyGroups];
  uint64_t q_full;
  uint64_t q_empty;
  Item items[kNumItems];     // empty: this worker has no item at all
  bool has_next[kNumItems];  // whether another item follows
  bool arrives[kNumItems];   // at the grid barrier with this item: no later one is a kPart
  // Bit i: box or token i of the block is not absent.
  typename C::OwnedMask owned[C::kBlockPairNumbers][kBlocksPerPair];
  float reference[2][kBlockM];       // [warpgroup][row], valid where `rescaled` is set
  float sum[kNumItems][2][kBlockM];  // [item % 2][warpgroup][row]
  int32_t rescaled[2][kWarpgroupThreads / kWarpThreads];  // [warpgroup][warp]
  bool merges;  // whether CTAs merge partials of the call behind the grid barrier
  uint32_t grid_arrivals[kNumMathWarpgroups];
  MergeTask merge;
  uint64_t exchange_full;
};

}  // namespace jax_mla::decode::sm90::wide
