#include "decode/sm90/common/tensor_map.h"

#include <algorithm>

#include "decode/sm90/common/sizes.h"
#include "gpu/tensor_map.h"

namespace jax_mla::decode::sm90 {
namespace {

using gpu::kBoxRowBytes;

// Maps a stream of the cache as [num_layers, num_pages, page_size, width]. A box is a block of
// tokens x 128 bytes, or less where it is not swizzled. Coordinates, fastest first: element, token
// of the page, page, layer.
CUresult MakeKvMap(const DecodeParams& params, const KvStream& stream, DType dtype, int width,
                   CUtensorMap* map, int box_row_bytes = kBoxRowBytes) {
  const int64_t element_bytes = ElementBytes(dtype);
  // A pool without pages or layers has no address. Every load through its map is outside, so the
  // map only has to be valid.
  const bool is_empty = params.num_pages == 0 || params.num_layers == 0;
  const void* base = is_empty ? params.q_nope : stream.base;
  const int64_t page_bytes = stream.page_stride * element_bytes;
  const int64_t layer_bytes = params.num_layers > 1 ? stream.layer_stride * element_bytes
                                                    : page_bytes * std::max(params.num_pages, 1);
  return gpu::MakeTensorMap(
      {.dtype = dtype,
       .base = base,
       .dims = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(params.page_size),
                static_cast<cuuint64_t>(std::max(params.num_pages, 1)),
                static_cast<cuuint64_t>(std::max(params.num_layers, 1))},
       .stride_bytes = {static_cast<cuuint64_t>(stream.token_stride * element_bytes),
                        static_cast<cuuint64_t>(page_bytes), static_cast<cuuint64_t>(layer_bytes)},
       .box = {static_cast<cuuint32_t>(box_row_bytes / element_bytes),
               static_cast<cuuint32_t>(kBlockN), 1, 1},
       .swizzle =
           box_row_bytes == kBoxRowBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE},
      map);
}

// How the rows of the queries are grouped: a box has rows of one group only.
struct RowGroups {
  int64_t count, rows;
};

RowGroups SequencesOf(const DecodeParams& params) {
  if (params.units.units != nullptr) return {1, params.units.num_rows};
  return {params.batch, int64_t{params.q_len} * params.num_heads};
}

RowGroups TokensOf(const UnitTable& units) {
  return {units.num_rows / units.heads_per_token, units.heads_per_token};
}

// Maps a query operand [groups, rows, width] as [groups, width / 64, rows, 64]. A box is all of
// `width` for `box_rows` rows of one group, and lands as [width / 64] [box_rows][64]. Coordinates,
// fastest first: element (0), row, chunk (0), group.
CUresult MakeQueryMap(const DecodeParams& params, const RowGroups& groups, const void* base,
                      int width, int box_rows, CUtensorMap* map) {
  const int element_bytes = ElementBytes(params.dtype);
  const int box_width = kBoxRowBytes / element_bytes;
  const int64_t row_bytes = int64_t{width} * element_bytes;
  const int chunks = std::max(width / box_width, 1);
  return gpu::MakeTensorMap(
      {.dtype = params.dtype,
       .base = base,
       .dims = {static_cast<cuuint64_t>(std::min(width, box_width)),
                static_cast<cuuint64_t>(groups.rows), static_cast<cuuint64_t>(chunks),
                static_cast<cuuint64_t>(groups.count)},
       .stride_bytes = {static_cast<cuuint64_t>(row_bytes), kBoxRowBytes,
                        static_cast<cuuint64_t>(groups.rows * row_bytes)},
       .box = {static_cast<cuuint32_t>(box_width), static_cast<cuuint32_t>(box_rows),
               static_cast<cuuint32_t>(chunks), 1}},
      map);
}

}  // namespace

CUresult MakeTensorMaps(const DecodeParams& params, KvLoad load, int box_rows, TensorMaps* maps) {
  const RowGroups groups = SequencesOf(params);
  CUresult error =
      MakeQueryMap(params, groups, params.q_nope, params.d_ckv, box_rows, &maps->q_nope);
  if (error != CUDA_SUCCESS) return error;
  const bool has_rope = params.d_kpe > 0;
  if (has_rope) {
    error = MakeQueryMap(params, groups, params.q_pe, params.d_kpe, box_rows, &maps->q_pe);
  }
  if (error != CUDA_SUCCESS || load == KvLoad::kGather) return error;
  error = MakeKvMap(params, params.ckv, CkvType(params.kv_format, params.dtype), params.d_ckv,
                    &maps->ckv);
  if (error != CUDA_SUCCESS || !has_rope) return error;
  return MakeKvMap(params, params.kpe, KpeType(params.kv_format, params.dtype), params.d_kpe,
                   &maps->kpe);
}

CUresult MakeTokenMaps(const DecodeParams& params, int box_rows, UnitTensorMaps* maps) {
  const RowGroups groups = TokensOf(params.units);
  const CUresult error =
      MakeQueryMap(params, groups, params.q_nope, params.d_ckv, box_rows, &maps->token_q_nope);
  if (error != CUDA_SUCCESS || params.d_kpe == 0) return error;
  return MakeQueryMap(params, groups, params.q_pe, params.d_kpe, box_rows, &maps->token_q_pe);
}

CUresult MakeTileScaleMap(const DecodeParams& params, CUtensorMap* map) {
  constexpr int kScales = DsMla::kDCkv / DsMla::kTileDims, kScaleBytes = sizeof(float);
  KvStream scales = params.ckv;  // its strides are bytes
  scales.base = static_cast<const char*>(scales.base) + DsMla::kScalesOffset;
  scales.layer_stride /= kScaleBytes;
  scales.page_stride /= kScaleBytes;
  scales.token_stride /= kScaleBytes;
  return MakeKvMap(params, scales, DType::kF32, kScales, map, kScales * kScaleBytes);
}

}  // namespace jax_mla::decode::sm90
