#include "decode/sm90/wide/launch.cuh"

namespace jax_mla::decode::sm90::wide {

template std::string Launch<Config<DType::kF16, 512, 64, KvLoad::kTmaBlocks>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);
template std::string Launch<Config<DType::kF16, 512, 64, KvLoad::kTma>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);
template std::string Launch<Config<DType::kF16, 512, 64, KvLoad::kGather>>(
    const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream);

}  // namespace jax_mla::decode::sm90::wide
