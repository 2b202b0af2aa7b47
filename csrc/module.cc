// The Python module jax_mla._extension: the FFI targets, and facts about the build and the devices.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/call_counter.h"
#include "decode/backend_answers.h"
#include "decode/cpu/dispatch.h"
#include "decode/schedule/host_schedule.h"
#include "decode/schedule/plan.h"
#include "decode/schedule/unit_plan.h"
#include "index/params.h"
#include "index/why_not.h"
#include "prefill/why_not.h"
#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxMlaDecodeCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaAppendCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaRaggedCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaIndexAppendCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaIndexTopkCpu(XLA_FFI_CallFrame* call_frame);
#ifdef JAX_MLA_WITH_CUDA
XLA_FFI_Error* JaxMlaDecodeCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaAppendCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaRaggedCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaRaggedPlanCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaPrefillCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaIndexAppendCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMlaIndexTopkCuda(XLA_FFI_CallFrame* call_frame);
#endif
}

namespace nb = nanobind;

namespace jax_mla {
namespace {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

nb::dict PlatformTargets(std::initializer_list<std::pair<const char*, Handler>> handlers) {
  nb::dict targets;
  for (const auto& [name, handler] : handlers) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  }
  return targets;
}

nb::dict Targets() {
  nb::dict platforms;
  platforms["cpu"] = PlatformTargets({{"jax_mla_decode", JaxMlaDecodeCpu},
                                      {"jax_mla_append", JaxMlaAppendCpu},
                                      {"jax_mla_ragged", JaxMlaRaggedCpu},
                                      {"jax_mla_index_append", JaxMlaIndexAppendCpu},
                                      {"jax_mla_index_topk", JaxMlaIndexTopkCpu}});
#ifdef JAX_MLA_WITH_CUDA
  platforms["CUDA"] = PlatformTargets({{"jax_mla_decode", JaxMlaDecodeCuda},
                                       {"jax_mla_append", JaxMlaAppendCuda},
                                       {"jax_mla_ragged", JaxMlaRaggedCuda},
                                       {"jax_mla_ragged_plan", JaxMlaRaggedPlanCuda},
                                       {"jax_mla_prefill", JaxMlaPrefillCuda},
                                       {"jax_mla_index_append", JaxMlaIndexAppendCuda},
                                       {"jax_mla_index_topk", JaxMlaIndexTopkCuda}});
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
  if (const std::optional<DType> dtype = DTypeOf(name)) return *dtype;
  throw nb::value_error("dtype: expected bfloat16, float16 or float32");
}

#ifdef JAX_MLA_WITH_CUDA
// An element type that may also be e4m3.
DType ParseNumbers(std::string_view name) {
  return name == DTypeName(DType::kE4m3) ? DType::kE4m3 : ParseDType(name);
}
#endif

KvFormat ParseFormat(std::string_view name) {
  if (const std::optional<KvFormat> format = KvFormatOf(name)) return *format;
  throw nb::value_error("kv_format: expected a known format");
}

// `is_described`: on CUDA, the answers for any GPU of that capability, for tests and tools.
std::vector<std::pair<std::string, std::string>> DecodeBackends(
    std::string_view platform, const decode::DecodeShape& shape,
    [[maybe_unused]] int compute_capability, [[maybe_unused]] bool is_described) {
  std::vector<decode::BackendAnswer> answers;
  if (platform == "cpu") answers = decode::CpuBackends(shape);
#ifdef JAX_MLA_WITH_CUDA
  if (platform == "CUDA") {
    answers = is_described ? decode::DescribedBackends(shape, compute_capability)
                           : decode::CudaBackends(shape, compute_capability);
  }
#endif
  std::vector<std::pair<std::string, std::string>> pairs;
  for (auto& [name, reason] : answers) pairs.emplace_back(std::move(name), std::move(reason));
  return pairs;
}

std::vector<std::pair<std::string, std::string>> BackendsByName() {
#ifdef JAX_MLA_WITH_CUDA
  return decode::CudaBackendsByName();
#else
  return {};
#endif
}

std::string PrefillWhyNot([[maybe_unused]] int compute_capability,
                          [[maybe_unused]] std::string_view dtype, [[maybe_unused]] int d_nope,
                          [[maybe_unused]] int d_kpe, [[maybe_unused]] int d_v) {
#ifdef JAX_MLA_WITH_CUDA
  return prefill::WhyNot(compute_capability, ParseDType(dtype), d_nope, d_kpe, d_v);
#else
  return "this build has no CUDA part";
#endif
}

// Why no CUDA backend takes a call of index_topk. A build with CUDA asks the backends.
std::string IndexTopkWhyNot([[maybe_unused]] int compute_capability,
                            [[maybe_unused]] std::string_view q_dtype,
                            [[maybe_unused]] std::string_view key_dtype,
                            [[maybe_unused]] int32_t num_heads, [[maybe_unused]] int32_t d,
                            [[maybe_unused]] int32_t k, [[maybe_unused]] int32_t page_size,
                            [[maybe_unused]] std::string_view backend) {
#ifdef JAX_MLA_WITH_CUDA
  return index::WhyNot({.q_dtype = ParseNumbers(q_dtype),
                        .key_dtype = ParseNumbers(key_dtype),
                        .num_heads = num_heads,
                        .d = d,
                        .k = k,
                        .page_size = page_size},
                       compute_capability, backend);
#else
  return "this build has no CUDA part";
#endif
}

int64_t ScratchBytes(const decode::DecodeShape& shape, [[maybe_unused]] std::string_view backend) {
#ifdef JAX_MLA_WITH_CUDA
  return decode::CudaScratchBytes(shape, backend);
#else
  return decode::DecodeScratchBytes(shape);
#endif
}

std::vector<std::string> CpuKernels() {
  std::vector<std::string> names;
  for (const decode::cpu::Kernel* kernel : decode::cpu::SupportedKernels()) {
    names.emplace_back(kernel->name);
  }
  return names;
}

std::string CpuKernel() {
  const decode::cpu::Kernel* kernel = decode::cpu::ChosenKernel();
  return kernel == nullptr ? "" : kernel->name;
}

// The CUDA schedule, for tests and tools. It only computes.
void AddSchedule(nb::module_& m) {
  using nb::literals::operator""_a;
  nb::class_<decode::TwinItem>(m, "ScheduleItem", "One part of one sequence, of one worker.")
      .def_ro("worker", &decode::TwinItem::worker)
      .def_ro("seq_idx", &decode::TwinItem::seq_idx)
      .def_ro("block_begin", &decode::TwinItem::block_begin)
      .def_ro("block_end", &decode::TwinItem::block_end)
      .def_ro("part_idx", &decode::TwinItem::part_idx)
      .def_ro("num_parts", &decode::TwinItem::num_parts)
      .def_ro("slot", &decode::TwinItem::slot)
      .def_ro("slot_end_bytes", &decode::TwinItem::slot_end_bytes)
      .def_ro("merges", &decode::TwinItem::merges);
  m.def(
      "schedule",
      [](const decode::DecodeShape& shape, const std::vector<int32_t>& seq_lens, int32_t block_m,
         int32_t num_ctas, int32_t seq_cost, int32_t max_single_blocks, int64_t scratch_bytes,
         bool can_cluster, int32_t slack_blocks, int32_t slack_shift) {
        const decode::SplitOptions options = {.block_m = block_m,
                                              .num_ctas = num_ctas,
                                              .seq_cost = seq_cost,
                                              .max_single_blocks = max_single_blocks,
                                              .can_cluster = can_cluster,
                                              .slack = {slack_blocks, slack_shift}};
        return decode::ScheduleTwin(shape, seq_lens, options, scratch_bytes);
      },
      "shape"_a, "seq_lens"_a, nb::kw_only(), "block_m"_a, "num_ctas"_a, "seq_cost"_a,
      "max_single_blocks"_a, "scratch_bytes"_a, "can_cluster"_a = false,
      "slack_blocks"_a = decode::Slack{}.blocks, "slack_shift"_a = decode::Slack{}.shift,
      "The CUDA schedule, computed on the host.");
}

}  // namespace
}  // namespace jax_mla

