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
// A query that sees at most k tokens gets all of them, without keys.
//
// No result depends on the order in which threads come to the atomic additions: they only count,
// and the candidates' list is a set.
#include "gpu/launch.h"
#include "index/choose.cuh"
#include "index/choose_held.cuh"
#include "index/group_counts.cuh"
#include "index/launch.h"
#include "index/row.cuh"

namespace jax_mla::index {
namespace {

// Marks all tokens whose pages are in the pool.
__device__ __forceinline__ void MarkPresent(const Row& row, const Span& span) {
#pragma unroll 1
  for (int32_t token = threadIdx.x; token < span.num_words() * kWarpThreads;
       token += kChooseThreads) {
    const bool is_present = token < span.size && row.IsPresent(span.begin + token);
    const uint32_t word = __ballot_sync(kAllLanes, is_present);
    if (token % kWarpThreads == 0) {
      span.winners[token / kWarpThreads] = word;
      span.ties[token / kWarpThreads] = 0;
    }
  }
}

// The lowest `number` set bits.
__device__ __forceinline__ uint32_t LowestBits(uint32_t word, int32_t number) {
  if (number >= __popc(word)) return word;
  uint32_t rest = word;
#pragma unroll 1
  for (int32_t i = 0; i < number; ++i) rest &= rest - 1;
  return word ^ rest;
}

// Writes the places of the set bits of each lane's word, which begin at `first`, from `out` on.
__device__ __forceinline__ void ExpandBits(uint32_t word, int32_t first, int32_t* out) {
  constexpr uint32_t kFewBits = 6;
  const int lane = threadIdx.x % kWarpThreads;
  if (__reduce_max_sync(kAllLanes, __popc(word)) <= kFewBits) {
#pragma unroll 1
    for (uint32_t bits = word; bits != 0; bits &= bits - 1) *out++ = first + __ffs(bits) - 1;
    return;
  }
  int32_t* const chosen = Shared().own.chosen;
  const auto offset = static_cast<int32_t>(out - chosen);
#pragma unroll 1
  for (int source = 0; source < kWarpThreads; ++source) {
    const uint32_t bits = __shfl_sync(kAllLanes, word, source);
    const int32_t begin = __shfl_sync(kAllLanes, offset, source);
    const int32_t position = __shfl_sync(kAllLanes, first, source) + lane;
    if (bits >> lane & 1) chosen[begin + __popc(bits & ((1u << lane) - 1))] = position;
  }
}

// Turns the bitmaps into positions, in shared memory. Each warp has some successive words.
__device__ __forceinline__ Output ListChosen(const Span& span, const CtaGroup& group,
                                             uint32_t num_ties) {
  ChooseShared& shared = Shared();
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int32_t num_words = span.num_words();
  const int32_t each = (num_words + kChooseThreads - 1) / kChooseThreads * kWarpThreads;
  const int32_t first = min(warp * each, num_words), last = min(first + each, num_words);
  __syncthreads();
  WordCounts own{0, 0};
#pragma unroll 1
  for (int32_t i = first + lane; i < last; i += kWarpThreads) {
    own.winners += __popc(span.winners[i]);
    own.ties += __popc(span.ties[i]);
  }
  own.winners = __reduce_add_sync(kAllLanes, own.winners);
  own.ties = __reduce_add_sync(kAllLanes, own.ties);
  if (lane == 0) shared.warp_counts[warp] = own;
  __syncthreads();
  const WordCounts of_warp = lane < kChooseWarps ? shared.warp_counts[lane] : WordCounts{0, 0};
  const bool is_before = lane < warp;
  WordCounts before{__reduce_add_sync(kAllLanes, is_before ? of_warp.winners : 0),
                    __reduce_add_sync(kAllLanes, is_before ? of_warp.ties : 0)};
  const WordCounts of_cta{__reduce_add_sync(kAllLanes, of_warp.winners),
                          __reduce_add_sync(kAllLanes, of_warp.ties)};
  const GroupCounts counts = ExchangeCounts(group, shared.cta_counts, of_cta);
  const Output output = OutputOf(counts, num_ties);
  const auto begin = static_cast<uint32_t>(output.begin);
  before.ties += counts.of_lower.ties;
  before.winners += counts.of_lower.winners;
#pragma unroll 1
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
    ExpandBits(winners | LowestBits(ties, room), span.begin + i * kWarpThreads,
               shared.own.chosen + (winners_before + min(ties_before, num_ties) - begin));
    const uint32_t all = __shfl_sync(kAllLanes, inclusive, kWarpThreads - 1);
    before.winners += all & 0xffff;
    before.ties += all >> 16;
  }
  __syncthreads();
  return output;
}

// Grid: a group of CTAs a query of the slab.
__global__ void __launch_bounds__(kChooseThreads, 3)
    ChooseKernel(const __grid_constant__ ChooseParams params) {
  CtaGroup group;
  ChooseShared& shared = Shared();
  Span span;
  span.winners = reinterpret_cast<uint32_t*>(&shared + 1);
  span.ties = span.winners + params.max_span / kWarpThreads;
  uint32_t* behind = span.ties + params.max_span / kWarpThreads;
  span.merged = &shared.own;
  Clear(shared.own);
  if (group.size() > 1) {
    span.merged = reinterpret_cast<Histograms*>(behind);
    behind += sizeof(Histograms) / sizeof(uint32_t);
    Clear(*span.merged);
  }
  span.kept = params.keeps_keys ? behind : nullptr;
  if (threadIdx.x == 0) shared.num_candidates = 0;
  group.Arrive();
  const TopkParams& p = params.call;
  const auto slab_row = static_cast<int32_t>(blockIdx.x / group.size());
  const int32_t row_idx = params.slab.begin + slab_row;
  if (!params.has_scores) gpu::PdlWait();
  const QueryPlace place = PlaceOf(p, row_idx);
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  const int32_t num_visible = place.seq_idx == kNoSequence ? 0 : max(place.num_visible, 0);
  const bool has_keys = num_visible > p.k;
  const Row row(params, row_idx, place.seq_idx);
  // A query without keys is served by the first CTA of its group.
  const int32_t span_size = has_keys ? SpanOf(num_visible, group.size()) : num_visible;
  const uint32_t* keys = params.slab.score_keys + slab_row * params.slab.stride;
  span.begin = min(static_cast<int32_t>(group.rank()) * span_size, num_visible);
  span.size = min(span_size, num_visible - span.begin);
  span.keys = keys + span.begin;
  uint32_t num_ties = 0;
  if (has_keys) {
    num_ties = Choose(span, group, p.k);
  } else {
    group.Wait();
    if (group.rank() != 0 || WriteAll(row, num_visible)) return;
    group.Leave();
    MarkPresent(row, span);
  }
  const Output output = ListChosen(span, group, num_ties);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < output.number; i += kChooseThreads) {
    const int32_t position = shared.own.chosen[i], page = row.Page(position);
    row.Write(output.begin + i, position, page, row.pages.Id(page));
    row.WriteScore(output.begin + i, has_keys ? ScoreOfKey(keys[position]) : 0.0f);
  }
  row.End(output.num_total, group.rank() * kChooseThreads + threadIdx.x,
          group.size() * kChooseThreads);
}

