// Partial results of split sequences: what they look like and where they lie.
#pragma once

#include <cstdint>

#include "core/divisor.h"

namespace jax_mla::decode {

// The order of a partial result's elements: the backend's choice.
enum class PartialOrder : int32_t {
  // Rows of float32.
  kRows,
  // Rows of float16 with PartialStats (the wide kernel's own merge has the same vectors in another
  // order: sm90/wide/merge/fragments.cuh). A vector is what one thread of a wgmma accumulator owns
  // of 32 columns: vector v of a row has the dims
  // v / 4 * 32 + v % 4 * 2 + {0, 1, 8, 9, 16, 17, 24, 25}.
  kWgmma,
  // Rows of float16 with PartialStats. A vector is what one thread owns of a row of O^T if two
  // warpgroups take its chunks of 64 dims in turn: vector v of a row, of 64, has the d_ckv / 64
  // dims v / 8 * 16 + v % 8 + {0, 8, 128, 136, 256, ...}.
  kTransposed,
  // Rows of float16 with PartialStats, in the order of their dims. A vector is d_ckv / 64 of them.
  kPackedRows,
};

// The statistics of a row of a part. The part's own result is out / sum, and its weight in the
// sequence's result is exp2(reference) * sum. A row that sees no key of the part has out = 0 and
// weight 0.
struct alignas(8) PartialStats {
  float reference;  // log2 units
  float sum;
};

// Where partial results lie in DecodeParams::scratch. Row-major, one of each for every
// [num_slots][num_row_tiles][block_m]:
//   out       d_ckv elements: float32 normalised by the part's sum, or float16 of O times a power
//             of two (merge/partial_range.cuh)
//   lse_log2  with float32: log2 of the part's sum of exp2(scores * log2e), -inf for a row that
//             sees no key
//   stats     with float16; kWgmma has one for each half of a row's dims: [row / 8][half][row % 8]
// Rows past q_len * num_heads need not be written. Slots come from WorkItem::slot(); a slot nobody
// owns is never read.
struct PartialBuffers {
  float* out;
  // Only one of these is used. `out` has the size of float32 rows; float16 rows fill the first half
  // of it, and their statistics lie at three quarters.
  float* lse_log2;
  PartialStats* stats;
  int32_t num_row_tiles;
  int32_t block_m;  // rows a tile; row r of a sequence lies in tile r / block_m
  PartialOrder order = PartialOrder::kRows;

  // Index of (slot, tile, row 0), in rows; times d_ckv for `out`.
  MLA_HOST_DEVICE int64_t RowIndex(int32_t slot, int32_t row_tile) const {
    return (static_cast<int64_t>(slot) * num_row_tiles + row_tile) * block_m;
  }
};

// kWgmma: a band is the rows that share a run of statistics. Tiles have whole bands.
inline constexpr int32_t kBandRows = 8;

// kWgmma: where the statistics of a row's first half lie; those of its second half lie
// kBandRows behind.
MLA_HOST_DEVICE int64_t HalfStatsIndex(int64_t row) { return 2 * row - row % kBandRows; }

// Scratch is sized for tiles of up to this many rows.
inline constexpr int32_t kMaxRowTile = 64;

}  // namespace jax_mla::decode
