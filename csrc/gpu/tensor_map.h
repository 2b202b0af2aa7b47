// Makes TMA descriptors of rank 4 on the host, from device pointers. Nothing here knows an op.
//
// Boxes are at most 128 bytes wide. What lies outside the tensor is filled with zeros.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::gpu {

inline constexpr int kTensorMapRank = 4;
inline constexpr int kBoxRowBytes = 128;  // the swizzle's width

// A tensor and its boxes; dimensions in elements, fastest first.
struct TensorMapSpec {
  DType dtype;
  const void* base;
  cuuint64_t dims[kTensorMapRank];
  cuuint64_t stride_bytes[kTensorMapRank - 1];  // of every dimension but the first
  cuuint32_t box[kTensorMapRank];
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
};

CUresult MakeTensorMap(const TensorMapSpec& spec, CUtensorMap* map);

}  // namespace jax_mla::gpu
