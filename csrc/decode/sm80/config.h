// Tile shapes of the portable kernel and which one a problem gets. Plain C++: no device code.
#pragma once

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::decode::sm80 {

inline constexpr int kWarpThreads = 32;
inline constexpr int kNumWarps = 8;
inline constexpr int kNumThreads = kNumWarps * kWarpThreads;
inline constexpr int kMinStages = 2, kMaxStages = 4;
// Schedule (see ScheduleParams). A sequence's fixed cost is small: the next one's first tiles are
// copied while the last result is stored (c = 2 lost up to 1.9 us on small batches, H200).
inline constexpr int kSeqCost = 0;
inline constexpr int kChunkBytes = 16;  // one cp.async, one row of an ldmatrix matrix
inline constexpr int kMmaM = 16, kMmaN = 8, kMmaK = 16;

inline constexpr int kMaxQkUnroll = 4;  // 16-dimension steps, when the query is re-read
// Largest row tile on GPUs with 99 KB.
inline constexpr int kSmallMaxBlockM = 32;

// How the 8 warps share the scores of one tile, rows x tokens: kRowWarps groups of rows,
// kTokenWarps groups of tokens. Chosen for the fewest shared-memory reads: a warp reads its query
// rows and its tokens whole. With 16 rows a warp the query fragments stay in registers for the
// whole sequence.
template <int kBlockM, int kBlockN>
struct QkSplit;
template <>
struct QkSplit<16, 64> {
  static constexpr int kRowWarps = 1, kTokenWarps = 8;
};
template <>
struct QkSplit<16, 32> {  // 4 warps, one on each quarter of the SM; the others only load and do PV
  static constexpr int kRowWarps = 1, kTokenWarps = 4;
};
template <>
struct QkSplit<32, 32> {
  static constexpr int kRowWarps = 2, kTokenWarps = 4;
};
template <>
struct QkSplit<64, 64> {
  static constexpr int kRowWarps = 2, kTokenWarps = 4;
};
template <>
struct QkSplit<64, 32> {
  static constexpr int kRowWarps = 2, kTokenWarps = 4;
};

template <DType kDType_, int kDimCkv_, int kDimKpe_, int kBlockM_, int kBlockN_>
struct Config {
  static constexpr DType kDType = kDType_;
  static constexpr int kElementBytes = 2;
  static constexpr int kDimCkv = kDimCkv_;
  static constexpr int kDimKpe = kDimKpe_;
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = kBlockN_;  // KV tokens of one stage

  // Loads: every warp copies the same number of consecutive tokens of a stage.
  static constexpr int kTokensPerWarp = kBlockN / kNumWarps;

  // QK: scores[kBlockM, kBlockN], a block of kQkRows x kQkTokens a warp.
  static constexpr int kRowWarps = QkSplit<kBlockM, kBlockN>::kRowWarps;
  static constexpr int kTokenWarps = QkSplit<kBlockM, kBlockN>::kTokenWarps;
  static constexpr int kQkWarps = kRowWarps * kTokenWarps;
  static constexpr int kQkRows = kBlockM / kRowWarps;
  static constexpr int kQkTokens = kBlockN / kTokenWarps;
  static constexpr int kQkMTiles = kQkRows / kMmaM;
  static constexpr int kQkNTiles = kQkTokens / kMmaN;
  // Independent accumulator sets, to hide the latency of dependent mma: at least 2 in flight.
  static constexpr int kQkChains = kQkMTiles * kQkNTiles >= 2 ? 1 : 2;
  static constexpr int kCkvSteps = kDimCkv / kMmaK;
  static constexpr int kKpeSteps = kDimKpe / kMmaK;
  static constexpr bool kQueryInRegisters = kQkMTiles == 1 && kBlockM <= 32;

  // 224 registers leave the combine kernel (kCombineThreads threads of 64) room on the SM, so that
  // it can be resident before this kernel ends: 8 warps x 32 x 224 + 4 warps x 32 x 64 = 65,536.
  // With 32 rows the query fragments (128 registers) and O (64) need all there are.
  static constexpr int kMaxRegisters = kBlockM == 32 ? 255 : 224;

  // PV: out[kBlockM, kDimCkv], all rows and kPvDims latent dimensions a warp.
  static constexpr int kPvDims = kDimCkv / kNumWarps;
  static constexpr int kPvMTiles = kBlockM / kMmaM;
  static constexpr int kPvNTiles = kPvDims / kMmaN;

  static constexpr int kCkvRowBytes = kDimCkv * kElementBytes;
  static constexpr int kKpeRowBytes = kDimKpe * kElementBytes;
  static constexpr int kPRowBytes = kBlockN * kElementBytes;
  static constexpr int kStageBytes = kBlockN * (kCkvRowBytes + kKpeRowBytes);
  static constexpr int kQueryBytes = kBlockM * (kCkvRowBytes + kKpeRowBytes);

  static_assert(kQkWarps <= kNumWarps, "QkSplit uses more warps than there are");
  static_assert(kQkNTiles <= 2, "the K fragments of a warp are loaded 16 tokens at a time at most");
  static_assert(kQueryBytes <= kStageBytes || !kQueryInRegisters,
                "the query passes through one stage on its way to registers");
};

// The shared-memory classes of GPUs; backend="sm80:<name>" forces one (tests).
inline constexpr int kLargeBlockN = 64, kSmallBlockN = 32;
struct SharedMemoryClass {
  const char* name;
  int bytes;    // dynamic shared memory a block may use
  int block_n;  // tokens a stage, rows permitting
  int max_block_m;
};
inline constexpr SharedMemoryClass kSharedMemoryClasses[] = {
    {"227kb", 227 * 1024, kLargeBlockN, 64},             // sm_90, sm_100
    {"163kb", 163 * 1024, kLargeBlockN, 64},             // sm_80
    {"99kb", 99 * 1024, kSmallBlockN, kSmallMaxBlockM},  // sm_86, sm_89, sm_120
};

// Tile of a problem with `rows` rows: the smallest that holds them, else the largest.
constexpr int BlockM(const SharedMemoryClass& smem, int rows) {
  for (int block_m : {16, 32}) {
    if (rows <= block_m) return block_m;
  }
  return smem.max_block_m;
}
// Large stages where two of them fit, except with 32 rows, whose registers do not suffice.
constexpr int BlockN(const SharedMemoryClass& smem, int block_m) {
  if (block_m == 32 || (block_m == 64 && smem.bytes < 227 * 1024)) return kSmallBlockN;
  return smem.block_n;
}

// Whether code for an architecture (80 or more) has a tile: each compiles only those that its own
// GPUs' shared memory can hold. Newer GPUs may run it too, from PTX.
constexpr bool HasTile(int architecture, int block_m, int block_n) {
  if (architecture == 80) return block_n == kSmallBlockN || block_m < 64;
  if (architecture < 90 || architecture >= 120) {
    return block_n == kSmallBlockN && block_m <= kSmallMaxBlockM;
  }
  return true;
}
// The same of all tiles that a class may need.
constexpr bool HasClass(int architecture, const SharedMemoryClass& smem) {
  for (int block_m : {16, 32, smem.max_block_m}) {
    if (!HasTile(architecture, block_m, BlockN(smem, block_m))) return false;
  }
  return true;
}

}  // namespace jax_mla::decode::sm80
