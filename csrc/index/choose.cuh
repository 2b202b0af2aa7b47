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

// A CTA's part of a query. What lies behind ChooseShared is found from `bitmap_words`, in place of
// pointers: registers are scarce.
struct Span {
  const uint32_t* keys;  // [size]
  int32_t begin;         // position of the first token
  int32_t size;
  int32_t bitmap_words;  // of the longest span
  bool is_alone;         // the group is one CTA
  bool keeps_keys;

  __device__ __forceinline__ int32_t num_words() const {
    return (size + kWarpThreads - 1) / kWarpThreads;
  }
  __device__ __forceinline__ uint32_t* winners() const {
    return reinterpret_cast<uint32_t*>(&Shared() + 1);
  }
  __device__ __forceinline__ uint32_t* ties() const { return winners() + bitmap_words; }
  // Of all CTAs of the group together.
  __device__ __forceinline__ GroupShared& of_group() const {
    return *reinterpret_cast<GroupShared*>(ties() + bitmap_words);
  }
  __device__ __forceinline__ Histograms& merged() const {
    return is_alone ? Shared().own : of_group().merged;
  }
  // The keys in shared memory, if they are kept.
  __device__ __forceinline__ uint32_t* kept() const {
    uint32_t* behind = ties() + bitmap_words;
    return is_alone ? behind : behind + sizeof(GroupShared) / sizeof(uint32_t);
  }
};

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
  if (group.is_alone()) return;
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
  constexpr int kUnroll = 2;
  constexpr int32_t kStep = kChooseThreads * kLaneKeys;
  uint32_t* bins = Shared().own.first;
  const auto count = [&](uint32_t key) {
    if (key != kAbsentKey) atomicAdd(bins + (key >> kLowerBits), 1u);
  };
#pragma unroll 1
  for (int32_t base = threadIdx.x * kLaneKeys; base < span.size; base += kUnroll * kStep) {
    uint4 keys[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int32_t token = base + i * kStep;
      keys[i] = {kAbsentKey, kAbsentKey, kAbsentKey, kAbsentKey};
      if (token < span.size) {
        keys[i] = __ldcg(reinterpret_cast<const uint4*>(span.keys + token));
        if (token + 1 >= span.size) keys[i].y = kAbsentKey;
        if (token + 2 >= span.size) keys[i].z = kAbsentKey;
        if (token + 3 >= span.size) keys[i].w = kAbsentKey;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int32_t token = base + i * kStep;
      if (span.keeps_keys && token < span.size) {
        *reinterpret_cast<uint4*>(span.kept() + token) = keys[i];
      }
      count(keys[i].x);
      count(keys[i].y);
      count(keys[i].z);
      count(keys[i].w);
    }
  }
}

// Marks the tokens whose first digit is larger, and lists those whose first digit is the same.
// Lanes take successive tokens, so that a vote of theirs is a word of the bitmap.
__device__ __forceinline__ void MarkAndList(const Span& span, uint32_t digit) {
  constexpr int kWords = 8;
  constexpr int32_t kWarpTokens = kWords * kWarpThreads;
  ChooseShared& shared = Shared();
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const uint32_t lowest = max(digit << kLowerBits, kAbsentKey + 1);
  const uint32_t highest = digit << kLowerBits | ((1u << kLowerBits) - 1);
  uint32_t num_winners = 0;
#pragma unroll 1
  for (int32_t base = warp * kWarpTokens; base < span.size; base += kChooseWarps * kWarpTokens) {
    uint32_t keys[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int32_t token = base + i * kWarpThreads + lane;
      keys[i] = token < span.size ? span.keys[token] : kAbsentKey;
    }
    uint32_t own_word = 0;
    bool has_candidate = false;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = __ballot_sync(kAllLanes, keys[i] > highest);
      if (lane == i) own_word = word;
      has_candidate |= keys[i] - lowest <= highest - lowest;
    }
    const int32_t own = base / kWarpThreads + lane;
    if (lane < kWords && own < span.num_words()) {
      span.winners()[own] = own_word;
      span.ties()[own] = 0;
      num_winners += __popc(own_word);
    }
    if (!has_candidate) continue;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (keys[i] - lowest > highest - lowest) continue;
      // Additions to one number take their time: where there is no room, they end.
      if (*const_cast<volatile int32_t*>(&shared.num_candidates) > kMaxCandidates) continue;
      const int32_t idx = atomicAdd(&shared.num_candidates, 1);
      if (idx >= kMaxCandidates) continue;
      shared.own.candidates.keys[idx] = keys[i] & ((1u << kLowerBits) - 1);
      shared.own.candidates.tokens[idx] = base + i * kWarpThreads + lane;
    }
  }
  if (!span.is_alone) {
    num_winners = __reduce_add_sync(kAllLanes, num_winners);
    if (lane == 0) atomicAdd(&shared.num_winners, num_winners);
  }
  __syncthreads();
}

// A list of candidates: a CTA's own, or the whole group's.
struct List {
  const Candidates& candidates;
  int32_t number;
  int32_t begin;  // of the CTA's span, in the terms of the list

  // Otherwise candidates are found among all keys.
  __device__ __forceinline__ bool is_complete() const { return number <= kMaxCandidates; }
};

