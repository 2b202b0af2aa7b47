// Random small decode calls against a float32 reference on the GPU, hundreds a second: for races
// and corner cases that a suite of named cases cannot reach. Half of the calls in bf16 read a cache
// of codes. Every cache row that is no key holds NaN and Inf, or codes of NaN, table entries that
// must not be used hold wild ids, lengths may lie outside the table, the layer outside the pool,
// page ids at the ends of 32 bits, outputs and scratch are poisoned. Every case runs three times
// and must repeat bit for bit; a batch-invariant one also when a sequence is decoded alone.
//
//   instances=$(python tools/kernel_instances.py DIR csrc/decode/sm90)
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -DJAX_MLA_WITH_CUDA
//     -DJAX_MLA_WITH_SM90A -Icsrc -I<cutlass>/include tests/cuda/decode_stress.cu csrc/gpu/*.cc
//     csrc/decode/schedule/plan.cc csrc/decode/{merge,sm90}/combine.cu csrc/decode/sm90/{*,*/*}.cc
//     $instances
//   ./a.out 10000 [seed [variant [longest]]]
//
// Add -DMLA_CHAOS for random delays at every barrier (gpu/sm90.cuh). On failure the case's seed is
// printed: `./a.out 1 SEED VARIANT` runs it alone. `longest` caps the lengths, for sanitizers.
// Linked against another backend: change kBackend.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "arena.h"
#include "decode/backend.h"
#include "decode/schedule/plan.h"
#include "decode/sm90/choice.h"
#include "decode_reference.cuh"
#include "draw.h"
#include "random_case.cuh"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode;          // NOLINT
using namespace jax_mla::decode::stress;  // NOLINT

constexpr const DecodeBackend& kBackend = kSm90Backend;
constexpr int kRepeats = 3;
constexpr int kMaxRows = 160;
// Variants for caches of codes alone. Then queries are bf16.
constexpr std::string_view kTeams = "narrow16x2", kScores = "scores";

// One random call.
template <typename T>
class Case {
 public:
  Case(Arena& arena, const Options& options, Draw& draw, uint64_t seed)
      : arena_(arena), options_(options), draw_(draw), seed_(seed) {
    arena.Reset();
    DrawShape();
    DrawTable();
    DrawPool();
    FillKeys<T><<<dim3(64, p_.batch), 128>>>(p_, seed, magnitude_);
  }

