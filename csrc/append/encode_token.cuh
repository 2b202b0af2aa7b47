// Writes one new token to the cache, by one warp: its row is normalised and rotated where the call
// says so, and stored in the format of the cache. Padding has no row; its results are cleared.
//
// As in append_token.cuh, all that does not depend on the token's place is loaded before the place
// is known.
#pragma once

#include <cstdint>

#include "append/append_token.cuh"
#include "append/ckv_row.cuh"
#include "append/clear_padding.cuh"
#include "append/kpe_row.cuh"
#include "append/params.h"
#include "core/kv_format.h"
#include "gpu/launch.h"
#include "gpu/token_row.cuh"

namespace jax_mla::append {

// The address of a row of the cache, whose elements have `element_bytes`.
__device__ __forceinline__ char* RowAddress(const MutableKvStream& pool, const gpu::RowPlace& place,
                                            int32_t element_bytes) {
  const int64_t to = place.layer * pool.layer_stride + place.page * pool.page_stride +
                     place.row * pool.token_stride;
  return static_cast<char*>(pool.base) + to * element_bytes;
}

// The reciprocals of a sequence's scales, of ckv and of kpe; 1 without scales.
__device__ __forceinline__ float2 InverseScales(const AppendParams& p, int32_t seq) {
  if (p.kv_scale == nullptr) return {1.0f, 1.0f};
  const float* scales = p.kv_scale + int64_t{seq} * p.kv_scale_stride;
  return {1.0f / __ldg(scales), 1.0f / __ldg(scales + 1)};
}

// Called by all lanes. `inverse_width`: 1 / d_ckv. `kSavesRegisters`: at the price of a longer
// latency.
template <DType kDType, bool kIsVector, bool kSavesRegisters>
__device__ __forceinline__ void EncodeToken(const AppendParams& p, float inverse_width,
                                            int32_t token) {
  const int32_t layer = __ldg(p.layer), page_begin = __ldg(p.page_begin);
  int32_t position = p.positions == nullptr ? 0 : __ldg(p.positions + token);
  CkvRow<kDType, kIsVector, /*kDCkv=*/0, /*kHoldsWeight=*/!kSavesRegisters> ckv(p, token);
  KpeRow<kDType> kpe(p, token);
  int32_t seq, rotation = position;
  if (p.positions != nullptr) {
    seq = SequenceOf(p, token);
    if (seq == kNoSequence) return;
  } else {
    const TokenPlace place = PlaceOf(p, token);
    seq = place.seq_idx, position = place.position;
    if (seq == kNoSequence) {
      if (p.padding.out != nullptr) ClearPadding(p, token);
      return;
    }
    if (p.rope_table != nullptr) rotation = RotationPosition(p, token, seq);
  }
  if (position < 0 || layer < 0 || layer >= p.num_layers) return;
  const int32_t page_idx = position / p.page_size;
  if (page_idx >= p.max_pages_per_seq) return;
  const int32_t page_id = __ldg(p.page_table + int64_t{seq} * p.max_pages_per_seq + page_idx);
  if (p.rope_table != nullptr) kpe.LoadAngles(rotation);
  gpu::PdlLaunchDependents();
  const float2 inverse = InverseScales(p, seq);
  if (p.norm_weight != nullptr) ckv.FindFactor(inverse_width);
  const int64_t page = int64_t{page_id} - page_begin;
  if (page < 0 || page >= p.num_pages) return;  // another device's page, or a wild id
  const gpu::RowPlace place{layer, static_cast<int32_t>(page), position - page_idx * p.page_size};
  const auto store_kpe = [&] {
    kpe.Store(RowAddress(p.kpe_pages, place, ElementBytes(KpeType(p.kv_format, kDType))),
              inverse.y);
  };
  if constexpr (kSavesRegisters) store_kpe();
  ckv.Store(RowAddress(p.ckv_pages, place, ElementBytes(CkvType(p.kv_format, kDType))), inverse.x);
  if constexpr (!kSavesRegisters) store_kpe();
}

}  // namespace jax_mla::append
