// Random engine steps through the CUDA sources of ragged_paged_attention, against a float32
// reference on the GPU that takes each token as a sequence of its own. A quarter of the steps hold
// wild values: bounds that fall or are huge, lengths shorter than their tokens or outside the
// table, numbers of sequences, page ids, layers. What these mean is defined, so they are compared
// like the others.
//
// Cache rows that are no key hold NaN and Inf, and so do rows that the step has to write, and the
// queries and new rows of padding. A third of the steps normalise or rotate their rows; what these
// become is what the append kernel makes of them alone. Outputs and scratch are poisoned. Each step
// runs twice and must repeat bit for bit; the second time, two layers share a plan, and a step with
// fewer sequences runs right behind them in the same scratch and with its plan in the same memory.
// The others' queries are NaN there. Where steps are batch invariant, it must give the same bits.
// The whole pool is compared bit for bit with what must be in it, and guards around the pool, the
// outputs, the scratch and the plan must stay as they are.
//
//   instances=$(python tools/kernel_instances.py DIR csrc/decode/sm90 csrc/decode/sm80)
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
//     -DJAX_MLA_WITH_CUDA -DJAX_MLA_WITH_SM90A -Icsrc -I<cutlass>/include
//     tests/cuda/ragged_stress.cu csrc/append/append.cu csrc/gpu/*.cc
//     csrc/decode/ragged/{launch.cc,plan.cu,rows.cu} csrc/decode/schedule/*.cc
//     csrc/decode/{merge,sm90}/combine.cu csrc/decode/sm90/{*,*/*}.cc csrc/decode/sm80/*.cc
//     $instances
//   ./a.out 1000 [seed [backend[:variant] [longest]]]
//
// Without JAX_MLA_WITH_SM90A and the files of sm90 it is a stress of sm80 alone. Add -DMLA_CHAOS
// for random delays at every barrier (gpu/sm90.cuh). On failure the step's seed is printed:
// `./a.out 1 SEED BACKEND` runs it alone. `longest` caps the lengths, for sanitizers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "append/append.h"
#include "arena.h"
#include "core/divisor.h"
#include "decode/backend.h"
#include "decode/ragged/launch.h"
#include "decode/schedule/unit_plan.h"
#include "decode_reference.cuh"
#include "draw.h"
#include "guards.cuh"
#include "ragged_reference.cuh"
#include "random_case.cuh"
#include "random_step.h"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode;          // NOLINT
using namespace jax_mla::decode::stress;  // NOLINT

constexpr size_t kStepArenaBytes = size_t{3} << 30;  // the largest of 20000 steps takes 1.7
constexpr int64_t kMaxScores = 24 << 20;             // of the reference; with more, it skips heads

// The backend and the variant that a text like "sm90:wide" names.
std::pair<const DecodeBackend*, std::string_view> FindKernels(std::string_view text) {
  const DecodeBackend* backends[] = {
#ifdef JAX_MLA_WITH_SM90A
      &kSm90Backend,
#endif
      &kSm80Backend,
  };
  const std::string_view name = text.substr(0, text.find(':'));
  const std::string_view variant = name == text ? "" : text.substr(name.size() + 1);
  for (const DecodeBackend* backend : backends) {
    if (name.empty() || backend->name == name) return {backend, variant};
  }
  std::fprintf(stderr, "this program has no backend %s\n", std::string(name).c_str());
  std::exit(2);
}

// Makes the plan of a step, if it takes one (decode/ragged/plan_cuda.cc).
std::string LaunchPlan(const append::AppendParams& append, void* plan, const DecodeProblem& problem,
                       const DecodeBackend& backend) {
  if (!HasUnits(problem.shape)) return "";
  const ragged::StepTokens tokens{.seq_lens = append.seq_lens,
                                  .cu_q_lens = append.cu_q_lens,
                                  .num_seqs = append.num_seqs,
                                  .batch = append.batch,
                                  .q_len = append.q_len,
                                  .num_tokens = append.num_tokens};
  return ragged::MakePlan(tokens, plan, problem, backend, nullptr);
}

