// What the kernels with swapped operands (narrow/, pairs/, codes64/) have in common at compile
// time: pieces of the cache, chunks and warps, and what lies in shared memory for every one of
// them. wgmma's M side is a block's tokens, or the dims of V, and N the query rows of a tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kv_format.h"
#include "decode/schedule/schedule.h"
#include "decode/schedule/units.h"
#include "decode/sm90/common/append_task.h"
#include "decode/sm90/common/codes.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/common/sizes.h"
#include "decode/sm90/common/tensor_map.h"

namespace jax_mla::decode::sm90 {

// Math warpgroups that work on the same blocks, and have half of the dims of O^T each.
inline constexpr int kTeamWarpgroups = 2;
inline constexpr int kTeamThreads = kTeamWarpgroups * kWarpgroupThreads;
inline constexpr int kTeamWarps = kTeamThreads / kWarpThreads;

inline constexpr int kChunkRowBytes = kChunkDims * kElementBytes;  // the swizzle's 128
inline constexpr int kChunkBytes = kBlockN * kChunkRowBytes;
inline constexpr int kMmaK = 16;                          // depth of one wgmma
inline constexpr int kMmaKBytes = kMmaK * kElementBytes;  // the same along a K-major row
inline constexpr int kCopyBytes = 16;                     // one cp.async or vector store

// Ids of the named barriers that all of these kernels have.
inline constexpr int kSyncThreads = 0;
inline constexpr int kBarrierWg = 1;    // + warpgroup: 1, 2
inline constexpr int kBarrierMath = 3;  // both math warpgroups of a team
inline constexpr int kAppendTold = 4, kAppendDone = 5;

// A work item as the math warpgroups see it: 16 bytes, which one load takes from shared memory.
struct alignas(16) Item {
  int32_t seq_idx;
  int32_t num_blocks;   // kNoMoreItems: the CTA has done its work
  int32_t tokens_left;  // of the sequence, from the item's first token on
  int32_t slot;         // of the partial result; kFinal: the item is the whole sequence
};
// The same in a call of units (schedule/units.h), whose sequences are units.
struct UnitItem : Item {
  Unit unit;
};
inline constexpr int kItemPlaces = 2;
inline constexpr int32_t kNoMoreItems = -1;
inline constexpr int32_t kFinal = -1;

// What the producer knows of an item of a call of units.
struct UnitWork : WorkItem {
  Unit unit;
};

// What a CTA takes of an SM. A kernel's config.h has a table of them.
struct Budget {
  int registers;           // of a thread, at the launch
  int math_registers;      // setmaxnreg gives the math warpgroups so many; 0: nothing is moved
  int producer_registers;  // and leaves the producer's warpgroup these
  int kv_stages;           // of kChunkBytes
  int resident_merges;     // CTAs of the combine kernel that fit beside it
};

template <DType kDType_, int kDCkv_, int kDKpe_, int kTileRows_, CacheCodes kCodes_, KvLoad kLoad_,
          bool kHasUnits_, bool kAppends_>
struct Shape {
  static constexpr DType kDType = kDType_;
  static constexpr int kDCkv = kDCkv_;
  static constexpr int kDKpe = kDKpe_;
  static constexpr int kTileRows = kTileRows_;  // query rows of a tile: N of every wgmma
  static constexpr CacheCodes kCodes = kCodes_;
  static constexpr bool kHasCodes = kCodes != CacheCodes::kNone;
  static constexpr bool kHasTileScales = kCodes == CacheCodes::kTileScales;
  static constexpr KvLoad kLoad = kLoad_;
  static constexpr bool kHasUnits = kHasUnits_;  // a call of units
  static constexpr bool kAppends = kAppends_;    // a warp writes new rows (new_row.cuh)
  using Maps = std::conditional_t<kHasTileScales, TileTensorMaps, TensorMaps>;
  using Item = std::conditional_t<kHasUnits, UnitItem, sm90::Item>;
  using Work = std::conditional_t<kHasUnits, UnitWork, WorkItem>;

  // A row of a chunk has as many values as fit its 128 bytes: 64, or 128 codes.
  static constexpr int kValueBytes = kHasCodes ? 1 : kElementBytes;
  static constexpr int kLatentChunkDims = kChunkRowBytes / kValueBytes;
  static constexpr int kCkvChunks = kDCkv / kLatentChunkDims;
  // Of a block: the rope chunk, if rows have a rotary part, and then the latent ones.
  static constexpr bool kHasRope = kDKpe > 0;
  static constexpr int kFirstLatentChunk = kHasRope ? 1 : 0;
  static constexpr int kChunks = kFirstLatentChunk + kCkvChunks;
  // What a math warpgroup owns of a block. Its part of O^T is tiles of 64 dims, wgmma's M.
  static constexpr int kOwnChunks = kCkvChunks / kTeamWarpgroups;
  static constexpr int kOwnTiles = kDCkv / kChunkDims / kTeamWarpgroups;
  static constexpr int kAccumulators = kTileRows / 2;  // a thread's registers of 64 x kTileRows
  static constexpr int kThreadRows = kTileRows / 4;    // query rows of which a thread holds some

  static constexpr int kProducerWarps = kLoad == KvLoad::kBoxes ? 1 : 4;
  static constexpr int kProducerThreads = kProducerWarps * kWarpThreads;
  // Arrivals of kv_full. With boxes every warp announces its bytes. Where threads gather, each
  // one's copies arrive, and thread 0, which has written key_mask, arrives once more.
  static constexpr int kFullArrivals =
      kLoad == KvLoad::kGather ? 1 + kProducerThreads : kProducerWarps;

  static constexpr int kQueryChunkBytes = kTileRows * kChunkRowBytes;
  static constexpr int kCkvQueryChunks = kDCkv / kChunkDims;
  static constexpr int kRopeQueryBytes = kHasRope ? kQueryChunkBytes : 0;
  static constexpr int kQueryBytes = kCkvQueryChunks * kQueryChunkBytes + kRopeQueryBytes;

  static_assert(!kAppends || (TakesSteps(kDType) && kLoad == KvLoad::kBoxes && !kHasUnits),
                "new rows are written for a single copying warp, one row a sequence");
  static_assert(kDCkv % (kLatentChunkDims * kTeamWarpgroups) == 0,
                "each math warpgroup owns the same number of latent chunks");
  static_assert(!kHasTileScales || kLatentChunkDims == DsMla::kTileDims,
                "a latent chunk is a tile");
  static_assert(kHasRope || !kHasTileScales, "tile scales come with the rope chunk");
};

// What a row of kDsMla has for a token of a block.
struct alignas(16) TokenScales {
  float tiles[DsMla::kDCkv / DsMla::kTileDims];
};
inline constexpr int kTileScaleBytes = kBlockN * sizeof(TokenScales);
template <int kBlocks>
struct TileScales {
  alignas(128) TokenScales blocks[kBlocks][kBlockN];
};
template <>
struct TileScales<0> {};

}  // namespace jax_mla::decode::sm90
