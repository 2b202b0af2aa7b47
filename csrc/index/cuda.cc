// CUDA handler of "jax_mla_index_topk". It has no state, and all it does is enqueue kernels.
#include <cuda_runtime_api.h>

#include <string>

#include "core/call_counter.h"
#include "core/check.h"
#include "gpu/launch.h"
#include "index/binding.h"
#include "index/choose_backend.h"

namespace jax_mla::index {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("index_topk_cuda");

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  TopkAttrs attrs) {
  calls.Increment();
  const auto params = ParseTopk(args, rets, attrs);
  if (!params) return params.error();
  cudaError_t error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&error);
  if (device == nullptr) {
    return ffi::Error::Internal(std::string("jax_mla_index_topk: ") + cudaGetErrorString(error));
  }
  MLA_RETURN_IF_ERROR(Checker("jax_mla_index_topk")
                          .Aligned({{"q", params->q},
                                    {"index_pages", params->index_pages},
                                    {"scratch", params->scratch}}));
  const std::string problem = RunCuda(*params, attrs.backend, *device, stream);
  if (!problem.empty()) return ffi::Error::InvalidArgument("jax_mla_index_topk: " + problem);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_mla::index

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaIndexTopkCuda, jax_mla::index::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::index::TopkAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