  // What went wrong, "" if nothing.
  std::string Run() {
    if (std::string reason = kBackend.why_not(Problem(p_)); !reason.empty()) return reason;
    scratch_ = arena_.template Take<char>(DecodeScratchBytes(ShapeOf(p_)));
    int* differences = arena_.Copy(std::vector<int>{0});
    DecodeParams first{};
    const int seq = Below(p_.batch), rows = p_.q_len * p_.num_heads;
    DecodeParams alone = Alone(seq);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const bool is_last = repeat == kRepeats - 1;
      Prepare(p_);
      if (is_last) Prepare(alone);
      if (std::string error = Launch(p_); !error.empty()) return error;
      if (repeat == 0) {
        first = p_;
        if (std::string error = CompareWithReference(); !error.empty()) return error;
        continue;
      }
      // A call right behind it that uses the same scratch: only the kernels themselves keep it from
      // starting too early.
      if (is_last) {
        if (std::string error = Launch(alone); !error.empty()) return error;
      }
      CountDifferences(first, p_, 0, p_.batch * rows, differences);
    }
    if (p_.batch_invariant) CountDifferences(first, alone, seq * rows, rows, differences);
    int num_differences = 0;
    Check(cudaMemcpy(&num_differences, differences, sizeof(int), cudaMemcpyDeviceToHost));
    return num_differences == 0 ? "" : std::to_string(num_differences) + " words do not repeat";
  }

  std::string Describe() const {
    return std::string(KvFormatName(p_.kv_format)) + Text(" batch ", p_.batch) +
           Text(", q_len ", p_.q_len) + Text(", heads ", p_.num_heads) + Text(", dims ", p_.d_ckv) +
           Text(" + ", p_.d_kpe) + Text(", page size ", p_.page_size) +
           Text(", longest ", longest_) + Text(", num_splits ", p_.num_splits) +
           Text(", causal ", p_.causal) + Text(", invariant ", p_.batch_invariant) +
           Text(", layer ", layer_) + Text(", page begin ", page_ids_.begin);
  }

 private:
  int Below(int n) { return draw_.Below(n); }
  bool OneIn(int n) { return draw_.OneIn(n); }
  size_t num_rows() const { return size_t(p_.batch) * p_.q_len * p_.num_heads; }

  void DrawShape() {
    const bool is_mini = OneIn(3), is_large_batch = OneIn(20);
    p_.dtype = DTypeOf<T>();
    p_.d_ckv = is_mini ? 256 : 512;
    p_.d_kpe = is_mini ? 32 : 64;
    if (DTypeOf<T>() == DType::kBf16 && OneIn(3)) p_.d_kpe = is_mini ? 64 : 0;
    DrawFormat();
    p_.q_len = Below(2) ? 1 : 1 + Below(5);
    // The variants "narrow8" and "narrow16" are there for many rows.
    const bool few_rows = options_.kernels == "wide"     ? OneIn(8)
                          : options_.kernels == "narrow" ? !OneIn(6)
                                                         : OneIn(2);
    const int rows = 1 + Below(few_rows ? 32 : kMaxRows);
    p_.num_heads = std::max(1, rows / p_.q_len);
    const bool is_medium_batch = OneIn(4);  // two or three workers a sequence
    p_.batch = is_large_batch ? 140 + Below(100) : is_medium_batch ? 13 + Below(60) : 1 + Below(12);
    p_.causal = !OneIn(4);
    magnitude_ = DrawMagnitude<T>(draw_, p_);
    p_.num_splits = Below(3) ? 0 : 1 + Below(8);
    p_.batch_invariant = OneIn(8);
    p_.num_layers = 1 + Below(3);
    for (int tries = 0; tries < 100; ++tries) {  // not every variant takes every page size
      p_.page_size = draw_.Of(kPageSizes);
      if (kBackend.why_not(Problem(p_)).empty()) break;
    }
    longest_ = is_large_batch ? 130 : is_medium_batch ? 300 : OneIn(4) ? 1500 : OneIn(4) ? 70 : 400;
    longest_ = std::min(longest_, options_.longest);
  }

  void DrawFormat() {
    const bool needs_codes = options_.kernels == kScores || options_.kernels == kTeams;
    const bool takes_codes = DTypeOf<T>() == DType::kBf16 && options_.kernels != "wide";
    if (!takes_codes || (!needs_codes && OneIn(2))) return;
    if (needs_codes) p_.d_ckv = 512, p_.d_kpe = OneIn(3) ? 0 : 64;
    constexpr KvFormat kFormats[] = {KvFormat::kE4m3, KvFormat::kE4m3KpeBf16, KvFormat::kDsMla};
    const int num_formats = p_.d_kpe == 0 ? 1 : p_.d_ckv != DsMla::kDCkv ? 2 : 3;
    p_.kv_format = kFormats[Below(num_formats)];
    if (OneIn(2)) p_.q_scale = arena_.Copy(std::vector<float>{1.0f});  // until DrawScales
  }

  // One scale for the call, or one for each sequence.
  void DrawScales() {
    const auto draw = [&](int num_scales, float magnitude, int32_t* stride) {
      const bool is_for_all = OneIn(2);
      *stride = is_for_all ? 0 : num_scales;
      std::vector<float> scales((is_for_all ? 1 : p_.batch) * num_scales);
      for (float& scale : scales) scale = magnitude * static_cast<float>(1 + Below(100)) / 50.0f;
      if (OneIn(2)) std::ranges::fill(scales, scales[0]);
      return arena_.Copy(scales);
    };
    if (HasScale(p_.kv_format)) p_.kv_scale = draw(2, magnitude_, &p_.kv_scale_stride);
    if (p_.q_scale != nullptr) p_.q_scale = draw(1, 1.0f, &p_.q_scale_stride);
  }

  void DrawTable() {
    std::vector<int> lens(p_.batch);
    int num_used = 0;
    const bool are_equal =
        OneIn(3);  // about: the schedule then gives every sequence as many workers
    auto num_pages = [&](int len) { return (len + p_.page_size - 1) / p_.page_size; };
    for (int& len : lens) {
      len = OneIn(are_equal ? 40 : 8) ? 0
            : are_equal               ? std::max(longest_ - Below(80), 0)
                                      : Below(longest_ + 1);
      num_used += num_pages(len);
      p_.max_pages_per_seq = std::max(p_.max_pages_per_seq, num_pages(len));
    }
    p_.max_pages_per_seq += 1 + Below(3);
    p_.max_seq_len = p_.max_pages_per_seq * p_.page_size;
    if (OneIn(4)) p_.max_seq_len = 1 + Below(p_.max_seq_len);  // the keys behind it stay NaN
    p_.num_pages = num_used + 1 + Below(4);
    page_ids_ = DrawPageIds(draw_, p_.num_pages);
    layer_ = DrawLayer(draw_, p_.num_layers);
    const std::vector<int> table =
        DrawPageTable(draw_, page_ids_, lens, p_.max_pages_per_seq, p_.page_size);
    if (OneIn(8)) lens[Below(p_.batch)] = draw_.Of(kWildLengths);
    for (int len : lens) lens_.push_back(std::clamp(len, 0, p_.max_seq_len));
    p_.page_table = arena_.Copy(table);
    p_.seq_lens = arena_.Copy(lens);
    p_.layer = arena_.Copy(std::vector<int>{layer_});
    p_.page_begin = arena_.Copy(std::vector<int>{page_ids_.begin});
  }

  void DrawPool() {
    const PoolLayout layout = DrawLayout(draw_, p_);
    char* pool = arena_.template Take<char>(layout.size());
    layout.Place(pool, p_);
    PoisonPool<T>(pool, layout.size());
    DrawScales();
    const int d_qk = p_.d_ckv + p_.d_kpe;
    T* q = arena_.template Take<T>(num_rows() * d_qk);
    FillGauss<<<64, 256>>>(q, num_rows() * d_qk, seed_);
    if (p_.q_scale != nullptr) RoundToCodes<<<64, 256>>>(q, num_rows() * d_qk);
    p_.q_nope = q;
    p_.q_pe = q + num_rows() * p_.d_ckv;
  }

  DecodeProblem Problem(const DecodeParams& p) const {
    return {options_.device, ShapeOf(p), options_.kernels};
  }

  // The same call for one sequence of the batch. A batch-invariant result may not depend on the
  // bound of the lengths either.
  DecodeParams Alone(int seq) const {
    DecodeParams p = p_;
    const int64_t row = int64_t{seq} * p.q_len * p.num_heads;
    p.q_nope = static_cast<const T*>(p.q_nope) + row * p.d_ckv;
    p.q_pe = static_cast<const T*>(p.q_pe) + row * p.d_kpe;
    p.page_table += int64_t{seq} * p.max_pages_per_seq;
    p.seq_lens += seq;
    if (p.kv_scale != nullptr) p.kv_scale += int64_t{seq} * p.kv_scale_stride;
    if (p.q_scale != nullptr) p.q_scale += int64_t{seq} * p.q_scale_stride;
    if (p.batch_invariant) p.max_seq_len = std::max(lens_[seq], 1);
    p.batch = 1;
    return p;
  }

  // New, poisoned outputs and scratch.
  void Prepare(DecodeParams& p) {
    const size_t rows = size_t(p.batch) * p.q_len * p.num_heads;
    p.scratch_bytes = DecodeScratchBytes(ShapeOf(p));
    p.scratch = scratch_;
    p.out = arena_.template Take<T>(rows * p.d_ckv);
    p.lse = arena_.template Take<float>(rows);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.out), rows * p.d_ckv / 2, kNanPair);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(p.lse), rows, kNanWord);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.scratch), p.scratch_bytes / 4, kNanWord);
  }

  std::string Launch(const DecodeParams& p) { return kBackend.launch(p, Problem(p), nullptr); }

  // Compares the results of `a` from row `begin` on with those of `b`.
  void CountDifferences(const DecodeParams& a, const DecodeParams& b, size_t begin, size_t num_rows,
                        int* count) {
    const T* a_out = static_cast<const T*>(a.out) + begin * a.d_ckv;
    CountDifferentWords<<<64, 256>>>(reinterpret_cast<const uint32_t*>(a_out),
                                     static_cast<const uint32_t*>(b.out), num_rows * a.d_ckv / 2,
                                     count);
    CountDifferentWords<<<64, 256>>>(reinterpret_cast<const uint32_t*>(a.lse + begin),
                                     reinterpret_cast<const uint32_t*>(b.lse), num_rows, count);
  }

  std::string CompareWithReference() {
    std::vector<Verdict> verdicts(p_.batch);
    Verdict* device_verdicts = arena_.Copy(verdicts);
    float* scores = arena_.template Take<float>(num_rows() * (p_.max_seq_len + 1));
    const bool may_score_codes =
        (options_.kernels.empty() || options_.kernels == "narrow" || options_.kernels == kScores) &&
        sm90::HasQueryCodes(ShapeOf(p_));
    Compare<T><<<dim3(p_.q_len * p_.num_heads, p_.batch), 128>>>(
        p_, scores, p_.max_seq_len + 1, /*stride=*/1, device_verdicts,
        may_score_codes ? kMaxCodesScore : 0.0f);
    Check(cudaMemcpy(verdicts.data(), device_verdicts, p_.batch * sizeof(Verdict),
                     cudaMemcpyDeviceToHost));
    for (int seq = 0; seq < p_.batch; ++seq) {
      const double relative = std::sqrt(verdicts[seq].error / std::max(verdicts[seq].norm, 1e-300));
      const double max_relative = kMaxRelative + std::expm1(verdicts[seq].score_error);
      if (verdicts[seq].bad == 0 && !(verdicts[seq].norm > 0 && !(relative < max_relative)))
        continue;
      return "sequence " + std::to_string(seq) + ": relative error " + std::to_string(relative) +
             ", " + std::to_string(verdicts[seq].bad) + " bad values";
    }
    return "";
  }

  Arena& arena_;
  const Options& options_;
  Draw& draw_;
  const uint64_t seed_;
  float magnitude_ = 1.0f;  // of the cache
  DecodeParams p_{};
  char* scratch_ = nullptr;
  std::vector<int> lens_;  // clamped
  int longest_ = 0, layer_ = 0;
  PageIds page_ids_{};
};

}  // namespace

int main(int argc, char** argv) {
  const auto run = []<typename T>(Arena& arena, const Options& options, Draw& draw, uint64_t seed,
                                  T) {
    const auto run_case = [&](auto one) -> std::string {
      const std::string problem = one.Run();
      return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
    };
    if (options.kernels == kTeams || options.kernels == kScores) {
      return run_case(Case<__nv_bfloat16>(arena, options, draw, seed));
    }
    return run_case(Case<T>(arena, options, draw, seed));
  };
  return RunCases(argc, argv, kArenaBytes, run);
}
