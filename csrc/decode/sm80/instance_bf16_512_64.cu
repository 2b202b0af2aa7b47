#include "decode/sm80/launch.cuh"

template cudaError_t jax_mla::decode::sm80::LaunchDecode<jax_mla::DType::kBf16, 512, 64>(
    const DecodeParams&, const gpu::DeviceFacts&, const SharedMemoryClass&, cudaStream_t);
template int32_t jax_mla::decode::sm80::DecodeArchitecture<jax_mla::DType::kBf16, 512, 64>();
