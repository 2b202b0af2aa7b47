// TMA descriptors of the operands of one decode call, made on the host from device pointers.
//
// They are built anew for every launch and travel as __grid_constant__ parameters: no cache of
// descriptors, nothing to invalidate when XLA moves a buffer. Boxes are 64 elements (128 bytes)
// wide in the 128-byte swizzle, so every box lands as rows of 128 bytes; what lies outside the
// tensor is filled with zeros, also the missing half of a 32-wide rope row.
#pragma once

#include <cuda.h>

#include "decode/params.h"

namespace jax_mla::decode::sm90 {

// Coordinate that lies outside every map in any dimension: the box is filled with zeros.
inline constexpr int kOutside = -1;

// The cache stream as [num_layers, num_pages, page_size, width]; a box is `box_tokens` (a divisor
// of page_size) x 64 elements. Coordinates, fastest first: element, token of the page, page, layer.
CUresult MakeKvMap(const DecodeParams& params, const KvStream& stream, int width, int box_tokens,
                   CUtensorMap* map);

// A query operand [batch, rows, width] as [batch, width / 64, rows, 64], rows = q_len * num_heads;
// a box is all of `width` for `box_rows` rows of one sequence, and lands as
// [width / 64][box_rows][64]. Coordinates, fastest first: element (0), row, chunk (0), sequence.
CUresult MakeQueryMap(const DecodeParams& params, const void* base, int width, int box_rows,
                      CUtensorMap* map);

// Largest power of two up to 64 that divides page_size: the tokens that one box can take.
constexpr int BoxTokens(int page_size) {
  const int power = page_size & -page_size;
  return power < 64 ? power : 64;
}

}  // namespace jax_mla::decode::sm90
