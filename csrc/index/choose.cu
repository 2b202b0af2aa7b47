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
// each has a span of its tokens. They add up their first counts in the shared memory of all, and
// copy their candidates there: from then on each finds the same threshold by itself.
//
// A query that sees at most k tokens gets all of them, without keys.
//
// No result depends on the order in which threads come to the atomic additions: they only count,
// and the candidates' list is a set.
#include "core/divisor.h"
#include "gpu/launch.h"
#include "gpu/sm80.cuh"
#include "index/choose.cuh"
#include "index/launch.h"
#include "index/places.cuh"

namespace jax_mla::index {
namespace {

struct ChooseParams {
  TopkParams call;
  Slab slab;
  Divisor page_size;
  int32_t max_span;  // that of the longest query
  bool keeps_keys;
};

// A query's row of the results.
class Row {
 public:
  __device__ __forceinline__ Row(const ChooseParams& params, int32_t row, int32_t seq_idx)
      : pages(params.call, max(seq_idx, 0)),
        params_(params),
        row_(row),
        indices_(params.call.indices + int64_t{row} * params.call.k) {}

  __device__ __forceinline__ int32_t Page(int32_t position) const {
    return params_.page_size.Floor(position);
  }
  // What entry `i` shows of a token.
  __device__ __forceinline__ void Write(int32_t i, int32_t position, int32_t page,
                                        int32_t page_id) const {
    indices_[i] = params_.call.return_positions
                      ? position
                      : (page_id - page) * params_.call.page_size + position;
  }
  __device__ __forceinline__ void WriteScore(int32_t i, float score) const {
    if (params_.call.scores != nullptr) {
      params_.call.scores[int64_t{row_} * params_.call.k + i] = score;
    }
  }
  // Ends the row behind `number` entries. The group's threads share this.
  __device__ __forceinline__ void End(int32_t number, int32_t thread, int32_t num_threads) const {
#pragma unroll 1
    for (int32_t i = number + thread; i < params_.call.k; i += num_threads) indices_[i] = -1;
    if (thread == 0) params_.call.lens[row_] = number;
  }

  Pages pages;

