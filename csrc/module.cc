// Python module jax_mla._extension: FFI targets and facts about the build and the devices.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/call_counter.h"
#include "decode/query.h"
#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxMlaDecodeCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaAppendCpu(XLA_FFI_CallFrame* call_frame);
#ifdef JAX_MLA_WITH_CUDA
XLA_FFI_Error* JaxMlaDecodeCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaAppendCuda(XLA_FFI_CallFrame* call_frame);
#endif
}

namespace nb = nanobind;

namespace jax_mla {
namespace {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

nb::dict PlatformTargets(Handler decode, Handler append) {
  nb::dict targets;
  targets["jax_mla_decode"] = nb::capsule(reinterpret_cast<void*>(decode));
  targets["jax_mla_append"] = nb::capsule(reinterpret_cast<void*>(append));
  return targets;
}

nb::dict Targets() {
  nb::dict platforms;
  platforms["cpu"] = PlatformTargets(JaxMlaDecodeCpu, JaxMlaAppendCpu);
#ifdef JAX_MLA_WITH_CUDA
  platforms["CUDA"] = PlatformTargets(JaxMlaDecodeCuda, JaxMlaAppendCuda);
#endif
  return platforms;
}

nb::dict BuildInfo() {
  nb::dict info;
#ifdef JAX_MLA_WITH_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["cuda_archs"] = JAX_MLA_CUDA_ARCHS;
  info["cuda_version"] = JAX_MLA_CUDA_VERSION;
  info["compiler"] = JAX_MLA_COMPILER;
  info["version"] = JAX_MLA_VERSION;
  return info;
}

nb::dict CallCounts() {
  nb::dict counts;
  for (const CallCounter* c = CallCounter::first(); c != nullptr; c = c->next()) {
    counts[c->name()] = c->count();
  }
  return counts;
}

DType ParseDType(std::string_view name) {
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  throw nb::value_error("dtype: expected bfloat16, float16 or float32");
}

// The static description of a call, as Python gives it.
decode::DecodeShape Shape(std::string_view dtype, int32_t batch, int32_t q_len, int32_t num_heads,
                          int32_t d_ckv, int32_t d_kpe, int32_t page_size,
                          int32_t max_pages_per_seq, int32_t num_splits, bool batch_invariant) {
  return {
      .dtype = ParseDType(dtype),
      .batch = batch,
      .q_len = q_len,
      .num_heads = num_heads,
      .d_ckv = d_ckv,
      .d_kpe = d_kpe,
      .page_size = page_size,
      .max_pages_per_seq = max_pages_per_seq,
      .num_splits = num_splits,
      .batch_invariant = batch_invariant,
  };
}

std::vector<std::pair<std::string, std::string>> DecodeBackends(
    std::string_view platform, const decode::DecodeShape& shape,
    [[maybe_unused]] int compute_capability) {
  std::vector<decode::BackendAnswer> answers;
  if (platform == "cpu") answers = decode::CpuBackends(shape);
#ifdef JAX_MLA_WITH_CUDA
  if (platform == "CUDA") answers = decode::CudaBackends(shape, compute_capability);
#endif
  std::vector<std::pair<std::string, std::string>> pairs;
  for (auto& [name, reason] : answers) pairs.emplace_back(std::move(name), std::move(reason));
  return pairs;
}

}  // namespace
}  // namespace jax_mla

NB_MODULE(_extension, m) {
  using namespace jax_mla;  // NOLINT: the module body names little else
  using nb::literals::operator""_a;

  nb::class_<decode::DecodeShape>(m, "DecodeShape", "The static part of a decode call.")
      .def(
          "__init__",
          [](decode::DecodeShape* self, std::string dtype, int32_t batch, int32_t q_len,
             int32_t num_heads, int32_t d_ckv, int32_t d_kpe, int32_t page_size,
             int32_t max_pages_per_seq, int32_t num_splits, bool batch_invariant) {
            new (self)
                decode::DecodeShape(Shape(dtype, batch, q_len, num_heads, d_ckv, d_kpe, page_size,
                                          max_pages_per_seq, num_splits, batch_invariant));
          },
          nb::kw_only(), "dtype"_a, "batch"_a, "q_len"_a, "num_heads"_a, "d_ckv"_a, "d_kpe"_a,
          "page_size"_a, "max_pages_per_seq"_a, "num_splits"_a = 0, "batch_invariant"_a = false);

  m.def("targets", &Targets, "FFI handlers: {platform: {target name: capsule}}.");
  m.def(
      "ffi_api_version", [] { return std::pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "XLA FFI version (major, minor) of the headers this module was built with.");
  m.def("build_info", &BuildInfo, "What this module was built with.");
  m.def("call_counts", &CallCounts, "Executions of each handler since the module was loaded.");
  m.def("decode_backends", &DecodeBackends, "platform"_a, "shape"_a, "compute_capability"_a = 0,
        "[(backend, reason it declines or '')] in the order in which they are tried.");
#ifdef JAX_MLA_WITH_CUDA
  m.def("decode_scratch_bytes", &decode::CudaScratchBytes, "shape"_a,
        "Size of the scratch result that a CUDA decode call must have.");
#endif
}
