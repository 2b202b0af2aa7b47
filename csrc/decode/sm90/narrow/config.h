// Compile-time choices of the narrow Hopper kernel: tile sizes, ring depth, shared-memory plan.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kv_format.h"
#include "decode/sm90/common/append_task.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/common/sizes.h"
#include "decode/sm90/common/tensor_map.h"
#include "decode/split/schedule.h"
#include "decode/split/units.h"

namespace jax_mla::decode::sm90::narrow {

// Math warpgroups that work on the same blocks.
inline constexpr int kTeamWarpgroups = 2;
inline constexpr int kTeamThreads = kTeamWarpgroups * kWarpgroupThreads;
inline constexpr int kTeamWarps = kTeamThreads / kWarpThreads;

inline constexpr int kChunkRowBytes = kChunkDims * kElementBytes;  // the swizzle's 128
inline constexpr int kChunkBytes = kBlockN * kChunkRowBytes;
inline constexpr int kMmaK = 16;                          // depth of one wgmma
inline constexpr int kMmaKBytes = kMmaK * kElementBytes;  // the same along a K-major row
inline constexpr int kCopyBytes = 16;                     // one cp.async or vector store

// Ids of named barriers.
inline constexpr int kSyncThreads = 0;
inline constexpr int kBarrierWg = 1;    // + warpgroup: 1, 2
inline constexpr int kBarrierMath = 3;  // both math warpgroups of a team
inline constexpr int kAppendTold = 4, kAppendDone = 5;
inline constexpr int kSecondTeam = 5;  // is added to the ids of the second team
inline constexpr int kBarrierTeams = 9;
inline constexpr int kBarrierExchangeRead = 10;  // + warpgroup of all: 10 to 13
inline constexpr int kBarrierScores = 14;        // the warpgroup for the scores (scores.cuh)

// Shared memory of a Hopper SM, and what the system takes of it for every CTA. Without pairs and
// without a second team, the combine kernel has to be resident beside this one, so it shares the
// SM's memory with it.
inline constexpr int kSmSharedBytes = 228 * 1024;
inline constexpr int kSystemSharedBytes = 1024;

// A work item as the math warpgroups see it: 16 bytes, which one load takes from shared memory.
struct alignas(16) Item {
  int32_t seq_idx;
  int32_t num_blocks;   // kNoMoreItems: the CTA has done its work
  int32_t tokens_left;  // of the sequence, from the item's first token on
  int32_t slot;         // of the partial result; kFinal: the item is the whole sequence
};
inline constexpr int kItemPlaces = 2;
inline constexpr int32_t kNoMoreItems = -1;
inline constexpr int32_t kFinal = -1;

// The same in a call of units (split/units.h), whose sequences are units. It is not derived from
// Item, because SendItem writes either of them with designated initialisers, which cannot name the
// members of a base.
struct UnitItem {
  int32_t seq_idx;
  int32_t num_blocks;
  int32_t tokens_left;
  int32_t slot;
  Unit unit;
};

// What the producer knows of an item.
struct UnitWork : WorkItem {
  Unit unit;
};

inline constexpr int kScoredPlaces = 2;  // of ScoredBlocks, which blocks take in turn

// The operand type of the queries in the MMA. The input is always bf16.
enum class QueryStorage : uint8_t {
  kPlain,     // 16 bits
  kCodes,     // the codes of e4m3 that they stand for
  kTwoCodes,  // sums of two codes each, times a power of two for each row
};

template <DType kDType_, int kDCkv_, int kDKpe_, int kBlockM_, KvStorage kStorage_, KvLoad kLoad_,
          int kTeams_ = 1, QueryStorage kQueries_ = QueryStorage::kPlain, bool kHasUnits_ = false,
          bool kAppends_ = false>
struct Config {
  static constexpr DType kDType = kDType_;
  static constexpr int kDCkv = kDCkv_;
  static constexpr int kDKpe = kDKpe_;
  static constexpr int kBlockM = kBlockM_;  // query rows a tile: N of every wgmma
  static constexpr KvStorage kStorage = kStorage_;
  static constexpr bool kIsFp8 = kStorage != KvStorage::kPlain;
  static constexpr bool kHasTileScales = kStorage == KvStorage::kFp8Tiles;
  static constexpr KvLoad kLoad = kLoad_;
  static constexpr bool kHasUnits = kHasUnits_;  // a call of units
  static constexpr bool kAppends = kAppends_;    // a warp writes new rows (new_row.cuh)
  static constexpr int kTeams = kTeams_;         // they take the blocks in turn
  static constexpr QueryStorage kQueries = kQueries_;
  static constexpr bool kHasQueryCodes = kQueries != QueryStorage::kPlain;
  static constexpr int kQueryParts = kQueries == QueryStorage::kTwoCodes ? 2 : 1;  // of codes
  using Maps = std::conditional_t<kHasTileScales, TileTensorMaps, TensorMaps>;
  using Item = std::conditional_t<kHasUnits, UnitItem, narrow::Item>;
  using Work = std::conditional_t<kHasUnits, UnitWork, WorkItem>;

