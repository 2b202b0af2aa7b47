// Compile-time choices of the narrow Hopper kernel: tile sizes, ring depth, shared-memory plan.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/sm90/swapped/shape.h"
#include "decode/sm90/tuning.h"
#include "gpu/element.h"

namespace jax_mla::decode::sm90::narrow {

// Ids of named barriers.
inline constexpr int kTeamBarriers = 5;  // is added to the ids of the second team
inline constexpr int kBarrierTeams = 9;
inline constexpr int kBarrierExchangeRead = 10;  // + warpgroup of all: 10 to 13

// An SM has four quarters of 16,384 registers, and three of this kernel's warps lie in one of them.
// That quarter decides how many CTAs of the combine kernel, which takes 2,560 registers a warp, fit
// beside this one: two beside 104 registers a thread. With codes a thread holds a block's part of
// K, and then of V, in registers: 112, which leave room for two as well.
// The ring is as deep as fits beside the combine kernel. From 10 to 18 stages the time falls from
// 171 to 144 us (B128 x 4096, 16 rows, H200); more bring nothing. Two teams have its blocks in
// turn, so it holds whole ones; they take all of the SM.
struct BudgetRow {
  int tile_rows;
  bool has_codes;
  int teams;
  Budget budget;
};
// clang-format off
inline constexpr BudgetRow kBudgets[] = {
    // rows, codes, teams   registers, math, producer   stages   merges
    { 8, false, 1, {104, 0, 0, 22, 2}},
    {16, false, 1, {104, 0, 0, 18, 2}},
    { 8, true,  1, {112, 0, 0, 22, 2}},
    {16, true,  1, {112, 0, 0, 18, 2}},
    {16, true,  2, {96, 104, 64, 20, 0}},
};
// clang-format on

// Some kernels of 16 rows of codes need more registers, and leave room for one CTA: with tile
// scales those with units, with a warp that writes new rows or with a gather; without, units that
// are gathered.
constexpr Budget BudgetOf(int tile_rows, CacheCodes codes, int teams, KvLoad load, bool has_units,
                          bool appends) {
  const bool gathers = load == KvLoad::kGather;
  const bool needs_many = codes == CacheCodes::kTileScales ? has_units || appends || gathers
                          : codes == CacheCodes::kOneScale ? has_units && gathers
                                                           : false;
  for (const BudgetRow& row : kBudgets) {
    if (row.tile_rows != tile_rows || row.has_codes != (codes != CacheCodes::kNone) ||
        row.teams != teams) {
      continue;
    }
    Budget budget = row.budget;
    if (needs_many && tile_rows == 16 && teams == 1) {
      budget.registers = 144;
      budget.resident_merges = 1;
    }
    return budget;
  }
  return {};
}

template <class C>
struct SharedMemory;

template <DType kDType, int kDCkv, int kDKpe, int kTileRows, CacheCodes kCodes, KvLoad kLoad,
          int kTeams_ = 1, bool kHasUnits = false, bool kAppends = false>
struct Config : Shape<kDType, kDCkv, kDKpe, kTileRows, kCodes, kLoad, kHasUnits, kAppends> {
  using Base = Shape<kDType, kDCkv, kDKpe, kTileRows, kCodes, kLoad, kHasUnits, kAppends>;
  using Shared = SharedMemory<Config>;
  using WithUnits = Config<kDType, kDCkv, kDKpe, kTileRows, kCodes, kLoad, kTeams_, true>;
  using WithAppend = Config<kDType, kDCkv, kDKpe, kTileRows, kCodes, kLoad, kTeams_, false, true>;
  using PElement = std::conditional_t<Base::kHasCodes, __half, gpu::Element<kDType>>;
  static constexpr int kTeams = kTeams_;  // they take the blocks in turn
  static constexpr Budget kBudget = BudgetOf(kTileRows, kCodes, kTeams, kLoad, kHasUnits, kAppends);
  static constexpr int kTurnStages = kTeams * Base::kChunks;  // of one block of each team
  // A stage is always the same team's.
  static constexpr int kKvStages =
      kTeams == 1 ? kBudget.kv_stages : kBudget.kv_stages / kTurnStages * kTurnStages;

  // With tile scales an own chunk has a scale of its own, and so its own P and its own tiles of
  // O^T: a run of dims that a thread has.
  static constexpr int kRuns = Base::kHasTileScales ? Base::kOwnChunks : 1;
  static constexpr float kValueScale = 1.0f;
  static constexpr int kOwnRopeSteps = kDKpe / kMmaK / kTeamWarpgroups;  // of a math warpgroup

