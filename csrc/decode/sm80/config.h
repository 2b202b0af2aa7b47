// The tiles of the portable kernel, and which of them a call gets. Plain C++, without device code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::decode::sm80 {

inline constexpr int kWarpThreads = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr int kNumWarps = 8;
inline constexpr int kNumThreads = kNumWarps * kWarpThreads;
inline constexpr int kMinStages = 2, kMaxStages = 4;
// The fixed cost of a sequence in the schedule, in blocks (ScheduleParams). It is small, because
// the next sequence's first tiles are copied while a result is stored: with 2 instead of 0, small
// batches took up to 1.9 us longer (H200).
inline constexpr int kSeqCost = 0;
inline constexpr int kChunkBytes = 16;  // of one cp.async, and of one row of an ldmatrix matrix
// A row's reference is raised only when a score exceeds it by more than this (online_softmax.cuh).
inline constexpr float kRescaleThreshold = 8.0f;
inline constexpr int kMmaM = 16, kMmaN = 8, kMmaK = 16;

// The narrowest row that is stored swizzled (gpu::SwizzledOffset).
inline constexpr int kMinSwizzledBytes = 64;
// So many dims of a query's ckv fit the registers: 4 for each 16.
inline constexpr int kMaxRegisterDims = 512;
// Steps of 16 dimensions to unroll where the query is read again for each tile.
inline constexpr int kMaxQkUnroll = 4;
// The largest row tile on GPUs with 99 KB of shared memory.
inline constexpr int kSmallMaxBlockM = 32;

// How the warps divide the scores of a tile: the rows among kRowWarps warps, the tokens among
// kTokenWarps. A warp reads its query rows and its tokens whole from shared memory, and the numbers
// here give the fewest such reads. Where a warp has 16 rows, its query fragments stay in registers
// for the whole item.
template <int kBlockM, int kBlockN>
struct QkSplit;
template <>
struct QkSplit<16, 64> {
  static constexpr int kRowWarps = 1, kTokenWarps = 8;
};
// 4 warps, one on each quarter of the SM, compute scores. The others only copy and multiply P V.
template <>
struct QkSplit<16, 32> {
  static constexpr int kRowWarps = 1, kTokenWarps = 4;
};
template <>
struct QkSplit<32, 32> {
  static constexpr int kRowWarps = 2, kTokenWarps = 4;
};
template <>
struct QkSplit<16, 16> {
  static constexpr int kRowWarps = 1, kTokenWarps = 2;
};
template <>
struct QkSplit<32, 16> {
  static constexpr int kRowWarps = 2, kTokenWarps = 2;
};
template <>
struct QkSplit<64, 64> {
  static constexpr int kRowWarps = 2, kTokenWarps = 4;
};
template <>
struct QkSplit<64, 32> {
  static constexpr int kRowWarps = 2, kTokenWarps = 4;
};

template <DType kDType_, KvStorage kStorage_, int kDCkv_, int kDKpe_, int kBlockM_, int kBlockN_,
          bool kHasMasks_ = false>
struct Config {
  static constexpr bool kHasMasks = kHasMasks_;  // a sliding window, a soft cap, or both
  static constexpr DType kDType = kDType_;
  static constexpr KvStorage kStorage = kStorage_;
  static constexpr int kElementBytes = 2;
  static constexpr int kDCkv = kDCkv_;
  static constexpr int kDKpe = kDKpe_;      // 0: rows have no rotary part
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = kBlockN_;  // KV tokens of one stage

  // Copies: every warp copies this many consecutive tokens of a tile.
  static constexpr int kTokensPerWarp = kBlockN / kNumWarps;

  // QK: a warp computes kQkRows x kQkTokens of the scores [kBlockM, kBlockN].
  static constexpr int kRowWarps = QkSplit<kBlockM, kBlockN>::kRowWarps;
  static constexpr int kTokenWarps = QkSplit<kBlockM, kBlockN>::kTokenWarps;
  static constexpr int kQkWarps = kRowWarps * kTokenWarps;
  static constexpr int kQkRows = kBlockM / kRowWarps;
  static constexpr int kQkTokens = kBlockN / kTokenWarps;
  static constexpr int kQkMTiles = kQkRows / kMmaM;
  static constexpr int kQkNTiles = kQkTokens / kMmaN;
  // Sets of accumulators that do not depend on each other. An mma waits for the one before it that
  // has the same accumulators, so at least 2 independent ones should be in flight.
  static constexpr int kQkChains = kQkMTiles * kQkNTiles >= 2 ? 1 : 2;
  static constexpr int kCkvSteps = kDCkv / kMmaK;
  static constexpr int kKpeSteps = kDKpe / kMmaK;
  static constexpr bool kQueryInRegisters =
      kQkMTiles == 1 && kBlockM <= 32 && kDCkv <= kMaxRegisterDims;

