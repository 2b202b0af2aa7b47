// Finds a digit of the threshold from the histogram of a group of CTAs.
#pragma once

#include "index/choose_shared.cuh"
#include "index/cta_group.cuh"

namespace jax_mla::index {

// The sum of `value` over the threads before this one, and over all threads. Every thread calls it.
struct BlockSum {
  uint32_t before, total;
};
__device__ __forceinline__ BlockSum SumBefore(ChooseShared& shared, uint32_t value) {
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  uint32_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == kWarpThreads - 1) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t of_warp = lane < kChooseWarps ? shared.warp_sums[lane] : 0;
  return {inclusive - value + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0),
          __reduce_add_sync(kAllLanes, of_warp)};
}

// Which digit the `wanted`-th largest key has, or the smallest one if there are fewer keys. `bins`
// has each CTA's counts; all threads of the group call this. Each CTA adds up a slice of the bins,
// the first CTA the highest one. If no key was counted, only `total` holds.
template <int kNumBins>
__device__ __forceinline__ DigitFound FindDigit(ChooseShared& shared, const CtaGroup& group,
                                                uint32_t* bins, uint32_t wanted) {
  constexpr int kMaxBinsPerThread = (kNumBins + kChooseThreads - 1) / kChooseThreads;
  const int slice = kNumBins / group.size();
  const int per_thread = (slice + kChooseThreads - 1) / kChooseThreads;
  group.Sync();  // all have counted
  // Descending bins: the last of this thread's is `lowest`.
  const int first_idx = threadIdx.x * per_thread;
  const int lowest = kNumBins - (group.rank() * slice + first_idx + per_thread);
  uint32_t counts[kMaxBinsPerThread] = {};  // ascending
  if (first_idx < slice) {
    for (uint32_t rank = 0; rank < group.size(); ++rank) {
      const uint32_t* of_cta = group.At(bins, rank) + lowest;
      if (per_thread % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kMaxBinsPerThread / 4; ++i) {
          if (4 * i >= per_thread) break;
          const uint4 four = reinterpret_cast<const uint4*>(of_cta)[i];
          counts[4 * i] += four.x, counts[4 * i + 1] += four.y;
          counts[4 * i + 2] += four.z, counts[4 * i + 3] += four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kMaxBinsPerThread; ++i) {
          if (i < per_thread) counts[i] += of_cta[i];
        }
      }
    }
  }
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t count : counts) sum += count;
  const BlockSum block = SumBefore(shared, sum);
  uint32_t before = block.before, total = block.total;
  if (group.size() > 1) {
    if (threadIdx.x < group.size()) {
      group.At(shared.slice_totals, threadIdx.x)[group.rank()] = block.total;
    }
    group.Sync();
    total = 0;
    for (uint32_t rank = 0; rank < group.size(); ++rank) {
      const uint32_t of_slice = shared.slice_totals[rank];
      total += of_slice;
      if (rank < group.rank()) before += of_slice;
    }
  }
  wanted = min(wanted, total);
  if (before < wanted && wanted <= before + sum) {
    DigitFound found{0, before, total};
    bool is_found = false;
#pragma unroll
    for (int i = kMaxBinsPerThread - 1; i >= 0; --i) {
      if (is_found || i >= per_thread) continue;
      found.digit = lowest + i;
      is_found = wanted <= found.num_above + counts[i];
      if (!is_found) found.num_above += counts[i];
    }
    for (uint32_t rank = 0; rank < group.size(); ++rank) *group.At(&shared.found, rank) = found;
  }
  group.Sync();
  DigitFound found = shared.found;
  found.total = total;
  return found;
}

}  // namespace jax_mla::index
