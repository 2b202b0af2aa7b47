// Random calls of index_topk against scores in double precision and a choice on the host. Unused
// slots hold NaN, page ids behind a sequence's end are wild, as are some lengths, layers and
// cu_q_lens. Operands of small whole numbers give exact scores, and so thousands of ties: then the
// result must be the reference's. Results are poisoned, every call runs three times, with scratch
// of different sizes, and must repeat bit for bit; guards around the results must stay.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
//     -DJAX_MLA_WITH_CUDA -DJAX_MLA_WITH_SM90A -Icsrc -I<cutlass>/include
//     tests/cuda/index_topk_stress.cu csrc/index/{choose_backend.cc,choose.cu,places.cu}
//     csrc/index/sm80/scores.cu csrc/index/sm90/launch.cu csrc/gpu/*.cc
//   ./a.out 1000 [seed ["" | sm90 | sm80 [longest]]]
//
// On failure the call's seed is printed: `./a.out 1 SEED` runs it alone. `longest` caps the
// sequences, for sanitizers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "arena.h"
#include "core/ragged.h"
#include "draw.h"
#include "guards.cuh"
#include "index/choose_backend.h"
#include "index_case.cuh"
#include "random_case.cuh"

namespace {

using namespace jax_mla;                  // NOLINT: a program, not a header
using namespace jax_mla::decode::stress;  // NOLINT
using namespace jax_mla::index;           // NOLINT
using namespace jax_mla::index::check;    // NOLINT

constexpr int kTopks[] = {1, 2, 16, 17, 64, 100, 512, 1000, 2048, 2048, 2176, 4096};
constexpr int kHeads[] = {1, 5, 8, 16, 24, 32, 32, 33, 48, 64, 64};
constexpr int64_t kMaxScores = 4 << 20;  // of a call

class Case {
 public:
  Case(Arena& arena, const Options& options, Draw& draw, uint64_t seed)
      : arena_(arena), guarded_(arena), options_(options), draw_(draw), seed_(seed) {
    arena.Reset();
    DrawShape();
    DrawSequences();
    DrawPool();
    DrawQueries();
  }

  // What went wrong, "" if nothing.
  std::string Run() {
    const int64_t all = ScratchBytes(p_.num_tokens, p_.max_seq_len, p_.k, p_.cu_q_lens != nullptr);
    const int64_t places = PlaceBytes(p_.num_tokens, p_.cu_q_lens != nullptr);
    const int64_t row = ScoreStride(p_.max_seq_len) * 4;
    Results first = Prepare(), again = Prepare(), positions = Prepare();
    int* counts = arena_.Copy(std::vector<int>(2));
    std::string error = Launch(first, all, false);
    if (error.empty()) error = Launch(again, all, false);
    if (error.empty()) {
      error = Launch(positions, places + row * (1 + draw_.Below(p_.num_tokens)), true);
    }
    if (!error.empty()) return error;
    guarded_.CountChanges(counts + 1);
    int totals[2];
    Check(cudaMemcpy(totals, counts, sizeof(totals), cudaMemcpyDeviceToHost));
    if (totals[1] != 0) return Text("guards changed: ", totals[1]);
    return Compare(first, again, positions);
  }

  std::string Describe() const {
    return Text("heads ", p_.num_heads) + Text(", k ", p_.k) + Text(", page ", p_.page_size) +
           Text(", batch ", p_.batch) + Text(", tokens ", p_.num_tokens) +
           Text(", q_len ", p_.q_len) + Text(", max_seq_len ", p_.max_seq_len) + ", keys " +
           DTypeName(p_.key_dtype) + ", q " + DTypeName(p_.q_dtype) +
           Text(", values ", static_cast<int>(values_)) + Text(", layer ", layer_) +
           Text(" of ", p_.num_layers);
  }

 private:
  struct Results {
    int32_t* indices;
    int32_t* lens;
    float* scores;
    std::vector<int32_t> host_indices, host_lens;
    std::vector<float> host_scores;
  };