// Spans of a query are no shorter, lest the exchange costs more than it saves.
constexpr int32_t kMinSpan = 4096;
static_assert(kMinSpan >= kMaxTopk, "one CTA has bitmaps of a query without keys");
// CTAs on an SM, by threads and registers.
constexpr int32_t kCtasPerSm = 3;

struct Grouping {
  int32_t size;  // CTAs a query; 0: no group has room for the bitmaps
  int32_t span;
  bool keeps_keys;
  int32_t smem_bytes;
};

// CTAs of a query, at most.
int32_t MaxGroupSize(const gpu::DeviceFacts& device) {
  return device.cc_major >= 9 ? kMaxGroupCtas : 1;
}

// More CTAs serve a query where there are SMs without work, or where one CTA has no room for the
// bitmaps. Keys are kept where that does not leave fewer CTAs on an SM.
Grouping GroupingOf(int32_t num_rows, int32_t max_seq_len, int32_t k,
                    const gpu::DeviceFacts& device) {
  const int32_t most = MaxGroupSize(device);
  int32_t size = 1;
  while (size < most && int64_t{num_rows} * size <= device.num_sms &&
         SpanOf(max_seq_len, size) >= 2 * kMinSpan) {
    size *= 2;
  }
  for (; size <= most; size *= 2) {
    const int32_t span = SpanOf(max_seq_len, size);
    const int64_t kept_bytes = ChooseSharedBytes(span, size, true);
    const int64_t ctas_per_sm = CeilDiv(int64_t{num_rows} * size, device.num_sms);
    const bool keeps_keys = max_seq_len > k && ctas_per_sm <= kCtasPerSm &&
                            ctas_per_sm * kept_bytes <= device.max_smem_per_block_bytes;
    const int64_t bytes = keeps_keys ? kept_bytes : ChooseSharedBytes(span, size, false);
    if (bytes > device.max_smem_per_block_bytes) continue;
    return {size, span, keeps_keys, static_cast<int32_t>(bytes)};
  }
  return {};
}

