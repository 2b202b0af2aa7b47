// Partial results of split sequences: their layout, their size, and the kernel that merges them.
// Shared by all CUDA backends.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/schedule.h"

#if defined(__CUDACC__) || defined(JAX_MLA_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace jax_mla::decode {

// Two regions of DecodeParams::scratch, both f32, row-major (dims in the order of `interleave`):
//   out      [num_slots][num_row_tiles][block_m][d_ckv]  normalised: sum(p v) / sum(p) of the part
//   lse_log2 [num_slots][num_row_tiles][block_m]         log2 of the part's sum of exp2(scores *
//   log2e)
// A row that sees no key of the part has out = 0 and lse_log2 = -inf. Rows past q_len * num_heads
// need not be written. Slots come from WorkItem::slot(); a slot nobody owns is never read.
struct PartialBuffers {
  float* out;
  float* lse_log2;
  int32_t num_row_tiles;
  int32_t block_m;  // rows a tile; row r of a sequence lies in tile r / block_m
  // Order of a row of `out`: element e is dim e / interleave + e % interleave * (d_ckv /
  // interleave). 1 is row-major. A kernel whose threads own every (d_ckv / interleave)-th dim
  // stores vectors so. kWgmmaOrder: in every 16 dims, element 4 q + k is dim 8 (k / 2) + 2 q + k %
  // 2, which is what one thread of a wgmma accumulator owns of a row.
  int32_t interleave = 1;
  static constexpr int32_t kWgmmaOrder = 0;

  // Index of (slot, tile, row 0), in rows; times d_ckv for `out`.
  MLA_HOST_DEVICE int64_t RowIndex(int32_t slot, int32_t row_tile) const {
    return (static_cast<int64_t>(slot) * num_row_tiles + row_tile) * block_m;
  }
};

// Everything a backend needs to split one call: pass it to the decode kernel by value.
struct SplitPlan {
  ScheduleParams schedule;
  PartialBuffers partials;
  // False if no sequence of this shape can ever be split: then no combine is launched.
  bool may_split;
  // CTAs of the combine kernel that are resident while the decode kernel runs; 0: none.
  int32_t resident_merges = 0;
};

// What a backend chooses about the split.
struct SplitOptions {
  int32_t block_m;   // rows a tile
  int32_t num_ctas;  // CTAs that run at once (all row tiles together), e.g. the SM count
  int32_t seq_cost;  // see ScheduleParams
  int32_t min_blocks;
  bool can_pair = false;    // see "paired" in schedule.h
  int32_t slack_shift = 4;  // see ScheduleParams
};

// The plan of one call: workers = num_ctas / num_row_tiles, less if the scratch holds fewer slots.
SplitPlan MakeSplitPlan(const DecodeParams& params, const SplitOptions& options);

// Bytes of scratch a call may need, whatever backend and GPU run it: decided when the call is
// lowered, possibly on a machine without a GPU. The single place that sizes it.
int64_t DecodeScratchBytes(const DecodeShape& shape);

#if defined(__CUDACC__) || defined(JAX_MLA_WITH_CUDA)
// Merges the partials of all split sequences into params.out and params.lse. Launched with
// programmatic dependent launch: the decode kernel must execute griddepcontrol.wait before
// griddepcontrol.launch_dependents (gpu/launch.h), and the merge overlaps its tail. To be resident
// beside the decode kernel it needs kCombineSharedBytes of shared memory and kCombineThreads
// threads an SM.
cudaError_t LaunchCombine(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream);
#endif

inline constexpr int32_t kCombineThreads = 128;  // of at most 64 registers
// What a decode kernel that fills an SM has to leave free (both CTAs' 1 KiB of system use
// included).
inline constexpr int32_t kCombineSharedBytes = 4096;

}  // namespace jax_mla::decode