  static constexpr int kSecondTeam = kTeamBarriers;
  static constexpr int kMathWarps = kTeams * kTeamWarps;
  static constexpr int kMathThreads = kMathWarps * kWarpThreads;
  static constexpr int kAppendWarp = kMathWarps + Base::kProducerWarps;
  static constexpr int kFirstIdleWarp = kAppendWarp + (kAppends ? 1 : 0);
  // With two teams the rest of the producer's warpgroup is idle warps, which exist to give their
  // registers to the math warpgroups.
  static constexpr bool kMovesRegisters = kBudget.math_registers > 0;
  static constexpr int kThreads =
      kMovesRegisters ? kMathThreads + kWarpgroupThreads : kFirstIdleWarp * kWarpThreads;
  static_assert(!kMovesRegisters || kMathThreads * kBudget.math_registers +
                                            kWarpgroupThreads * kBudget.producer_registers ==
                                        kThreads * kBudget.registers,
                "setmaxnreg moves what there is");

  // Arrivals: of kv_empty, of q_empty. wgmma reads a stage for all warps of a warpgroup at once,
  // while codes are loaded by each warp, which wgmma then takes from registers.
  static constexpr int kEmptyArrivals = Base::kHasCodes ? kWarpgroupWarps : 1;
  static constexpr int kQueryEmptyArrivals = kTeams * kTeamWarpgroups;
  static constexpr bool kWgmmaReadsKv = !Base::kHasCodes;
  static constexpr bool kLoadsValuesAhead = false;
  static constexpr bool kTakesTurns = kTeams > 1;  // then an empty block has all its stages, too

  // Places for the tile scales of a block, which blocks take in turn. The stage of a block's first
  // chunk was freed behind math_all of a later block than that which had the place before, of the
  // same team.
  static constexpr int kTileScaleBlocks =
      Base::kHasTileScales ? CeilDiv(kKvStages, Base::kChunks) + kTeams : 0;
  // Blocks take them in turn. With tile scales two teams have room for one (FreeExchange).
  static constexpr int kExchangeBuffers = Base::kHasTileScales && kTeams > 1 ? 1 : 2;
  static constexpr int kQueryStages = kMovesRegisters ? 1 : 2;

  static constexpr bool kMayAppend =
      TakesSteps(kDType) && kLoad == KvLoad::kBoxes && NarrowMayAppend(kTeams) && Base::kHasRope;
  static constexpr bool kMayTakeUnits =
      TakesSteps(kDType) && (kTeams == 1 || TeamsTakeUnits(Base::kHasTileScales));

  static_assert(kBudget.registers > 0, "a row of kBudgets is missing");
  static_assert(!kAppends || kMayAppend, "see NarrowMayAppend");
  static_assert(kDKpe <= kChunkDims && kDKpe % (kMmaK * kTeamWarpgroups) == 0,
                "the rope part is one chunk, split evenly between the math warpgroups");
  static_assert(kKvStages >= Base::kChunks, "a block must fit into the ring");
};

template <class C>
struct SharedMemory {
  alignas(1024) uint8_t kv[C::kKvStages][kChunkBytes];       // [64 tokens][64 dims], 128 B swizzle
  alignas(1024) uint8_t q[C::kQueryStages][C::kQueryBytes];  // [chunks][kTileRows][64], swizzled
  // [kTileRows][64 tokens], the same swizzle; with tile scales times those of each own chunk.
  alignas(1024) uint8_t p[C::kTeams * kTeamWarpgroups][C::kRuns][C::kQueryChunkBytes];
  // Partial scores of each warpgroup for the other one.
  float4 exchange[C::kTeams][C::kExchangeBuffers][kTeamWarpgroups][C::kTileRows / 8]
                 [kWarpgroupThreads];
  // Each warp's maxima while a reference is raised, and its sums at the end of an item.
  alignas(16) float row_stats[C::kTeams * kTeamWarpgroups][C::kTileRows][kWarpgroupWarps];
  float reference[C::kTeams * kTeamWarpgroups][C::kTileRows];  // at the end of an item
  typename C::Item items[kItemPlaces];
  // Bit t: token t of the block is a key. Valid in the stage of a block's first chunk.
  uint64_t key_mask[C::kKvStages];
  uint64_t kv_full[C::kKvStages];
  uint64_t kv_empty[C::kKvStages];
  uint64_t q_full[C::kQueryStages];
  uint64_t q_rope_full[C::kQueryStages];  // see QueryBarriers; kAppends alone
  uint64_t q_empty[C::kQueryStages];
  AppendTask append_task;                                               // Config::kAppends alone
  float query_scale[kTeamWarpgroups][C::kHasCodes ? C::kTileRows : 1];  // see PrepareQueries
  TileScales<C::kTileScaleBlocks> tile_scales;
};

}  // namespace jax_mla::decode::sm90::narrow
