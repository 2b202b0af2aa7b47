// Random small decode calls against a float32 reference on the GPU, hundreds a second: for races
// and corner cases that a suite of named cases cannot reach. Every cache row that is no key holds
// NaN and Inf, table entries that must not be used hold wild ids, lengths may lie outside the
// table, the layer outside the pool, page ids at the ends of 32 bits, outputs and scratch are
// poisoned. Every case runs three times and must repeat bit for bit; a batch-invariant one also
// when a sequence is decoded alone.
//
//   instances=$(python tools/kernel_instances.py DIR csrc/decode/sm90)
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -DJAX_MLA_WITH_CUDA
//     -DJAX_MLA_WITH_SM90A -Icsrc -I<cutlass>/include tests/cuda/decode_stress.cu
//     csrc/decode/split/{plan.cc,combine.cu} csrc/decode/sm90/{*,*/*}.cc $instances
//   ./a.out 10000 [seed [variant [longest]]]
//
// Add -DMLA_CHAOS for random delays at every barrier (gpu/sm90.cuh). On failure the case's seed is
// printed: `./a.out 1 SEED VARIANT` runs it alone. `longest` caps the lengths, for sanitizers.
// Linked against another backend: change kBackend.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "arena.h"
#include "decode/backend.h"
#include "decode/split/plan.h"
#include "decode_reference.cuh"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode;          // NOLINT
using namespace jax_mla::decode::stress;  // NOLINT

constexpr const DecodeBackend& kBackend = kSm90Backend;
constexpr int kRepeats = 3;
constexpr double kMaxRelative = 6e-3;  // of a sequence's output; 16-bit P and output give 2e-3
constexpr int kMaxRows = 160;
constexpr int kPageSizes[] = {1, 2, 4, 7, 8, 8, 16, 16, 20, 24, 32, 64, 64, 96, 100, 128, 256};
constexpr int kWildIds[] = {INT_MAX - 100, -1, INT_MIN};
constexpr int kWildLengths[] = {INT_MIN, -1, 1 << 20, INT_MAX};
constexpr int kWildLayers[] = {INT_MIN, -1, 1 << 30, INT_MAX};

struct Options {
  gpu::DeviceFacts device;
  std::string variant;
  int longest;
};

// One random call.
template <typename T>
class Case {
 public:
  Case(Arena& arena, const Options& options, std::mt19937_64& rng, uint64_t seed)
      : arena_(arena), options_(options), rng_(rng), seed_(seed) {
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
    auto text = [](const char* name, auto value) { return name + std::to_string(value); };
    return text("batch ", p_.batch) + text(", q_len ", p_.q_len) + text(", heads ", p_.num_heads) +
           text(", dims ", p_.d_ckv) + text(", page size ", p_.page_size) +
           text(", longest ", longest_) + text(", num_splits ", p_.num_splits) +
           text(", causal ", int{p_.causal}) + text(", invariant ", int{p_.batch_invariant}) +
           text(", layer ", layer_) + text(", page begin ", page_begin_);
  }

 private:
  int Below(int n) { return static_cast<int>(rng_() % n); }
  bool OneIn(int n) { return Below(n) == 0; }
  size_t num_rows() const { return size_t(p_.batch) * p_.q_len * p_.num_heads; }

