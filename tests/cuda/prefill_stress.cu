// Random calls of Hopper's prefill kernel against a float32 reference on the GPU. Queries and keys
// of no sequence hold NaN, and so do prior results that must not be read. A quarter of the calls
// hold wild bounds: ranges that fall, and ends far outside the arrays. Half of them go on from a
// prior result, in other memory or in that of the results. Outputs and the counter are poisoned,
// every call runs twice and must repeat bit for bit, and guards around the results must stay.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
//     -DJAX_MLA_WITH_CUDA -Icsrc -I<cutlass>/include tests/cuda/prefill_stress.cu
//     csrc/prefill/sm90/launch.cu csrc/gpu/*.cc
//   ./a.out 1000 [seed ["" [longest]]]
//
// Add -DMLA_CHAOS for random delays at every barrier (gpu/sm90.cuh). On failure the call's seed is
// printed: `./a.out 1 SEED` runs it alone. `longest` caps the sequences, for sanitizers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "arena.h"
#include "decode_reference.cuh"
#include "draw.h"
#include "guards.cuh"
#include "prefill/params.h"
#include "prefill/sm90/launch.h"
#include "random_case.cuh"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode::stress;  // NOLINT
using prefill::PrefillParams;

constexpr int kMaxQueries = 600, kMaxKeys = 1500;  // of a sequence
constexpr int kReferenceThreads = 256;

struct Sizes {
  int d_nope, d_kpe, d_v;
};
constexpr Sizes kSizes[] = {{128, 64, 128}, {192, 64, 256}, {64, 64, 128}, {64, 32, 64}};

// Rows of an array, inside it whatever the bounds are.
struct Rows {
  int begin, end;

  __host__ __device__ Rows(int first, int last, int num_rows)
      : begin(Clamp(first, num_rows)), end(Clamp(last, num_rows)) {
    if (end < begin) end = begin;
  }
  __host__ __device__ int size() const { return end - begin; }

 private:
  static __host__ __device__ int Clamp(int row, int num_rows) {
    return row < 0 ? 0 : row > num_rows ? num_rows : row;
  }
};

// Fills rows of `width` values that no range holds with NaN.
template <typename T>
__global__ void PoisonOtherRows(T* values, int num_rows, int width, const int* begin,
                                const int* end, int num_seqs) {
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
    bool is_used = false;
    for (int seq = 0; seq < num_seqs; ++seq) {
      const Rows rows(begin[seq], end[seq], num_rows);
      is_used |= row >= rows.begin && row < rows.end;
    }
    if (is_used) continue;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      values[int64_t{row} * width + i] = T(NAN);
    }
  }
}

// Prior results: a third of the rows have none, and NaN in `out`.
__global__ void FillPrior(float* out, float* lse, size_t num_rows, int d_v, uint64_t seed) {
  for (size_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const bool has_prior = Hash(row + seed) % 3 != 0;
    if (threadIdx.x == 0) lse[row] = has_prior ? 4.0f * Gauss(row + (seed << 32)) : -INFINITY;
    for (int i = threadIdx.x; i < d_v; i += blockDim.x) {
      const size_t element = row * d_v + i;
      out[element] = has_prior ? Gauss(element + (seed << 33)) : NAN;
    }
  }
}

