// TMA descriptors of the operands of one decode call, made on the host from device pointers.
//
// They are built anew for every launch and travel as __grid_constant__ parameters: no cache of
// descriptors, nothing to invalidate when XLA moves a buffer. Boxes are 64 elements (128 bytes)
// wide in the 128-byte swizzle, so every box lands as rows of 128 bytes; what lies outside the
// tensor is filled with zeros, also the missing half of a 32-wide rope row.
#pragma once

#include <cuda.h>

#include "decode/params.h"
#include "decode/sm90/common/kv_load.h"

namespace jax_mla::decode::sm90 {

// Coordinate that lies outside every map in any dimension: the box is filled with zeros.
inline constexpr int kOutside = -1;

struct TensorMaps {
  CUtensorMap q_nope, q_pe, ckv, kpe;
};

// All maps of a call; those of the cache only where it is not gathered. A box is `box_rows` query
// rows, or `box_tokens` (a divisor of page_size) of the cache.
CUresult MakeTensorMaps(const DecodeParams& params, KvLoad load, int box_rows, int box_tokens,
                        TensorMaps* maps);

// Largest power of two up to 64 that divides page_size: the tokens that one box can take.
constexpr int BoxTokens(int page_size) {
  const int power = page_size & -page_size;
  return power < 64 ? power : 64;
}

}  // namespace jax_mla::decode::sm90
