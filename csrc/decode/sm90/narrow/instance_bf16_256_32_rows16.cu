#include "decode/sm90/narrow/launch.cuh"

namespace jax_mla::decode::sm90::narrow {

template std::string Launch<Config<DType::kBf16, 256, 32, 16, KvLoad::kTma>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);
template std::string Launch<Config<DType::kBf16, 256, 32, 16, KvLoad::kTmaBlocks>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);
template std::string Launch<Config<DType::kBf16, 256, 32, 16, KvLoad::kGather>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90::narrow
