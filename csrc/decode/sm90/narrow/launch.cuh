// Launch of one instance of the narrow kernel. Only the files that the build makes from the rows of
// instances.inc include it.
#pragma once

#include "decode/sm90/narrow/kernel.cuh"
#include "decode/sm90/narrow/launch.h"
#include "decode/sm90/swapped/launch.cuh"

namespace jax_mla::decode::sm90::narrow {

template <class C>
std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  return LaunchSwapped<Kernel, C>(params, problem, stream);
}

}  // namespace jax_mla::decode::sm90::narrow

// What the build compiles in a source file of its own for each row of instances.inc.
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, tile_rows, codes, load, teams)                        \
  template std::string                                                                          \
  jax_mla::decode::sm90::narrow::Launch<jax_mla::decode::sm90::narrow::Config<                  \
      jax_mla::DType::dtype, d_ckv, d_kpe, tile_rows, jax_mla::decode::sm90::CacheCodes::codes, \
      jax_mla::decode::sm90::KvLoad::load, teams>>(                                             \
      const jax_mla::decode::DecodeParams&, const jax_mla::decode::DecodeProblem&, cudaStream_t);
