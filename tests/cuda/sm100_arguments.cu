// The backend "sm100" without a Blackwell GPU: all of it but CUTLASS's kernel, which a model
// replaces. The model gets the same parameters, and follows them as the kernel's source does
// (docs/kernels/decode_sm100.md): it trusts its page table and its lengths, reads whole pages, and
// multiplies what lies behind a sequence's end by 0. So the results are right only if the
// arguments, the kernel in front and the kernel behind are. On Hopper it also copies every page and
// the queries through the tensor maps that CUTLASS makes of the arguments. Prints the seeds of
// wrong cases.
//
//   nvcc -std=c++20 -O3 -DNDEBUG -arch=native --expt-relaxed-constexpr -DJAX_MLA_WITH_CUDA -Icsrc
//     -isystem=CUTLASS/{include,examples/common,examples/77_blackwell_fmha}
//     tests/cuda/sm100_arguments.cu csrc/decode/sm100/backend.cc csrc/decode/schedule/plan.cc
//     csrc/gpu/launch.cc
//   ./a.out 1000 [seed]
//   compute-sanitizer ./a.out 6 1 "" 300  (lengths up to 300)
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "arena.h"
#include "decode/backend.h"
#include "decode/sm100/launch.cuh"
#include "decode_reference.cuh"
#include "draw.h"
#include "guards.cuh"
#include "random_case.cuh"
#include "sm100_maps.cuh"
#include "sm100_model.cuh"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode;          // NOLINT
using namespace jax_mla::decode::sm100;   // NOLINT
using namespace jax_mla::decode::stress;  // NOLINT

bool has_maps = false;  // whether the GPU can copy through them

}  // namespace

namespace jax_mla::decode::sm100 {

// In place of the instance.
template <>
cudaError_t LaunchDecode<DType::kBf16>(const DecodeParams& p, const CallPlan& plan,
                                       const Buffers& b, cudaStream_t stream) {
  return LaunchAround(p, plan, b, stream, [&](const KernelParams& params) {
    Model<<<MlaKernel::get_grid_shape(params), kModelThreads, 0, stream>>>(params);
    if (has_maps) {
      CheckMaps<<<dim3(plan.max_tiles, plan.num_entries), kModelThreads, 0, stream>>>(params);
    }
    return cudaGetLastError();
  });
}

}  // namespace jax_mla::decode::sm100

namespace {

// One random call.
class Case {
 public:
  Case(Arena& arena, const Options& options, Draw& draw, uint64_t seed)
      : arena_(arena), guarded_(arena), draw_(draw), seed_(seed), device_(options.device) {
    arena.Reset();
    constexpr int kSms[] = {148, 148, 40, 2};
    device_.cc_major = 10, device_.cc_minor = 0, device_.num_sms = draw.Of(kSms);
    DrawShape();
    longest_ = std::min(longest_, options.longest);
    DrawTable();
    DrawPool();
    FillKeys<T><<<dim3(64, p_.batch), 128>>>(p_, seed, 1.0f);
  }

  // What went wrong, "" if nothing.
  std::string Run() {
    if (std::string reason = kSm100Backend.why_not(Problem(p_)); !reason.empty()) return reason;
    Check(cudaMemcpyToSymbol(num_model_errors, &kZero, sizeof(int)));
    Launch(p_);
    if (!error_.empty()) return error_;
    if (std::string wrong = CompareWithReference(); !wrong.empty()) return wrong;
    int* differences = arena_.Copy(std::vector<int>{0});
    if (p_.batch_invariant) CompareAlone(differences);
    guarded_.CountChanges(differences);
    int num_differences = 0, num_errors = 0;
    Check(cudaMemcpy(&num_differences, differences, sizeof(int), cudaMemcpyDeviceToHost));
    Check(cudaMemcpyFromSymbol(&num_errors, num_model_errors, sizeof(int)));
    if (!error_.empty()) return error_;
    if (num_errors != 0) return std::to_string(num_errors) + " wrong arguments or maps";
    return num_differences == 0 ? "" : std::to_string(num_differences) + " words differ";
  }