  // A row of a chunk has as many values as fit its 128 bytes: 64, or 128 codes.
  static constexpr int kValueBytes = kIsFp8 ? 1 : kElementBytes;
  static constexpr int kLatentChunkDims = kChunkRowBytes / kValueBytes;
  static constexpr int kCkvChunks = kDCkv / kLatentChunkDims;
  static constexpr int kChunks = kCkvChunks + 1;  // of a block: the rope chunk and the latent ones
  // What a math warpgroup owns of a block, and of the rope chunk's steps of kMmaK dims. Its part of
  // O^T is tiles of 64 dims, wgmma's M.
  static constexpr int kOwnChunks = kCkvChunks / kTeamWarpgroups;
  static constexpr int kOwnTiles = kDCkv / kChunkDims / kTeamWarpgroups;
  // With tile scales an own chunk has a scale of its own, and so its own P and its own tiles of
  // O^T. With query codes the scales go on the values instead (tile_scores.cuh).
  static constexpr bool kScalesValues = kHasTileScales && kHasQueryCodes;
  static constexpr int kScaledChunks = kHasTileScales && !kScalesValues ? kOwnChunks : 1;
  // Up to 16 rows, the math warpgroups share a block's scores by dims, and each computes the
  // softmax. With more they take a pair of blocks, one each (block_pairs.cuh), or leave scores and
  // softmax to a third one, which multiplies codes by codes (scores.cuh).
  static constexpr bool kHasManyRows = kBlockM == kLargeTileRows;
  static constexpr bool kTakesPairs = kHasManyRows && !kHasQueryCodes;
  static constexpr int kOwnRopeSteps = kDKpe / kMmaK / kTeamWarpgroups;
  static constexpr int kAccumulators = kBlockM / 2;  // a thread's registers of a 64 x kBlockM tile
  static constexpr int kThreadRows = kBlockM / 4;    // query rows of which a thread holds some

  static constexpr int kOutWarpgroups = kTeams * kTeamWarpgroups;  // that have a part of O^T
  static constexpr int kMathWarpgroups = kOutWarpgroups + (kHasQueryCodes ? 1 : 0);
  static constexpr int kMathWarps = kMathWarpgroups * kWarpgroupWarps;
  static constexpr int kMathThreads = kMathWarpgroups * kWarpgroupThreads;
  static constexpr int kProducerWarps = kLoad == KvLoad::kBoxes ? 1 : 4;
  static constexpr int kProducerThreads = kProducerWarps * kWarpThreads;
  static constexpr int kAppendWarp = kMathWarps + kProducerWarps;
  static constexpr int kAppendThreads = kAppends ? kWarpThreads : 0;
  static constexpr int kFirstIdleWarp = kAppendWarp + kAppendThreads / kWarpThreads;
  // With many rows, and with two teams, the rest of the producer's warpgroup is idle warps, which
  // exist to give their registers to the math warpgroups.
  static constexpr bool kMovesRegisters = kHasManyRows || kTeams > 1;
  static constexpr int kIdleThreads =
      kMovesRegisters ? kWarpgroupThreads - kProducerThreads - kAppendThreads : 0;
  static constexpr int kThreads = kMathThreads + kProducerThreads + kAppendThreads + kIdleThreads;
  // Arrivals of kv_full. With boxes every warp announces its bytes. Where threads gather, each
  // one's copies arrive, and thread 0, which has written key_mask, arrives once more.
  static constexpr int kFullArrivals =
      kLoad == KvLoad::kGather ? 1 + kProducerThreads : kProducerWarps;

