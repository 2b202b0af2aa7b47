// Sizes of the wide Hopper decode kernel, and the layout of its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kv_format.h"
#include "decode/schedule/schedule.h"
#include "decode/schedule/units.h"
#include "decode/sm90/common/append_task.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/common/sizes.h"
#include "decode/sm90/common/tensor_map.h"
#include "gpu/element.h"
#include "gpu/launch.h"

namespace jax_mla::decode::sm90::wide {

inline constexpr int kTileRows = 64;      // most query rows of a tile: wgmma's M
inline constexpr int kBlocksPerPair = 2;  // the lead's block and the follower's
inline constexpr int kNumItems = 2;       // the item that is computed and the next one

inline constexpr int kMaxSharedBytes = gpu::kHopperSharedBytes;

inline constexpr int kNumMathWarpgroups = 2;
inline constexpr int kNumMathThreads = kNumMathWarpgroups * kWarpgroupThreads;
inline constexpr int kNumMathWarps = kNumMathThreads / kWarpThreads;
inline constexpr int kNumProducerThreads = kWarpgroupThreads;
inline constexpr int kProducerWarp = kNumMathThreads / kWarpThreads;
inline constexpr int kAppendWarp = kProducerWarp + 1;  // Config::kAppends

// Registers a thread. The launch gives every thread 168 (65,536 / 384), and setmaxnreg moves some
// from the other warpgroups to the math warpgroups. With boxes of whole blocks, three warps of the
// producer's warpgroup are idle and exist only for this. Without them the limit would still be 168,
// since three of 9 warps share a quarter of the SM's registers, and there would be none to move.
// The gather needs all of its 72: with 56 it is 2 % slower.
struct Budget {
  int half_dims;  // up to so many columns of O a math warpgroup
  int launch_registers, math_registers, producer_registers;
};
inline constexpr Budget kBudgets[] = {
    {128, 168, 200, 104},
    {256, 168, 216, 72},
};
constexpr Budget BudgetOf(int half_dims) {
  for (const Budget& budget : kBudgets) {
    if (half_dims <= budget.half_dims) return budget;
  }
  return {};
}

// Most parts of a sequence that this kernel merges itself.
inline constexpr int kMaxMergeParts = 144;

// Who merges the partial results of split sequences.
enum class Merge : uint8_t {
  // This kernel, behind a grid barrier. All CTAs must run at once. Automatic schedule only.
  kInside,
  // The combine kernel. For many parts, and for a fixed number of parts, which may need more CTAs
  // than run at once.
  kCombine,
};

// What becomes of an item's result.
enum class ItemEnd : int32_t {
  kWhole,      // it is the sequence's result, written to `out`
  kPart,       // it is stored in a slot as a partial result
  kExchanged,  // it is merged with that of the cluster's other CTA, through shared memory
  kKept,       // it stays in registers until the sequence's other part, in a slot, is added
};

// What a CTA knows of an item: the part of one sequence that it computes.
struct Item {
  int32_t seq_idx;
  int32_t seq_len;  // clamped
  int32_t block_begin;
  int32_t block_end;
  int32_t slot;  // kPart: of this part; kKept: of the other part; else unused
  ItemEnd end;
};

// The same in a call of units: seq_idx is the sequence in the page table, seq_len what the unit's
// last query sees of it. It is not derived from Item, because the producer uses offsetof on
// SharedMemory, which holds items and so needs a standard layout. A struct that adds members to a
// base has none.
struct UnitItem {
  int32_t seq_idx;
  int32_t seq_len;
  int32_t block_begin;
  int32_t block_end;
  int32_t slot;
  ItemEnd end;
  Unit unit;
};

template <DType kDType_, int kDCkv_, int kDKpe_, KvLoad kLoad_, Merge kMerge_ = Merge::kInside,
          bool kHasUnits_ = false, bool kAppends_ = false>
struct Config {
  using T = gpu::Element<kDType_>;
  static constexpr DType kDType = kDType_;
  static constexpr int kDCkv = kDCkv_;
  static constexpr int kDKpe = kDKpe_;
  static constexpr KvLoad kLoad = kLoad_;
  static constexpr Merge kMerge = kMerge_;
  static constexpr bool kHasUnits = kHasUnits_;  // a call of units (schedule/units.h)
  // Whether the CTAs of a cluster may merge.
  static constexpr bool kExchanges = kMerge == Merge::kInside && !kHasUnits;
  static constexpr bool kAppends = kAppends_;  // a warp writes new rows (new_row.cuh)
  static constexpr int kNumThreads = kNumMathThreads + kNumProducerThreads;
  using Item = std::conditional_t<kHasUnits, UnitItem, wide::Item>;
  using Maps = std::conditional_t<kHasUnits, UnitTensorMaps, TensorMaps>;
  // Warps that copy KV: all of the producer's warpgroup where one warp would take too long.
  static constexpr int kCopyWarps =
      kLoad == KvLoad::kBoxes ? 1 : kNumProducerThreads / kWarpThreads;

