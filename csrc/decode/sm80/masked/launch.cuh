// What the build compiles for a row of instances.inc, in a source file of its own.
#pragma once

#include "decode/sm80/launch.cuh"

#undef MLA_INSTANCE
#define MLA_INSTANCE(dtype, storage, d_ckv, d_kpe)                                             \
  namespace jax_mla::decode::sm80 {                                                            \
  template cudaError_t LaunchDecode<DType::dtype, KvStorage::storage, d_ckv, d_kpe, true>(     \
      const DecodeParams&, const gpu::DeviceFacts&, const SharedMemoryClass&, cudaStream_t);   \
  template int32_t DecodeArchitecture<DType::dtype, KvStorage::storage, d_ckv, d_kpe, true>(); \
  }