  void DrawShape() {
    p_.key_dtype = draw_.Below(3) ? DType::kE4m3 : DType::kBf16;
    p_.q_dtype = p_.key_dtype == DType::kE4m3 && draw_.Below(6) ? DType::kE4m3 : DType::kBf16;
    p_.num_heads = draw_.OneIn(4) ? 1 + draw_.Below(64) : draw_.Of(kHeads);
    p_.d = kDim;
    p_.page_size = draw_.OneIn(2) ? 64 : draw_.Of(kPageSizes);
    if (options_.kernels == "sm90") {
      p_.q_dtype = p_.key_dtype;
      constexpr int kBoxes[] = {8, 16, 32, 64, 128, 256};
      p_.page_size = draw_.Of(kBoxes);
    }
    p_.k = draw_.Of(kTopks);
    p_.batch = draw_.OneIn(8) ? 33 + draw_.Below(100) : 1 + draw_.Below(6);
    values_ = draw_.OneIn(8) ? Values::kNegative : draw_.Below(3) ? Values::kWhole : Values::kGauss;
    p_.return_positions = false;
  }

  int DrawLength(int most) {
    return draw_.OneIn(8)   ? 0
           : draw_.OneIn(3) ? 1 + draw_.Below(std::min(most, 100))
           : draw_.OneIn(3) ? std::min(most, p_.k + draw_.Below(5))
                            : 1 + draw_.Below(most);
  }

  void DrawSequences() {
    int most = draw_.OneIn(6) ? 70000 : draw_.OneIn(2) ? 9000 : 2600;
    if (p_.batch > 32) most = 3000;
    // Longer than what the registers of a group of CTAs hold.
    if (p_.batch == 1 && draw_.OneIn(3)) most = 600000;
    most = std::min(most, options_.longest);
    lens_.resize(p_.batch);
    for (int& len : lens_) len = DrawLength(most);
    const int longest = std::max(1, *std::max_element(lens_.begin(), lens_.end()));
    p_.max_pages_per_seq = (longest + p_.page_size - 1) / p_.page_size + draw_.Below(3);
    const int places = p_.max_pages_per_seq * p_.page_size;
    p_.max_seq_len = draw_.OneIn(3) ? std::max(1, longest - draw_.Below(20)) : places;
    const auto most_tokens =
        static_cast<int>(std::max<int64_t>(1, kMaxScores / ScoreStride(p_.max_seq_len)));
    const int most_each = std::max(1, std::min(most_tokens / p_.batch, draw_.OneIn(3) ? 200 : 9));
    if (draw_.OneIn(2)) {
      p_.q_len = 1 + draw_.Below(std::min(most_each, 5));
      p_.num_tokens = p_.batch * p_.q_len;
    } else {
      p_.q_len = 0;
      std::vector<int> ends(p_.batch + 1);
      ends[0] = draw_.OneIn(3) ? draw_.Below(4) : 0;
      for (int seq = 0; seq < p_.batch; ++seq) {
        ends[seq + 1] = ends[seq] + (draw_.OneIn(5) ? 0 : 1 + draw_.Below(most_each));
      }
      p_.num_tokens = std::max(1, ends.back() + (draw_.OneIn(3) ? draw_.Below(5) : 0));
      if (draw_.OneIn(4)) {  // wild
        for (int& end : ends) {
          if (draw_.OneIn(4))
            end = draw_.OneIn(2) ? draw_.Below(p_.num_tokens) : draw_.Of(kWildIds);
        }
      }
      cu_q_lens_ = ends;
      p_.cu_q_lens = arena_.Copy(ends);
    }
    num_seqs_ = draw_.OneIn(2) ? p_.batch : draw_.Below(p_.batch + 2) - 1;
    if (draw_.OneIn(2)) p_.num_seqs = arena_.Copy(std::vector<int>{num_seqs_});
    if (p_.num_seqs == nullptr) num_seqs_ = p_.batch;
    if (draw_.OneIn(4)) {  // some lengths are wild: they are clamped
      for (int& len : lens_) {
        if (draw_.OneIn(4)) len = draw_.Of(kWildLengths);
      }
    }
    p_.seq_lens = arena_.Copy(lens_);
  }

  int Length(int seq) const { return std::clamp(lens_[seq], 0, p_.max_seq_len); }