  static constexpr int kHalfDims = kDCkv / 2;  // columns of O that a math warpgroup owns
  static constexpr int kCkvChunks = kDCkv / kChunkDims;
  static constexpr bool kHasRope = kDKpe > 0;
  // The last one is rope, padded with zeros, if rows have a rotary part.
  static constexpr int kChunks = kCkvChunks + (kHasRope ? 1 : 0);
  static constexpr int kKpeChunk = kCkvChunks;
  static constexpr int kHalfChunks = kCkvChunks / 2;
  // Latent chunks of a copy group, which share a full and an empty barrier. TMA copies two. Threads
  // that gather copy a whole half of the dims, so that they wait and fence only once for it.
  static constexpr int kChunksPerCopyGroup = kLoad == KvLoad::kGather ? kHalfChunks : 2;
  static constexpr int kCkvCopyGroups = kCkvChunks / kChunksPerCopyGroup;
  static constexpr int kHalfCopyGroups = kCkvCopyGroups / 2;
  static constexpr int kKpeCopyGroup = kCkvCopyGroups;
  static constexpr int kNumCopyGroups = kCkvCopyGroups + (kHasRope ? 1 : 0);

  // The order in which the copy groups of the lead's and the follower's block are copied and
  // scored, which is the order in which they become free. The follower's P lies in its rope chunk,
  // which is therefore its last; without rope it has a place of its own.
  static constexpr __host__ __device__ int LeadCopyGroup(int i) {
    return !kHasRope ? i : i == 0 ? kKpeCopyGroup : i - 1;
  }
  static constexpr __host__ __device__ int FollowCopyGroup(int i) {
    return i == kCkvCopyGroups ? kKpeCopyGroup : (i + kHalfCopyGroups) % kCkvCopyGroups;
  }

  // The same order in one number: four bits a copy group, the first one in the lowest bits.
  static constexpr uint32_t PackCopyGroups(int (*group)(int)) {
    uint32_t order = 0;
    for (int i = 0; i < kNumCopyGroups; ++i) order |= static_cast<uint32_t>(group(i)) << (4 * i);
    return order;
  }
  static __host__ __device__ constexpr uint32_t CopyGroupOrder(int block) {
    constexpr uint32_t kLeadOrder = PackCopyGroups(LeadCopyGroup),
                       kFollowOrder = PackCopyGroups(FollowCopyGroup);
    return block == 0 ? kLeadOrder : kFollowOrder;
  }

  static constexpr int kMmaK = 16;  // wgmma's K for 16-bit elements
  static constexpr int kKSteps = kChunkDims / kMmaK;
  static constexpr int kKpeKSteps = kDKpe / kMmaK;
  static constexpr int kChunkElements = kBlockN * kChunkDims;
  static constexpr int kChunkBytes = kChunkElements * kElementBytes;
  static constexpr int kRowBytes = kChunkDims * kElementBytes;
  static constexpr int kQueryBytes = kChunks * kChunkBytes;

  // Block pairs in the ring: as many as there is room for, up to two. That is one with 512 dims and
  // two with 256 dims. One of the latter would be too few bytes in flight (128 x 4096: two take
  // 74 us, one 84).
  static constexpr int kBlockPairBytes = kBlocksPerPair * kChunks * kChunkBytes;
  static constexpr int kPBuffers = kHasRope ? 1 : 2;                // of which one is the lead's
  static constexpr int kRestBytes = (kPBuffers + 1) * kChunkBytes;  // P, and small members
  static constexpr int kBlockPairs =
      kQueryBytes + 2 * kBlockPairBytes + kRestBytes <= kMaxSharedBytes ? 2 : 1;
  static constexpr int kRingBlocks = kBlockPairs * kBlocksPerPair;
  // Block pairs are numbered modulo this power of two. At most kBlockPairs + 1 are in use at once:
  // those in the ring, and the next one, which the producer has looked up.
  static constexpr int kBlockPairNumbers = 2 * kBlockPairs;
  static constexpr __host__ __device__ int NextBlockPair(int block_pair) {
    return (block_pair + 1) & (kBlockPairNumbers - 1);
  }
  // The place of a block pair in the ring, and that of its block 0 or 1.
  static constexpr __host__ __device__ int RingBlockPair(int block_pair) {
    return block_pair & (kBlockPairs - 1);
  }
  static constexpr __host__ __device__ int RingBlock(int block_pair, int block) {
    return RingBlockPair(block_pair) * kBlocksPerPair + block;
  }