  std::string Describe() const {
    const auto text = [](const char* name, int64_t x) { return name + std::to_string(x); };
    return text("batch ", p_.batch) + text(", heads ", p_.num_heads) +
           text(", page size ", p_.page_size) + text(", longest ", longest_) +
           text(", width ", p_.ckv.token_stride) + text(", num_splits ", p_.num_splits) +
           text(", invariant ", p_.batch_invariant) + text(", layer ", layer_) +
           text(", SMs ", device_.num_sms);
  }

 private:
  static constexpr int kZero = 0;

  int Below(int n) { return draw_.Below(n); }
  bool OneIn(int n) { return draw_.OneIn(n); }

  void DrawShape() {
    constexpr int kHeads[] = {1, 16, 64, 100, 128, 128, 128, 129, 200, 256};
    constexpr int kPages[] = {128, 128, 256, 384};
    p_.dtype = DType::kBf16;
    p_.d_ckv = kDCkv, p_.d_kpe = kDKpe, p_.q_len = 1;
    p_.num_heads = draw_.Of(kHeads);
    p_.batch = OneIn(8) ? 20 + Below(30) : 1 + Below(5);
    p_.causal = !OneIn(4);
    p_.sm_scale = OneIn(8) ? 0.5f : 0.0721688f;
    p_.num_splits = Below(3) ? 0 : 1 + Below(8);
    p_.batch_invariant = OneIn(4);
    p_.num_layers = 1 + Below(3);
    p_.page_size = draw_.Of(kPages);
    longest_ = p_.batch > 5 ? 300 : OneIn(3) ? 1500 : 500;
    p_.num_tokens = p_.batch;
  }

  void DrawTable() {
    std::vector<int> lens(p_.batch);
    int num_used = 0;
    const auto num_pages = [&](int len) { return (len + p_.page_size - 1) / p_.page_size; };
    for (int& len : lens) {
      len = OneIn(8) ? 0 : OneIn(4) ? kTileTokens * Below(4) : Below(longest_ + 1);
      num_used += num_pages(len);
      p_.max_pages_per_seq = std::max(p_.max_pages_per_seq, num_pages(len));
    }
    p_.max_pages_per_seq += Below(3);
    p_.max_pages_per_seq = std::max(p_.max_pages_per_seq, 1);
    p_.max_seq_len = std::min(p_.max_pages_per_seq * p_.page_size, kMaxTokens);
    if (OneIn(4)) p_.max_seq_len = 1 + Below(p_.max_seq_len);  // the keys behind it stay NaN
    p_.num_pages = num_used + 1 + Below(4);
    const PageIds ids = DrawPageIds(draw_, p_.num_pages);
    layer_ = DrawLayer(draw_, p_.num_layers);
    const std::vector<int> table =
        DrawPageTable(draw_, ids, lens, p_.max_pages_per_seq, p_.page_size);
    if (OneIn(8)) lens[Below(p_.batch)] = draw_.Of(kWildLengths);
    for (int len : lens) lens_.push_back(std::clamp(len, 0, p_.max_seq_len));
    p_.page_table = arena_.Copy(table);
    p_.seq_lens = arena_.Copy(lens);
    p_.layer = arena_.Copy(std::vector<int>{layer_});
    p_.page_begin = arena_.Copy(std::vector<int>{ids.begin});
  }

  // The scratch lies before the pool or behind it: its pages are numbered from the lower one.
  void DrawPool() {
    const int64_t padding = OneIn(3) ? 16 + 16 * Below(12) : 0;
    const PoolLayout layout{.is_split = false,
                            .num_layers = p_.num_layers,
                            .num_tokens = int64_t{p_.num_pages} * p_.page_size,
                            .ckv_bytes = int64_t{kDCkv + kDKpe} * sizeof(T) + padding,
                            .kpe_bytes = 0,
                            .kpe_offset = kDCkv * sizeof(T)};
    const bool is_before = Below(2) != 0;
    layout.Place(nullptr, p_);  // the strides, which size the scratch
    if (is_before) TakeScratch();
    char* pool = arena_.Take<char>(layout.size());
    layout.Place(pool, p_);
    if (!is_before) TakeScratch();
    PoisonPool<T>(pool, layout.size());
    const size_t rows = size_t(p_.batch) * p_.num_heads;
    T* q = arena_.Take<T>(rows * (kDCkv + kDKpe));
    FillGauss<<<64, 256>>>(q, rows * (kDCkv + kDKpe), seed_);
    p_.q_nope = q;
    p_.q_pe = q + rows * kDCkv;
  }

