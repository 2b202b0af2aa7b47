// The choice where a query's keys fit into the registers of its CTAs: each is loaded once.
//
// Algorithm. A radix select. Each CTA counts a digit of its keys in shared memory: 12 bits, and
// then 10 and 10 of those keys whose upper bits are the threshold's. The second and the third round
// are left out where the keys that share the digit are all chosen. From the threshold each warp
// knows which of its tokens are chosen. A warp has successive tokens and a vote of its lanes is in
// the order of positions, so that nothing is sorted.
//
// CTAs of a group meet once a round and once more to learn how many tokens the others choose. In a
// round each CTA reads the sums of cells of bins from all of them, and then the bins of one cell.
//
// No result depends on the order in which threads come to the atomic additions: they only count.
#pragma once

#include "gpu/launch.h"
#include "index/cta_group.cuh"
#include "index/digit.cuh"
#include "index/group_counts.cuh"
#include "index/key.cuh"
#include "index/row.cuh"

namespace jax_mla::index {

inline constexpr int kRounds = 3;

struct HeldShared {
  union {  // one after the other
    uint32_t first[kFirstBins];
    int32_t chosen[kMaxTopk];  // positions
  };
  uint32_t others[kRounds - 1][kBins];
  uint32_t cells[kRounds][kChooseThreads];  // of each round: sums of a thread's bins
  int32_t page_ids[kChooseThreads];         // of the span's first pages
  uint32_t warp_sums[kChooseWarps], warp_counts[kChooseWarps];
  WordCounts cta_counts[kMaxGroupCtas];  // written by every CTA of the group
  uint32_t found_cell, found_before;
};

__device__ __forceinline__ HeldShared& SharedHeld() {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  return *reinterpret_cast<HeldShared*>(shared_bytes);
}

// The digit of the `wanted`-th largest key.
struct HeldDigit {
  uint32_t digit;
  uint32_t num_above;  // keys with a higher digit
  uint32_t num_equal;  // with this one
  uint32_t total;      // that were counted; if `wanted` or fewer, only this holds
};

// Every thread of the group calls it when its keys are counted.
template <int kNumBins>
__device__ __forceinline__ HeldDigit FindHeldDigit(const CtaGroup& group, uint32_t* bins,
                                                   uint32_t* cells, uint32_t wanted) {
  constexpr int kCell = kNumBins / kChooseThreads;
  HeldShared& shared = SharedHeld();
  const int lane = threadIdx.x % kWarpThreads;
  __syncthreads();
  // The first thread has the highest bins.
  const uint32_t* own = bins + kNumBins - (threadIdx.x + 1) * kCell;
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kCell; i += 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(own + i);
    sum += two.x + two.y;
  }
  if (group.size() > 1) {
    cells[threadIdx.x] = sum;
    group.Sync();
    sum = 0;
#pragma unroll
    for (uint32_t rank = 0; rank < kMaxGroupCtas; ++rank) {
      if (rank < group.size()) sum += group.At(cells, rank)[threadIdx.x];
    }
  }
  const BlockSum of_threads = SumBefore(shared.warp_sums, sum);
  HeldDigit result{0, 0, 0, of_threads.total};
  if (result.total <= wanted) return result;
  if (of_threads.before < wanted && wanted <= of_threads.before + sum) {
    shared.found_cell = threadIdx.x;
    shared.found_before = of_threads.before;
  }
  __syncthreads();
  const uint32_t lowest = kNumBins - (shared.found_cell + 1) * kCell;
  result.num_above = shared.found_before;
  // Each warp adds up the bins of the cell.
  uint32_t count = 0;
  for (uint32_t rank = lane / kCell; rank < group.size(); rank += kWarpThreads / kCell) {
    count += group.At(bins + lowest, rank)[lane % kCell];
  }
#pragma unroll
  for (int distance = kCell; distance < kWarpThreads; distance *= 2) {
    count += __shfl_xor_sync(kAllLanes, count, distance);
  }
  bool is_found = false;
#pragma unroll
  for (int i = kCell - 1; i >= 0; --i) {
    const uint32_t of_bin = __shfl_sync(kAllLanes, count, i);
    if (is_found) continue;
    is_found = wanted <= result.num_above + of_bin;
    if (is_found) {
      result.digit = lowest + i;
      result.num_equal = of_bin;
    } else {
      result.num_above += of_bin;
    }
  }
  return result;
}

