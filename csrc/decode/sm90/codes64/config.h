// Compile-time choices of the kernel with query codes: ring depth, registers, shared memory.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/sm90/swapped/shape.h"
#include "gpu/element.h"

namespace jax_mla::decode::sm90::codes64 {

inline constexpr int kBarrierScores = 14;  // id of the named barrier of SWG (kernel.cuh)
inline constexpr int kScoredPlaces = 2;    // of ScoredBlocks, which blocks take in turn

// Registers of a thread after setmaxnreg: of WG0 and WG1, of SWG and of the producer's warpgroup,
// which needs 64 with units. The launch gives each 128. Stages are as many as fit at all, and no
// CTA of the combine kernel is resident beside this one.
struct RolesBudget {
  Budget budget;
  int scores_registers;
};
// clang-format off
inline constexpr RolesBudget kBudgets[2][2] = {  // [tile scales][units]
    //  registers, math, producer  stages  merges   SWG
    {{{128, 184, 56,  16, 0},  88},
     {{128, 184, 64,  16, 0},  80}},
    {{{128, 176, 56,  15, 0}, 104},
     {{128, 176, 64,  15, 0},  96}},
};
// clang-format on

// The scale of V and O where tile scales go on the values. ScaleE4m3 takes a scale times 2^120,
// which is infinite from a scale of 2^8 on; times this, from 2^68 on.
inline constexpr float kTileValueScale = 0x1p60f;

template <class C>
struct SharedMemory;

template <DType kDType, int kDCkv, int kDKpe, CacheCodes kCodes, KvLoad kLoad,
          QueryOperand kQueries_, bool kHasUnits = false, bool kAppends = false>
struct Config : Shape<kDType, kDCkv, kDKpe, kLargeTileRows, kCodes, kLoad, kHasUnits, kAppends> {
  using Base = Shape<kDType, kDCkv, kDKpe, kLargeTileRows, kCodes, kLoad, kHasUnits, kAppends>;
  using Shared = SharedMemory<Config>;
  using WithUnits = Config<kDType, kDCkv, kDKpe, kCodes, kLoad, kQueries_, true>;
  using WithAppend = Config<kDType, kDCkv, kDKpe, kCodes, kLoad, kQueries_, false, true>;
  static constexpr QueryOperand kQueries = kQueries_;
  static constexpr int kQueryParts = kQueries == QueryOperand::kTwoCodes ? 2 : 1;  // of codes
  // The scales go on the values (tile_scores.cuh), in bf16, which has room for them.
  static constexpr bool kScalesValues = Base::kHasTileScales;
  using PElement = std::conditional_t<kScalesValues, gpu::Element<kDType>, __half>;
  static constexpr float kValueScale = kTileValueScale;
  static constexpr Budget kBudget = kBudgets[kScalesValues][kHasUnits].budget;
  static constexpr int kScoresRegisters = kBudgets[kScalesValues][kHasUnits].scores_registers;
  static constexpr int kKvStages = kBudget.kv_stages;

  static constexpr int kRuns = 1;
  static constexpr int kSecondTeam = 0;           // there is none
  static constexpr int kValueWarps = kTeamWarps;  // of WG0 and WG1; SWG's follow
  static constexpr int kMathWarps = kValueWarps + kWarpgroupWarps;
  static constexpr int kAppendWarp = kMathWarps + Base::kProducerWarps;
  static constexpr int kFirstIdleWarp = kAppendWarp + (kAppends ? 1 : 0);
  static constexpr bool kMovesRegisters = true;  // from the producer's warpgroup, idle warps too
  static constexpr int kThreads = kMathWarps * kWarpThreads + kWarpgroupThreads;
  static_assert(kTeamWarpgroups * kBudget.math_registers + kScoresRegisters +
                        kBudget.producer_registers ==
                    (kTeamWarpgroups + 2) * kBudget.registers,
                "setmaxnreg moves what there is");

  // Arrivals: of kv_empty, by the warps of SWG and of the owner of V, and of q_empty.
  static constexpr int kEmptyArrivals = 2 * kWarpgroupWarps;
  static constexpr int kQueryEmptyArrivals = 1 + kTeamWarps;
  static constexpr bool kWgmmaReadsKv = true;  // for the scores
  static constexpr bool kTakesTurns = false;
  // Places for the tile scales of a block, which blocks take in turn. The stage of a block's first
  // chunk was freed behind the scores of a later block than that which had the place before.
  static constexpr int kTileScaleBlocks = kScalesValues ? CeilDiv(kKvStages, Base::kChunks) + 1 : 0;
  static constexpr int kQueryStages = 1;
  static constexpr bool kMayAppend = kLoad == KvLoad::kBoxes && Base::kHasRope;
  static constexpr bool kMayTakeUnits = true;

  static_assert(kQueries != QueryOperand::k16Bit && Base::kHasCodes, "codes times codes");
  static_assert(kScoredPlaces == kTeamWarpgroups, "P has as many places");
  static_assert(kKvStages >= Base::kChunks, "a block must fit into the ring");
};

// What SWG tells WG0 and WG1 of a block with keys, and at the end of an item (scores.cuh,
// values.cuh).
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
  alignas(1024) uint8_t kv[C::kKvStages][kChunkBytes];       // [64 tokens][128 codes], swizzled
  alignas(1024) uint8_t q[C::kQueryStages][C::kQueryBytes];  // [chunks][kTileRows][64], swizzled
  // [kTileRows][64 tokens], the same swizzle, by place (ScoredBlocks).
  alignas(1024) uint8_t p[kScoredPlaces][C::kRuns][C::kQueryChunkBytes];
  float4 exchange[kWarpgroupThreads];  // scratch
  typename C::Item items[kItemPlaces];
  // Bit t: token t of the block is a key. Valid in the stage of a block's first chunk.
  uint64_t key_mask[C::kKvStages];
  uint64_t kv_full[C::kKvStages];
  uint64_t kv_empty[C::kKvStages];
  uint64_t q_full[C::kQueryStages];
  uint64_t q_rope_full[C::kQueryStages];  // see QueryBarriers; kAppends alone
  uint64_t q_empty[C::kQueryStages];
  AppendTask append_task;           // Config::kAppends alone
  float query_scale[C::kTileRows];  // of scores, see PackQueries
  ScoredBlocks<C::kTileRows> scored;
  TileScales<C::kTileScaleBlocks> tile_scales;
  ScaleTables<C::kTileScaleBlocks> scale_tables;  // by the same place
};

}  // namespace jax_mla::decode::sm90::codes64
