// Launch of one instance of the kernel with pairs of blocks. Only the files that the build makes
// from the rows of instances.inc include it.
#pragma once

#include "decode/sm90/pairs/kernel.cuh"
#include "decode/sm90/pairs/launch.h"
#include "decode/sm90/swapped/launch.cuh"

namespace jax_mla::decode::sm90::pairs {

template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  return LaunchSwapped<Kernel, C>(params, problem, stream);
}

}  // namespace jax_mla::decode::sm90::pairs

// What the build compiles in a source file of its own for each row of instances.inc.
#define MLA_INSTANCE(dtype, d_ckv, d_kpe)                                         \
  template std::string jax_mla::decode::sm90::pairs::Launch<                      \
      jax_mla::decode::sm90::pairs::Config<jax_mla::DType::dtype, d_ckv, d_kpe>>( \
      const jax_mla::decode::DecodeParams&, const jax_mla::decode::DecodeProblem&, cudaStream_t);
