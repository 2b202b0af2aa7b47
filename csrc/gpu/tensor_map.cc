#include "gpu/tensor_map.h"

#include <cuda_runtime_api.h>

namespace jax_mla::gpu {
namespace {

constexpr unsigned kEncoderVersion = 12000;  // the CUDA version whose encoder signature is used

using Encoder = decltype(&cuTensorMapEncodeTiled);

// Finds the driver's encoder at run time, because the extension does not link libcuda.
Encoder FindEncoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kEncoderVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encoder>(function);
}

CUtensorMapDataType TmaType(DType dtype) {
  switch (dtype) {
    case DType::kE4m3:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

}  // namespace

CUresult MakeTensorMap(const TensorMapSpec& spec, CUtensorMap* map) {
  static const Encoder encode = FindEncoder();
  if (encode == nullptr) return CUDA_ERROR_NOT_FOUND;
  const cuuint32_t element_strides[kTensorMapRank] = {1, 1, 1, 1};
  // With promotion to 256 B random pages stream 5-10 % slower (H200; see docs/kernels).
  return encode(map, TmaType(spec.dtype), kTensorMapRank, const_cast<void*>(spec.base), spec.dims,
                spec.stride_bytes, spec.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                spec.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace jax_mla::gpu