  // With 224 registers a thread, the combine kernel (kCombineThreads threads of 64) also has room
  // on the SM, so that it can start before this kernel ends: 8 warps x 32 x 224 + 4 warps x 32 x 64
  // = 65,536. With 32 rows, the query fragments (128 registers) and O (64) need all 255.
  // Without rotary part, nvcc 13.0 spills with 224 in the tile of 64 rows x 32 tokens.
  static constexpr int kMaxRegisters =
      kBlockM == 32 || (kDKpe == 0 && kBlockM == 64 && kBlockN == 32) ? 255 : 224;

  // PV: a warp computes all rows and kPvDims latent dimensions of out [kBlockM, kDCkv].
  static constexpr int kPvDims = kDCkv / kNumWarps;
  static constexpr int kPvMTiles = kBlockM / kMmaM;
  static constexpr int kPvNTiles = kPvDims / kMmaN;

  static constexpr int kCkvRowBytes = kDCkv * kElementBytes;
  static constexpr int kKpeRowBytes = kDKpe * kElementBytes;
  static constexpr int kPRowBytes = std::max(kBlockN * kElementBytes, kMinSwizzledBytes);
  static constexpr int kStageBytes = kBlockN * (kCkvRowBytes + kKpeRowBytes);
  static constexpr int kQueryBytes = kBlockM * (kCkvRowBytes + kKpeRowBytes);

  static_assert(kStorage == KvStorage::kPlain || kDType == DType::kBf16, "codes become bf16");
  static_assert(kQkWarps <= kNumWarps, "QkSplit uses more warps than there are");
  static_assert(kQkNTiles <= 2, "the K fragments of a warp are loaded 16 tokens at a time at most");
  static_assert(kQueryBytes <= kStageBytes || !kQueryInRegisters,
                "the query passes through one stage on its way to registers");
};

// Rows that models have often get all tiles below. The others have those of up to kRareMaxBlockM
// query rows, with stages of one size: their number of instances counts more than their speed.
constexpr bool HasAllTiles(int d_ckv) { return d_ckv == 256 || d_ckv == 512; }
inline constexpr int kRareMaxBlockM = 32;
inline constexpr int kMaxRows = 64;  // of any tile
constexpr int RareBlockN(int d_ckv) { return d_ckv > 512 ? 16 : 32; }
// What two stages of 1024 + 64 and the queries of kRareMaxBlockM rows need.
inline constexpr int kMinBytesOfWideRows = 163 * 1024;

// GPUs by their shared memory. backend="sm80:<name>" forces one of these, for tests.
inline constexpr int kLargeBlockN = 64, kSmallBlockN = 32;
struct SharedMemoryClass {
  const char* name;
  int bytes;    // dynamic shared memory that a CTA may use
  int block_n;  // tokens of a stage, unless the row tile needs a smaller one: BlockN
  int max_block_m;
};
inline constexpr SharedMemoryClass kSharedMemoryClasses[] = {
    {"227kb", 227 * 1024, kLargeBlockN, 64},             // sm_90, sm_100
    {"163kb", 163 * 1024, kLargeBlockN, 64},             // sm_80
    {"99kb", 99 * 1024, kSmallBlockN, kSmallMaxBlockM},  // sm_86, sm_89, sm_120
};

// The row tile for `rows` query rows: the smallest that holds them all, else the largest.
constexpr int BlockM(const SharedMemoryClass& smem, int d_ckv, int rows) {
  for (int block_m : {16, 32}) {
    if (rows <= block_m) return block_m;
  }
  return HasAllTiles(d_ckv) ? smem.max_block_m : kRareMaxBlockM;
}
// Tokens of a stage. Large stages are used where two of them fit, but not with 32 rows, for which
// there are too few registers.
constexpr int BlockN(const SharedMemoryClass& smem, int d_ckv, int block_m) {
  if (!HasAllTiles(d_ckv)) return RareBlockN(d_ckv);
  if (block_m == 32 || (block_m == 64 && smem.bytes < 227 * 1024)) return kSmallBlockN;
  return smem.block_n;
}

// Whether code for an architecture (80 or more) has a tile. Each architecture compiles only the
// tiles that fit the shared memory of its own GPUs. A newer GPU may run the same code, compiled
// from PTX.
constexpr bool HasTile(int architecture, int block_m, int block_n) {
  if (architecture == 80) return block_n == kSmallBlockN || block_m < 64;
  if (architecture < 90 || architecture >= 120) {
    return block_n == kSmallBlockN && block_m <= kSmallMaxBlockM;
  }
  return true;
}
// Whether code for an architecture has all tiles that a class may need for rows of d_ckv.
constexpr bool HasClass(int architecture, const SharedMemoryClass& smem, int d_ckv) {
  if (d_ckv > kMaxRegisterDims && smem.bytes < kMinBytesOfWideRows) return false;
  for (int block_m : {16, 32, BlockM(smem, d_ckv, kMaxRows)}) {
    if (!HasTile(architecture, block_m, BlockN(smem, d_ckv, block_m))) return false;
  }
  return true;
}

}  // namespace jax_mla::decode::sm80