  void TakeScratch() {
    p_.scratch_bytes = kSm100Backend.scratch_bytes(ShapeOf(p_));
    p_.scratch = guarded_.Take<char>(p_.scratch_bytes);
  }

  DecodeProblem Problem(const DecodeParams& p) const { return {device_, ShapeOf(p), ""}; }

  // With new, poisoned outputs and scratch.
  void Launch(DecodeParams& p) {
    const size_t rows = size_t(p.batch) * p.num_heads;
    p.out = guarded_.Take<T>(rows * kDCkv);
    p.lse = guarded_.Take<float>(rows);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.out), rows * kDCkv / 2, kNanPair);
    FillWords<<<64, 256>>>(reinterpret_cast<uint32_t*>(p.lse), rows, kNanWord);
    FillWords<<<64, 256>>>(static_cast<uint32_t*>(p.scratch), p.scratch_bytes / 4, kNanWord);
    error_ = kSm100Backend.launch(p, Problem(p), nullptr);
  }

  // One sequence alone, with a tighter bound of the lengths, has the same bits.
  void CompareAlone(int* differences) {
    const int seq = Below(p_.batch);
    const int64_t row = int64_t{seq} * p_.num_heads;
    DecodeParams alone = p_;
    alone.batch = alone.num_tokens = 1;
    alone.q_nope = static_cast<const T*>(p_.q_nope) + row * kDCkv;
    alone.q_pe = static_cast<const T*>(p_.q_pe) + row * kDKpe;
    alone.page_table += int64_t{seq} * p_.max_pages_per_seq;
    alone.seq_lens += seq;
    alone.max_seq_len = std::max(lens_[seq], 1);
    Launch(alone);
    const size_t words = size_t(p_.num_heads) * kDCkv / 2;
    CountDifferentWords<<<64, 256>>>(static_cast<const uint32_t*>(p_.out) + seq * words,
                                     static_cast<const uint32_t*>(alone.out), words, differences);
    CountDifferentWords<<<1, 256>>>(reinterpret_cast<const uint32_t*>(p_.lse + row),
                                    reinterpret_cast<const uint32_t*>(alone.lse), p_.num_heads,
                                    differences);
  }

  std::string CompareWithReference() {
    std::vector<Verdict> verdicts(p_.batch);
    Verdict* on_device = arena_.Copy(verdicts);
    const size_t rows = size_t(p_.batch) * p_.num_heads;
    float* scores = arena_.Take<float>(rows * (p_.max_seq_len + 1));
    Compare<T><<<dim3(p_.num_heads, p_.batch), 128>>>(p_, scores, p_.max_seq_len + 1, /*stride=*/1,
                                                      on_device);
    Check(
        cudaMemcpy(verdicts.data(), on_device, p_.batch * sizeof(Verdict), cudaMemcpyDeviceToHost));
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
  GuardedArena guarded_;
  Draw& draw_;
  const uint64_t seed_;
  gpu::DeviceFacts device_;
  DecodeParams p_{};
  std::vector<int> lens_;  // clamped
  int longest_ = 0, layer_ = 0;
  std::string error_;
};

}  // namespace

int main(int argc, char** argv) {
  const auto run = [](Arena& arena, const Options& options, Draw& draw, uint64_t seed, auto) {
    has_maps = options.device.cc_major >= 9;
    Case one(arena, options, draw, seed);
    const std::string problem = one.Run();
    return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
  };
  return RunCases(argc, argv, kArenaBytes, run);
}
