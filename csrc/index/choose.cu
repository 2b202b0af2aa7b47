// The choice: the k largest of a query's scores, in ascending order of position.
//
// Algorithm. A radix select on keys of 32 bits. One pass over the keys counts their upper 12 bits,
// which gives the threshold's. A second pass marks the tokens above it in a bitmap and lists those
// that share its upper bits, the candidates. From these come the other 20 bits, 10 at a time, and
// then two bitmaps hold the answer: the winners, whose keys are larger than the threshold, and the
// ties, whose keys are equal. The first ties by position fill up the k. A bitmap is in the order of
// positions, so that nothing is sorted. Candidates that find no room (thousands of equal scores,
// say) are found again in passes over all keys.
//
// A query is served by one CTA, or, where queries are few and long, by the CTAs of a cluster. Then
// each has a span of its tokens, and counts are exchanged through shared memory.
//
// A query that sees at most k tokens gets all of them: the bitmap is filled without keys.
//
// No result depends on the order in which threads come to the atomic additions: they only count,
// and the candidates' list is a set.
#include "gpu/launch.h"
#include "index/choose_shared.cuh"
#include "index/cta_group.cuh"
#include "index/digit.cuh"
#include "index/key.cuh"
#include "index/launch.h"
#include "index/places.cuh"

namespace jax_mla::index {
namespace {

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

  __device__ __forceinline__ int32_t num_words() const {
    return (size + kWarpThreads - 1) / kWarpThreads;
  }
};

// The keys of a lane; what is behind the span is absent.
__device__ __forceinline__ uint4 LoadKeys(const Span& span, int32_t token) {
  uint4 keys = {kAbsentKey, kAbsentKey, kAbsentKey, kAbsentKey};
  if (token >= span.size) return keys;
  keys = __ldcg(reinterpret_cast<const uint4*>(span.keys + token));
  if (token + 1 >= span.size) keys.y = kAbsentKey;
  if (token + 2 >= span.size) keys.z = kAbsentKey;
  if (token + 3 >= span.size) keys.w = kAbsentKey;
  return keys;
}

// Calls use(token, keys) for four tokens at a time. All lanes of a warp call it together.
template <class Use>
__device__ __forceinline__ void ForEachFour(const Span& span, Use use) {
  constexpr int kUnroll = 4;
  constexpr int32_t kStep = kChooseThreads * kLaneKeys;
  const int32_t own = threadIdx.x * kLaneKeys;
  for (int32_t base = 0; base < span.size; base += kUnroll * kStep) {
    uint4 keys[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) keys[i] = LoadKeys(span, base + i * kStep + own);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (base + i * kStep < span.size) use(base + i * kStep + own, keys[i]);
    }
  }
}

template <class Use>
__device__ __forceinline__ void ForEachKey(const Span& span, Use use) {
  ForEachFour(span, [&](int32_t, const uint4& keys) {
    use(keys.x);
    use(keys.y);
    use(keys.z);
    use(keys.w);
  });
}

template <int kNumBins>
__device__ __forceinline__ void ClearBins(uint32_t* bins) {
  for (int i = threadIdx.x; i < kNumBins / 4; i += kChooseThreads) {
    reinterpret_cast<uint4*>(bins)[i] = uint4{0, 0, 0, 0};
  }
  __syncthreads();
}

// Writes a bitmap of those tokens for which each lane's four bits are set. All lanes call it.
__device__ __forceinline__ void WriteBits(const Span& span, uint32_t* words, int32_t token,
                                          uint32_t four_bits) {
  const int lane = threadIdx.x % kWarpThreads;
  uint32_t word = four_bits << (lane % 8 * kLaneKeys);
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    word |= __shfl_xor_sync(kAllLanes, word, distance);
  }
  if (lane % 8 == 0 && token < span.size) words[token / kWarpThreads] = word;
}

template <class Predicate>
__device__ __forceinline__ uint32_t FourBits(const uint4& keys, Predicate holds) {
  return uint32_t{holds(keys.x)} | uint32_t{holds(keys.y)} << 1 | uint32_t{holds(keys.z)} << 2 |
         uint32_t{holds(keys.w)} << 3;
}

