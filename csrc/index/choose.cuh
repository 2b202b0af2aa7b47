// The parts of the choice kernel (choose.cu) that find the threshold and mark what is chosen.
#pragma once

#include "index/choose_shared.cuh"
#include "index/cta_group.cuh"
#include "index/digit.cuh"
#include "index/key.cuh"

namespace jax_mla::index {

__device__ __forceinline__ ChooseShared& Shared() {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  return *reinterpret_cast<ChooseShared*>(shared_bytes);
}

// A CTA's part of a query: its tokens and their bitmaps.
struct Span {
  const uint32_t* keys;  // [size]
  int32_t begin;         // position of the first token
  int32_t size;
  uint32_t* winners;
  uint32_t* ties;
  Histograms* merged;  // of all CTAs of a group; its own if it is alone
  uint32_t* kept;      // the keys in shared memory; null: they are loaded again

  __device__ __forceinline__ int32_t num_words() const {
    return (size + kWarpThreads - 1) / kWarpThreads;
  }
};

// Calls use(token, keys) for four tokens at a time. All lanes of a warp call it together, for
// tokens behind the span too, whose keys are absent.
template <class Load, class Use>
__device__ __forceinline__ void ForEachFour(const Span& span, Load load, Use use) {
  constexpr int kUnroll = 2;
  constexpr int32_t kStep = kChooseThreads * kLaneKeys;
  const int32_t own = threadIdx.x * kLaneKeys;
#pragma unroll 1
  for (int32_t base = 0; base < span.size; base += kUnroll * kStep) {
    uint4 keys[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int32_t token = base + i * kStep + own;
      keys[i] = {kAbsentKey, kAbsentKey, kAbsentKey, kAbsentKey};
      if (token < span.size) keys[i] = load(token);
      if (token + 1 >= span.size) keys[i].y = kAbsentKey;
      if (token + 2 >= span.size) keys[i].z = kAbsentKey;
      if (token + 3 >= span.size) keys[i].w = kAbsentKey;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) use(base + i * kStep + own, keys[i]);
  }
}

// Calls use(token, key) for one token at a time: little code, for what is rare. All lanes of a warp
// call it together.
template <class Use>
__device__ __forceinline__ void ForEachOne(const Span& span, Use use) {
#pragma unroll 1
  for (int32_t token = threadIdx.x; token < span.num_words() * kWarpThreads;
       token += kChooseThreads) {
    use(token, token < span.size ? span.keys[token] : kAbsentKey);
  }
}

// Clears the histograms.
__device__ __forceinline__ void Clear(Histograms& histograms) {
  constexpr int kVectors = sizeof(Histograms) / sizeof(uint4);
  for (int i = threadIdx.x; i < kVectors; i += kChooseThreads) {
    reinterpret_cast<uint4*>(&histograms)[i] = uint4{0, 0, 0, 0};
  }
}

// Adds a CTA's counts to those of the group, in each of its CTAs. Counts of the whole group are
// complete behind it.
__device__ __forceinline__ void Merge(const CtaGroup& group, const uint32_t* own, uint32_t* merged,
                                      int num_bins) {
  __syncthreads();
  if (group.size() == 1) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_bins; i += kChooseThreads) {
    const uint32_t count = own[i];
    if (count == 0) continue;
#pragma unroll 1
    for (uint32_t rank = 0; rank < group.size(); ++rank) {
      atomicAdd(group.At(merged + i, rank), count);
    }
  }
  group.Sync();
}

// Counts the first digits, and keeps the keys if there is room.
__device__ __forceinline__ void CountFirst(const Span& span) {
  uint32_t* bins = Shared().own.first;
  ForEachFour(
      span,
      [&](int32_t token) { return __ldcg(reinterpret_cast<const uint4*>(span.keys + token)); },
      [&](int32_t token, const uint4& keys) {
        if (span.kept != nullptr && token < span.size) {
          *reinterpret_cast<uint4*>(span.kept + token) = keys;
        }
        if (keys.x != kAbsentKey) atomicAdd(bins + (keys.x >> kLowerBits), 1u);
        if (keys.y != kAbsentKey) atomicAdd(bins + (keys.y >> kLowerBits), 1u);
        if (keys.z != kAbsentKey) atomicAdd(bins + (keys.z >> kLowerBits), 1u);
        if (keys.w != kAbsentKey) atomicAdd(bins + (keys.w >> kLowerBits), 1u);
      });
}

