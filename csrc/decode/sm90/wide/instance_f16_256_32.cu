#include "decode/sm90/wide/launch.cuh"

namespace jax_mla::decode::sm90::wide {

template std::string Launch<Config<DType::kF16, 256, 32>>(const DecodeParams& params,
                                                          const DecodeProblem& problem,
                                                          cudaStream_t stream);

}  // namespace jax_mla::decode::sm90::wide