  void DrawPool() {
    std::vector<int> lengths(p_.batch);
    int num_used = 0;
    for (int seq = 0; seq < p_.batch; ++seq) {
      lengths[seq] = Length(seq);
      num_used += (lengths[seq] + p_.page_size - 1) / p_.page_size;
    }
    p_.num_layers = 1 + draw_.Below(3);
    p_.num_pages = std::max(1, num_used + draw_.Below(4));
    const PageIds ids = DrawPageIds(draw_, p_.num_pages);
    table_ = DrawPageTable(draw_, ids, lengths, p_.max_pages_per_seq, p_.page_size);
    begin_ = ids.begin;
    layer_ = DrawLayer(draw_, p_.num_layers);
    p_.page_table = arena_.Copy(table_);
    p_.page_begin = arena_.Copy(std::vector<int>{begin_});
    p_.layer = arena_.Copy(std::vector<int>{layer_});
    const size_t bytes =
        p_.num_layers * p_.num_pages * IndexPageBytes(p_.key_dtype, kDim, p_.page_size);
    auto* pool = arena_.Take<uint32_t>(bytes / 4 + 1);
    FillWords<<<256, 256>>>(pool, bytes / 4, 0xffffffffu);
    p_.index_pages = pool;
    const int one_in_nan = draw_.OneIn(4) ? 1 + draw_.Below(30) : 0;
    index::check::FillKeys<<<dim3(1000, p_.batch), 64>>>(p_, values_, seed_, one_in_nan);
  }

  void DrawQueries() {
    const int64_t size = int64_t{p_.num_tokens} * p_.num_heads;
    void* q = arena_.Take<uint8_t>(size * kDim * ElementBytes(p_.q_dtype));
    FillElements<<<256, 256>>>(q, p_.q_dtype, size * kDim, values_, seed_);
    auto* weights = arena_.Take<float>(size);
    FillWeights<<<256, 256>>>(weights, size, values_, seed_ + 1);
    p_.q = q;
    p_.weights = weights;
  }

  int64_t num_entries() const { return int64_t{p_.num_tokens} * p_.k; }