// Grid (heads, queries). The prior result is that from before the call. `all_scores` has kMaxKeys
// for each CTA. Verdicts are those of the sequences and, behind them, of padding.
template <typename T>
__global__ void CompareWithReference(PrefillParams p, float* all_scores, Verdict* verdicts) {
  const int head = blockIdx.x, query = blockIdx.y;
  const int64_t row = int64_t{query} * p.num_heads + head;
  float* scores = all_scores + row * kMaxKeys;
  int seq = 0;
  for (; seq < p.num_seqs; ++seq) {
    const Rows queries(p.q_begin[seq], p.q_end[seq], p.num_queries);
    if (query >= queries.begin && query < queries.end) break;
  }
  int first_key = 0, visible = 0;
  float prior_lse = -INFINITY;
  if (seq < p.num_seqs) {
    const Rows keys(p.k_begin[seq], p.k_end[seq], p.num_keys);
    const int place = query - Rows(p.q_begin[seq], p.q_end[seq], p.num_queries).begin;
    first_key = keys.begin;
    visible = p.causal ? min(keys.size(), place + 1) : keys.size();
    if (p.prior_lse != nullptr) prior_lse = p.prior_lse[row];
  }
  const auto* q_nope = static_cast<const T*>(p.q_nope) + row * p.d_nope;
  const auto* q_pe = static_cast<const T*>(p.q_pe) + row * p.d_kpe;
  const auto key_row = [&](int key) { return int64_t{first_key + key} * p.num_heads + head; };
  for (int key = threadIdx.x; key < visible; key += blockDim.x) {
    const auto* k_nope = static_cast<const T*>(p.k_nope) + key_row(key) * p.d_nope;
    const auto* kpe = static_cast<const T*>(p.kpe) + int64_t{first_key + key} * p.d_kpe;
    float score = 0.0f;
    for (int d = 0; d < p.d_nope; ++d) score += float(q_nope[d]) * float(k_nope[d]);
    for (int d = 0; d < p.d_kpe; ++d) score += float(q_pe[d]) * float(kpe[d]);
    scores[key] = score * p.sm_scale;
  }
  __syncthreads();
  float top = prior_lse;
  for (int key = 0; key < visible; ++key) top = fmaxf(top, scores[key]);
  const bool has_keys = top != -INFINITY;
  const float prior_weight = has_keys ? expf(prior_lse - top) : 0.0f;
  float sum = prior_weight;
  for (int key = 0; key < visible; ++key) sum += expf(scores[key] - top);
  // In place, `out` may keep anything where no key was ever seen.
  const bool is_free = !has_keys && seq < p.num_seqs && p.prior_lse != nullptr;
  double error = 0.0, norm = 0.0;
  int bad = 0;
  for (int d = threadIdx.x; d < p.d_v && !is_free; d += blockDim.x) {
    float expected = 0.0f;
    if (prior_weight > 0.0f) expected = prior_weight * p.prior_out[row * p.d_v + d];
    for (int key = 0; key < visible; ++key) {
      const float value = static_cast<const T*>(p.v)[key_row(key) * p.d_v + d];
      expected += expf(scores[key] - top) * value;
    }
    if (has_keys) expected /= sum;
    const int64_t element = row * p.d_v + d;
    const float got = p.out_is_f32 ? static_cast<const float*>(p.out)[element]
                                   : float(static_cast<const T*>(p.out)[element]);
    bad += !(got == got) || (!has_keys && got != 0.0f);
    error += double(got - expected) * (got - expected);
    norm += double(expected) * expected;
  }
  if (threadIdx.x == 0) {
    const float got = p.lse[row], expected = has_keys ? top + logf(sum) : -INFINITY;
    bad += has_keys ? !(fabsf(got - expected) <= kMaxLse * (1.0f + 0.05f * fabsf(expected)))
                    : got != -INFINITY;
  }
  atomicAdd(&verdicts[seq].error, error);
  atomicAdd(&verdicts[seq].norm, norm);
  if (bad != 0) atomicAdd(&verdicts[seq].bad, bad);
}

// One random call.
template <typename T>
class Case {
 public:
  Case(Arena& arena, const Options& options, Draw& draw, uint64_t seed)
      : arena_(arena), guarded_(arena), options_(options), draw_(draw), seed_(seed) {
    arena.Reset();
    DrawShape();
    DrawRanges();
    DrawOperands();
    DrawPrior();
  }

  // What went wrong, "" if nothing.
  std::string Run() {
    p_.next_item = guarded_.Take<int32_t>(1);
    FillWords<<<1, 1>>>(reinterpret_cast<uint32_t*>(p_.next_item), 1, 0xdeadbeefu);
    int* counts = arena_.Copy(std::vector<int>(2));
    const Results first = Prepare(kNanWord), again = Prepare(0xffffffffu);
    for (const Results& results : {first, again}) {
      if (std::string error = Launch(results); !error.empty()) return error;
    }
    Check(cudaDeviceSynchronize());
    CountDifferentWords<<<64, 256>>>(static_cast<const uint32_t*>(first.out),
                                     static_cast<const uint32_t*>(again.out), out_words(), counts);
    CountDifferentWords<<<64, 256>>>(reinterpret_cast<const uint32_t*>(first.lse),
                                     reinterpret_cast<const uint32_t*>(again.lse), num_rows(),
                                     counts);
    guarded_.CountChanges(counts + 1);
    p_.out = first.out;
    p_.lse = first.lse;
    if (std::string error = Compare(); !error.empty()) return error;
    int totals[2];
    Check(cudaMemcpy(totals, counts, sizeof(totals), cudaMemcpyDeviceToHost));
    if (totals[0] != 0) return Text("words that do not repeat: ", totals[0]);
    if (totals[1] != 0) return Text("guards changed: ", totals[1]);
    return "";
  }