// Enqueues a step as the handler does (decode/ragged/cuda.cc).
std::string LaunchStep(const append::AppendParams& append, DecodeParams step, void* plan,
                       DecodeProblem problem, const DecodeBackend& backend) {
  if (append.q_pe != nullptr) step.q_pe = append.rotated_q_pe;
  if (HasUnits(problem.shape)) {
    return ragged::Launch(append, step, plan, problem, backend, nullptr);
  }
  problem.new_rows = &append;
  if (backend.can_append(problem)) {
    if (append.q_pe != nullptr) step.q_pe = append.q_pe;
  } else {
    problem.new_rows = nullptr;
    Check(append::LaunchAppend(append, nullptr));
  }
  return backend.launch(step, problem, nullptr);
}

// One random step.
template <typename T>
class Case {
 public:
  Case(Arena& arena, const Options& options, Draw& draw, uint64_t seed)
      : arena_(arena), guarded_(arena), options_(options), draw_(draw), seed_(seed) {
    arena.Reset();
    std::tie(backend_, variant_) = FindKernels(options.kernels);
    const StepLimits limits{.longest = options.longest,
                            .prefers_few = variant_.starts_with("narrow")};
    step_ = DrawStep(draw, limits);
    places_ = PlacesOf(step_);
    DrawShape();
    DrawTable();
    DrawTokens();
    MakeReference();
    DrawPool();
  }

  // What went wrong, "" if nothing.
  std::string Run() {
    const DecodeShape shape = ShapeOf(p_);
    if (std::string reason = backend_->why_not(Problem()); !reason.empty()) return reason;
    p_.scratch_bytes = RaggedScratchBytes(shape, step_.num_tokens);
    p_.scratch = guarded_.Take<char>(p_.scratch_bytes);
    plan_bytes_ = UnitPlanBytes(shape, step_.num_tokens);
    plan_ = guarded_.Take<char>(plan_bytes_);
    counts_ = arena_.Copy(std::vector<int>(kNumCounts));

    const Results first = Prepare(kNanWord);
    if (std::string error = Launch(first, p_.num_seqs); !error.empty()) return error;
    const std::string error = CompareWithReference(first);
    ComparePool();
    if (!error.empty()) return error + "; " + Counted();

    const Results again = Prepare(0xffffffffu), behind = TakeResults();
    const int fewer = draw_.Below(step_.num_present() + 1);
    const int* fewer_seqs = FewerSequences(fewer);
    // Only the kernels themselves keep the second step from starting too early in the scratch and
    // the plan.
    if (std::string error = Launch(again, p_.num_seqs, /*num_layers=*/2); !error.empty()) {
      return error;
    }
    const void* poisoned = PoisonedQueries(NumSameTokens(fewer));
    if (std::string error = Launch(behind, fewer_seqs, 1, poisoned); !error.empty()) return error;
    CountDifferences(first, again, step_.num_tokens, kRepeat);
    if (p_.batch_invariant) CountDifferences(first, behind, NumSameTokens(fewer), kInvariant);
    ComparePool();
    guarded_.CountChanges(counts_ + kGuards);
    return Counted();
  }

  std::string Describe() const {
    return Text("tokens ", step_.num_tokens) + Text(", batch ", step_.batch) +
           Text(", present ", step_.num_present()) + Text(", q_len ", step_.q_len) +
           Text(", heads ", step_.num_heads) + Text(", dims ", p_.d_ckv) + Text(" + ", p_.d_kpe) +
           Text(", page size ", step_.page_size) + Text(", longest ", longest_) +
           Text(", num_splits ", step_.num_splits) + Text(", invariant ", step_.batch_invariant) +
           Text(", wild ", step_.is_wild) + Text(", norm ", append_.norm_weight != nullptr) +
           Text(", rope ", append_.rope_table != nullptr) + Text(", layer ", layer_) +
           Text(", page begin ", page_ids_.begin);
  }

 private:
  struct Results {
    T* out;
    float* lse;
  };
  // What is counted on the device while a case runs.
  enum Count { kRepeat, kInvariant, kPool, kGuards, kBadRows, kNumCounts };

  size_t num_rows() const { return size_t(step_.num_tokens) * step_.num_heads; }
  DecodeProblem Problem() const { return {options_.device, ShapeOf(p_), variant_}; }