  void DrawShape() {
    const bool is_mini = OneIn(3), is_large_batch = OneIn(20);
    p_.dtype = std::is_same_v<T, __half> ? DType::kF16 : DType::kBf16;
    p_.d_ckv = is_mini ? 256 : 512;
    p_.d_kpe = is_mini ? 32 : 64;
    p_.q_len = Below(2) ? 1 : 1 + Below(5);
    // The variants "narrow8" and "narrow16" are there for many rows.
    const bool few_rows = options_.variant == "wide"     ? OneIn(8)
                          : options_.variant == "narrow" ? !OneIn(6)
                                                         : OneIn(2);
    const int rows = 1 + Below(few_rows ? 32 : kMaxRows);
    p_.num_heads = std::max(1, rows / p_.q_len);
    const bool is_medium_batch = OneIn(4);  // two or three workers a sequence
    p_.batch = is_large_batch ? 140 + Below(100) : is_medium_batch ? 13 + Below(60) : 1 + Below(12);
    p_.causal = !OneIn(4);
    // Partial results in float16 have to be scaled where O is far from 1.
    const int log2 = std::is_same_v<T, __half> ? 10 : 60;
    magnitude_ = !OneIn(4) ? 1.0f : std::ldexp(1.0f, OneIn(2) ? log2 : -log2);
    p_.sm_scale = (OneIn(8) ? 0.5f : OneIn(16) ? -0.07f : 0.0721688f) / magnitude_;
    p_.num_splits = Below(3) ? 0 : 1 + Below(8);
    p_.batch_invariant = OneIn(8);
    p_.num_layers = 1 + Below(3);
    for (int tries = 0; tries < 100; ++tries) {  // not every variant takes every page size
      p_.page_size = kPageSizes[Below(std::size(kPageSizes))];
      if (kBackend.why_not(Problem(p_)).empty()) break;
    }
    longest_ = is_large_batch ? 130 : is_medium_batch ? 300 : OneIn(4) ? 1500 : OneIn(4) ? 70 : 400;
    longest_ = std::min(longest_, options_.longest);
  }