// Marks the tokens whose first digit is larger, and lists those whose first digit is the same.
__device__ __forceinline__ void MarkAndList(const Span& span, uint32_t digit) {
  ChooseShared& shared = Shared();
  ForEachFour(span, [&](int32_t token, const uint4& keys) {
    WriteBits(span, span.winners, token,
              FourBits(keys, [=](uint32_t key) { return key >> kFirstShift > digit; }));
    if (token % kWarpThreads == 0 && token < span.size) span.ties[token / kWarpThreads] = 0;
    const auto list = [&](uint32_t key, int32_t own) {
      if (key >> kFirstShift != digit || key == kAbsentKey) return;
      const int32_t idx = atomicAdd(&shared.num_candidates, 1);
      if (idx >= kMaxCandidates) return;
      shared.candidates.keys[idx] = key & ((1u << kFirstShift) - 1);
      shared.candidates.tokens[idx] = own;
    };
    list(keys.x, token);
    list(keys.y, token + 1);
    list(keys.z, token + 2);
    list(keys.w, token + 3);
  });
  __syncthreads();
}

// Calls use(lower bits of the key) for every token whose first digit is `digit`.
template <class Use>
__device__ __forceinline__ void ForEachCandidate(const Span& span, uint32_t digit, Use use) {
  const ChooseShared& shared = Shared();
  if (shared.num_candidates <= kMaxCandidates) {
    for (int32_t i = threadIdx.x; i < shared.num_candidates; i += kChooseThreads) {
      use(shared.candidates.keys[i]);
    }
  } else {
    ForEachKey(span, [&](uint32_t key) {
      if (key >> kFirstShift == digit && key != kAbsentKey) use(key & ((1u << kFirstShift) - 1));
    });
  }
}

// Marks winners and ties among the candidates.
__device__ __forceinline__ void MarkCandidates(const Span& span, uint32_t threshold) {
  const ChooseShared& shared = Shared();
  if (shared.num_candidates <= kMaxCandidates) {
    const uint32_t lower = threshold & ((1u << kFirstShift) - 1);
    for (int32_t i = threadIdx.x; i < shared.num_candidates; i += kChooseThreads) {
      const uint32_t key = shared.candidates.keys[i];
      const int32_t token = shared.candidates.tokens[i];
      if (key < lower) continue;
      atomicOr((key > lower ? span.winners : span.ties) + token / kWarpThreads,
               1u << token % kWarpThreads);
    }
  } else {
    ForEachFour(span, [&](int32_t token, const uint4& keys) {
      WriteBits(span, span.winners, token,
                FourBits(keys, [=](uint32_t key) { return key > threshold; }));
      WriteBits(span, span.ties, token,
                FourBits(keys, [=](uint32_t key) { return key == threshold; }));
    });
  }
}

// Fills the bitmaps. Returns how many ties are taken.
__device__ __forceinline__ uint32_t Choose(const Span& span, const CtaGroup& group, uint32_t k) {
  ChooseShared& shared = Shared();
  if (threadIdx.x == 0) shared.num_candidates = 0;
  ClearBins<kFirstBins>(shared.first_bins);
  ForEachKey(span, [&](uint32_t key) {
    if (key != kAbsentKey) atomicAdd(shared.first_bins + (key >> kFirstShift), 1u);
  });
  const DigitFound first = FindDigit<kFirstBins>(shared, group, shared.first_bins, k);
  uint32_t wanted = min(k, first.total) - first.num_above;
  // Without a candidate nothing is larger than this, nor equal.
  if (first.total == 0) {
    for (int32_t i = threadIdx.x; i < span.num_words(); i += kChooseThreads) {
      span.winners[i] = span.ties[i] = 0;
    }
    return 0;
  }
  ClearBins<kBins>(shared.candidates.bins);
  MarkAndList(span, first.digit);
  ForEachCandidate(span, first.digit, [&](uint32_t lower) {
    atomicAdd(shared.candidates.bins + (lower >> kDigitBits), 1u);
  });
  const DigitFound second = FindDigit<kBins>(shared, group, shared.candidates.bins, wanted);
  wanted -= second.num_above;
  ClearBins<kBins>(shared.candidates.bins);
  ForEachCandidate(span, first.digit, [&](uint32_t lower) {
    if (lower >> kDigitBits == second.digit) {
      atomicAdd(shared.candidates.bins + lower % kBins, 1u);
    }
  });
  const DigitFound third = FindDigit<kBins>(shared, group, shared.candidates.bins, wanted);
  MarkCandidates(span, first.digit << kFirstShift | second.digit << kDigitBits | third.digit);
  return wanted - third.num_above;
}

