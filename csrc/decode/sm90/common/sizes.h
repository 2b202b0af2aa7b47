// Sizes that all Hopper kernels share: of the hardware, and of the pieces in which KV is copied.
#pragma once

#include "core/kv_format.h"
#include "decode/schedule/schedule.h"

namespace jax_mla::decode::sm90 {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / kWarpThreads;

inline constexpr int kElementBytes = 2;         // float16 and bfloat16 alone
inline constexpr int kBlockN = kScheduleBlock;  // KV tokens of a block
inline constexpr int kChunkDims = 64;           // dims of a chunk: one 128-byte swizzled row

// Rows of a tile against caches of codes, if there are many (pairs/, codes64/).
inline constexpr int kLargeTileRows = 64;

// For caches of codes with so many dims of ckv the narrow kernel has two teams, and tiles of
// kLargeTileRows rows have query codes.
inline constexpr int kTeamsDCkv = 512, kQueryCodesDCkv = 512;

// Whether there are kernels for ragged steps of this type, and such as write a step's new rows. For
// float16 sm80 has them, and append's kernel runs in front.
constexpr bool TakesSteps(DType dtype) { return dtype == DType::kBf16; }

// Whether two teams take units (schedule/units.h). With tile scales, ptxas spills.
constexpr bool TeamsTakeUnits(bool has_tile_scales) { return !has_tile_scales; }

// Whether a warp of the narrow kernel can append (new_row.cuh). Beside two teams, ptxas spills and
// serialises wgmma.
constexpr bool NarrowMayAppend(int num_teams) { return num_teams == 1; }

}  // namespace jax_mla::decode::sm90
