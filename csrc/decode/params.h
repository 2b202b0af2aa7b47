// All that a decode backend is told about one call. Plain C++ (no FFI, no CUDA): kernels take it by
// value, as `const __grid_constant__ DecodeParams`. Pointers are device pointers on CUDA and host
// pointers on the CPU. binding.cc fills it, and checks every rank, dimension and element type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/kv_format.h"
#include "decode/schedule/units.h"
#if defined(JAX_MLA_TRACE)
#include "gpu/trace.cuh"
#endif

namespace jax_mla::decode {

// Of a call that has no sliding window. A window has at most as many tokens as a sequence may have,
// so places minus windows fit in 32 bits.
inline constexpr int32_t kNoWindow = 0, kMaxWindow = 1 << 30;

struct DecodeParams {
  // Operands. T is `dtype`; arrays are row-major and contiguous.
  const void* q_nope;         // T[num_tokens, num_heads, d_ckv], already multiplied by W_UK
  const void* q_pe;           // T[num_tokens, num_heads, d_kpe], rotated; null if d_kpe is 0
  const int32_t* page_table;  // [batch, max_pages_per_seq], global page ids
  const int32_t* seq_lens;    // [batch], tokens, the new ones included; any value: clamp
  const int32_t* layer;       // [1], which layer of the pool
  const int32_t* page_begin;  // [1], global id of the pool's page 0 (context parallelism)
  KvStream ckv;               // CkvType[num_layers, num_pages, page_size, d_ckv]
  KvStream kpe;               // KpeType[num_layers, num_pages, page_size, d_kpe]

  // Results.
  void* out;   // T[num_tokens, num_heads, d_ckv]; 0 for a row that sees no token
  float* lse;  // [num_tokens, num_heads], natural log; -inf for a row that sees no token

  // Device scratch of `scratch_bytes`, uninitialised. Null on the CPU.
  void* scratch;
  int64_t scratch_bytes;

  int32_t batch;
  int32_t q_len;  // 0 with cu_q_lens
  int32_t num_heads;
  int32_t d_ckv;
  int32_t d_kpe;  // 0: rows have no rotary part
  int32_t max_pages_per_seq;
  int32_t num_layers;   // 1 for a pool without layers
  int32_t num_pages;    // of this pool: local ids are [0, num_pages)
  int32_t page_size;    // tokens
  int32_t max_seq_len;  // what seq_lens are clamped to, see BoundOfLengths

  float sm_scale;
  bool causal;           // query token i sees token t only if t <= seq_len - q_len + i
  bool batch_invariant;  // a sequence's result must not depend on the other sequences
  int32_t num_splits;    // at most this many parts a sequence; 0: the backend chooses
  DType dtype;

  // Ragged calls. Behind the rest, because ptxas spills in the combine kernel if offsets change.
  const int32_t* cu_q_lens;  // [batch + 1], see core/ragged.h; null: q_len tokens a sequence
  const int32_t* num_seqs;   // [1], sequences beyond it are absent; null: all are present
  int32_t num_tokens;        // rows of q_nope; batch * q_len without cu_q_lens
  // The query at place p sees only tokens t with p - sliding_window < t; kNoWindow: all. (This and
  // soft_cap lie where padding would be, so that no kernel changes.)
  int32_t sliding_window;
  UnitTable units;  // empty, but in a call of units (CUDA)

  // Scales: what is stored or passed is multiplied by them.
  KvFormat kv_format;
  int32_t kv_scale_stride;  // floats from one sequence's to the next's; 0: one for all
  const float* kv_scale;    // [1 or batch, 2], of ckv and kpe; null if the format has none
  int32_t q_scale_stride;
  float soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0: they stay as they are
  // [1 or batch, 1], of both parts of the query, whose values are then codes of e4m3, in `dtype`;
  // null: 1.
  const float* q_scale;
#if defined(JAX_MLA_TRACE)
  gpu::trace::Buffer trace;
#endif

  // Whether the scores need more than the causal mask.
  MLA_HOST_DEVICE bool HasMasks() const { return sliding_window > 0 || soft_cap > 0.0f; }