// Larger keys are chosen, and of equal ones the first `num_ties` by position.
struct Threshold {
  uint32_t key;
  uint32_t num_ties;
};

// The keys of a warp's tokens: word i has the tokens from `first` + 32 i on, one a lane.
template <int kWords>
struct HeldKeys {
  uint32_t words[kWords];
  int32_t first;
};

// Chooses what is larger than any key below `lowest`; no absent one.
__device__ __forceinline__ Threshold AllFrom(uint32_t lowest) {
  return {max(lowest, kAbsentKey + 1) - 1, 0};
}

// Every thread of the group calls it. The histograms are cleared.
template <int kWords>
__device__ __forceinline__ Threshold FindThreshold(const CtaGroup& group,
                                                   const HeldKeys<kWords>& keys, uint32_t k) {
  HeldShared& shared = SharedHeld();
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (keys.words[i] != kAbsentKey) atomicAdd(shared.first + (keys.words[i] >> kLowerBits), 1u);
  }
  HeldDigit found = FindHeldDigit<kFirstBins>(group, shared.first, shared.cells[0], k);
  if (found.total <= k) return AllFrom(0);
  uint32_t wanted = k - found.num_above, known = found.digit;
  if (found.num_equal == wanted) return AllFrom(known << kLowerBits);
#pragma unroll 1
  for (int round = 0; round < kRounds - 1; ++round) {
    const int shift = round == 0 ? kDigitBits : 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t key = keys.words[i];
      if (key >> (shift + kDigitBits) == known && key != kAbsentKey) {
        atomicAdd(shared.others[round] + (key >> shift) % kBins, 1u);
      }
    }
    found = FindHeldDigit<kBins>(group, shared.others[round], shared.cells[round + 1], wanted);
    wanted -= found.num_above;
    known = known << kDigitBits | found.digit;
    if (found.num_equal == wanted) return AllFrom(known << shift);
  }
  return {known, wanted};
}

// Lists the positions of what is chosen. Every thread of the group calls it.
template <int kWords>
__device__ __forceinline__ Output ListHeld(const CtaGroup& group, const HeldKeys<kWords>& keys,
                                           const Threshold& threshold) {
  HeldShared& shared = SharedHeld();
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const uint32_t num_ties = threshold.num_ties;
  uint32_t packed = 0;  // ties << 16 | winners
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    packed += uint32_t{keys.words[i] > threshold.key};
    if (num_ties != 0) packed += uint32_t{keys.words[i] == threshold.key} << 16;
  }
  packed = __reduce_add_sync(kAllLanes, packed);
  if (lane == 0) shared.warp_counts[warp] = packed;
  __syncthreads();
  const uint32_t of_warp = lane < kChooseWarps ? shared.warp_counts[lane] : 0;
  const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
  const uint32_t total = __reduce_add_sync(kAllLanes, of_warp);
  const WordCounts of_cta{total & 0xffff, total >> 16};
  const GroupCounts counts = ExchangeCounts(group, shared.cta_counts, of_cta);
  const Output output = OutputOf(counts, num_ties);
  uint32_t ties_before = counts.of_lower.ties + (before >> 16);
  uint32_t out = counts.of_lower.winners + (before & 0xffff) + min(ties_before, num_ties) -
                 static_cast<uint32_t>(output.begin);
  const uint32_t lower_lanes = (1u << lane) - 1;
  int32_t position = keys.first + lane;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    bool is_chosen = keys.words[i] > threshold.key;
    if (num_ties != 0) {
      const bool is_tie = keys.words[i] == threshold.key;
      const uint32_t ties = __ballot_sync(kAllLanes, is_tie);
      is_chosen |= is_tie && ties_before + __popc(ties & lower_lanes) < num_ties;
      ties_before += __popc(ties);
    }
    const uint32_t word = __ballot_sync(kAllLanes, is_chosen);
    if (is_chosen) shared.chosen[out + __popc(word & lower_lanes)] = position;
    out += __popc(word);
    position += kWarpThreads;
  }
  __syncthreads();
  return output;
}