NB_MODULE(_extension, m) {
  using namespace jax_mla;  // NOLINT: the module body names little else
  using nb::literals::operator""_a;

  nb::class_<decode::DecodeShape>(m, "DecodeShape", "The static part of a decode call.")
      .def(
          "__init__",
          [](decode::DecodeShape* self, std::string_view dtype, int32_t batch, int32_t q_len,
             int32_t num_heads, int32_t d_ckv, int32_t d_kpe, int32_t page_size,
             int32_t max_pages_per_seq, int64_t max_seq_len, int32_t num_splits,
             bool batch_invariant, int32_t row_alignment, std::string_view kv_format,
             int32_t packed_width, int32_t sliding_window, bool has_soft_cap) {
            new (self) decode::DecodeShape{
                .dtype = ParseDType(dtype),
                .batch = batch,
                .q_len = q_len,
                .num_heads = num_heads,
                .d_ckv = d_ckv,
                .d_kpe = d_kpe,
                .page_size = page_size,
                .max_pages_per_seq = max_pages_per_seq,
                .max_seq_len = decode::BoundOfLengths(max_pages_per_seq, page_size, max_seq_len),
                .num_splits = num_splits,
                .batch_invariant = batch_invariant,
                .row_alignment = row_alignment,
                .kv_format = ParseFormat(kv_format),
                .packed_width = packed_width,
                .sliding_window = sliding_window,
                .has_soft_cap = has_soft_cap};
          },
          nb::kw_only(), "dtype"_a, "batch"_a, "q_len"_a, "num_heads"_a, "d_ckv"_a, "d_kpe"_a,
          "page_size"_a, "max_pages_per_seq"_a, "max_seq_len"_a = 0, "num_splits"_a = 0,
          "batch_invariant"_a = false, "row_alignment"_a = 16, "kv_format"_a = "",
          "packed_width"_a = 0, "sliding_window"_a = 0, "has_soft_cap"_a = false);

  m.def("targets", &Targets, "FFI handlers: {platform: {target name: capsule}}.");
  m.def(
      "ffi_api_version", [] { return std::pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "XLA FFI version (major, minor) of the headers this module was built with.");
  m.def("build_info", &BuildInfo, "What this module was built with.");
  m.def("call_counts", &CallCounts, "Executions of each handler since the module was loaded.");
  m.def("decode_backends", &DecodeBackends, "platform"_a, "shape"_a, "compute_capability"_a = 0,
        "is_described"_a = false,
        "[(backend, reason it declines or '')] in the order in which they are tried.");
  m.def("backends_by_name", &BackendsByName,
        "[(backend, why)] of those that run only if backend= names them.");
  m.def("cpu_kernels", &CpuKernels,
        "Vector kernels of the CPU backend that this processor can run, best first.");
  m.def(
      "cpu_kernel", &CpuKernel,
      "The one that calls use: the best, or what the environment variable JAX_MLA_CPU_KERNEL named "
      "when the process first needed a kernel. '' if this processor cannot run that.");
  m.def("prefill_why_not", &PrefillWhyNot, nb::kw_only(), "compute_capability"_a, "dtype"_a,
        "d_nope"_a, "d_kpe"_a, "d_v"_a,
        "Why the prefill kernel does not run such a call on a GPU of this capability (10 * major + "
        "minor); '' if it does.");
  m.def("index_topk_why_not", &IndexTopkWhyNot, nb::kw_only(), "compute_capability"_a, "q_dtype"_a,
        "key_dtype"_a, "num_heads"_a, "d"_a, "k"_a, "page_size"_a, "backend"_a,
        "Why no CUDA backend runs such a call of index_topk on a GPU of this capability; '' if one "
        "does.");
  m.def("index_topk_scratch_bytes", &index::ScratchBytes, nb::kw_only(), "num_tokens"_a,
        "max_seq_len"_a, "k"_a, "is_ragged"_a,
        "Size of the scratch result of a CUDA call of index_topk.");
  m.def("decode_scratch_bytes", &ScratchBytes, "shape"_a, "backend"_a = "",
        "Size of the scratch result of a CUDA decode call: enough for every GPU, and for every "
        "backend that the attribute `backend` may choose.");
  m.def("ragged_scratch_bytes", &decode::RaggedScratchBytes, "shape"_a, "num_tokens"_a,
        "The same of a ragged CUDA call; the shape's batch counts sequences, its q_len is 0 unless "
        "all have the same.");
  m.def("rotated_query_bytes", &decode::RotatedQueryBytes, "shape"_a, "num_tokens"_a,
        "What a ragged CUDA call that rotates q_pe needs in addition.");
  m.def("ragged_plan_bytes", &decode::UnitPlanBytes, "shape"_a, "num_tokens"_a,
        "Size of the plan that a ragged CUDA call takes; 0 if it takes none.");
  AddSchedule(m);
}
