// One warp a token copies the token's new row to its page or, for padding, clears the token's
// results.
#include "append/append_token.cuh"
#include "core/ragged.h"
#include "decode/ragged/rows.h"
#include "gpu/launch.h"

namespace jax_mla::decode::ragged {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerCta = kThreads / append::kWarpThreads;

__device__ __forceinline__ void ClearResults(const RowsParams& p, int32_t token) {
  constexpr int kVectorElements = sizeof(uint4) / 2;
  const int32_t lane = threadIdx.x % append::kWarpThreads;
  const int64_t first_row = int64_t{token} * p.num_heads;
  const int64_t num_vectors = int64_t{p.num_heads} * p.append.d_ckv / kVectorElements;
  uint4* out = static_cast<uint4*>(p.out) + first_row * p.append.d_ckv / kVectorElements;
  for (int64_t i = lane; i < num_vectors; i += append::kWarpThreads) out[i] = uint4{};
  for (int32_t i = lane; i < p.num_heads; i += append::kWarpThreads) {
    p.lse[first_row + i] = -INFINITY;
  }
}

template <bool kAppends>
__global__ void __launch_bounds__(kThreads)
    Rows(const __grid_constant__ RowsParams p,
         const __grid_constant__ append::KernelParams<uint4> tokens) {
  gpu::PdlWait();
  // Not earlier: the decode kernel behind this one reads the plan as soon as it starts.
  gpu::PdlLaunchDependents();
  const int32_t token = blockIdx.x * kTokensPerCta + threadIdx.x / append::kWarpThreads;
  if (token >= p.append.num_tokens) return;
  const TokenPlace place = append::PlaceOf(p.append, token);
  if (place.seq_idx == kNoSequence) {
    ClearResults(p, token);
  } else if constexpr (kAppends) {
    append::AppendToken(tokens, token, [=] { return place.seq_idx; }, place.position);
  }
}

}  // namespace

cudaError_t LaunchRows(const RowsParams& params, bool appends, cudaStream_t stream) {
  const gpu::LaunchConfig config{
      .grid = dim3(CeilDiv(params.append.num_tokens, kTokensPerCta)),
      .block = dim3(kThreads),
      .stream = stream,
      .programmatic = true,
  };
  const auto tokens = append::MakeKernelParams<uint4>(params.append);
  return appends ? gpu::Launch<&Rows<true>>(config, params, tokens)
                 : gpu::Launch<&Rows<false>>(config, params, tokens);
}

}  // namespace jax_mla::decode::ragged
