// TMA descriptors of the operands of one decode call, made on the host from device pointers.
//
// They are built anew for every launch and are passed as __grid_constant__ parameters. So there is
// no cache of descriptors, and nothing becomes invalid when XLA moves a buffer. Boxes are 128 bytes
// wide (64 elements, or 128 codes) in the 128-byte swizzle, so every box lands as rows of 128
// bytes. What lies outside the tensor is filled with zeros; so is what a row of kpe is shorter than
// a box.
#pragma once

#include <cuda.h>

#include "decode/params.h"
#include "decode/sm90/common/kv_load.h"

namespace jax_mla::decode::sm90 {

// A coordinate that lies outside every map in any dimension. Its box is filled with zeros.
inline constexpr int kOutside = -1;

struct TensorMaps {
  CUtensorMap q_nope, q_pe, ckv, kpe;
};
// Of a call of units. The same queries token by token: rows behind a token's are zeros.
struct UnitTensorMaps : TensorMaps {
  CUtensorMap token_q_nope, token_q_pe;
};
// Of a cache of kDsMla. A box of tile scales is 16 bytes wide and not swizzled.
struct TileTensorMaps : TensorMaps {
  CUtensorMap tile_scales;
};

// Makes the maps of a call; ckv and kpe stay empty where KV is gathered, q_pe and kpe where rows
// have no rotary part. A box has `box_rows` query rows, or a block of tokens of the cache.
CUresult MakeTensorMaps(const DecodeParams& params, KvLoad load, int box_rows, TensorMaps* maps);

// Makes the maps of the queries token by token.
CUresult MakeTokenMaps(const DecodeParams& params, int box_rows, UnitTensorMaps* maps);

// Makes the map of the scales in the rows of kDsMla.
CUresult MakeTileScaleMap(const DecodeParams& params, CUtensorMap* map);

}  // namespace jax_mla::decode::sm90
