// CUDA handler of "jax_mla_index_append". It has no state, and all it does is enqueue one kernel.
#include <cuda_runtime_api.h>

#include <string>

#include "core/call_counter.h"
#include "index_append/append.h"
#include "index_append/binding.h"

namespace jax_mla::index_append {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("index_append_cuda");

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  IndexAppendAttrs attrs) {
  calls.Increment();
  const auto params = ParseIndexAppend(args, rets, attrs);
  if (!params) return params.error();
  if (params->d != kCudaDim) {
    return ffi::Error::InvalidArgument(
        "jax_mla_index_append: k: expected keys of 128 values, got " + std::to_string(params->d));
  }
  if (const cudaError_t error = LaunchIndexAppend(*params, stream); error != cudaSuccess) {
    return ffi::Error::Internal(std::string("jax_mla_index_append: ") + cudaGetErrorString(error));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_mla::index_append

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaIndexAppendCuda, jax_mla::index_append::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::index_append::IndexAppendAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