  std::string Describe() const {
    return Text("d_nope ", p_.d_nope) + Text(", heads ", p_.num_heads) +
           Text(", queries ", p_.num_queries) + Text(", keys ", p_.num_keys) +
           Text(", sequences ", p_.num_seqs) + Text(", causal ", p_.causal) +
           Text(", prior ", p_.prior_lse != nullptr) + Text(", in place ", is_in_place_) +
           Text(", f32 ", p_.out_is_f32) + Text(", wild ", is_wild_);
  }

 private:
  struct Results {
    void* out;
    float* lse;
  };

  size_t num_rows() const { return size_t(p_.num_queries) * p_.num_heads; }
  size_t out_words() const {
    return num_rows() * p_.d_v * (p_.out_is_f32 ? sizeof(float) : sizeof(T)) / sizeof(uint32_t);
  }

  void DrawShape() {
    const Sizes sizes = kSizes[draw_.Below(std::size(kSizes))];
    p_.d_nope = sizes.d_nope;
    p_.d_kpe = sizes.d_kpe;
    p_.d_v = sizes.d_v;
    p_.dtype = DTypeOf<T>();
    p_.num_seqs = draw_.OneIn(8) ? 33 + draw_.Below(40) : 1 + draw_.Below(6);
    p_.num_heads = p_.num_seqs > 32 ? 1 + draw_.Below(3) : 1 + draw_.Below(12);
    p_.causal = draw_.OneIn(2);
    // Scores of some calls differ so much that references have to rise.
    p_.sm_scale = draw_.OneIn(4) ? 1.0f : 0.07f;
  }

  int DrawLength(int most) {
    most = std::min(most, options_.longest);
    if (p_.num_seqs > 32) most = std::min(most, 150);
    return draw_.OneIn(6)   ? 0
           : draw_.OneIn(3) ? 1 + draw_.Below(std::min(most, 20))
                            : 1 + draw_.Below(most);
  }

  // Ranges of one kind, in any order, with gaps. Returns the array's rows.
  int DrawRangesOf(int most, std::vector<int>& begin, std::vector<int>& end) {
    std::vector<int> order(p_.num_seqs);
    std::iota(order.begin(), order.end(), 0);
    if (draw_.OneIn(2)) std::shuffle(order.begin(), order.end(), draw_.rng());
    begin.resize(p_.num_seqs);
    end.resize(p_.num_seqs);
    int row = draw_.OneIn(2) ? 0 : draw_.Below(40);
    for (int seq : order) {
      begin[seq] = row;
      row += DrawLength(most);
      end[seq] = row;
      if (draw_.OneIn(4)) row += draw_.Below(200);
    }
    const int num_rows = std::max(row, 1);
    if (!is_wild_) return num_rows;
    // What lies outside the array means its ends.
    if (begin[order.front()] == 0) begin[order.front()] = draw_.OneIn(2) ? INT_MIN : -1;
    if (end[order.back()] == num_rows) end[order.back()] = draw_.OneIn(2) ? INT_MAX : num_rows + 1;
    for (int seq = 0; seq < p_.num_seqs; ++seq) {
      if (!draw_.OneIn(4)) continue;
      if (draw_.OneIn(2)) begin[seq] = INT_MAX - draw_.Below(3);
      if (begin[seq] > num_rows || draw_.OneIn(2)) end[seq] = draw_.OneIn(2) ? INT_MIN : -7;
    }
    return num_rows;
  }

  void DrawRanges() {
    is_wild_ = draw_.OneIn(4);
    std::vector<int> q_begin, q_end, k_begin, k_end;
    p_.num_queries = DrawRangesOf(kMaxQueries, q_begin, q_end);
    p_.num_keys = DrawRangesOf(kMaxKeys, k_begin, k_end);
    p_.q_begin = arena_.Copy(q_begin);
    p_.q_end = arena_.Copy(q_end);
    p_.k_begin = arena_.Copy(k_begin);
    p_.k_end = arena_.Copy(k_end);
  }