  // An SM has four quarters of 16,384 registers, and three of this kernel's warps lie in one of
  // them. That quarter decides how many CTAs of the combine kernel, which takes 2,560 registers a
  // warp, fit beside this one: two beside 104 registers a thread.
  // With codes a thread holds a block's part of K, and then of V, in registers: 112, which leave
  // room for two as well. With tile scales, units, a warp that writes new rows or a gather need
  // more, and leave room for one. Without tile scales only units that are gathered need more.
  // With pairs the launch gives every thread 168, with two teams 96 and with query codes 128;
  // setmaxnreg moves some of them.
  static constexpr bool kNeedsManyRegisters =
      kBlockM == 16 && (kHasTileScales ? kHasUnits || kAppends || kLoad == KvLoad::kGather
                                       : kIsFp8 && kHasUnits && kLoad == KvLoad::kGather);
  static constexpr int kMaxRegisters = kHasQueryCodes        ? 128
                                       : kTeams > 1          ? 96
                                       : kTakesPairs         ? 168
                                       : kNeedsManyRegisters ? 144
                                       : kIsFp8              ? 112
                                                             : 104;
  static constexpr int kMathRegisters = kScalesValues    ? 176
                                        : kHasQueryCodes ? 184
                                        : kTeams > 1     ? 104
                                                         : 200;
  // kHasQueryCodes alone. With units the producer needs 64 of what is left.
  static constexpr int kScoresRegisters = !kScalesValues ? (kHasUnits ? 80 : 88)
                                          : kHasUnits    ? 96
                                                         : 104;
  static constexpr int kProducerRegisters = (kMathWarpgroups + 1) * kMaxRegisters -
                                            kOutWarpgroups * kMathRegisters -
                                            (kHasQueryCodes ? kScoresRegisters : 0);
  static constexpr int kResidentMerges = kMovesRegisters ? 0 : kNeedsManyRegisters ? 1 : 2;

  // Arrivals of kv_empty. wgmma reads a stage for all warps of a warpgroup at once, while codes are
  // loaded by each warp. With query codes the scores' warps arrive too.
  static constexpr int kEmptyArrivals = kHasQueryCodes ? 2 * kWarpgroupWarps
                                        : kIsFp8       ? kWarpgroupWarps
                                                       : 1;

  // As many as fit beside the combine kernel. From 10 to 18 stages the time falls from 171 to 144
  // us (B128 x 4096, 16 rows, H200); more bring nothing. With many rows and with two teams as
  // many as fit at all. Two teams have the ring's blocks in turn, so it holds whole ones.
  static constexpr int kKvStages = kTeams > 1      ? 20
                                   : kScalesValues ? 15
                                   : kHasManyRows  ? 16
                                   : kBlockM == 8  ? 22
                                                   : 18;
  // Places for the tile scales of a block, which blocks take in turn. The stage of a block's first
  // chunk was freed behind math_all of a later block than that which had the place before, of the
  // same team. With query codes it was freed behind the scores of such a block.
  static constexpr int kTileScaleBlocks = kHasTileScales ? CeilDiv(kKvStages, kChunks) + kTeams : 0;
  // Blocks take them in turn. With tile scales two teams have room for one (FreeExchange).
  static constexpr int kExchangeBuffers = kHasTileScales && kTeams > 1 ? 1 : 2;
  static constexpr int kQueryStages = kMovesRegisters ? 1 : 2;
  static constexpr int kQueryChunkBytes = kBlockM * kChunkRowBytes;
  static constexpr int kCkvQueryChunks = kDCkv / kChunkDims;
  static constexpr int kQueryBytes = (kCkvQueryChunks + 1) * kQueryChunkBytes;

  static_assert(kTeams == 1 || (kIsFp8 && kDCkv == kTeamsDCkv && kBlockM == 16),
                "two teams are for 16 rows of codes");
  static_assert(!kHasQueryCodes || (kHasManyRows && kTeams == 1),
                "query codes are for tiles of 64 rows");
  static_assert(!kTakesPairs || kDCkv == 256, "with 512 dims there are query codes");
  static_assert(!kHasQueryCodes || kScoredPlaces == kOutWarpgroups, "P has as many places");
  static_assert(kTeams == 1 || kKvStages % (kTeams * kChunks) == 0,
                "a stage is always the same team's");
  static constexpr bool kMayAppend =
      TakesSteps(kDType) && kLoad == KvLoad::kBoxes && NarrowMayAppend(kTeams);
  static constexpr bool kMayTakeUnits =
      TakesSteps(kDType) && (kTeams == 1 || TeamsTakeUnits(kHasTileScales));
  static_assert(!kAppends || (kMayAppend && !kHasUnits),
                "new rows are written for a single copying warp, one row a sequence");
  static_assert(kDCkv % (kLatentChunkDims * kTeamWarpgroups) == 0,
                "each math warpgroup owns the same number of latent chunks");
  static_assert(kDKpe <= kChunkDims && kDKpe % (kMmaK * kTeamWarpgroups) == 0,
                "the rope part is one chunk, split evenly between the math warpgroups");
  static_assert(kBlockM == 8 || kBlockM == 16 || (kBlockM == kLargeTileRows && kIsFp8),
                "the softmax knows the layout of P for 8 and 16 rows, and with codes for 64");
  static_assert(kKvStages >= kChunks, "a block must fit into the ring");
  static_assert(!kHasTileScales || (kLatentChunkDims == DsMla::kTileDims && !kTakesPairs),
                "a latent chunk is a tile");
};

// What the math warpgroups know in common of the rows, where they take pairs of blocks.
template <int kRows>
struct RowSoftmax {
  alignas(8) float score_scale[kRows];  // of scores, to log2 units
  alignas(8) float rope_factor[kRows];  // see PrepareQueries
  alignas(8) float reference[kRows];    // 0 for a row that has seen no key
};
struct NoRowSoftmax {};

// What the warpgroup for the scores tells those for the values of a block with keys, and at the end
// of an item (scores.cuh, values.cuh).
struct alignas(16) ScoredBlock {
  uint64_t key_mask;             // 0 at the end of an item
  int32_t empty_blocks;          // in front of it
  bool raises[kWarpgroupWarps];  // of each warp of the scores: whether rows with keys had them rise
};
template <int kRows>
struct ScoredBlocks {
  ScoredBlock blocks[kScoredPlaces];
  float factors[kScoredPlaces][kRows];   // by what O is multiplied where references rose
  float references[kItemPlaces][kRows];  // at the end of an item, by its place in `items`
  float sums[kItemPlaces][kRows];        // the same
  uint64_t full[kScoredPlaces];
  uint64_t empty[kScoredPlaces];
};
struct NoScoredBlocks {};

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

// The unit of V and O where tile scales go on the values. ScaleE4m3 takes a scale times 2^120,
// which is infinite from a scale of 2^8 on; in this unit, from 2^68 on.
inline constexpr float kValueUnit = 0x1p60f;

// What a block's tile scales become where they go on the values (tile_scores.cuh). Tokens have the
// order of Index.
struct ScaleTable {
  static constexpr int kTiles = DsMla::kDCkv / DsMla::kTileDims;