  MLA_HOST_DEVICE int32_t RowsPerToken() const {
    return units.units != nullptr ? units.heads_per_token : num_heads;
  }
};

// The scale of the queries of a sequence. Always inlined: see cpu/kernel.h.
[[gnu::always_inline]] inline float QueryScaleOf(const DecodeParams& p, int64_t seq_idx) {
  return p.q_scale == nullptr ? 1.0f : p.q_scale[seq_idx * p.q_scale_stride];
}

// What is known of a call when it is lowered. It decides which backend takes the call and how much
// scratch the call needs.
struct DecodeShape {
  DType dtype;
  int32_t batch;
  int32_t q_len;
  int32_t num_heads;
  int32_t d_ckv;
  int32_t d_kpe;
  int32_t page_size;
  int32_t max_pages_per_seq;  // a limit of the call; whatever is chosen goes by max_seq_len
  int32_t max_seq_len;        // see BoundOfLengths
  int32_t num_splits;
  bool batch_invariant;
  bool has_positive_scale = true;  // sm_scale > 0
  int32_t row_alignment = 16;      // largest number of bytes, up to 16, that divides a pool's row
  KvFormat kv_format = KvFormat::kPlain;
  int32_t packed_width = 0;  // elements of a row of a packed pool, padding included; 0: it is split
  bool has_query_codes = false;  // whether the queries are codes (DecodeParams::q_scale)
  int32_t sliding_window = kNoWindow;
  bool has_soft_cap = false;

  bool HasMasks() const { return sliding_window > 0 || has_soft_cap; }
};

// The most tokens that a sequence of a call may have: as many as its row of the page table has
// places for, or fewer if the caller says so. `max_seq_len` is the attribute of that name; 0: the
// caller says nothing.
inline int32_t BoundOfLengths(int32_t max_pages_per_seq, int32_t page_size, int64_t max_seq_len) {
  const int64_t places = std::min<int64_t>(int64_t{max_pages_per_seq} * page_size,
                                           std::numeric_limits<int32_t>::max());
  return static_cast<int32_t>(max_seq_len > 0 ? std::min(max_seq_len, places) : places);
}

// The largest power of two, up to 16, that divides the bytes of a row of every pool.
inline int32_t RowAlignment(const DecodeParams& p) {
  const int64_t bits = 16 | p.ckv.token_stride * ElementBytes(CkvType(p.kv_format, p.dtype)) |
                       p.kpe.token_stride * ElementBytes(KpeType(p.kv_format, p.dtype));
  return static_cast<int32_t>(bits & -bits);
}

// DecodeShape::packed_width. Only in a packed pool do the two streams have the same strides and lie
// in the same rows.
inline int32_t PackedWidth(const DecodeParams& p) {
  const int64_t ckv_bytes = int64_t{p.d_ckv} * ElementBytes(CkvType(p.kv_format, p.dtype));
  const bool is_packed =
      p.ckv.token_stride == p.kpe.token_stride &&
      static_cast<const char*>(p.kpe.base) == static_cast<const char*>(p.ckv.base) + ckv_bytes;
  return is_packed ? static_cast<int32_t>(p.ckv.token_stride) : 0;
}

inline DecodeShape ShapeOf(const DecodeParams& p) {
  return {.dtype = p.dtype,
          .batch = p.batch,
          .q_len = p.q_len,
          .num_heads = p.num_heads,
          .d_ckv = p.d_ckv,
          .d_kpe = p.d_kpe,
          .page_size = p.page_size,
          .max_pages_per_seq = p.max_pages_per_seq,
          .max_seq_len = p.max_seq_len,
          .num_splits = p.num_splits,
          .batch_invariant = p.batch_invariant,
          .has_positive_scale = p.sm_scale > 0.0f,
          .row_alignment = RowAlignment(p),
          .kv_format = p.kv_format,
          .packed_width = PackedWidth(p),
          .has_query_codes = p.q_scale != nullptr,
          .sliding_window = p.sliding_window,
          .has_soft_cap = p.soft_cap > 0.0f};
}

}  // namespace jax_mla::decode