// Grid: a group of CTAs a query of the slab. kWords: of a warp.
template <int kWords>
__global__ void __launch_bounds__(kChooseThreads, kWords <= 16 ? 2 : 1)
    ChooseHeld(const __grid_constant__ ChooseParams params) {
  CtaGroup group;
  HeldShared& shared = SharedHeld();
  constexpr int kVectors = (sizeof(shared.first) + sizeof(shared.others)) / sizeof(uint4);
  for (int i = threadIdx.x; i < kVectors; i += kChooseThreads) {
    reinterpret_cast<uint4*>(shared.first)[i] = uint4{0, 0, 0, 0};
  }
  if (!params.has_scores) gpu::PdlWait();
  const TopkParams& p = params.call;
  const auto slab_row = static_cast<int32_t>(blockIdx.x / group.size());
  const int32_t row_idx = params.slab.begin + slab_row;
  const QueryPlace place = PlaceOf(p, row_idx);
  const int32_t num_visible = place.seq_idx == kNoSequence ? 0 : max(place.num_visible, 0);
  const bool has_keys = num_visible > p.k;
  const Row row(params, row_idx, place.seq_idx);
  // A query without keys is served by the first CTA of its group.
  if (!has_keys && group.rank() != 0) return;
  const int32_t span_size = has_keys ? SpanOf(num_visible, group.size()) : num_visible;
  const int32_t span_begin = min(static_cast<int32_t>(group.rank()) * span_size, num_visible);
  const int32_t span_end = min(span_begin + span_size, num_visible);
  const int32_t first_page = row.Page(span_begin);
  // Page ids of the span's first pages, ahead: one a thread.
  int32_t page_id = 0;
  const int32_t own_page = first_page + static_cast<int32_t>(threadIdx.x);
  if (span_begin < span_end && own_page <= row.Page(span_end - 1)) page_id = row.pages.Id(own_page);
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  if (!has_keys) {
    if (WriteAll(row, num_visible)) return;
    group.Leave();
  }
  shared.page_ids[threadIdx.x] = page_id;

  const uint32_t* scores = params.slab.score_keys + slab_row * params.slab.stride;
  const int32_t num_words = (span_end - span_begin + kWarpThreads - 1) / kWarpThreads;
  const int32_t words_each = (num_words + kChooseWarps - 1) / kChooseWarps;
  const auto warp = static_cast<int32_t>(threadIdx.x / kWarpThreads);
  HeldKeys<kWords> keys;
  keys.first = span_begin + warp * words_each * kWarpThreads;
  const int32_t own = keys.first + static_cast<int32_t>(threadIdx.x % kWarpThreads);
  // One branch for all words. A branch for each takes more registers than there are on Blackwell.
  if (has_keys) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int32_t position = own + i * kWarpThreads;
      const bool is_own = i < words_each && position < span_end;
      keys.words[i] = is_own ? __ldcg(scores + position) : kAbsentKey;
    }
  } else {
    constexpr int kMostWords = CeilDiv(kMaxTopk, kChooseThreads);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int32_t position = own + i * kWarpThreads;
      const bool is_own = i < kMostWords && i < words_each && position < span_end;
      keys.words[i] = is_own && row.IsPresent(position) ? 1 : kAbsentKey;
    }
  }
  __syncthreads();  // histograms are cleared
  const Threshold threshold = has_keys ? FindThreshold(group, keys, p.k) : AllFrom(0);
  const Output output = ListHeld(group, keys, threshold);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < output.number; i += kChooseThreads) {
    const int32_t position = shared.chosen[i], page = row.Page(position), idx = page - first_page;
    row.Write(output.begin + i, position, page,
              idx < kChooseThreads ? shared.page_ids[idx] : row.pages.Id(page));
    row.WriteScore(output.begin + i, has_keys ? ScoreOfKey(scores[position]) : 0.0f);
  }
  row.End(output.num_total, group.rank() * kChooseThreads + threadIdx.x,
          group.size() * kChooseThreads);
}

}  // namespace jax_mla::index