// Copies a CTA's candidates to the lists of all CTAs of its group, and tells them how many tokens
// the first digit chose. There is room.
__device__ __forceinline__ void ListForGroup(const Span& span, const CtaGroup& group) {
  ChooseShared& shared = Shared();
  if (threadIdx.x < group.size()) {
    group.At(shared.cta_counts, threadIdx.x)[group.rank()] = {shared.num_winners, 0};
  }
  if (threadIdx.x == 0) {
    shared.first_listed = atomicAdd(group.At(&shared.num_listed, 0), shared.num_candidates);
  }
  __syncthreads();
  const auto size = static_cast<int32_t>(group.size());
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < shared.num_candidates * size; i += kChooseThreads) {
    const int32_t own = i / size;
    Candidates* list = group.At(&span.of_group().candidates, i % size);
    list->keys[shared.first_listed + own] = shared.own.candidates.keys[own];
    list->tokens[shared.first_listed + own] = span.begin + shared.own.candidates.tokens[own];
  }
  group.Sync();
}

// Counts the digit above `shift` of those candidates whose bits above the digit are `known`.
__device__ __forceinline__ void CountNext(const Span& span, const List& list, uint32_t first_digit,
                                          uint32_t known, int shift, uint32_t* bins) {
  const auto count = [&](uint32_t lower) {
    if (lower >> (shift + kDigitBits) == known) atomicAdd(bins + (lower >> shift) % kBins, 1u);
  };
  if (list.is_complete()) {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < list.number; i += kChooseThreads) {
      count(list.candidates.keys[i]);
    }
  } else {
    ForEachOne(span, [&](int32_t, uint32_t key) {
      if (key >> kLowerBits == first_digit && key != kAbsentKey) {
        count(key & ((1u << kLowerBits) - 1));
      }
    });
  }
}

// Marks winners and ties among the candidates of the span. Of a group's list it also counts them.
__device__ __forceinline__ void MarkCandidates(const Span& span, const List& list,
                                               uint32_t threshold, bool is_of_group) {
  ChooseShared& shared = Shared();
  if (!list.is_complete()) {
    ForEachOne(span, [&](int32_t token, uint32_t key) {
      const uint32_t winners = __ballot_sync(kAllLanes, key > threshold);
      const uint32_t ties = __ballot_sync(kAllLanes, key == threshold);
      if (token % kWarpThreads == 0) {
        span.winners()[token / kWarpThreads] = winners;
        span.ties()[token / kWarpThreads] = ties;
      }
    });
    return;
  }
  const uint32_t lower = threshold & ((1u << kLowerBits) - 1);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < list.number; i += kChooseThreads) {
    const uint32_t key = list.candidates.keys[i];
    if (key < lower) continue;
    const bool is_winner = key > lower;
    const int32_t token = list.candidates.tokens[i] - list.begin;
    if (token >= 0 && token < span.size) {
      atomicOr((is_winner ? span.winners() : span.ties()) + token / kWarpThreads,
               1u << token % kWarpThreads);
    }
    if (!is_of_group) continue;
    atomicAdd(is_winner ? &shared.listed.winners : &shared.listed.ties, 1u);
    if (token < 0) {
      atomicAdd(is_winner ? &shared.listed_below.winners : &shared.listed_below.ties, 1u);
    }
  }
}

// What is chosen beside the winners.
struct Chosen {
  uint32_t num_ties;  // the first ones by position
  bool is_of_group;   // each CTA knows how many tokens the others chose
};

// Fills the bitmaps. The histograms are cleared, and the group has arrived.
__device__ __forceinline__ Chosen Choose(Span& span, const CtaGroup& group, uint32_t k) {
  ChooseShared& shared = Shared();
  CountFirst(span);
  group.Wait();
  Merge(group, shared.own.first, span.merged().first, kFirstBins);
  if (span.keeps_keys) span.keys = span.kept();
  const DigitFound first = FindDigit<kFirstBins>(shared, span.merged().first, k);
  if (first.total == 0) {  // no candidate: no key is larger than this one, nor equal
    MarkCandidates(span, {shared.own.candidates, kMaxCandidates + 1, 0}, 0xffffffffu, false);
    return {0, false};
  }
  MarkAndList(span, first.digit);
  const bool is_of_group = !span.is_alone && first.num_equal <= kMaxCandidates;
  if (is_of_group) ListForGroup(span, group);
  const List list{is_of_group ? span.of_group().candidates : shared.own.candidates,
                  is_of_group ? static_cast<int32_t>(first.num_equal) : shared.num_candidates,
                  is_of_group ? span.begin : 0};
  uint32_t wanted = min(k, first.total) - first.num_above;
  uint32_t known = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    uint32_t* bins = shared.own.others[i];
    CountNext(span, list, first.digit, known, (1 - i) * kDigitBits, bins);
    if (is_of_group) {
      __syncthreads();
    } else {
      Merge(group, bins, span.merged().others[i], kBins);
      bins = span.merged().others[i];
    }
    const DigitFound next = FindDigit<kBins>(shared, bins, wanted);
    wanted -= next.num_above;
    known = known << kDigitBits | next.digit;
  }
  MarkCandidates(span, list, first.digit << kLowerBits | known, is_of_group);
  return {wanted, is_of_group};
}

}  // namespace jax_mla::index
