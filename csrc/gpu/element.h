// CUDA's type for an element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/kv_format.h"

namespace jax_mla::gpu {

template <DType kDType>
using Element = std::conditional_t<kDType == DType::kBf16, __nv_bfloat16, __half>;

}  // namespace jax_mla::gpu
