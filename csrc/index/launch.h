// Launches the kernels that every GPU runs: of places, and of the choice.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "gpu/launch.h"
#include "index/params.h"

namespace jax_mla::index {

// Some queries of a call, whose scores lie in the scratch at once.
struct Slab {
  int32_t begin;  // the first query
  int32_t num_rows;
  uint32_t* score_keys;  // [num_rows, stride], see key.cuh
  int64_t stride;
};

// Writes the places of the queries of a ragged call to the scratch. In other calls nothing.
cudaError_t LaunchPlaces(const TopkParams& p, cudaStream_t stream);

// Chooses the k largest of a slab's scores and writes the results. Queries that see at most k
// tokens get all of them, and no score of theirs is read.
cudaError_t LaunchChoose(const TopkParams& p, const Slab& slab, const gpu::DeviceFacts& device,
                         cudaStream_t stream);

// Why LaunchChoose cannot serve sequences of this length; empty if it can.
std::string WhyNotChoose(int32_t max_seq_len, const gpu::DeviceFacts& device);

}  // namespace jax_mla::index
