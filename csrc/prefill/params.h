// One call of attention on keys and values of every head. Plain C++ (no FFI, no CUDA); pointers are
// device pointers.
#pragma once

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::prefill {

struct PrefillParams {
  // Operands. T is `dtype`; arrays are row-major and contiguous. Each sequence has a range of
  // queries and a range of keys. Ranges of queries must not overlap: the results of a query in two
  // of them are undefined.
  const void* q_nope;      // T[num_queries, num_heads, d_nope]
  const void* q_pe;        // T[num_queries, num_heads, d_kpe]
  const void* k_nope;      // T[num_keys, num_heads, d_nope]
  const void* kpe;         // T[num_keys, d_kpe], of all heads
  const void* v;           // T[num_keys, num_heads, d_v]
  const int32_t* q_begin;  // [num_seqs], the sequence's first query; any value: clamp
  const int32_t* q_end;    // [num_seqs]
  const int32_t* k_begin;  // [num_seqs], the sequence's first key; any value: clamp
  const int32_t* k_end;    // [num_seqs]

  // What earlier calls found for other keys, or null: this call's result is the merged one. In the
  // memory of the results, out may keep anything where lse stays -inf.
  const float* prior_out;  // [num_queries, num_heads, d_v]; not read where prior_lse is -inf
  const float* prior_lse;  // [num_queries, num_heads]

  // Results. Queries of no sequence, and queries without keys, get 0 and -inf, but see prior_out.
  void* out;   // T, or float32 with `out_is_f32`: [num_queries, num_heads, d_v]
  float* lse;  // [num_queries, num_heads], natural log

  int32_t* next_item;  // [1], device scratch

  int32_t num_queries;
  int32_t num_keys;
  int32_t num_heads;
  int32_t num_seqs;
  int32_t d_nope;
  int32_t d_kpe;
  int32_t d_v;
  DType dtype;
  bool out_is_f32;
  bool causal;  // query i of a sequence sees only its keys up to i
  float sm_scale;
};

}  // namespace jax_mla::prefill
