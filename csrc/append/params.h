// All that append is told about one call. Plain C++ (no FFI, no CUDA), as in decode/params.h.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "core/ragged.h"

namespace jax_mla::append {

// What the attention call behind the append returns.
struct PaddingResults {
  void* out;   // [num_tokens, num_heads, d_ckv], 16-bit values
  float* lse;  // [num_tokens, num_heads]
  int32_t num_heads;
};

struct AppendParams {
  // Operands. T is `dtype`; arrays are row-major and contiguous. If T is e4m3, the rows are codes
  // already, of a format that stores both parts so.
  const void* ckv;            // T[num_tokens, d_ckv], the new tokens
  const void* kpe;            // T[num_tokens, d_kpe]; null if d_kpe is 0
  const int32_t* page_table;  // [batch, max_pages_per_seq], global page ids
  // [num_tokens], place in the sequence; a negative one skips the token. Null: the tokens are the
  // newest ones of their sequences, and seq_lens says where those end.
  const int32_t* positions;
  const int32_t* layer;       // [1], which layer of the pool
  const int32_t* page_begin;  // [1], global id of the pool's page 0 (context parallelism)

  // The pool, written in place.
  MutableKvStream ckv_pages;  // CkvType[num_layers, num_pages, page_size, d_ckv]
  MutableKvStream kpe_pages;  // KpeType[num_layers, num_pages, page_size, d_kpe]

  int32_t batch;
  int32_t q_len;  // 0 with cu_q_lens
  int32_t d_ckv;
  int32_t d_kpe;  // 0: rows have no rotary part
  int32_t max_pages_per_seq;
  int32_t num_layers;  // 1 for a pool without layers
  int32_t num_pages;   // pages held by this pool: local ids are [0, num_pages)
  int32_t page_size;   // tokens
  DType dtype;

  // Ragged calls.
  const int32_t* seq_lens;   // [batch], the new tokens included; only without positions
  const int32_t* cu_q_lens;  // [batch + 1], see core/ragged.h; null: q_len tokens a sequence
  const int32_t* num_seqs;   // [1], sequences beyond it are absent; null: all are present
  int32_t num_tokens;        // rows of ckv; batch * q_len without cu_q_lens
  int32_t max_seq_len;       // of a longer sequence nothing is written; only without positions
  // [num_tokens], where they belong, if that has been found out; it follows from the arrays above.
  const TokenPlace* places;
  // Of tokens without a sequence these are cleared. Only with places; null `out`: nothing is.
  PaddingResults padding;

  KvFormat kv_format;
  int32_t kv_scale_stride;  // floats from one sequence's to the next's; 0: one for all
  const float* kv_scale;    // [1 or batch, 2], of ckv and kpe; null if the format has none

  // What the rows go through first. Not if they are codes.
  const float* norm_weight;    // [d_ckv]; null: ckv is written as it is
  const float* rope_table;     // [num_rope_positions, d_kpe]; null: kpe is written as it is
  const void* q_pe;            // T[num_tokens, num_heads, d_kpe], rotated as well; null: none
  void* rotated_q_pe;          // like q_pe
  int32_t num_rope_positions;  // positions are clamped to them
  int32_t num_heads;
  float norm_eps;
  bool rope_interleaved;
  // [batch], as seq_lens, but of whole sequences where those are shortened to the pages at hand.
  // They say by which angles tokens are rotated. Only with rope_table and without positions.
  const int32_t* rope_lens;
};

}  // namespace jax_mla::append
