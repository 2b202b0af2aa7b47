#include "decode/sm90/common/tensor_map.h"

#include <algorithm>

#include "gpu/tensor_map.h"

namespace jax_mla::decode::sm90 {
namespace {

using gpu::kBoxRowBytes;

// Maps a stream of the cache as [num_layers, num_pages, page_size, width]. A box is `box_tokens` (a
// divisor of page_size) x 128 bytes, or less where it is not swizzled. Coordinates, fastest first:
// element, token of the page, page, layer.
CUresult MakeKvMap(const DecodeParams& params, const KvStream& stream, DType dtype, int width,
                   int box_tokens, CUtensorMap* map, int box_row_bytes = kBoxRowBytes) {
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
               static_cast<cuuint32_t>(box_tokens), 1, 1},
       .swizzle =
           box_row_bytes == kBoxRowBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE},
      map);
}

// Maps a query operand [batch, rows, width] as [batch, width / 64, rows, 64], where rows = q_len *
// num_heads; in a call of units [1, rows of the call, width]. A box is all of `width` for
// `box_rows` rows of one sequence, and lands as [width / 64] [box_rows][64]. Coordinates, fastest
// first: element (0), row, chunk (0), sequence.
CUresult MakeQueryMap(const DecodeParams& params, const void* base, int width, int box_rows,
                      CUtensorMap* map) {
  const bool has_units = params.units.units != nullptr;
  const int64_t rows = has_units ? params.units.num_rows : int64_t{params.q_len} * params.num_heads;
  const int element_bytes = ElementBytes(params.dtype);
  const int box_width = kBoxRowBytes / element_bytes;
  const int64_t row_bytes = int64_t{width} * element_bytes;
  const int chunks = std::max(width / box_width, 1);
  return gpu::MakeTensorMap(
      {.dtype = params.dtype,
       .base = base,
       .dims = {static_cast<cuuint64_t>(std::min(width, box_width)), static_cast<cuuint64_t>(rows),
                static_cast<cuuint64_t>(chunks),
                static_cast<cuuint64_t>(has_units ? 1 : params.batch)},
       .stride_bytes = {static_cast<cuuint64_t>(row_bytes), kBoxRowBytes,
                        static_cast<cuuint64_t>(rows * row_bytes)},
       .box = {static_cast<cuuint32_t>(box_width), static_cast<cuuint32_t>(box_rows),
               static_cast<cuuint32_t>(chunks), 1}},
      map);
}

}  // namespace

CUresult MakeTensorMaps(const DecodeParams& params, KvLoad load, int box_rows, int box_tokens,
                        TensorMaps* maps) {
  CUresult error = MakeQueryMap(params, params.q_nope, params.d_ckv, box_rows, &maps->q_nope);
  if (error != CUDA_SUCCESS) return error;
  error = MakeQueryMap(params, params.q_pe, params.d_kpe, box_rows, &maps->q_pe);
  if (error != CUDA_SUCCESS || load == KvLoad::kGather) return error;
  error = MakeKvMap(params, params.ckv, CkvType(params.kv_format, params.dtype), params.d_ckv,
                    box_tokens, &maps->ckv);
  if (error != CUDA_SUCCESS) return error;
  return MakeKvMap(params, params.kpe, KpeType(params.kv_format, params.dtype), params.d_kpe,
                   box_tokens, &maps->kpe);
}

CUresult MakeTileScaleMap(const DecodeParams& params, int box_tokens, CUtensorMap* map) {
  constexpr int kScales = DsMla::kDCkv / DsMla::kTileDims, kScaleBytes = sizeof(float);
  KvStream scales = params.ckv;  // its strides are bytes
  scales.base = static_cast<const char*>(scales.base) + DsMla::kScalesOffset;
  scales.layer_stride /= kScaleBytes;
  scales.page_stride /= kScaleBytes;
  scales.token_stride /= kScaleBytes;
  return MakeKvMap(params, scales, DType::kF32, kScales, box_tokens, map, kScales * kScaleBytes);
}

}  // namespace jax_mla::decode::sm90
