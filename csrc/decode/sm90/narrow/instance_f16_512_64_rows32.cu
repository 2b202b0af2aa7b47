#include "decode/sm90/narrow/launch.cuh"

namespace jax_mla::decode::sm90::narrow {

template std::string Launch<Config<DType::kF16, 512, 64, 32, KvLoad::kTma>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);
template std::string Launch<Config<DType::kF16, 512, 64, 32, KvLoad::kTmaBlocks>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);
template std::string Launch<Config<DType::kF16, 512, 64, 32, KvLoad::kGather>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90::narrow
