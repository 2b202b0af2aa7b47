// The places of the queries of a ragged call: one warp a query.
#include "gpu/launch.h"
#include "gpu/ragged.cuh"
#include "index/launch.h"
#include "index/places.cuh"

namespace jax_mla::index {
namespace {

constexpr int kNumThreads = 256;
constexpr int kWarpThreads = 32;
constexpr int kQueriesPerCta = kNumThreads / kWarpThreads;

// Where the tokens of sequence `seq_idx` begin: the largest of cu_q_lens up to its own, clipped.
__device__ __forceinline__ int32_t FirstToken(const TopkParams& p, int32_t seq_idx, int32_t lane) {
  int32_t largest = 0;
  for (int32_t i = lane; i <= seq_idx; i += kWarpThreads) largest = max(largest, p.cu_q_lens[i]);
  return __reduce_max_sync(0xffffffffu, largest);
}

__global__ void __launch_bounds__(kNumThreads) PlacesKernel(const __grid_constant__ TopkParams p) {
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  const int32_t token = blockIdx.x * kQueriesPerCta + threadIdx.x / kWarpThreads;
  const int32_t lane = threadIdx.x % kWarpThreads;
  if (token >= p.num_tokens) return;
  const int32_t num_present = NumPresentSeqs(p.num_seqs, p.batch);
  const int32_t seq_idx = gpu::FindSequence(p.cu_q_lens, num_present, token);
  QueryPlace place{kNoSequence, 0, 0, 0};
  if (seq_idx != kNoSequence) {
    const int32_t end = min(p.cu_q_lens[seq_idx + 1], p.num_tokens);
    const int32_t num_behind = end - 1 - token;
    place = {seq_idx, ClampedLength(p, seq_idx) - num_behind, token - FirstToken(p, seq_idx, lane),
             num_behind};
  }
  if (lane == 0) static_cast<QueryPlace*>(p.scratch)[token] = place;
}

}  // namespace

cudaError_t LaunchPlaces(const TopkParams& p, cudaStream_t stream) {
  if (p.cu_q_lens == nullptr || p.num_tokens == 0) return cudaSuccess;
  return gpu::Launch<&PlacesKernel>(
      {.grid = dim3((p.num_tokens + kQueriesPerCta - 1) / kQueriesPerCta),
       .block = dim3(kNumThreads),
       .stream = stream,
       .programmatic = true},
      p);
}

}  // namespace jax_mla::index
