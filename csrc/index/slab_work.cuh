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
  int32_t begin, end;            // the CTA's tiles, of the slab
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

// Fills `work`. All threads of the CTA call it; they meet at barriers.
template <int kNumThreads>
__device__ __forceinline__ void FindWork(const TopkParams& p, const Slab& slab, int32_t max_queries,
                                         SlabWork& work) {
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
  if (threadIdx.x == 0) {
    work.begin = static_cast<int32_t>(int64_t{total} * blockIdx.x / gridDim.x);
    work.end = static_cast<int32_t>(int64_t{total} * (blockIdx.x + 1) / gridDim.x);
  }
  __syncthreads();
}

// Walks the windows of which a CTA has tiles. Keeps little, because registers are scarce.
class Walk {
 public:
  __device__ __forceinline__ Walk(const SlabWork& work, int32_t num_rows) {
    // The first row with tiles behind `begin`.
    int32_t high = num_rows;
    while (row < high) {
      const int32_t middle = (row + high) / 2;
      if (work.windows[middle].tiles_end > work.begin) {
        high = middle;
      } else {
        row = middle + 1;
      }
    }
    last_tile = work.begin - TilesBefore(work);
  }

  // Goes to the next window. Returns whether there is one.
  __device__ __forceinline__ bool Next(const SlabWork& work) {
    const int32_t tile = TilesBefore(work) + last_tile;
    if (tile >= work.end) return false;
    while (work.windows[row].tiles_end <= tile) ++row;
    first_tile = tile - TilesBefore(work);
    last_tile = min(work.end, work.windows[row].tiles_end) - TilesBefore(work);
    return true;
  }

  int32_t row = 0;  // of the slab: the window is work.windows[row]
  // The CTA's tiles of the window, half-open.
  int32_t first_tile, last_tile;

 private:
  // Tiles of the slab before the window's.
  __device__ __forceinline__ int32_t TilesBefore(const SlabWork& work) const {
    return row == 0 ? 0 : work.windows[row - 1].tiles_end;
  }
};

}  // namespace jax_mla::index
