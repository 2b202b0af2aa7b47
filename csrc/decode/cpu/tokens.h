// Finds the tokens of a task in the cache. Only the files that are compiled for one instruction set
// include it, so it has internal linkage and uses no standard library (see kernel_impl.h).
#pragma once

#include <cstdint>

#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode::cpu {
namespace {

// The tokens of one KV tile that are present in this pool.
struct TokenTile {
  int32_t num_tokens = 0;
  int32_t position[kTileTokens];  // in the sequence, increasing
  const char* ckv[kTileTokens];   // addresses in the cache
  const char* kpe[kTileTokens];
};

// Walks over a task's tokens, page by page.
template <int64_t kCkvBytes, int64_t kKpeBytes>
class TokenCursor {
 public:
  TokenCursor(const DecodeParams& p, const Task& task)
      : p_(p),
        pages_(p.page_table + int64_t{task.seq_idx} * p.max_pages_per_seq),
        position_(task.token_begin),
        end_(task.token_end) {
    if (*p.layer < 0 || *p.layer >= p.num_layers)
      position_ = end_;  // of no layer is any token present
  }

  // Fills `tokens` with the next tokens that are present: kTileTokens of them, or fewer at the end.
  // The addresses after the last token repeat it, for loops that take several tokens at a time.
  void Next(TokenTile& tokens) {
    tokens.num_tokens = 0;
    while (tokens.num_tokens < kTileTokens && position_ < end_) {
      const int32_t page_idx = position_ / p_.page_size;
      const int64_t page_end = (int64_t{page_idx} + 1) * p_.page_size;
      const int32_t run_end = page_end < end_ ? static_cast<int32_t>(page_end) : end_;
      const int64_t page = int64_t{pages_[page_idx]} - *p_.page_begin;
      if (page < 0 || page >= p_.num_pages) {
        position_ = run_end;
        continue;
      }
      const int64_t page_row = position_ - int64_t{page_idx} * p_.page_size;
      const char* ckv = Address<kCkvBytes>(p_.ckv, page, page_row);
      const char* kpe = Address<kKpeBytes>(p_.kpe, page, page_row);
      for (; position_ < run_end && tokens.num_tokens < kTileTokens; ++position_) {
        const int32_t t = tokens.num_tokens++;
        tokens.position[t] = position_;
        tokens.ckv[t] = ckv;
        tokens.kpe[t] = kpe;
        ckv += p_.ckv.token_stride * kCkvBytes;
        kpe += p_.kpe.token_stride * kKpeBytes;
      }
    }
    for (int32_t t = tokens.num_tokens; t > 0 && t < kTileTokens; ++t) {
      tokens.ckv[t] = tokens.ckv[t - 1];
      tokens.kpe[t] = tokens.kpe[t - 1];
    }
  }

 private:
  template <int64_t kElementBytes>
  const char* Address(const KvStream& stream, int64_t page, int64_t page_row) const {
    const int64_t element = *p_.layer * stream.layer_stride + page * stream.page_stride +
                            page_row * stream.token_stride;
    return static_cast<const char*>(stream.base) + element * kElementBytes;
  }

  const DecodeParams& p_;
  const int32_t* pages_;
  int32_t position_;
  int32_t end_;
};

}  // namespace
}  // namespace jax_mla::decode::cpu