// All tokens whose pages are in the pool.
__device__ __forceinline__ void MarkPresent(const TopkParams& p, const Pages& pages,
                                            const Span& span) {
  for (int32_t token = threadIdx.x; token < span.num_words() * kWarpThreads;
       token += kChooseThreads) {
    const bool is_present =
        token < span.size && pages.Local(pages.Id((span.begin + token) / p.page_size)) >= 0;
    const uint32_t word = __ballot_sync(kAllLanes, is_present);
    if (threadIdx.x % kWarpThreads == 0) {
      span.winners[token / kWarpThreads] = word;
      span.ties[token / kWarpThreads] = 0;
    }
  }
}

// Where the results of a CTA lie in its query's row.
struct Output {
  int32_t begin;      // the CTA's first entry
  int32_t num_rows;   // its entries
  int32_t num_total;  // of the query
};

// The lowest `number` set bits.
__device__ __forceinline__ uint32_t LowestBits(uint32_t word, int32_t number) {
  if (number >= __popc(word)) return word;
  uint32_t rest = word;
  for (int32_t i = 0; i < number; ++i) rest &= rest - 1;
  return word ^ rest;
}

// Turns the bitmaps into positions, in shared memory. Each warp has some successive words.
__device__ __forceinline__ Output ListChosen(const Span& span, const CtaGroup& group,
                                             uint32_t num_ties) {
  ChooseShared& shared = Shared();
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int32_t num_words = span.num_words();
  const int32_t each = (num_words + kChooseThreads - 1) / kChooseThreads * kWarpThreads;
  const int32_t first = min(warp * each, num_words), last = min(first + each, num_words);
  WordCounts own{0, 0};
  for (int32_t i = first + lane; i < last; i += kWarpThreads) {
    own.winners += __popc(span.winners[i]);
    own.ties += __popc(span.ties[i]);
  }
  own.winners = __reduce_add_sync(kAllLanes, own.winners);
  own.ties = __reduce_add_sync(kAllLanes, own.ties);
  if (lane == 0) shared.warp_counts[warp] = own;
  __syncthreads();
  WordCounts before{0, 0}, of_cta{0, 0};  // before the warp, in the CTA
  for (int i = 0; i < kChooseWarps; ++i) {
    const WordCounts counts = shared.warp_counts[i];
    of_cta.winners += counts.winners, of_cta.ties += counts.ties;
    if (i < warp) before.winners += counts.winners, before.ties += counts.ties;
  }
  if (threadIdx.x < group.size()) {
    group.At(shared.cta_counts, threadIdx.x)[group.rank()] = of_cta;
  }
  group.Sync();
  WordCounts of_lower{0, 0}, of_all{0, 0};
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    const WordCounts counts = shared.cta_counts[rank];
    of_all.winners += counts.winners, of_all.ties += counts.ties;
    if (rank < group.rank()) of_lower.winners += counts.winners, of_lower.ties += counts.ties;
  }
  const uint32_t begin = of_lower.winners + min(of_lower.ties, num_ties);
  const uint32_t end =
      of_lower.winners + of_cta.winners + min(of_lower.ties + of_cta.ties, num_ties);
  before.ties += of_lower.ties;
  before.winners += of_lower.winners;
  for (int32_t base = first; base < last; base += kWarpThreads) {
    const int32_t i = base + lane;
    const uint32_t winners = i < last ? span.winners[i] : 0, ties = i < last ? span.ties[i] : 0;
    const uint32_t packed = __popc(winners) | __popc(ties) << 16;
    uint32_t inclusive = packed;
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    const uint32_t exclusive = inclusive - packed;
    const uint32_t ties_before = before.ties + (exclusive >> 16);
    const uint32_t winners_before = before.winners + (exclusive & 0xffff);
    const int32_t room = ties_before < num_ties ? static_cast<int32_t>(num_ties - ties_before) : 0;
    int32_t* out = shared.chosen + (winners_before + min(ties_before, num_ties) - begin);
    for (uint32_t bits = winners | LowestBits(ties, room); bits != 0; bits &= bits - 1) {
      *out++ = span.begin + i * kWarpThreads + __ffs(bits) - 1;
    }
    const uint32_t all = __shfl_sync(kAllLanes, inclusive, kWarpThreads - 1);
    before.winners += all & 0xffff;
    before.ties += all >> 16;
  }
  __syncthreads();
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
          static_cast<int32_t>(of_all.winners + min(of_all.ties, num_ties))};
}