  void DrawShape() {
    const bool is_mini = draw_.OneIn(3);
    p_.dtype = append_.dtype = DTypeOf<T>();
    p_.d_ckv = append_.d_ckv = is_mini ? 256 : 512;
    p_.d_kpe = is_mini ? 32 : 64;
    if (DTypeOf<T>() == DType::kBf16 && draw_.OneIn(3)) p_.d_kpe = is_mini ? 64 : 0;
    append_.d_kpe = p_.d_kpe;
    p_.batch = append_.batch = step_.batch;
    p_.q_len = append_.q_len = step_.q_len;
    p_.num_tokens = append_.num_tokens = step_.num_tokens;
    p_.page_size = append_.page_size = step_.page_size;
    p_.max_pages_per_seq = append_.max_pages_per_seq = step_.max_pages_per_seq;
    p_.num_layers = append_.num_layers = 1 + draw_.Below(3);
    p_.max_seq_len = append_.max_seq_len = step_.max_seq_len;
    p_.num_heads = step_.num_heads;
    p_.causal = true;
    p_.num_splits = step_.num_splits;
    p_.batch_invariant = step_.batch_invariant;
    magnitude_ = DrawMagnitude<T>(draw_, p_);
  }

  void DrawTable() {
    const int width = step_.max_pages_per_seq;
    int num_used = 0;
    for (int len : step_.planned_lens) num_used += CeilDiv(len, step_.page_size);
    p_.num_pages = append_.num_pages = num_used + 1 + draw_.Below(4);
    page_ids_ = DrawPageIds(draw_, p_.num_pages);
    layer_ = DrawLayer(draw_, p_.num_layers);
    std::vector<int> order(p_.num_pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), draw_.rng());
    const int wild_percent = step_.is_wild && draw_.OneIn(2) ? 30 : 0;
    table_.resize(size_t(step_.batch) * width);
    for (size_t i = 0, next = 0; i < table_.size(); ++i) {
      const int seq = i / width, begin = i % width * step_.page_size;
      const bool is_used = begin < step_.planned_lens[seq];
      // Behind the planned length there is no page of its own, and no row may have two owners.
      const bool is_seen = begin < step_.ClampedLength(seq);
      const bool is_wild = draw_.Below(100) < wild_percent ||  //
                           (!is_used && (is_seen || draw_.OneIn(2)));
      table_[i] = is_wild ? page_ids_.Wild(draw_)
                          : page_ids_.Id(is_used ? order[next++] : draw_.Below(p_.num_pages));
    }
    p_.page_table = append_.page_table = arena_.Copy(table_);
    p_.seq_lens = append_.seq_lens = arena_.Copy(step_.seq_lens);
    p_.layer = append_.layer = arena_.Copy(std::vector<int>{layer_});
    p_.page_begin = append_.page_begin = arena_.Copy(std::vector<int>{page_ids_.begin});
    if (step_.cu_q_lens.empty()) return;
    p_.cu_q_lens = append_.cu_q_lens = arena_.Copy(step_.cu_q_lens);
    if (!step_.has_num_seqs) return;
    p_.num_seqs = append_.num_seqs = arena_.Copy(std::vector<int>{step_.num_seqs});
  }

  // Queries and new rows. Those of padding, in front of the sequences and behind, hold NaN.
  void DrawTokens() {
    const std::vector<int> bounds = BoundsOf(step_);
    const auto take = [&](size_t width, int stream, float magnitude) {
      const size_t size = step_.num_tokens * width;
      T* values = arena_.template Take<T>(size);
      FillGauss<<<512, 256>>>(values, size, 4 * seed_ + stream, magnitude);
      const auto poison = [&](size_t begin, size_t end) {
        FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(values + begin * width),
                               (end - begin) * width / 2, kNanPair);
      };
      poison(0, bounds.front());
      poison(bounds.back(), step_.num_tokens);
      return values;
    };
    p_.q_nope = take(size_t(step_.num_heads) * p_.d_ckv, 0, 1.0f);
    p_.q_pe = take(size_t(step_.num_heads) * p_.d_kpe, 1, 1.0f);
    append_.ckv = take(p_.d_ckv, 2, magnitude_);
    append_.kpe = take(p_.d_kpe, 3, magnitude_);
    written_ckv_ = static_cast<const T*>(append_.ckv);
    written_kpe_ = static_cast<const T*>(append_.kpe);
    if (draw_.OneIn(3)) DrawTransforms();
  }

  // Has the step normalise or rotate its rows, and rotate its queries.
  void DrawTransforms() {
    const auto uniform = [&](size_t size, float low, float high) {
      std::vector<float> values(size);
      for (float& value : values) value = low + (high - low) * draw_.Below(1024) / 1024.0f;
      return arena_.Copy(values);
    };
    const bool has_both = p_.d_kpe > 0 && draw_.OneIn(2);
    const bool has_norm = p_.d_kpe == 0 || has_both || draw_.OneIn(2);
    if (has_norm) {
      append_.norm_weight = uniform(p_.d_ckv, 0.5f * magnitude_, 1.5f * magnitude_);
      append_.norm_eps = 1e-6f;
    }
    if (has_both || !has_norm) {
      append_.num_rope_positions = 1 + draw_.Below(step_.max_seq_len);  // or clamped
      append_.rope_table = uniform(size_t(append_.num_rope_positions) * p_.d_kpe, -1.0f, 1.0f);
      append_.rope_interleaved = draw_.OneIn(2);
      append_.rope_lens = p_.seq_lens;
      append_.q_pe = p_.q_pe;
      append_.num_heads = step_.num_heads;
      append_.rotated_q_pe = TakeTokens(size_t(step_.num_heads) * p_.d_kpe);
    }
    Transform();
  }

  // What rows and queries become by the append kernel, where every token has a page of its own.
  void Transform() {
    append::AppendParams alone = append_;
    const int tokens = step_.num_tokens, width = std::max(longest_place(), 0) + 1;
    std::vector<int> table(size_t(tokens) * width), positions(tokens);
    for (int token = 0; token < tokens; ++token) {
      std::fill_n(table.begin() + size_t(token) * width, width, token);
      positions[token] = std::max(places_[token].place, 0);
    }
    T *ckv = TakeTokens(p_.d_ckv), *kpe = TakeTokens(p_.d_kpe);
    written_ckv_ = ckv;
    written_kpe_ = kpe;
    alone.page_table = arena_.Copy(table);
    alone.positions = arena_.Copy(positions);
    alone.layer = alone.page_begin = arena_.Copy(std::vector<int>{0});
    alone.ckv_pages = {ckv, 0, p_.d_ckv, p_.d_ckv};
    alone.kpe_pages = {kpe, 0, p_.d_kpe, p_.d_kpe};
    alone.batch = alone.num_pages = tokens;
    alone.q_len = alone.num_layers = alone.page_size = 1;
    alone.max_pages_per_seq = width;
    alone.cu_q_lens = alone.num_seqs = nullptr;
    if (append_.q_pe != nullptr) {
      alone.rotated_q_pe = rotated_q_pe_ = TakeTokens(size_t(step_.num_heads) * p_.d_kpe);
    }
    Check(append::LaunchAppend(alone, nullptr));
  }
  int longest_place() const {
    int longest = -1;
    for (const PlannedToken& token : places_) longest = std::max(longest, token.place);
    return longest;
  }

  // Memory for so many values a token, full of NaN.
  T* TakeTokens(size_t width) {
    const size_t size = CeilDiv<size_t>(step_.num_tokens * width, 2) * 2;
    T* values = arena_.template Take<T>(size);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(values), size / 2, kNanPair);
    return values;
  }

  // The step as a call of decode in which every token is a sequence, of what it sees.
  void MakeReference() {
    const int width = step_.max_pages_per_seq;
    std::vector<int> table(size_t(step_.num_tokens) * width), lens(step_.num_tokens);
    for (int token = 0; token < step_.num_tokens; ++token) {
      const PlannedToken& place = places_[token];
      lens[token] = place.place + 1;
      longest_ = std::max(longest_, lens[token]);
      if (place.seq < 0) continue;
      std::copy_n(table_.begin() + size_t(place.seq) * width, width,
                  table.begin() + size_t(token) * width);
    }
    reference_ = p_;
    reference_.batch = step_.num_tokens;
    reference_.q_len = 1;
    if (append_.q_pe != nullptr) reference_.q_pe = rotated_q_pe_;
    reference_.page_table = arena_.Copy(table);
    reference_.seq_lens = arena_.Copy(lens);
  }

  // The pool as the step finds it, and as it must leave it.
  void DrawPool() {
    const PoolLayout layout = DrawLayout(draw_, p_);
    pool_bytes_ = layout.size();
    pool_ = guarded_.Take<char>(pool_bytes_);
    before_ = arena_.template Take<char>(pool_bytes_);
    after_ = arena_.template Take<char>(pool_bytes_);
    layout.Place(pool_, p_);
    const auto writable = [](const KvStream& stream) {
      return MutableKvStream{const_cast<void*>(stream.base), stream.layer_stride,
                             stream.page_stride, stream.token_stride};
    };
    append_.ckv_pages = writable(p_.ckv);
    append_.kpe_pages = writable(p_.kpe);
    PoisonPool<T>(before_, pool_bytes_);
    DecodeParams old = p_;
    layout.Place(before_, old);
    old.seq_lens = arena_.Copy(OldLengthsOf(step_));
    FillKeys<T><<<dim3(64, old.batch), 128>>>(old, seed_, magnitude_);
    Check(cudaMemcpyAsync(after_, before_, pool_bytes_, cudaMemcpyDeviceToDevice));
    layout.Place(after_, reference_);
    std::vector<char> is_written;
    for (const PlannedToken& place : places_) is_written.push_back(place.is_written);
    const auto* is_written_there = reinterpret_cast<const bool*>(arena_.Copy(is_written));
    WriteRows<T>
        <<<step_.num_tokens, 128>>>(reference_, written_ckv_, written_kpe_, is_written_there);
  }

  // New, poisoned outputs.
  Results TakeResults() {
    const Results results{guarded_.Take<T>(num_rows() * p_.d_ckv),
                          guarded_.Take<float>(num_rows())};
    FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(results.out), num_rows() * p_.d_ckv / 2,
                            kNanPair);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(results.lse), num_rows(), kNanWord);
    return results;
  }

  // The same, with a scratch and a plan full of `scratch_word` and the pool as the step finds it.
  Results Prepare(uint32_t scratch_word) {
    FillWords<<<256, 256>>>(static_cast<uint32_t*>(p_.scratch), p_.scratch_bytes / 4, scratch_word);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(plan_), plan_bytes_ / 4, scratch_word);
    Check(cudaMemcpyAsync(pool_, before_, pool_bytes_, cudaMemcpyDeviceToDevice));
    return TakeResults();
  }

  // Queries of which only the first tokens' are as they were. The others are NaN.
  const void* PoisonedQueries(int num_tokens) {
    const size_t token_size = size_t(step_.num_heads) * p_.d_ckv;
    const size_t size = step_.num_tokens * token_size, kept = num_tokens * token_size;
    T* queries = arena_.template Take<T>(size);
    Check(cudaMemcpyAsync(queries, p_.q_nope, kept * sizeof(T), cudaMemcpyDeviceToDevice));
    FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(queries + kept), (size - kept) / 2,
                            kNanPair);
    return queries;
  }

  // The plan and so many layers, which all leave the same.
  std::string Launch(const Results& results, const int* num_seqs, int num_layers = 1,
                     const void* q_nope = nullptr) {
    DecodeParams params = p_;
    append::AppendParams append = append_;
    if (q_nope != nullptr) params.q_nope = q_nope;
    params.out = results.out;
    params.lse = results.lse;
    params.num_seqs = append.num_seqs = num_seqs;
    std::string error = LaunchPlan(append, plan_, Problem(), *backend_);
    for (int i = 0; i < num_layers && error.empty(); ++i) {
      error = LaunchStep(append, params, plan_, Problem(), *backend_);
    }
    return error;
  }

  // The number of sequences of the step that runs behind. It writes some of the same rows.
  const int* FewerSequences(int fewer) {
    if (step_.cu_q_lens.empty()) return p_.num_seqs;
    return arena_.Copy(std::vector<int>{fewer});
  }

  // Tokens, from the first one on, that fewer sequences leave as they are.
  int NumSameTokens(int fewer) const {
    return step_.cu_q_lens.empty() ? step_.num_tokens : BoundsOf(step_)[fewer];
  }

  // Compares the results of the first tokens.
  void CountDifferences(const Results& a, const Results& b, int num_tokens, Count count) {
    const auto words = [](const auto* values) { return reinterpret_cast<const uint32_t*>(values); };
    const size_t rows = size_t(num_tokens) * step_.num_heads;
    CountDifferentWords<<<256, 256>>>(words(a.out), words(b.out), rows * p_.d_ckv / 2,
                                      counts_ + count);
    CountDifferentWords<<<64, 256>>>(words(a.lse), words(b.lse), rows, counts_ + count);
  }

  void ComparePool() {
    CountDifferentWords<<<256, 256>>>(reinterpret_cast<const uint32_t*>(pool_),
                                      reinterpret_cast<const uint32_t*>(after_), pool_bytes_ / 4,
                                      counts_ + kPool);
  }

  std::string CompareWithReference(const Results& results) {
    reference_.out = results.out;
    reference_.lse = results.lse;
    CheckRows<T><<<step_.num_tokens, 256>>>(reference_, counts_ + kBadRows);
    const int max_len = longest_ + 1;
    const int stride = static_cast<int>(CeilDiv(int64_t(num_rows()) * max_len, kMaxScores));
    const int num_heads = CeilDiv(step_.num_heads, stride);
    std::vector<Verdict> verdicts(step_.num_tokens);
    Verdict* device_verdicts = arena_.Copy(verdicts);
    float* scores = arena_.template Take<float>(size_t(step_.num_tokens) * num_heads * max_len);
    Compare<T><<<dim3(num_heads, step_.num_tokens), 128>>>(reference_, scores, max_len, stride,
                                                           device_verdicts);
    Check(cudaGetLastError());
    Check(cudaMemcpy(verdicts.data(), device_verdicts, verdicts.size() * sizeof(Verdict),
                     cudaMemcpyDeviceToHost));
    for (int token = 0; token < step_.num_tokens; ++token) {
      const Verdict& verdict = verdicts[token];
      const double norm = verdict.norm;
      const double relative = std::sqrt(verdict.error / std::max(norm, 1e-300));
      if (verdict.bad == 0 && !(norm > 0 && !(relative < kMaxRelative))) continue;
      return Text("token ", token) + Text(" of sequence ", places_[token].seq) +
             Text(" at ", places_[token].place) + ": relative error " + std::to_string(relative) +
             Text(", bad values ", verdict.bad);
    }
    return "";
  }

  std::string Counted() {
    constexpr const char* kNames[kNumCounts] = {
        "words that do not repeat: ", "words that depend on other sequences: ",
        "wrong words in the pool: ", "changed words of guards: ", "NaN or results without keys: "};
    std::vector<int> counts(kNumCounts);
    Check(cudaGetLastError());
    Check(cudaMemcpy(counts.data(), counts_, kNumCounts * sizeof(int), cudaMemcpyDeviceToHost));
    std::string text;
    for (int i = 0; i < kNumCounts; ++i) {
      if (counts[i] != 0) text += (text.empty() ? "" : ", ") + Text(kNames[i], counts[i]);
    }
    return text;
  }

  Arena& arena_;
  GuardedArena guarded_;
  const Options& options_;
  Draw& draw_;
  const uint64_t seed_;
  const DecodeBackend* backend_ = nullptr;
  std::string_view variant_;
  Step step_{};
  std::vector<PlannedToken> places_;
  std::vector<int> table_;
  PageIds page_ids_{};
  int layer_ = 0, longest_ = 0;
  float magnitude_ = 1.0f;  // of the cache and the new rows
  DecodeParams p_{};        // the step, without its outputs
  append::AppendParams append_{};
  const T *written_ckv_ = nullptr, *written_kpe_ = nullptr;  // what the new rows become
  void* rotated_q_pe_ = nullptr;                             // the same of q_pe
  DecodeParams reference_{};
  char *pool_ = nullptr, *before_ = nullptr, *after_ = nullptr;
  size_t pool_bytes_ = 0;
  int* counts_ = nullptr;
  char* plan_ = nullptr;
  int64_t plan_bytes_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const auto run_as = []<typename T>(Arena& arena, const Options& options, Draw& draw,
                                     uint64_t seed, T) {
    Case<T> one(arena, options, draw, seed);
    const std::string problem = one.Run();
    return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
  };
  const auto run = [&](Arena& arena, const Options& options, Draw& draw, uint64_t seed, auto type) {
    // Hopper leaves steps in float16 to sm80.
    const bool takes_f16 = std::string_view(options.kernels).starts_with("sm80");
    return takes_f16 ? run_as(arena, options, draw, seed, type)
                     : run_as(arena, options, draw, seed, __nv_bfloat16{});
  };
  return RunCases(argc, argv, kStepArenaBytes, run);
}
