// CPU handler of "jax_mla_index_topk". Each query is work of its own.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/call_counter.h"
#include "core/index_page.h"
#include "core/ragged.h"
#include "core/thread_pool.h"
#include "index/binding.h"
#include "index/cpu/choose.h"
#include "index/cpu/query.h"

namespace jax_mla::index::cpu {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("index_topk_cpu");

// What a thread needs.
struct Worker {
  std::unique_ptr<float[]> query;        // [QueryFloats]
  std::unique_ptr<float[]> scores;       // [longest sequence], by position
  std::unique_ptr<int32_t[]> positions;  // the same size: the candidates
};

class TopkCall {
 public:
  explicit TopkCall(const TopkParams& params) : p_(params), places_(params.num_tokens) {
    for (TokenPlace& place : places_) place = {.seq_idx = kNoSequence, .position = -1};
    const int32_t num_seqs = NumPresentSeqs(p_.num_seqs, p_.batch);
    TokenRanges ranges(p_);
    for (int32_t b = 0; b < num_seqs; ++b) {
      const TokenRange tokens = ranges.Next();
      for (int32_t t = tokens.begin; t < tokens.end; ++t) {
        places_[t] = {.seq_idx = b,
                      .position = ClampedPosition(p_.seq_lens[b], p_.max_seq_len, tokens.end, t)};
        longest_ = std::max(longest_, places_[t].position + 1);
      }
    }
  }

  void Run(ffi::ThreadPool& pool) {
    if (p_.num_tokens == 0) return;
    const int64_t num_workers = std::clamp<int64_t>(pool.num_threads(), 1, p_.num_tokens);
    // All memory of the call is allocated here, so that nothing on the pool's threads can fail.
    workers_.resize(num_workers);
    for (Worker& worker : workers_) {
      worker.query = std::make_unique_for_overwrite<float[]>(QueryFloats(p_));
      worker.scores = std::make_unique_for_overwrite<float[]>(longest_);
      worker.positions = std::make_unique_for_overwrite<int32_t[]>(longest_);
    }
    ParallelFor(pool, p_.num_tokens, num_workers, *this);
  }

  // Serves one query.
  void operator()(int64_t worker_idx, int64_t token) {
    Worker& worker = workers_[worker_idx];
    const TokenPlace place = places_[token];
    int32_t* positions = worker.positions.get();
    const int64_t num_keys = Candidates(place, positions);
    const bool has_choice = place.position >= p_.k;  // it sees more than k keys
    if (has_choice && (num_keys > p_.k || p_.scores != nullptr)) {
      const Query query(p_, token, worker.query.get());
      for (int64_t i = 0; i < num_keys; ++i) {
        const int32_t position = positions[i];
        worker.scores[position] =
            query.Score(PageAt(place.seq_idx, position), position % p_.page_size) +
            0.0f;  // -0 becomes 0
      }
      if (num_keys > p_.k) ChooseBest(positions, num_keys, p_.k, worker.scores.get());
    }
    const int64_t count = std::min<int64_t>(num_keys, p_.k);
    p_.lens[token] = static_cast<int32_t>(count);
    int32_t* indices = p_.indices + token * p_.k;
    for (int64_t i = 0; i < count; ++i) indices[i] = IndexOf(place.seq_idx, positions[i]);
    std::fill(indices + count, indices + p_.k, -1);
    if (p_.scores == nullptr) return;
    float* scores = p_.scores + token * p_.k;
    std::fill(scores, scores + p_.k, 0.0f);
    for (int64_t i = 0; has_choice && i < count; ++i) scores[i] = worker.scores[positions[i]];
  }

 private:
  // The page id at a position of a sequence.
  int32_t PageIdAt(int64_t seq_idx, int32_t position) const {
    return p_.page_table[seq_idx * p_.max_pages_per_seq + position / p_.page_size];
  }

  // Its page in the pool, which exists.
  const char* PageAt(int64_t seq_idx, int32_t position) const {
    const int64_t page = int64_t{PageIdAt(seq_idx, position)} - *p_.page_begin;
    const int64_t idx = int64_t{*p_.layer} * p_.num_pages + page;
    return static_cast<const char*>(p_.index_pages) +
           idx * IndexPageBytes(p_.key_dtype, p_.d, p_.page_size);
  }

  int32_t IndexOf(int64_t seq_idx, int32_t position) const {
    if (p_.return_positions) return position;
    const int64_t slot = int64_t{PageIdAt(seq_idx, position)} * p_.page_size;
    return static_cast<int32_t>(slot + position % p_.page_size);
  }

  // Writes the positions that a query sees and whose page is in the pool; returns how many.
  int64_t Candidates(const TokenPlace& place, int32_t* positions) const {
    if (*p_.layer < 0 || *p_.layer >= p_.num_layers) return 0;
    int64_t count = 0;
    for (int32_t begin = 0; begin <= place.position; begin += p_.page_size) {
      const int64_t page = int64_t{PageIdAt(place.seq_idx, begin)} - *p_.page_begin;
      if (page < 0 || page >= p_.num_pages) continue;  // another device's page, or a wild id
      const int32_t end = std::min(begin + p_.page_size, place.position + 1);
      for (int32_t position = begin; position < end; ++position) positions[count++] = position;
    }
    return count;
  }

  const TopkParams& p_;
  std::vector<TokenPlace> places_;  // [num_tokens]
  std::vector<Worker> workers_;
  int32_t longest_ = 0;  // keys that a query sees, at most
};

ffi::Error Handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  TopkAttrs attrs) {
  calls.Increment();
  const auto params = ParseTopk(args, rets, attrs);
  if (!params) return params.error();
  if (!attrs.backend.empty() && attrs.backend != "cpu") {
    return ffi::Error::InvalidArgument(
        "jax_mla_index_topk: backend: expected \"cpu\" on this platform, got \"" +
        std::string(attrs.backend) + "\"");
  }
  try {
    TopkCall(*params).Run(pool);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "jax_mla_index_topk: no memory for the scores");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_mla::index::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaIndexTopkCpu, jax_mla::index::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::index::TopkAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
