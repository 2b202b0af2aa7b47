// One warp a token copies the token's new row to its page or, for padding, clears the token's
// results.
#include "append/append_token.cuh"
#include "append/clear_padding.cuh"
#include "core/ragged.h"
#include "decode/ragged/rows.h"
#include "gpu/launch.h"

namespace jax_mla::decode::ragged {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerCta = kThreads / append::kWarpThreads;

__global__ void __launch_bounds__(kThreads)
    Rows(const __grid_constant__ append::KernelParams<uint4> p) {
  gpu::PdlWait();
  // Not earlier: the decode kernel behind this one reads the plan as soon as it starts.
  gpu::PdlLaunchDependents();
  const int32_t token = blockIdx.x * kTokensPerCta + threadIdx.x / append::kWarpThreads;
  if (token >= p.call.num_tokens) return;
  const TokenPlace place = append::PlaceOf(p.call, token);
  if (place.seq_idx == kNoSequence) {
    append::ClearPadding(p.call, token);
  } else {
    append::AppendToken(p, token, [=] { return place.seq_idx; }, place.position);
  }
}

}  // namespace

cudaError_t LaunchRows(const append::AppendParams& params, cudaStream_t stream) {
  const gpu::LaunchConfig config{
      .grid = dim3(CeilDiv(params.num_tokens, kTokensPerCta)),
      .block = dim3(kThreads),
      .stream = stream,
      .programmatic = true,
  };
  return gpu::Launch<&Rows>(config, append::MakeKernelParams<uint4>(params));
}

}  // namespace jax_mla::decode::ragged
