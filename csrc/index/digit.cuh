// Finds a digit of the threshold from a histogram.
#pragma once

#include "index/choose_shared.cuh"

namespace jax_mla::index {

// The sum of `value` over the threads before this one, and over all threads. Every thread calls it;
// they meet once. `warp_sums`: [kChooseWarps] in shared memory.
struct BlockSum {
  uint32_t before, total;
};
__device__ __forceinline__ BlockSum SumBefore(uint32_t* warp_sums, uint32_t value) {
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  uint32_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == kWarpThreads - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t of_warp = lane < kChooseWarps ? warp_sums[lane] : 0;
  return {inclusive - value + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0),
          __reduce_add_sync(kAllLanes, of_warp)};
}

// Which digit the `wanted`-th largest key has, or the smallest one if there are fewer keys. If no
// key was counted, only `total` holds. Every thread calls it, behind a barrier.
template <int kNumBins>
__device__ __forceinline__ DigitFound FindDigit(ChooseShared& shared, const uint32_t* bins,
                                                uint32_t wanted) {
  constexpr int kBinsPerThread = kNumBins / kChooseThreads;
  static_assert(kBinsPerThread % 2 == 0, "bins are loaded in pairs");
  // The first thread has the highest bins.
  const int lowest = kNumBins - (threadIdx.x + 1) * kBinsPerThread;
  uint32_t counts[kBinsPerThread], sum = 0;  // ascending
#pragma unroll
  for (int i = 0; i < kBinsPerThread; i += 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(bins + lowest + i);
    counts[i] = two.x, counts[i + 1] = two.y;
    sum += two.x + two.y;
  }
  const BlockSum block = SumBefore(shared.warp_sums, sum);
  wanted = min(wanted, block.total);
  if (block.before < wanted && wanted <= block.before + sum) {
    DigitFound found{0, block.before, block.total};
    bool is_found = false;
#pragma unroll
    for (int i = kBinsPerThread - 1; i >= 0; --i) {
      if (is_found) continue;
      found.digit = lowest + i;
      is_found = wanted <= found.num_above + counts[i];
      if (!is_found) found.num_above += counts[i];
    }
    shared.found = found;
  }
  __syncthreads();
  DigitFound found = shared.found;
  found.total = block.total;
  return found;
}

}  // namespace jax_mla::index