  Results Prepare() {
    Results results;
    results.indices = guarded_.Take<int32_t>(num_entries());
    results.lens = guarded_.Take<int32_t>(p_.num_tokens);
    results.scores = guarded_.Take<float>(num_entries());
    FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(results.indices), num_entries(),
                            0x7ffffff0);
    FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(results.lens), p_.num_tokens, 0x7ffffff0);
    FillWords<<<256, 256>>>(reinterpret_cast<uint32_t*>(results.scores), num_entries(), kNanWord);
    return results;
  }

  std::string Launch(Results& results, int64_t scratch_bytes, bool return_positions) {
    TopkParams call = p_;
    call.return_positions = return_positions;
    call.indices = results.indices;
    call.lens = results.lens;
    call.scores = results.scores;
    call.scratch = guarded_.Take<uint8_t>(scratch_bytes);
    call.scratch_bytes = scratch_bytes;
    FillWords<<<256, 256>>>(static_cast<uint32_t*>(call.scratch), scratch_bytes / 4, 0xffffffffu);
    if (std::string error = RunCuda(call, options_.kernels, options_.device, nullptr);
        !error.empty()) {
      return error;
    }
    Check(cudaDeviceSynchronize());
    results.host_indices = Pull(results.indices, num_entries());
    results.host_lens = Pull(results.lens, p_.num_tokens);
    results.host_scores = Pull(results.scores, num_entries());
    return "";
  }

  template <typename T>
  static std::vector<T> Pull(const T* device, size_t size) {
    std::vector<T> host(size);
    Check(cudaMemcpy(host.data(), device, size * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

  int Slot(int seq, int position) const {
    return table_[size_t(seq) * p_.max_pages_per_seq + position / p_.page_size] * p_.page_size +
           position % p_.page_size;
  }

  std::string Compare(const Results& first, const Results& again, const Results& positions) {
    // Where each token belongs, by the definition.
    std::vector<int> seq_of(p_.num_tokens, -1), visible(p_.num_tokens);
    struct {
      const int32_t* cu_q_lens;
      int32_t q_len, num_tokens;
    } ragged{p_.q_len == 0 ? cu_q_lens_.data() : nullptr, p_.q_len, p_.num_tokens};
    TokenRanges ranges(ragged);
    for (int seq = 0; seq < std::min(num_seqs_, p_.batch); ++seq) {
      const TokenRange range = ranges.Next();
      for (int token = range.begin; token < range.end; ++token) {
        seq_of[token] = seq;
        visible[token] =
            std::max(0, ClampedPosition(lens_[seq], p_.max_seq_len, range.end, token) + 1);
      }
    }
    const int64_t stride = std::max(1, *std::max_element(visible.begin(), visible.end()));
    auto* scores = arena_.Take<ReferenceScore>(stride * p_.num_tokens);
    ReferenceScores<<<dim3((stride + 7) / 8, p_.num_tokens), 256>>>(
        p_, arena_.Copy(seq_of), arena_.Copy(visible), stride, scores);
    Check(cudaGetLastError());
    const std::vector<ReferenceScore> reference = Pull(scores, stride * p_.num_tokens);
    for (int token = 0; token < p_.num_tokens; ++token) {
      const int32_t* got = &positions.host_indices[int64_t{token} * p_.k];
      const float* got_scores = &positions.host_scores[int64_t{token} * p_.k];
      const int num_visible = seq_of[token] < 0 ? 0 : visible[token];
      std::string problem = CompareRow(&reference[token * stride], num_visible, got,
                                       positions.host_lens[token], got_scores);
      const int number = positions.host_lens[token];
      for (int i = 0; i < p_.k && problem.empty(); ++i) {
        const int64_t entry = int64_t{token} * p_.k + i;
        const int slot = i < number ? Slot(seq_of[token], got[i]) : -1;
        if (first.host_indices[entry] != slot) problem = Text("wrong slot at ", i);
        if (first.host_indices[entry] != again.host_indices[entry]) problem = "does not repeat";
        if (i < number && std::memcmp(&first.host_scores[entry], &got_scores[i], 4) != 0) {
          problem = Text("other score in other slabs, at ", i);
        }
      }
      if (first.host_lens[token] != number || again.host_lens[token] != number) {
        problem = "lens do not repeat";
      }
      if (!problem.empty()) {
        return Text("token ", token) + Text(" seq ", seq_of[token]) +
               Text(" visible ", num_visible) + ": " + problem;
      }
    }
    return "";
  }

  std::string CompareRow(const ReferenceScore* reference, int num_visible, const int32_t* got,
                         int number, const float* got_scores) const {
    std::vector<int> order;
    for (int position = 0; position < num_visible; ++position) {
      if (reference[position].is_present) order.push_back(position);
    }
    const int wanted = std::min<int>(p_.k, order.size());
    if (number != wanted) return Text("lens ", number) + Text(", expected ", wanted);
    for (int i = 0; i < p_.k; ++i) {
      if (i >= number && got[i] != -1) return Text("not -1 at ", i);
      if (i >= number) continue;
      if (got[i] < 0 || got[i] >= num_visible || !reference[got[i]].is_present) {
        return Text("no candidate: ", got[i]);
      }
      if (i > 0 && got[i] <= got[i - 1]) return Text("not ascending at ", i);
      const bool has_score = num_visible > p_.k;
      const double expected = has_score ? reference[got[i]].score : 0.0;
      const double most_error = has_score ? reference[got[i]].error : 0.0;
      const bool is_nan = expected != expected;
      if (is_nan ? got_scores[i] == got_scores[i]
                 : !(std::abs(got_scores[i] - expected) <= most_error)) {
        return Text("wrong score at position ", got[i]) + ": " + std::to_string(got_scores[i]) +
               ", expected " + std::to_string(expected);
      }
    }
    if (wanted == 0) return "";
    const auto key = [&](int position) {  // NaN is lowest
      const double score = reference[position].score;
      return score == score ? score : -INFINITY;
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
    std::vector<char> is_chosen(num_visible);
    for (int i = 0; i < number; ++i) is_chosen[got[i]] = true;
    const double threshold = key(order[wanted - 1]);
    double error = 0.0;
    if (values_ == Values::kGauss) {
      for (int position : order) {
        if (reference[position].score == reference[position].score) {
          error = std::max(error, 2 * reference[position].error);
        }
      }
    }
    for (size_t i = 0; i < order.size(); ++i) {
      const int position = order[i];
      const bool is_wanted = i < size_t(wanted);
      if (is_wanted == bool(is_chosen[position])) continue;
      if (values_ == Values::kGauss && std::abs(key(position) - threshold) <= error) continue;
      return Text(is_wanted ? "not chosen: " : "chosen: ", position) + Text(", rank ", i) +
             ", score " + std::to_string(key(position)) + ", threshold " +
             std::to_string(threshold);
    }
    return "";
  }

  Arena& arena_;
  GuardedArena guarded_;
  const Options& options_;
  Draw& draw_;
  const uint64_t seed_;
  TopkParams p_{};
  Values values_;
  std::vector<int> lens_, cu_q_lens_, table_;
  int num_seqs_ = 0, begin_ = 0, layer_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const auto run = [](Arena& arena, const Options& options, Draw& draw, uint64_t seed, auto) {
    Case one(arena, options, draw, seed);
    const std::string problem = one.Run();
    return problem.empty() ? "" : problem + " (" + one.Describe() + ")";
  };
  return RunCases(argc, argv, kArenaBytes, run);
}
