// CUDA handler of "jax_mla_prefill". It has no state, and all it does is enqueue a memset and one
// kernel.
#include <cuda_runtime_api.h>

#include <string>

#include "core/call_counter.h"
#include "core/check.h"
#include "gpu/launch.h"
#include "prefill/binding.h"
#include "prefill/why_not.h"
#if defined(JAX_MLA_WITH_SM90A)
#include "prefill/sm90/launch.h"
#endif

namespace jax_mla::prefill {
namespace ffi = xla::ffi;

std::string WhyNot([[maybe_unused]] int compute_capability, [[maybe_unused]] DType dtype,
                   [[maybe_unused]] int d_nope, [[maybe_unused]] int d_kpe,
                   [[maybe_unused]] int d_v) {
#if defined(JAX_MLA_WITH_SM90A)
  if (compute_capability != 90) {
    return "needs a GPU of compute capability 9.0 (Hopper), got " +
           (compute_capability == 0 ? "none"
                                    : std::to_string(compute_capability / 10) + "." +
                                          std::to_string(compute_capability % 10));
  }
  if (dtype != DType::kBf16 && dtype != DType::kF16) {
    return std::string("needs bfloat16 or float16, got ") + DTypeName(dtype);
  }
  if (!sm90::HasKernel(d_nope, d_kpe, d_v)) {
    return "needs d_nope, d_kpe, d_v of 128, 64, 128 (DeepSeek, Kimi), 192, 64, 256 (GLM), "
           "64, 64, 128 (Mistral) or 64, 32, 64 (MiniCPM3), got " +
           std::to_string(d_nope) + ", " + std::to_string(d_kpe) + ", " + std::to_string(d_v);
  }
  return "";
#else
  return "this build has no code for compute capability 9.0 (JAX_MLA_CUDA_ARCHS without 90a)";
#endif
}

namespace {

CallCounter calls("prefill_cuda");

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  PrefillAttrs attrs) {
  calls.Increment();
  const auto params = ParsePrefill(args, rets, attrs);
  if (!params) return params.error();
  cudaError_t error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&error);
  if (device == nullptr) {
    return ffi::Error::Internal(std::string("jax_mla_prefill: ") + cudaGetErrorString(error));
  }
  const std::string why_not = WhyNot(device->compute_capability(), params->dtype, params->d_nope,
                                     params->d_kpe, params->d_v);
  if (!why_not.empty()) return ffi::Error::InvalidArgument("jax_mla_prefill: " + why_not);
  MLA_RETURN_IF_ERROR(Checker("jax_mla_prefill")
                          .Aligned({{"q_nope", params->q_nope},
                                    {"q_pe", params->q_pe},
                                    {"k_nope", params->k_nope},
                                    {"kpe", params->kpe},
                                    {"v", params->v},
                                    {"prior_out", params->prior_out},
                                    {"out", params->out}}));
#if defined(JAX_MLA_WITH_SM90A)
  const std::string problem = sm90::Launch(*params, *device, stream);
  if (!problem.empty()) return ffi::Error::Internal("jax_mla_prefill: " + problem);
#endif
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_mla::prefill

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaPrefillCuda, jax_mla::prefill::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::prefill::PrefillAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
