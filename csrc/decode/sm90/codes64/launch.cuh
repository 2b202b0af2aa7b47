// Launch of one instance of the kernel with query codes. Only the files that the build makes
// from the rows of instances.inc include it.
#pragma once

#include "decode/sm90/codes64/kernel.cuh"
#include "decode/sm90/codes64/launch.h"
#include "decode/sm90/swapped/launch.cuh"

namespace jax_mla::decode::sm90::codes64 {

template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  return LaunchSwapped<Kernel, C>(params, problem, stream);
}

}  // namespace jax_mla::decode::sm90::codes64

// What the build compiles in a source file of its own for each row of instances.inc.
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, codes, load, queries)                            \
  template std::string                                                                     \
  jax_mla::decode::sm90::codes64::Launch<jax_mla::decode::sm90::codes64::Config<           \
      jax_mla::DType::dtype, d_ckv, d_kpe, jax_mla::decode::sm90::CacheCodes::codes,       \
      jax_mla::decode::sm90::KvLoad::load, jax_mla::decode::sm90::QueryOperand::queries>>( \
      const jax_mla::decode::DecodeParams&, const jax_mla::decode::DecodeProblem&, cudaStream_t);
