// The work of a slab's scores, and each CTA's share of it.
//
// Successive queries of a sequence form a window: a CTA loads each of their tokens once. A window's
// tokens are cut into tiles. All tiles of the slab, one window after the other, are dealt out to
// the CTAs in equal shares.
#pragma once

#include <cstdint>

#include "core/ragged.h"
#include "index/launch.h"
#include "index/params.h"
#include "index/places.cuh"

namespace jax_mla::index {

inline constexpr int32_t kTileTokens = 64;

// A window stands at its first query. Other rows of the slab have no tiles.
struct alignas(16) Window {
  int32_t tiles_end;    // of the slab's tiles, those up to this row
  int32_t seq_idx;      // kNoSequence: no tiles
  int32_t num_visible;  // tokens that the first query sees; each further one sees one more
  int32_t num_queries;

  __device__ __forceinline__ int32_t num_tokens() const { return num_visible + num_queries - 1; }
};

struct SlabWork {
  Window windows[kMaxSlabRows];  // by row of the slab
  int32_t warp_sums[32];
};

// Without a query that needs scores a window has no tiles.
__device__ __forceinline__ Window MakeWindow(const TopkParams& p, const Slab& slab,
                                             int32_t slab_row, int32_t max_queries) {
  const QueryPlace place = PlaceOf(p, slab.begin + slab_row);
  const int32_t in_window = place.idx % max_queries;
  if (place.seq_idx == kNoSequence || (in_window != 0 && slab_row != 0)) {
    return {0, kNoSequence, 0, 1};
  }
  Window window;
  window.seq_idx = place.seq_idx;
  window.num_visible = place.num_visible;
  window.num_queries =
      min(min(max_queries - in_window, place.num_behind + 1), slab.num_rows - slab_row);
  window.tiles_end =
      window.num_tokens() > p.k ? (window.num_tokens() + kTileTokens - 1) / kTileTokens : 0;
  return window;
}

// Fills `work` with the windows of the slab and returns how many tiles they have. All threads of
// the CTA call it; they meet at barriers.
template <int kNumThreads>
__device__ __forceinline__ int32_t FindWork(const TopkParams& p, const Slab& slab,
                                            int32_t max_queries, SlabWork& work) {
  constexpr int kWarp = 32;
  constexpr int kNumWarps = kNumThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int32_t each = (slab.num_rows + kNumThreads - 1) / kNumThreads;
  const int32_t first = min(static_cast<int32_t>(threadIdx.x) * each, slab.num_rows);
  const int32_t last = min(first + each, slab.num_rows);
  int32_t sum = 0;
  for (int32_t row = first; row < last; ++row) {
    work.windows[row] = MakeWindow(p, slab, row, max_queries);
    sum += work.windows[row].tiles_end;
  }
  int32_t inclusive = sum;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == kWarp - 1) work.warp_sums[warp] = inclusive;
  __syncthreads();
  const int32_t of_warp = lane < kNumWarps ? work.warp_sums[lane] : 0;
  int32_t end = inclusive - sum + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
  const int32_t total = __reduce_add_sync(0xffffffffu, of_warp);
  for (int32_t row = first; row < last; ++row) {
    end += work.windows[row].tiles_end;
    work.windows[row].tiles_end = end;
  }
  __syncthreads();
  return total;
}

// Walks the windows of which a CTA has tiles.
class Walk {
 public:
  __device__ __forceinline__ Walk(const SlabWork& work, int32_t num_rows, int32_t total)
      : work_(work),
        tile_(static_cast<int32_t>(int64_t{total} * blockIdx.x / gridDim.x)),
        end_(static_cast<int32_t>(int64_t{total} * (blockIdx.x + 1) / gridDim.x)) {
    // The first row with tiles behind `tile_`.
    int32_t high = num_rows;
    while (row_ < high) {
      const int32_t middle = (row_ + high) / 2;
      if (work_.windows[middle].tiles_end > tile_) {
        high = middle;
      } else {
        row_ = middle + 1;
      }
    }
  }

  // Goes to the next window. Returns whether there is one.
  __device__ __forceinline__ bool Next() {
    tile_ += num_tiles;
    if (tile_ >= end_) return false;
    while (work_.windows[row_].tiles_end <= tile_) ++row_;
    window = work_.windows[row_];
    row = row_;
    const int32_t begin = row_ == 0 ? 0 : work_.windows[row_ - 1].tiles_end;
    first_tile = tile_ - begin;
    num_tiles = min(end_, window.tiles_end) - tile_;
    return true;
  }

  Window window;
  int32_t row;             // of the slab, the window's first
  int32_t first_tile = 0;  // of the window
  int32_t num_tiles = 0;   // the CTA's tiles of the window

 private:
  const SlabWork& work_;
  int32_t row_ = 0;
  int32_t tile_, end_;  // of the slab
};

}  // namespace jax_mla::index