 private:
  const ChooseParams& params_;
  int32_t row_;
  int32_t* indices_;
};

// Writes all of a query's tokens, if all their pages are in the pool. Returns whether they are.
__device__ __forceinline__ bool WriteAll(const Row& row, int32_t num_visible) {
  bool is_present = true;
#pragma unroll 4  // loads in flight
  for (int32_t position = threadIdx.x; position < num_visible; position += kChooseThreads) {
    is_present &= row.pages.Local(row.pages.Id(row.Page(position))) >= 0;
  }
  if (!__syncthreads_and(is_present)) return false;
#pragma unroll 1
  for (int32_t position = threadIdx.x; position < num_visible; position += kChooseThreads) {
    const int32_t page = row.Page(position);
    row.Write(position, position, page, row.pages.Id(page));
    row.WriteScore(position, 0.0f);
  }
  row.End(num_visible, threadIdx.x, kChooseThreads);
  return true;
}

// Marks all tokens whose pages are in the pool.
__device__ __forceinline__ void MarkPresent(const Row& row, const Span& span) {
#pragma unroll 1
  for (int32_t token = threadIdx.x; token < span.num_words() * kWarpThreads;
       token += kChooseThreads) {
    const bool is_present =
        token < span.size && row.pages.Local(row.pages.Id(row.Page(span.begin + token))) >= 0;
    const uint32_t word = __ballot_sync(kAllLanes, is_present);
    if (token % kWarpThreads == 0) {
      span.winners()[token / kWarpThreads] = word;
      span.ties()[token / kWarpThreads] = 0;
    }
  }
}

// Where the results of a CTA lie in its query's row.
struct Output {
  int32_t begin;      // the CTA's first entry
  int32_t number;     // its entries
  int32_t num_total;  // of the query
};

// The lowest `number` set bits.
__device__ __forceinline__ uint32_t LowestBits(uint32_t word, int32_t number) {
  if (number >= __popc(word)) return word;
  uint32_t rest = word;
#pragma unroll 1
  for (int32_t i = 0; i < number; ++i) rest &= rest - 1;
  return word ^ rest;
}

// Writes the places of the set bits of each lane's word, which begin at `first`, from `out` on.
// Only the first `num_words` lanes have bits.
__device__ __forceinline__ void ExpandBits(uint32_t word, int num_words, int32_t first,
                                           int32_t* out) {
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
  for (int source = 0; source < num_words; ++source) {
    const uint32_t bits = __shfl_sync(kAllLanes, word, source);
    const int32_t begin = __shfl_sync(kAllLanes, offset, source);
    const int32_t position = __shfl_sync(kAllLanes, first, source) + lane;
    if (bits >> lane & 1) chosen[begin + __popc(bits & ((1u << lane) - 1))] = position;
  }
}

// Turns the bitmaps into positions, in shared memory. Each warp has some successive words.
__device__ __forceinline__ Output ListChosen(const Span& span, const CtaGroup& group,
                                             const Chosen& by) {
  const uint32_t num_ties = by.num_ties;
  ChooseShared& shared = Shared();
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int32_t num_words = span.num_words();
  const int32_t each = (num_words + kChooseWarps - 1) / kChooseWarps;
  const int32_t first = min(warp * each, num_words), last = min(first + each, num_words);
  __syncthreads();
  WordCounts own{0, 0};
#pragma unroll 1
  for (int32_t i = first + lane; i < last; i += kWarpThreads) {
    own.winners += __popc(span.winners()[i]);
    own.ties += __popc(span.ties()[i]);
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
  WordCounts of_lower{0, 0}, of_all = of_cta;
  if (!group.is_alone()) {
    if (!by.is_of_group) {
      if (threadIdx.x < group.size()) {
        group.At(shared.cta_counts, threadIdx.x)[group.rank()] = of_cta;
      }
      group.Sync();
    }
    const auto cta = static_cast<uint32_t>(lane);
    const WordCounts other = cta < group.size() ? shared.cta_counts[cta] : WordCounts{0, 0};
    const bool is_lower = cta < group.rank();
    of_all.winners = __reduce_add_sync(kAllLanes, other.winners);
    of_all.ties = __reduce_add_sync(kAllLanes, other.ties);
    of_lower.winners = __reduce_add_sync(kAllLanes, is_lower ? other.winners : 0);
    of_lower.ties = __reduce_add_sync(kAllLanes, is_lower ? other.ties : 0);
    if (by.is_of_group) {
      of_all.winners += shared.listed.winners, of_all.ties += shared.listed.ties;
      of_lower.winners += shared.listed_below.winners, of_lower.ties += shared.listed_below.ties;
    }
  }
  const uint32_t begin = of_lower.winners + min(of_lower.ties, num_ties);
  const uint32_t end =
      of_lower.winners + of_cta.winners + min(of_lower.ties + of_cta.ties, num_ties);
  before.ties += of_lower.ties;
  before.winners += of_lower.winners;
#pragma unroll 1
  for (int32_t base = first; base < last; base += kWarpThreads) {
    const int32_t i = base + lane;
    const uint32_t winners = i < last ? span.winners()[i] : 0, ties = i < last ? span.ties()[i] : 0;
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
    ExpandBits(winners | LowestBits(ties, room), min(last - base, kWarpThreads),
               span.begin + i * kWarpThreads,
               shared.own.chosen + (winners_before + min(ties_before, num_ties) - begin));
    const uint32_t all = __shfl_sync(kAllLanes, inclusive, kWarpThreads - 1);
    before.winners += all & 0xffff;
    before.ties += all >> 16;
  }
  __syncthreads();
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
          static_cast<int32_t>(of_all.winners + min(of_all.ties, num_ties))};
}

// Writes what is in `chosen`. The row is found again, lest it be kept in registers all the time.
__device__ __forceinline__ void WriteChosen(const ChooseParams& params, const CtaGroup& group,
                                            int32_t span_begin, bool has_keys,
                                            const Output& output) {
  const ChooseShared& shared = Shared();
  const int32_t slab_row = shared.slab_row;
  const Row row(params, params.slab.begin + slab_row, shared.seq_idx);
  const uint32_t* keys = params.slab.keys + slab_row * params.slab.stride;
  const int32_t first_page = row.Page(span_begin);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < output.number; i += kChooseThreads) {
    const int32_t position = shared.own.chosen[i], page = row.Page(position);
    const int32_t idx = page - first_page;
    row.Write(output.begin + i, position, page,
              idx < kChooseThreads ? shared.page_ids[idx] : row.pages.Id(page));
    row.WriteScore(output.begin + i, has_keys ? ScoreOfKey(keys[position]) : 0.0f);
  }
  row.End(output.num_total, group.rank() * kChooseThreads + threadIdx.x,
          group.size() * kChooseThreads);
}

// Grid: a group of CTAs a query of the slab.
__global__ void __launch_bounds__(kChooseThreads, 3)
    ChooseKernel(const __grid_constant__ ChooseParams params) {
  CtaGroup group;
  ChooseShared& shared = Shared();
  Span span;
  span.bitmap_words = params.max_span / kWarpThreads;
  span.is_alone = group.is_alone();
  span.keeps_keys = params.keeps_keys;
  Clear(shared.own);
  if (!span.is_alone) Clear(span.merged());
  if (threadIdx.x == 0) {
    shared.num_candidates = shared.num_listed = 0;
    shared.num_winners = 0;
    shared.listed = shared.listed_below = {0, 0};
  }
  group.Arrive();
  gpu::PdlWait();
  gpu::PdlLaunchDependents();

  const TopkParams& p = params.call;
  const auto slab_row = static_cast<int32_t>(blockIdx.x / group.size());
  const int32_t row_idx = params.slab.begin + slab_row;
  const QueryPlace place = PlaceOf(p, row_idx);
  const int32_t num_visible = place.seq_idx == kNoSequence ? 0 : max(place.num_visible, 0);
  const bool has_keys = num_visible > p.k;
  const Row row(params, row_idx, place.seq_idx);
  // A query without keys is served by the first CTA of its group.
  const int32_t span_size = has_keys ? SpanOf(num_visible, group.size()) : num_visible;
  span.begin = min(static_cast<int32_t>(group.rank()) * span_size, num_visible);
  span.size = min(span_size, num_visible - span.begin);
  span.keys = params.slab.keys + slab_row * params.slab.stride + span.begin;
  if (threadIdx.x == 0) shared.slab_row = slab_row, shared.seq_idx = place.seq_idx;
  // Page ids of the span's first pages, loaded ahead: one a thread.
  const int32_t own_page = row.Page(span.begin) + static_cast<int32_t>(threadIdx.x);
  if (own_page < row.Page(span.begin + span.size + p.page_size - 1)) {
    gpu::CopyAsync4(gpu::SharedAddress32(&shared.page_ids[threadIdx.x]),
                    row.pages.Address(own_page));
  }
  Chosen chosen{0, false};
  if (has_keys) {
    chosen = Choose(span, group, p.k);
  } else {
    group.Wait();
    if (group.rank() != 0 || WriteAll(row, num_visible)) return;
    group.Leave();
    MarkPresent(row, span);
  }
  gpu::CopyAsyncWaitAll();
  const Output output = ListChosen(span, group, chosen);
  WriteChosen(params, group, span.begin, has_keys, output);
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

int32_t MaxGroupSize(const gpu::DeviceFacts& device) {
  return device.cc_major >= 9 ? kMaxGroupCtas : 1;
}

// More CTAs serve a query where there are SMs without work, or where one CTA has no room for the
// bitmaps. Keys are kept where that does not leave fewer CTAs on an SM.
Grouping GroupingOf(int32_t num_rows, int32_t max_seq_len, int32_t k,
                    const gpu::DeviceFacts& device) {
  const int32_t most = MaxGroupSize(device);
  int32_t size = 1;
  while (size < most && int64_t{num_rows} * size * 2 <= device.num_sms &&
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

}  // namespace

std::string WhyNotChoose(int32_t max_seq_len, const gpu::DeviceFacts& device) {
  if (GroupingOf(1, max_seq_len, kMaxTopk, device).size > 0) return "";
  const int32_t size = MaxGroupSize(device);
  const int64_t room = device.max_smem_per_block_bytes - ChooseSharedBytes(0, size, false);
  return "index_topk needs a max_seq_len of at most " +
         std::to_string(room * 4 / kWarpKeys * kWarpKeys * size) + " on this GPU, got " +
         std::to_string(max_seq_len);
}

cudaError_t LaunchChoose(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream) {
  const Grouping grouping = GroupingOf(slab.num_rows, p.max_seq_len, p.k, device);
  return gpu::Launch<&ChooseKernel>(
      {.grid = dim3(static_cast<uint32_t>(slab.num_rows * grouping.size)),
       .block = dim3(kChooseThreads),
       .smem_bytes = grouping.smem_bytes,
       .stream = stream,
       .programmatic = true,
       .cluster = dim3(static_cast<uint32_t>(grouping.size))},
      ChooseParams{p, slab, Divisor(p.page_size), grouping.span, grouping.keeps_keys});
}

}  // namespace jax_mla::index
