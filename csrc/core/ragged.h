// Which token of a step belongs to which sequence, and where it lies there. Every platform includes
// this file, so that all agree about every array that a device may hold.
//
// The tokens of all sequences lie end to end. Let largest(j) be the largest of cu_q_lens[0] to
// cu_q_lens[j]. Sequence b has the tokens from largest(b) to largest(b + 1), clipped to
// [0, num_tokens]. So no array, however wild, makes two sequences share a token. Tokens before the
// first sequence and after the last one are padding.
#pragma once

#include <cstdint>

#include "core/divisor.h"

namespace jax_mla {

// The token is padding: it belongs to no sequence.
inline constexpr int32_t kNoSequence = -1;

// How many of `num_rows` sequences a step has. The pointer is null if it has all of them.
MLA_HOST_DEVICE int32_t NumPresentSeqs(const int32_t* num_seqs, int32_t num_rows) {
  if (num_seqs == nullptr || *num_seqs > num_rows) return num_rows;
  return *num_seqs < 0 ? 0 : *num_seqs;
}

// The sequence of a token by definition, which tests compare with: b = j - 1 for the first j in [0,
// num_present] with cu_q_lens[j] > token. There is none if j is 0.
MLA_HOST_DEVICE int32_t SequenceOfToken(const int32_t* cu_q_lens, int32_t num_present,
                                        int32_t token) {
  for (int32_t j = 0; j <= num_present; ++j) {
    if (cu_q_lens[j] > token) return j - 1;
  }
  return kNoSequence;
}

// The place of a token in its sequence, whose tokens end at `q_end` and whose length is `seq_len`,
// at most 2^30. It is negative if the sequence is shorter than its tokens.
MLA_HOST_DEVICE int32_t TokenPosition(int32_t seq_len, int32_t q_end, int32_t token) {
  return seq_len - (q_end - token);
}

// Whether new rows are written for a sequence of this length, as it was given. A length that the
// call has no room for is a mistake, and nothing says where its rows should go.
MLA_HOST_DEVICE bool IsWritable(int32_t seq_len, int32_t max_seq_len) {
  return seq_len >= 0 && seq_len <= max_seq_len;
}

// TokenPosition for a length that may be any number: it is clamped first to what the call has room
// for, as attention does it.
MLA_HOST_DEVICE int32_t ClampedPosition(int32_t seq_len, int32_t max_seq_len, int32_t q_end,
                                        int32_t token) {
  const int32_t len = seq_len < 0 ? 0 : seq_len > max_seq_len ? max_seq_len : seq_len;
  return TokenPosition(len, q_end, token);
}

// Where a token of a step belongs.
struct alignas(8) TokenPlace {
  int32_t seq_idx;   // kNoSequence: it is padding
  int32_t position;  // in the sequence; negative: its row is not written
};

struct TokenRange {
  int32_t begin;
  int32_t end;

  MLA_HOST_DEVICE int32_t size() const { return end - begin; }
};

// The token ranges of the sequences of a call, one after another. Params has the members cu_q_lens
// (null if every sequence has q_len tokens), q_len and num_tokens.
template <typename Params>
class TokenRanges {
 public:
  MLA_HOST_DEVICE explicit TokenRanges(const Params& params) : p_(params) {
    if (p_.cu_q_lens != nullptr) end_ = Clip(p_.cu_q_lens[0]);
  }

  // Where the tokens of the next sequence begin.
  MLA_HOST_DEVICE int32_t begin() const { return end_; }

  // The range of the next sequence; of sequence 0 at first. Call it once for each sequence.
  MLA_HOST_DEVICE TokenRange Next() {
    const int32_t begin = end_;
    if (p_.cu_q_lens == nullptr) {
      end_ += p_.q_len;
    } else {
      const int32_t end = Clip(p_.cu_q_lens[++seq_idx_]);
      if (end > end_) end_ = end;
    }
    return {begin, end_};
  }

 private:
  MLA_HOST_DEVICE int32_t Clip(int32_t token) const {
    return token < 0 ? 0 : token > p_.num_tokens ? p_.num_tokens : token;
  }

  const Params& p_;
  int32_t seq_idx_ = 0;
  int32_t end_ = 0;
};

}  // namespace jax_mla