  void DrawOperands() {
    const auto take = [&](int num_rows, int width, const int* begin, const int* end, int stream) {
      const size_t size = size_t(num_rows) * width;
      T* values = arena_.template Take<T>(size);
      FillGauss<<<512, 256>>>(values, size, 8 * seed_ + stream);
      PoisonOtherRows<<<256, 128>>>(values, num_rows, width, begin, end, p_.num_seqs);
      return values;
    };
    const auto queries = [&](int width, int stream) {
      return take(p_.num_queries, width, p_.q_begin, p_.q_end, stream);
    };
    const auto keys = [&](int width, int stream) {
      return take(p_.num_keys, width, p_.k_begin, p_.k_end, stream);
    };
    p_.q_nope = queries(p_.num_heads * p_.d_nope, 0);
    p_.q_pe = queries(p_.num_heads * p_.d_kpe, 1);
    p_.k_nope = keys(p_.num_heads * p_.d_nope, 2);
    p_.kpe = keys(p_.d_kpe, 3);
    p_.v = keys(p_.num_heads * p_.d_v, 4);
  }

  void DrawPrior() {
    p_.out_is_f32 = draw_.OneIn(2);
    if (draw_.OneIn(2)) return;
    is_in_place_ = p_.out_is_f32 && draw_.OneIn(2);
    prior_out_ = arena_.template Take<float>(num_rows() * p_.d_v);
    prior_lse_ = arena_.template Take<float>(num_rows());
    FillPrior<<<256, 64>>>(prior_out_, prior_lse_, num_rows(), p_.d_v, seed_);
    p_.prior_out = prior_out_;
    p_.prior_lse = prior_lse_;
  }

  // Results full of poison, or of what earlier calls found.
  Results Prepare(uint32_t word) {
    const Results results{guarded_.template Take<uint32_t>(out_words()),
                          guarded_.template Take<float>(num_rows())};
    if (is_in_place_) {
      CopyTo(results.out, prior_out_, out_words());
      CopyTo(results.lse, prior_lse_, num_rows());
    } else {
      FillWords<<<256, 256>>>(static_cast<uint32_t*>(results.out), out_words(), word);
      FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(results.lse), num_rows(), word);
    }
    return results;
  }
  static void CopyTo(void* to, const void* from, size_t words) {
    Check(cudaMemcpyAsync(to, from, words * sizeof(uint32_t), cudaMemcpyDeviceToDevice, nullptr));
  }

  std::string Launch(const Results& results) {
    PrefillParams call = p_;
    call.out = results.out;
    call.lse = results.lse;
    if (is_in_place_) {
      call.prior_out = static_cast<const float*>(results.out);
      call.prior_lse = results.lse;
    }
    return prefill::sm90::Launch(call, options_.device, nullptr);
  }

  std::string Compare() {
    float* scores = arena_.template Take<float>(num_rows() * kMaxKeys);
    std::vector<Verdict> verdicts(p_.num_seqs + 1);
    Verdict* on_device = arena_.Copy(verdicts);
    CompareWithReference<T>
        <<<dim3(p_.num_heads, p_.num_queries), kReferenceThreads>>>(p_, scores, on_device);
    Check(cudaGetLastError());
    Check(cudaMemcpy(verdicts.data(), on_device, verdicts.size() * sizeof(Verdict),
                     cudaMemcpyDeviceToHost));
    for (int seq = 0; seq <= p_.num_seqs; ++seq) {
      const Verdict& verdict = verdicts[seq];
      const double relative = std::sqrt(verdict.error / std::max(verdict.norm, 1e-30));
      if (verdict.bad == 0 && relative <= kMaxRelative) continue;
      return Text("sequence ", seq) + ": relative error " + std::to_string(relative) +
             Text(", bad values ", verdict.bad);
    }
    return "";
  }

  Arena& arena_;
  GuardedArena guarded_;
  const Options& options_;
  Draw& draw_;
  const uint64_t seed_;
  PrefillParams p_{};
  bool is_wild_ = false, is_in_place_ = false;
  float *prior_out_ = nullptr, *prior_lse_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const auto run = [](Arena& arena, const Options& options, Draw& draw, uint64_t seed, auto type) {
    Case<decltype(type)> one(arena, options, draw, seed);
    const std::string problem = one.Run();
    return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
  };
  return RunCases(argc, argv, kArenaBytes, run);
}