  alignas(16) float scores[kTiles][kBlockN];     // see MakeScaleTable
  alignas(16) uint16_t values[kTiles][kBlockN];  // bf16, for ScaleE4m3; 0 where there is no key

  // Tokens 2c, 2c + 1, 2c + 8 and 2c + 9 of 16 follow each other: lanes with lane % 4 = c have
  // their scores, and their values in a fragment.
  static constexpr __host__ __device__ int Index(int token) {
    return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2;
  }
};
template <int kTables>
struct ScaleTables {
  ScaleTable tables[kTables];
};
template <>
struct ScaleTables<0> {};

template <class C>
struct SharedMemory {
  alignas(1024) uint8_t kv[C::kKvStages][kChunkBytes];       // [64 tokens][64 dims], 128 B swizzle
  alignas(1024) uint8_t q[C::kQueryStages][C::kQueryBytes];  // [chunks][kBlockM][64], swizzled
  // [kBlockM][64 tokens], the same swizzle; times the scales of each own chunk, if it has scales.
  // With query codes by place (ScoredBlocks), which are as many.
  alignas(1024) uint8_t p[C::kOutWarpgroups][C::kScaledChunks][C::kQueryChunkBytes];
  // Partial scores of each warpgroup for the other one. With kHasManyRows only scratch.
  std::conditional_t<
      C::kHasManyRows, float4[kWarpgroupThreads],
      float4[C::kTeams][C::kExchangeBuffers][kTeamWarpgroups][C::kBlockM / 8][kWarpgroupThreads]>
      exchange;
  // Each warp's maxima while a reference is raised, and its sums at the end of an item.
  alignas(16) float row_stats[C::kOutWarpgroups][C::kBlockM][kWarpgroupWarps];
  float reference[C::kOutWarpgroups][C::kBlockM];  // of the rows, at the end of an item
  typename C::Item items[kItemPlaces];
  // Bit t: token t of the block is a key. Valid in the stage of a block's rope chunk.
  uint64_t key_mask[C::kKvStages];
  uint64_t kv_full[C::kKvStages];
  uint64_t kv_empty[C::kKvStages];
  uint64_t q_full[C::kQueryStages];
  uint64_t q_rope_full[C::kQueryStages];  // see QueryBarriers; kAppends alone
  uint64_t q_empty[C::kQueryStages];
  AppendTask append_task;                                          // Config::kAppends alone
  float query_scale[kTeamWarpgroups][C::kIsFp8 ? C::kBlockM : 1];  // see PrepareQueries
  std::conditional_t<C::kTakesPairs, RowSoftmax<C::kBlockM>, NoRowSoftmax> softmax;
  std::conditional_t<C::kHasQueryCodes, ScoredBlocks<C::kBlockM>, NoScoredBlocks> scored;
  TileScales<C::kTileScaleBlocks> tile_scales;
  ScaleTables<C::kScalesValues ? C::kTileScaleBlocks : 0> scale_tables;  // by the same place
};

}  // namespace jax_mla::decode::sm90::narrow
