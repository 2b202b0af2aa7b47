// Finds the rows of the cache that a task reads. Included only by the files that are compiled for
// one instruction set: internal linkage, no standard library (see cpu_kernel_impl.h).
#pragma once

#include <cstdint>

#include "decode/cpu/kernel.h"
#include "decode/params.h"

namespace jax_mla::decode {
namespace {

// The tokens of one tile that exist in this pool.
struct TileRows {
  int32_t num_tokens = 0;
  int32_t position[kTileTokens];  // in the sequence, increasing
  const char* ckv[kTileTokens];
  const char* kpe[kTileTokens];
};

// Walks the tokens [begin, end) of one sequence page by page.
template <int64_t kElementBytes>
class TokenCursor {
 public:
  TokenCursor(const DecodeParams& p, const CpuTask& task)
      : p_(p),
        pages_(p.page_table + int64_t{task.seq_idx} * p.max_pages_per_seq),
        position_(task.token_begin),
        end_(task.token_end) {
    if (*p.layer < 0 || *p.layer >= p.num_layers) position_ = end_;  // no such layer: owns nothing
  }

  // Fills `rows` with the next tokens; fewer than kTileTokens only at the end. The places after
  // them repeat the last token, for loops that take several tokens at a time.
  void Next(TileRows& rows) {
    rows.num_tokens = 0;
    while (rows.num_tokens < kTileTokens && position_ < end_) {
      const int32_t page_idx = position_ / p_.page_size;
      const int64_t page_end = (int64_t{page_idx} + 1) * p_.page_size;
      const int32_t run_end = page_end < end_ ? static_cast<int32_t>(page_end) : end_;
      const int64_t page = int64_t{pages_[page_idx]} - *p_.page_begin;
      if (page < 0 || page >= p_.num_pages) {
        position_ = run_end;
        continue;
      }
      const int64_t slot = position_ - int64_t{page_idx} * p_.page_size;
      const char* ckv = Address(p_.ckv, page, slot);
      const char* kpe = Address(p_.kpe, page, slot);
      for (; position_ < run_end && rows.num_tokens < kTileTokens; ++position_) {
        const int32_t t = rows.num_tokens++;
        rows.position[t] = position_;
        rows.ckv[t] = ckv;
        rows.kpe[t] = kpe;
        ckv += p_.ckv.token_stride * kElementBytes;
        kpe += p_.kpe.token_stride * kElementBytes;
      }
    }
    for (int32_t t = rows.num_tokens; t > 0 && t < kTileTokens; ++t) {
      rows.ckv[t] = rows.ckv[t - 1];
      rows.kpe[t] = rows.kpe[t - 1];
    }
  }

 private:
  const char* Address(const KvStream& stream, int64_t page, int64_t slot) const {
    const int64_t element =
        *p_.layer * stream.layer_stride + page * stream.page_stride + slot * stream.token_stride;
    return static_cast<const char*>(stream.base) + element * kElementBytes;
  }

  const DecodeParams& p_;
  const int32_t* pages_;
  int32_t position_;
  int32_t end_;
};

}  // namespace
}  // namespace jax_mla::decode
