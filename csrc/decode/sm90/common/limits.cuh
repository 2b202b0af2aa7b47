// Which tokens of its sequence a query row sees: the one place that knows of masks. What is absent
// from the pool is no matter of rows, and is hidden by the block's key mask beside this.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "decode/params.h"
#include "decode/schedule/units.h"
#include "decode/sm90/common/sizes.h"

namespace jax_mla::decode::sm90 {

// What a call of units says of rows is in the unit; otherwise rows are those of a sequence.
template <class C>
struct Limits {
  const DecodeParams& decode;
  const Divisor& num_heads;  // rows of a token
  const Unit* unit;          // Config::kHasUnits alone

  // The end of what query row `row` of the sequence, or of the unit, sees, counted from the
  // sequence's end: 0 or less. For a row that the sequence does not have it may be more.
  __device__ __forceinline__ int32_t End(int32_t row) const {
    if constexpr (C::kHasUnits) {
      const int32_t query = num_heads.Floor(unit->first_head + row);
      return min(unit->first_limit + query - unit->seq_len, 0);
    }
    // A query does not see the tokens of the queries behind it.
    return decode.causal ? num_heads.Floor(row) - (decode.q_len - 1) : 0;
  }
  // The same as a token of a sequence of `seq_len`, and never behind its last one.
  __device__ __forceinline__ int32_t EndToken(int32_t row, int32_t seq_len) const {
    if constexpr (C::kHasUnits) {
      return min(unit->first_limit + num_heads.Floor(unit->first_head + row), seq_len);
    }
    const int32_t query = min(num_heads.Floor(row), decode.q_len - 1);
    return decode.causal ? seq_len - (decode.q_len - 1 - query) : seq_len;
  }
  // How many of the sequence's last tokens some row does not see.
  __device__ __forceinline__ int32_t HiddenByRows() const {
    if constexpr (C::kHasUnits) return unit->seq_len - unit->first_limit;
    return decode.causal ? decode.q_len - 1 : 0;
  }
  // How many tokens of a sequence of `seq_len` every row sees.
  __device__ __forceinline__ int32_t SeenByAll(int32_t seq_len) const {
    if constexpr (C::kHasUnits) return unit->first_limit;
    return seq_len - (decode.causal ? decode.q_len - 1 : 0);
  }
};

// Bits [0, n) of a block's tokens, n clamped to [0, kBlockN].
__device__ __forceinline__ uint64_t LowBits(int n) {
  static_assert(kBlockN == 64, "a token is a bit of uint64_t");
  return n >= kBlockN ? ~uint64_t{0} : n <= 0 ? uint64_t{0} : (uint64_t{1} << n) - 1;
}

}  // namespace jax_mla::decode::sm90