  // Global id of the pool's page 0. Near INT_MAX, the ids of the last pages wrap: as 64-bit
  // numbers, which they are, these are far from the pool, and modulo 2^32 they are pages of it.
  int DrawPageBegin() {
    switch (Below(16)) {
      case 0:
        return INT_MAX - Below(p_.num_pages);
      case 1:
        return INT_MIN + Below(100);
      case 2:
        return -1 - Below(100);
      default:
        return Below(2) ? 0 : Below(100);
    }
  }
  int PageId(int page) const { return static_cast<int>(int64_t{page_begin_} + page); }
  int WildId() {
    for (;;) {
      const int id = kWildIds[Below(std::size(kWildIds))];
      const int64_t page = int64_t{id} - page_begin_;
      if (page < 0 || page >= p_.num_pages) return id;
    }
  }
  // Now and then one that the pool does not have: then no key is there.
  int DrawLayer() {
    if (!OneIn(16)) return Below(p_.num_layers);
    return OneIn(4) ? p_.num_layers : kWildLayers[Below(std::size(kWildLayers))];
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
    p_.num_pages = num_used + 1 + Below(4);
    page_begin_ = DrawPageBegin();
    layer_ = DrawLayer();
    std::vector<int> order(p_.num_pages), table(size_t(p_.batch) * p_.max_pages_per_seq);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng_);
    const int wild_percent = Below(3) ? 0 : 30;
    for (size_t i = 0, next = 0; i < table.size(); ++i) {
      const int seq = i / p_.max_pages_per_seq, index = i % p_.max_pages_per_seq;
      const bool is_used = index * p_.page_size < lens[seq] && Below(100) >= wild_percent;
      table[i] = is_used ? PageId(order[next++]) : WildId();
    }
    if (OneIn(8)) lens[Below(p_.batch)] = kWildLengths[Below(std::size(kWildLengths))];
    p_.page_table = arena_.Copy(table);
    p_.seq_lens = arena_.Copy(lens);
    p_.layer = arena_.Copy(std::vector<int>{layer_});
    p_.page_begin = arena_.Copy(std::vector<int>{page_begin_});
  }

  void DrawPool() {
    const bool is_split = Below(2);
    const int64_t d_qk = p_.d_ckv + p_.d_kpe, tokens = int64_t{p_.num_pages} * p_.page_size;
    const int64_t padding = OneIn(3) ? 8 + 8 * Below(12) : 0;  // multiples of 16 bytes
    const int64_t ckv_width = (is_split ? p_.d_ckv : d_qk) + padding,
                  kpe_width = p_.d_kpe + padding;
    const int64_t row = ckv_width + (is_split ? kpe_width : 0);
    const size_t size = p_.num_layers * tokens * row;
    T* pool = arena_.template Take<T>(size);
    auto stream = [&](T* base, int64_t width) {
      return KvStream{base, tokens * width, p_.page_size * width, width};
    };
    p_.ckv = stream(pool, ckv_width);
    p_.kpe = is_split ? stream(pool + p_.num_layers * tokens * ckv_width, kpe_width)
                      : stream(pool + p_.d_ckv, ckv_width);
    FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(pool), size / 2,
                            p_.dtype == DType::kF16 ? 0x7e00fc00u : 0x7fff7f80u);  // NaN and Inf
    T* q = arena_.template Take<T>(num_rows() * d_qk);
    FillGauss<<<64, 256>>>(q, num_rows() * d_qk, seed_);
    p_.q_nope = q;
    p_.q_pe = q + num_rows() * p_.d_ckv;
  }

  DecodeProblem Problem(const DecodeParams& p) const {
    return {options_.device, ShapeOf(p), options_.variant};
  }

  // The same call for one sequence of the batch.
  DecodeParams Alone(int seq) const {
    DecodeParams p = p_;
    const int64_t row = int64_t{seq} * p.q_len * p.num_heads;
    p.q_nope = static_cast<const T*>(p.q_nope) + row * p.d_ckv;
    p.q_pe = static_cast<const T*>(p.q_pe) + row * p.d_kpe;
    p.page_table += int64_t{seq} * p.max_pages_per_seq;
    p.seq_lens += seq;
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
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.out), rows * p.d_ckv / 2, 0x7fff7fffu);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(p.lse), rows, 0x7fc00000u);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.scratch), p.scratch_bytes / 4, 0x7fc00000u);
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
    Compare<T><<<dim3(p_.q_len * p_.num_heads, p_.batch), 128>>>(p_, scores, p_.max_seq_len + 1,
                                                                 device_verdicts);
    Check(cudaMemcpy(verdicts.data(), device_verdicts, p_.batch * sizeof(Verdict),
                     cudaMemcpyDeviceToHost));
    for (int seq = 0; seq < p_.batch; ++seq) {
      const double relative = std::sqrt(verdicts[seq].error / std::max(verdicts[seq].norm, 1e-300));
      if (verdicts[seq].bad == 0 && !(verdicts[seq].norm > 0 && !(relative < kMaxRelative)))
        continue;
      return "sequence " + std::to_string(seq) + ": relative error " + std::to_string(relative) +
             ", " + std::to_string(verdicts[seq].bad) + " bad values";
    }
    return "";
  }

  Arena& arena_;
  const Options& options_;
  std::mt19937_64& rng_;
  const uint64_t seed_;
  float magnitude_ = 1.0f;  // of the cache
  DecodeParams p_{};
  char* scratch_ = nullptr;
  int longest_ = 0, layer_ = 0, page_begin_ = 0;
};

template <typename T>
std::string RunCase(Arena& arena, const Options& options, std::mt19937_64& rng, uint64_t seed) {
  Case<T> one(arena, options, rng, seed);
  const std::string problem = one.Run();
  return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
}

}  // namespace

int main(int argc, char** argv) {
  const int num_cases = argc > 1 ? std::atoi(argv[1]) : 1000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0));
  const Options options{{0, properties.major, properties.minor, properties.multiProcessorCount,
                         static_cast<int32_t>(properties.sharedMemPerBlockOptin)},
                        argc > 3 ? argv[3] : "",
                        argc > 4 ? std::atoi(argv[4]) : INT_MAX};
  Arena arena;
  int num_failures = 0;
  for (int i = 0; i < num_cases && num_failures < 20; ++i) {
    const uint64_t seed = first_seed + i;
    std::mt19937_64 rng(seed);
    const std::string problem = rng() % 2 ? RunCase<__half>(arena, options, rng, seed)
                                          : RunCase<__nv_bfloat16>(arena, options, rng, seed);
    if (problem.empty()) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), problem.c_str());
    std::fflush(stdout);
    ++num_failures;
  }
  std::printf("%d cases, %d failures\n", num_cases, num_failures);
  return num_failures == 0 ? 0 : 1;
}