// Marks the tokens whose first digit is larger, and lists those whose first digit is the same.
__device__ __forceinline__ void MarkAndList(const Span& span, uint32_t digit) {
  ChooseShared& shared = Shared();
  const int lane = threadIdx.x % kWarpThreads;
  const uint32_t lowest = digit << kLowerBits, highest = lowest | ((1u << kLowerBits) - 1);
  ForEachFour(
      span, [&](int32_t token) { return *reinterpret_cast<const uint4*>(span.keys + token); },
      [&](int32_t token, const uint4& keys) {
        uint32_t word = uint32_t{keys.x > highest} | uint32_t{keys.y > highest} << 1 |
                        uint32_t{keys.z > highest} << 2 | uint32_t{keys.w > highest} << 3;
        word <<= lane % 8 * kLaneKeys;
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) {
          word |= __shfl_xor_sync(kAllLanes, word, distance);
        }
        if (lane % 8 == 0 && token < span.size) {
          span.winners[token / kWarpThreads] = word;
          span.ties[token / kWarpThreads] = 0;
        }
        const auto list = [&](uint32_t key, int32_t own) {
          if (key < lowest || key > highest || key == kAbsentKey) return;
          const int32_t idx = atomicAdd(&shared.num_candidates, 1);
          if (idx >= kMaxCandidates) return;
          shared.own.candidates.keys[idx] = key - lowest;
          shared.own.candidates.tokens[idx] = own;
        };
        list(keys.x, token);
        list(keys.y, token + 1);
        list(keys.z, token + 2);
        list(keys.w, token + 3);
      });
  __syncthreads();
}

// Counts the digit above `shift` of those candidates whose bits above the digit are `known`.
__device__ __forceinline__ void CountNext(const Span& span, uint32_t first_digit, uint32_t known,
                                          int shift, uint32_t* bins) {
  const ChooseShared& shared = Shared();
  const auto count = [&](uint32_t lower) {
    if (lower >> (shift + kDigitBits) == known) atomicAdd(bins + (lower >> shift) % kBins, 1u);
  };
  if (shared.num_candidates <= kMaxCandidates) {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < shared.num_candidates; i += kChooseThreads) {
      count(shared.own.candidates.keys[i]);
    }
  } else {
    ForEachOne(span, [&](int32_t, uint32_t key) {
      if (key >> kLowerBits == first_digit && key != kAbsentKey) {
        count(key & ((1u << kLowerBits) - 1));
      }
    });
  }
}

// Marks winners and ties among the candidates.
__device__ __forceinline__ void MarkCandidates(const Span& span, uint32_t threshold) {
  const ChooseShared& shared = Shared();
  if (shared.num_candidates <= kMaxCandidates) {
    const uint32_t lower = threshold & ((1u << kLowerBits) - 1);
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < shared.num_candidates; i += kChooseThreads) {
      const uint32_t key = shared.own.candidates.keys[i];
      if (key < lower) continue;
      const int32_t token = shared.own.candidates.tokens[i];
      atomicOr((key > lower ? span.winners : span.ties) + token / kWarpThreads,
               1u << token % kWarpThreads);
    }
  } else {
    ForEachOne(span, [&](int32_t token, uint32_t key) {
      const uint32_t winners = __ballot_sync(kAllLanes, key > threshold);
      const uint32_t ties = __ballot_sync(kAllLanes, key == threshold);
      if (token % kWarpThreads == 0) {
        span.winners[token / kWarpThreads] = winners;
        span.ties[token / kWarpThreads] = ties;
      }
    });
  }
}

// Fills the bitmaps. Returns how many ties are taken. The histograms are cleared, and the group has
// arrived.
__device__ __forceinline__ uint32_t Choose(Span& span, const CtaGroup& group, uint32_t k) {
  ChooseShared& shared = Shared();
  CountFirst(span);
  group.Wait();
  Merge(group, shared.own.first, span.merged->first, kFirstBins);
  if (span.kept != nullptr) span.keys = span.kept;
  const DigitFound first = FindDigit<kFirstBins>(shared, span.merged->first, k);
  // With no candidate at all, no key is larger than this one, nor equal.
  uint32_t threshold = 0xffffffffu, wanted = 0;
  if (first.total != 0) {
    MarkAndList(span, first.digit);
    wanted = min(k, first.total) - first.num_above;
    uint32_t known = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      CountNext(span, first.digit, known, (1 - i) * kDigitBits, shared.own.others[i]);
      Merge(group, shared.own.others[i], span.merged->others[i], kBins);
      const DigitFound next = FindDigit<kBins>(shared, span.merged->others[i], wanted);
      wanted -= next.num_above;
      known = known << kDigitBits | next.digit;
    }
    threshold = first.digit << kLowerBits | known;
  } else {
    if (threadIdx.x == 0) shared.num_candidates = kMaxCandidates + 1;  // marks all words
    __syncthreads();
  }
  MarkCandidates(span, threshold);
  return wanted;
}

}  // namespace jax_mla::index
