// The prologue of a ragged call. CTA 0 plans the units; in the other CTAs, one warp a token copies
// the token's new row to its page or, for padding, clears the token's results.
#include "append/append_token.cuh"
#include "core/ragged.h"
#include "decode/ragged/plan_units.cuh"
#include "decode/ragged/prologue.h"
#include "gpu/launch.h"

namespace jax_mla::decode::ragged {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kTokensPerCta = kThreads / kWarpThreads;

__device__ __forceinline__ void ClearResults(const PrologueParams& p, int32_t token) {
  constexpr int kVectorElements = sizeof(uint4) / 2;
  const int32_t lane = threadIdx.x % kWarpThreads;
  const int64_t first_row = int64_t{token} * p.num_heads;
  const int64_t num_vectors = int64_t{p.num_heads} * p.append.d_ckv / kVectorElements;
  uint4* out = static_cast<uint4*>(p.out) + first_row * p.append.d_ckv / kVectorElements;
  for (int64_t i = lane; i < num_vectors; i += kWarpThreads) out[i] = uint4{};
  for (int32_t i = lane; i < p.num_heads; i += kWarpThreads) p.lse[first_row + i] = -INFINITY;
}

__global__ void __launch_bounds__(kThreads, 1)
    Prologue(const __grid_constant__ PrologueParams p,
             const __grid_constant__ append::KernelParams<uint4> tokens) {
  gpu::PdlWait();
  gpu::PdlLaunchDependents();
  if (blockIdx.x == 0) {
    __shared__ SharedMemory shared;
    PlanUnits(p, shared);
    return;
  }
  const int32_t token = (blockIdx.x - 1) * kTokensPerCta + threadIdx.x / kWarpThreads;
  if (token >= p.append.num_tokens) return;
  const int32_t seq = append::SequenceOf(p.append, token);
  if (seq == kNoSequence) {
    ClearResults(p, token);
  } else {
    append::AppendToken(
        tokens, token, [=] { return seq; }, append::PositionOf(p.append, token, seq));
  }
}

}  // namespace

cudaError_t LaunchPrologue(const PrologueParams& params, cudaStream_t stream) {
  const gpu::LaunchConfig config{
      .grid = dim3(1 + CeilDiv(params.append.num_tokens, kTokensPerCta)),
      .block = dim3(kThreads),
      .stream = stream,
      .programmatic = true,
  };
  return gpu::Launch<&Prologue>(config, params, append::MakeKernelParams<uint4>(params.append));
}

}  // namespace jax_mla::decode::ragged
