// Copies ckv and kpe of one new token to its page, by one warp.
//
// Where a token goes is known only after two dependent loads (its position, then its page's id). A
// warp therefore loads the token's values first, and stores them when the place is known.
#pragma once

#include <cstdint>

#include "append/params.h"
#include "core/kv_format.h"
#include "core/ragged.h"
#include "gpu/launch.h"
#include "gpu/ragged.cuh"
#include "gpu/token_row.cuh"

namespace jax_mla::append {

inline constexpr int kWarpThreads = 32;
// Vectors of a token that a lane holds in registers: all, for 512 + 64 elements of 16 bits.
inline constexpr int kHeldCkv = 2, kHeldKpe = 1;

template <typename V>
struct KernelParams {
  gpu::RowStream<V> ckv;
  gpu::RowStream<V> kpe;
  AppendParams call;
};

template <typename V>
KernelParams<V> MakeKernelParams(const AppendParams& p) {
  const int64_t element_bytes = ElementBytes(p.dtype);
  return {gpu::MakeRowStream<V>(p.ckv, p.ckv_pages, p.d_ckv, element_bytes),
          gpu::MakeRowStream<V>(p.kpe, p.kpe_pages, p.d_kpe, element_bytes), p};
}

// The sequence of a token, or kNoSequence, without `places`. All lanes get it.
__device__ __forceinline__ int32_t SequenceOf(const AppendParams& p, int32_t token) {
  if (p.cu_q_lens == nullptr && p.num_seqs == nullptr) return token / p.q_len;
  const int32_t present = NumPresentSeqs(p.num_seqs, p.batch);
  if (p.cu_q_lens != nullptr) return gpu::FindSequence(p.cu_q_lens, present, token);
  const int32_t seq = token / p.q_len;
  return seq < present ? seq : kNoSequence;
}

// Where the tokens of a sequence end among those of the step.
__device__ __forceinline__ int32_t TokensEnd(const AppendParams& p, int32_t seq) {
  return p.cu_q_lens == nullptr ? (seq + 1) * p.q_len
                                : min(__ldg(p.cu_q_lens + seq + 1), p.num_tokens);
}

// The position of a token in its sequence, or less than 0 if the token is not written.
__device__ __forceinline__ int32_t PositionOf(const AppendParams& p, int32_t token, int32_t seq) {
  if (p.positions != nullptr) return __ldg(p.positions + token);
  const int32_t seq_len = __ldg(p.seq_lens + seq);
  if (!IsWritable(seq_len, p.max_seq_len)) return -1;
  return TokenPosition(seq_len, TokensEnd(p, seq), token);
}

// Where a token belongs, in a call without positions.
__device__ __forceinline__ TokenPlace PlaceOf(const AppendParams& p, int32_t token) {
  if (p.places != nullptr) {
    const int2 place = __ldg(reinterpret_cast<const int2*>(p.places) + token);
    return {place.x, place.y};
  }
  const int32_t seq = SequenceOf(p, token);
  return {seq, seq == kNoSequence ? -1 : PositionOf(p, token, seq)};
}

// The place of a token by which it is rotated, any number, in a call without positions.
__device__ __forceinline__ int32_t RotationPosition(const AppendParams& p, int32_t token,
                                                    int32_t seq) {
  return ClampedPosition(__ldg(p.rope_lens + seq), p.max_seq_len, TokensEnd(p, seq), token);
}

// Copies a token to its place in its sequence. Called by all lanes. `seq_of()` gives the sequence;
// it is asked late, because whatever is known early takes registers.
template <typename V, class SeqOf>
__device__ __forceinline__ void AppendToken(const KernelParams<V>& p, int32_t token, SeqOf seq_of,
                                            int32_t position) {
  const int lane = threadIdx.x % kWarpThreads;
  V held_ckv[kHeldCkv], held_kpe[kHeldKpe];
  gpu::LoadRow(p.ckv, token, lane, held_ckv);
  gpu::LoadRow(p.kpe, token, lane, held_kpe);

  gpu::PdlLaunchDependents();
  const int32_t layer = __ldg(p.call.layer);
  if (position < 0 || layer < 0 || layer >= p.call.num_layers) return;
  const int32_t page_idx = position / p.call.page_size;
  if (page_idx >= p.call.max_pages_per_seq) return;
  const int32_t* page_ids = p.call.page_table + int64_t{seq_of()} * p.call.max_pages_per_seq;
  const int64_t page = int64_t{__ldg(page_ids + page_idx)} - __ldg(p.call.page_begin);
  if (page < 0 || page >= p.call.num_pages) return;  // another device's page, or a wild id
  const gpu::RowPlace place{layer, static_cast<int32_t>(page),
                            position - page_idx * p.call.page_size};
  gpu::StoreRow(p.ckv, token, place, lane, held_ckv);
  gpu::StoreRow(p.kpe, token, place, lane, held_kpe);
}

}  // namespace jax_mla::append
