// Partial results of split sequences: their layout, their size, and the kernel that merges them.
// Shared by all CUDA backends.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/split/schedule.h"

#if defined(__CUDACC__) || defined(JAX_MLA_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace jax_mla::decode {

// What partial results look like: the backend's choice.
enum class PartialOrder : int32_t {
  // f32 rows.
  kRows,
  // Rows of the call's dtype, with PartialStats. Vector v of a row has the dims v / 4 * 32 +
  // v % 4 * 2 + {0, 1, 8, 9, 16, 17, 24, 25}: what one thread of a wgmma accumulator owns of 32
  // columns.
  kWgmma,
  // Rows of the call's dtype, with PartialStats. Vector v of a row, of 64, has the d_ckv / 64 dims
  // v / 8 * 16 + v % 8 + {0, 8, 128, 136, 256, ...}: what one thread owns of a row of O^T if two
  // warpgroups own its chunks of 64 dims in turn.
  kTransposed,
};

// Of a row of a part: its result is out / sum, and its weight in the sequence's is
// exp2(reference) * sum. A row that sees no key of the part has out = 0 and weight 0.
struct alignas(8) PartialStats {
  float reference;  // log2 units
  float sum;
};

// Where partial results lie in DecodeParams::scratch. Row-major, one of each for every
// [num_slots][num_row_tiles][block_m]:
//   out       d_ckv elements
//   lse_log2  of f32 partials, which are normalised: log2 of the part's sum of
//             exp2(scores * log2e), -inf for a row that sees no key
//   stats     of 16-bit partials, which take half of the bytes: writing and reading them is much of
//             what a merge costs. bf16 has the range of f32 and takes O as it is; f16 takes
//             O / sum, and stats are {lse_log2, 1}.
// Rows past q_len * num_heads need not be written. Slots come from WorkItem::slot(); a slot nobody
// owns is never read.
struct PartialBuffers {
  float* out;
  float* lse_log2;      // behind out
  PartialStats* stats;  // behind the first half of out
  int32_t num_row_tiles;
  int32_t block_m;  // rows a tile; row r of a sequence lies in tile r / block_m
  PartialOrder order = PartialOrder::kRows;

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

// Scratch is sized for tiles of up to so many rows.
inline constexpr int32_t kMaxRowTile = 64;

// What a backend chooses about the split.
struct SplitOptions {
  int32_t block_m;   // rows a tile, up to kMaxRowTile
  int32_t num_ctas;  // CTAs that run at once (all row tiles together), e.g. the SM count
  int32_t seq_cost;  // see ScheduleParams
  int32_t max_single_blocks = kMaxSingleBlocks;  // see ScheduleParams
  bool can_pair = false;                         // see "paired" in schedule.h
  Slack slack = {};
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
// beside the decode kernel it needs kCombineSharedBytes of shared memory and, for each CTA,
// kCombineThreads threads with their registers (kTransposed, kRows; kWgmma starts late).
cudaError_t LaunchCombine(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream);
#endif

// Of at most 64 registers with kRows, 80 with kTransposed, 168 with kWgmma.
inline constexpr int32_t kCombineThreads = 128;
// What a decode kernel that fills an SM has to leave free. The combine kernel has no shared memory
// of its own: this is the 1 KiB of system use of every CTA, the decode kernel's included, so that
// up to three CTAs of it fit.
inline constexpr int32_t kCombineSharedBytes = 4096;

}  // namespace jax_mla::decode