  static constexpr Budget kBudget = BudgetOf(kHalfDims);

  // Arrivals that a full barrier of KV counts besides the copied bytes. TMA: one lane announces the
  // bytes. Gather: one lane of each warp, and each thread for its own copies.
  static constexpr int kFullArrivals =
      kLoad == KvLoad::kGather ? kCopyWarps + kNumProducerThreads : 1;
  // A bit for each token of a block. A whole block has one page, and all its bits are alike.
  using OwnedMask = std::conditional_t<kLoad == KvLoad::kGather, uint64_t, uint32_t>;

  static constexpr bool kMayAppend = TakesSteps(kDType) && kLoad == KvLoad::kBoxes && kHasRope;
  static constexpr bool kMayTakeUnits = TakesSteps(kDType);

  static_assert(!kAppends || (kMayAppend && !kHasUnits),
                "new rows are written for a single copying warp, one row a sequence");
  static_assert(kNumMathWarpgroups * kBudget.math_registers + kBudget.producer_registers ==
                    (kNumMathWarpgroups + 1) * kBudget.launch_registers,
                "setmaxnreg moves what there is");
  static_assert(ElementBytes(kDType) == kElementBytes, "wgmma here takes 16-bit elements");
  static_assert(kTileRows == kBlockN, "query and KV chunks share one layout");
  static_assert(kDCkv % (4 * kChunkDims) == 0, "each half of O needs whole copy groups");
  static_assert(kDKpe % kMmaK == 0 && kDKpe <= kChunkDims, "rope has one chunk");
  static_assert(kHasRope || kBlockPairs == 1,
                "the follower's P is free once the block that follows in its place has landed");
};

// The share of a split sequence's row tile that a CTA merges once all parts are in their slots. The
// CTA has none if num_shares is 0.
struct MergeTask {
  int32_t seq_idx;  // in a call of units, the unit's
  int32_t num_parts;
  int32_t slot_base;  // see WorkItem
  int32_t share_idx;
  int32_t num_shares;
};

template <class C>
struct alignas(1024) SharedMemory {
  uint16_t q[C::kChunks][C::kChunkElements];  // q, kv and p: 128 B swizzle
  uint16_t kv[C::kRingBlocks][C::kChunks][C::kChunkElements];
  // The lead's P. The follower's lies in its rope chunk, or behind the lead's.
  uint16_t p[C::kPBuffers][C::kChunkElements];
  uint64_t kv_full[C::kRingBlocks][C::kNumCopyGroups];
  uint64_t kv_empty[C::kRingBlocks][C::kNumCopyGroups];
  uint64_t q_full;
  uint64_t q_empty;
  typename C::Item items[kNumItems];  // an empty item: this worker has no work
  bool has_next[kNumItems];           // whether another item follows
  bool arrives[kNumItems];            // see Producer::ArrivesWith
  // Of the tokens of a block: whether the pool has their page, or they are past the sequence's end.
  typename C::OwnedMask owned[C::kBlockPairNumbers][kBlocksPerPair];
  float reference[2][kTileRows];       // [warpgroup][row], valid where `rescaled` is set
  float sum[kNumItems][2][kTileRows];  // [item % 2][warpgroup][row]
  int32_t rescaled[2][kWarpgroupThreads / kWarpThreads];  // [warpgroup][warp]
  bool merges;  // CTAs of this launch merge partial results behind the grid barrier
  uint32_t grid_arrivals[kNumMathWarpgroups];
  MergeTask merge;
  uint64_t exchange_full;
  // Config::kAppends alone.
  uint64_t q_rope_full;  // see QueryBarriers
  AppendTask append_task;
};

}  // namespace jax_mla::decode::sm90::wide
