// All that index_append is told about one call. Plain C++ (no FFI, no CUDA), as in append/params.h.
#pragma once

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::index_append {

struct IndexAppendParams {
  // Operands; arrays are row-major and contiguous.
  const void* k;              // dtype[num_tokens, d], the new keys
  const int32_t* page_table;  // [batch, max_pages_per_seq], global page ids
  const int32_t* positions;   // [num_tokens], place in the sequence; a negative one skips the token
  const int32_t* cu_q_lens;   // [batch + 1], see core/ragged.h; null: q_len tokens a sequence
  const int32_t* layer;       // [1], which layer of the pool
  const int32_t* page_begin;  // [1], global id of the pool's page 0 (context parallelism)

  // What keys go through first.
  const float* norm_weight;  // [d]; null: no norm
  const float* norm_bias;    // [d]; null: none
  const float* rope_table;   // [num_rope_positions, d_rope]; null: no rotation
  float norm_eps;
  int32_t num_rope_positions;  // positions are clamped to them
  int32_t d_rope;
  bool rope_interleaved;
  bool rope_last;  // the last d_rope values are rotated, not the first

  // The pool, written in place; core/index_pool.h.
  void* index_pages;

  int32_t batch;
  int32_t q_len;  // 0 with cu_q_lens
  int32_t num_tokens;
  int32_t d;
  int32_t max_pages_per_seq;
  int32_t num_layers;  // 1 for a pool without layers
  int32_t num_pages;   // of this pool: local ids are [0, num_pages)
  int32_t page_size;   // tokens
  DType dtype;         // of k, not kE4m3
  DType key_dtype;     // of the pool: `dtype`, or kE4m3
  bool power_of_two_scales;
};

}  // namespace jax_mla::index_append
