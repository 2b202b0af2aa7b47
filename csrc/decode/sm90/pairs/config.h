// Compile-time choices of the kernel with pairs of blocks: ring depth, registers, shared memory.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "decode/sm90/swapped/shape.h"

namespace jax_mla::decode::sm90::pairs {

// Registers of a thread, and stages: as many as fit at all. No CTA of the combine kernel is
// resident beside this one.
inline constexpr Budget kBudget = {.registers = 168,
                                   .math_registers = 200,
                                   .producer_registers = 104,
                                   .kv_stages = 16,
                                   .resident_merges = 0};

template <class C>
struct SharedMemory;

template <DType kDType, int kDCkv, int kDKpe, bool kHasUnits = false, bool kAppends = false>
struct Config : Shape<kDType, kDCkv, kDKpe, kLargeTileRows, CacheCodes::kOneScale, KvLoad::kBoxes,
                      kHasUnits, kAppends> {
  using Base = Shape<kDType, kDCkv, kDKpe, kLargeTileRows, CacheCodes::kOneScale, KvLoad::kBoxes,
                     kHasUnits, kAppends>;
  using Shared = SharedMemory<Config>;
  using WithUnits = Config<kDType, kDCkv, kDKpe, true>;
  using WithAppend = Config<kDType, kDCkv, kDKpe, false, true>;
  using PElement = __half;
  static constexpr Budget kBudget = pairs::kBudget;
  static constexpr int kKvStages = kBudget.kv_stages;

  static constexpr int kRuns = 1;
  static constexpr int kOwnRopeSteps = kDKpe / kMmaK / kTeamWarpgroups;  // of q_pe, in ReorderRope

  static constexpr int kSecondTeam = 0;  // there is none
  static constexpr int kMathWarps = kTeamWarps;
  static constexpr int kAppendWarp = kMathWarps + Base::kProducerWarps;
  static constexpr int kFirstIdleWarp = kAppendWarp + (kAppends ? 1 : 0);
  static constexpr bool kMovesRegisters = true;  // from the producer's warpgroup, idle warps too
  static constexpr int kThreads = kTeamThreads + kWarpgroupThreads;
  static_assert(kTeamThreads * kBudget.math_registers +
                        kWarpgroupThreads * kBudget.producer_registers ==
                    kThreads * kBudget.registers,
                "setmaxnreg moves what there is");

  // Arrivals: of kv_empty, whose codes each warp loads, and of q_empty.
  static constexpr int kEmptyArrivals = kWarpgroupWarps;
  static constexpr int kQueryEmptyArrivals = kTeamWarpgroups;
  static constexpr bool kWgmmaReadsKv = false;
  static constexpr bool kLoadsValuesAhead = true;
  static constexpr bool kTakesTurns = false;
  static constexpr int kTileScaleBlocks = 0;
  static constexpr int kQueryStages = 1;
  static constexpr bool kMayAppend = true;
  static constexpr bool kMayTakeUnits = true;

  static_assert(Base::kLatentChunkDims * kTeamWarpgroups == kDCkv,
                "with 512 dims there are query codes (codes64/)");
  static_assert(kKvStages >= 2 * Base::kChunks, "a pair must fit into the ring");
};

// What the math warpgroups know in common of the rows.
template <int kRows>
struct RowSoftmax {
  alignas(8) float score_scale[kRows];  // of scores, to log2
  alignas(8) float rope_factor[kRows];  // of kpe's scores, see Math::StoreQueryScale
  alignas(8) float reference[kRows];    // 0 for a row that has seen no key
};

template <class C>
struct SharedMemory {
  alignas(1024) uint8_t kv[C::kKvStages][kChunkBytes];       // [64 tokens][128 codes], swizzled
  alignas(1024) uint8_t q[C::kQueryStages][C::kQueryBytes];  // [chunks][kTileRows][64], swizzled
  alignas(1024) uint8_t p[kTeamWarpgroups][C::kRuns][C::kQueryChunkBytes];  // of each block
  float4 exchange[kWarpgroupThreads];                                       // scratch
  // Each warp's maxima while a reference is raised, and its sums at the end of an item.
  alignas(16) float row_stats[kTeamWarpgroups][C::kTileRows][kWarpgroupWarps];
  typename C::Item items[kItemPlaces];
  // Bit t: token t of the block is a key. Valid in the stage of a block's first chunk.
  uint64_t key_mask[C::kKvStages];
  uint64_t kv_full[C::kKvStages];
  uint64_t kv_empty[C::kKvStages];
  uint64_t q_full[C::kQueryStages];
  uint64_t q_rope_full[C::kQueryStages];  // see QueryBarriers; kAppends alone
  uint64_t q_empty[C::kQueryStages];
  AppendTask append_task;  // Config::kAppends alone
  RowSoftmax<C::kTileRows> softmax;
};

}  // namespace jax_mla::decode::sm90::pairs