__device__ __forceinline__ void WriteRow(const TopkParams& p, int32_t row, const Pages& pages,
                                         const CtaGroup& group, const Output& output,
                                         const uint32_t* keys) {
  const ChooseShared& shared = Shared();
  int32_t* indices = p.indices + int64_t{row} * p.k;
  for (int32_t i = threadIdx.x; i < output.num_rows; i += kChooseThreads) {
    const int32_t position = shared.chosen[i];
    int32_t index = position;
    if (!p.return_positions) {
      const int32_t page = position / p.page_size;
      index = pages.Id(page) * p.page_size + (position - page * p.page_size);
    }
    indices[output.begin + i] = index;
    if (p.scores != nullptr) {
      p.scores[int64_t{row} * p.k + output.begin + i] =
          keys == nullptr ? 0.0f : ScoreOfKey(keys[position]);
    }
  }
  const auto num_threads = static_cast<int32_t>(group.size() * kChooseThreads);
  const auto thread = static_cast<int32_t>(group.rank() * kChooseThreads + threadIdx.x);
  for (int32_t i = output.num_total + thread; i < p.k; i += num_threads) indices[i] = -1;
  if (thread == 0) p.lens[row] = output.num_total;
}

// Grid: a group of CTAs a query of the slab. `max_span` is that of the longest query.
__global__ void __launch_bounds__(kChooseThreads, 3)
    ChooseKernel(const __grid_constant__ TopkParams p, const __grid_constant__ Slab slab,
                 int32_t max_span) {
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  const CtaGroup group;
  const auto slab_row = static_cast<int32_t>(blockIdx.x / group.size());
  const int32_t row = slab.begin + slab_row;
  const QueryPlace place = PlaceOf(p, row);
  const bool has_sequence = place.seq_idx != kNoSequence;
  const int32_t num_visible = has_sequence ? max(place.num_visible, 0) : 0;
  const Pages pages(p, has_sequence ? place.seq_idx : 0);
  const int32_t span_size = SpanOf(num_visible, group.size());
  const bool has_keys = num_visible > p.k;
  const uint32_t* keys = has_keys ? slab.keys + slab_row * slab.stride : nullptr;
  Span span;
  span.begin = min(static_cast<int32_t>(group.rank()) * span_size, num_visible);
  span.size = min(span_size, num_visible - span.begin);
  span.keys = keys + span.begin;
  span.winners = reinterpret_cast<uint32_t*>(&Shared() + 1);
  span.ties = span.winners + max_span / kWarpThreads;
  uint32_t num_ties = 0;
  if (has_keys) {
    num_ties = Choose(span, group, p.k);
  } else {
    MarkPresent(p, pages, span);
  }
  __syncthreads();
  const Output output = ListChosen(span, group, num_ties);
  WriteRow(p, row, pages, group, output, keys);
}

// Spans of a query are no shorter, lest the exchange costs more than it saves.
constexpr int32_t kMinSpan = 4096;

// How many CTAs serve a query: more where there are SMs without work, or where one CTA has no room
// for the bitmaps. 0: even the largest group has none.
int32_t GroupSize(int32_t num_rows, int32_t max_seq_len, const gpu::DeviceFacts& device) {
  const int32_t most = device.cc_major >= 9 ? kMaxGroupCtas : 1;
  int32_t size = 1;
  while (size < most && int64_t{num_rows} * size * 2 <= device.num_sms &&
         SpanOf(max_seq_len, size) >= 2 * kMinSpan) {
    size *= 2;
  }
  while (ChooseSharedBytes(SpanOf(max_seq_len, size)) > device.max_smem_per_block_bytes) {
    size *= 2;
    if (size > most) return 0;
  }
  return size;
}

}  // namespace

std::string WhyNotChoose(int32_t max_seq_len, const gpu::DeviceFacts& device) {
  if (GroupSize(1, max_seq_len, device) > 0) return "";
  const int64_t span =
      (device.max_smem_per_block_bytes - int64_t{sizeof(ChooseShared)}) * 4 / kWarpKeys * kWarpKeys;
  return "index_topk needs max_seq_len of at most " +
         std::to_string(span * (device.cc_major >= 9 ? kMaxGroupCtas : 1)) + " on this GPU, got " +
         std::to_string(max_seq_len);
}

cudaError_t LaunchChoose(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  const int32_t size = GroupSize(slab.num_rows, p.max_seq_len, device);
  const int32_t span = SpanOf(p.max_seq_len, size);
  return gpu::Launch<&ChooseKernel>({.grid = dim3(static_cast<uint32_t>(slab.num_rows * size)),
                                     .block = dim3(kChooseThreads),
                                     .smem_bytes = ChooseSharedBytes(span),
                                     .stream = stream,
                                     .programmatic = true,
                                     .cluster = dim3(static_cast<uint32_t>(size))},
                                    p, slab, span);
}

}  // namespace jax_mla::index