// Words of a warp with which ChooseHeld is compiled.
constexpr int kHeldWords[] = {8, 16, 32, 64};
// In a group. With more, counting and listing take longer than what is saved: 1 x 128k tokens took
// 22.2 us, and 20.8 with ChooseKernel.
constexpr int kMaxGroupWords = 16;

struct HeldGrouping {
  int32_t size;   // CTAs a query
  int32_t words;  // of kHeldWords; 0: ChooseKernel serves the queries
};

// More CTAs serve a query where there are SMs without work. Where there are more queries than SMs,
// CTAs that share an SM hide each other's latency, and ChooseKernel has more of them there.
HeldGrouping HeldGroupingOf(int32_t num_rows, int32_t max_seq_len, const gpu::DeviceFacts& device) {
  constexpr int32_t kSpanOfWord = kChooseWarps * kWarpThreads;
  if (num_rows > device.num_sms) return {};
  const int32_t most = MaxGroupSize(device);
  int32_t size = 1;
  while (size < most && int64_t{num_rows} * size * 2 <= device.num_sms &&
         SpanOf(max_seq_len, size) > kHeldWords[0] * kSpanOfWord) {
    size *= 2;
  }
  for (const int words : kHeldWords) {
    if (size > 1 && words > kMaxGroupWords) break;
    if (SpanOf(max_seq_len, size) <= words * kSpanOfWord) return {size, words};
  }
  return {};
}

template <int kWords>
cudaError_t LaunchHeld(const ChooseParams& params, int32_t size, cudaStream_t stream) {
  return gpu::Launch<&ChooseHeld<kWords>>(
      {.grid = dim3(static_cast<uint32_t>(params.slab.num_rows * size)),
       .block = dim3(kChooseThreads),
       .smem_bytes = sizeof(HeldShared),
       .stream = stream,
       .programmatic = true,
       .cluster = dim3(static_cast<uint32_t>(size))},
      params);
}

}  // namespace

std::string WhyNotChoose(int32_t max_seq_len, const gpu::DeviceFacts& device) {
  if (GroupingOf(1, max_seq_len, kMaxTopk, device).size > 0) return "";
  const int32_t most_ctas = MaxGroupSize(device);
  const int64_t room = device.max_smem_per_block_bytes - ChooseSharedBytes(0, most_ctas, false);
  const int64_t most = room * 4 / kWarpKeys * kWarpKeys * most_ctas;
  return "index_topk needs a max_seq_len of at most " + std::to_string(most) +
         " on this GPU, got " + std::to_string(max_seq_len);
}

cudaError_t LaunchChoose(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  ChooseParams params{.call = p,
                      .slab = slab,
                      .page_size = Divisor(p.page_size),
                      .has_scores = p.max_seq_len > p.k};
  const HeldGrouping held = HeldGroupingOf(slab.num_rows, p.max_seq_len, device);
  if (held.words == 8) return LaunchHeld<8>(params, held.size, stream);
  if (held.words == 16) return LaunchHeld<16>(params, held.size, stream);
  if (held.words == 32) return LaunchHeld<32>(params, held.size, stream);
  if (held.words == 64) return LaunchHeld<64>(params, held.size, stream);
  const Grouping grouping = GroupingOf(slab.num_rows, p.max_seq_len, p.k, device);
  params.max_span = grouping.span;
  params.keeps_keys = grouping.keeps_keys;
  return gpu::Launch<&ChooseKernel>(
      {.grid = dim3(static_cast<uint32_t>(slab.num_rows * grouping.size)),
       .block = dim3(kChooseThreads),
       .smem_bytes = grouping.smem_bytes,
       .stream = stream,
       .programmatic = true,
       .cluster = dim3(static_cast<uint32_t>(grouping.size))},
      params);
}

}  // namespace jax_mla::index
