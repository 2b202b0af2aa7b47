// The "sm90" backend: Hopper's decode kernels, chosen by the number of query rows that share one KV
// stream and the work there is (choice.h). What the table of kernels (kernels.h) does not have is
// declined.
#include "decode/backend.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "append/encode.h"
#include "decode/schedule/schedule.h"
#include "decode/schedule/unit_plan.h"
#include "decode/sm90/choice.h"
#include "decode/sm90/kernels.h"
#include "decode/sm90/tuning.h"

namespace jax_mla::decode {
namespace sm90 {
namespace {

constexpr int kComputeCapability = 90;  // sm_90a code runs on no other

KernelKey KeyOf(const DecodeProblem& problem, bool has_units) {
  return ChooseKernel(problem.shape, FindVariant(problem.variant), has_units,
                      problem.device.num_sms);
}

// Texts of what rows of the table have: those that `matches`, each once.
template <class Matches, class Text>
std::string AllOf(Matches matches, Text text) {
  std::vector<std::string> texts;
  for (const Kernel& kernel : Kernels()) {
    if (!matches(kernel.key)) continue;
    const std::string one = text(kernel.key);
    if (std::ranges::count(texts, one) == 0) texts.push_back(one);
  }
  std::string all;
  for (const std::string& one : texts) all += (all.empty() ? "" : " or ") + one;
  return all;
}
template <class Matches>
bool HasRow(Matches matches) {
  return std::ranges::any_of(Kernels(), matches, &Kernel::key);
}

std::string DimsText(int32_t d_ckv, int32_t d_kpe) {
  return std::to_string(d_ckv) + ", " + std::to_string(d_kpe);
}

// What the kernels for `call` lack: of all kernels, or of those that a variant names.
std::string WhyNoKernel(const KernelKey& call, const DecodeShape& shape, const Variant* variant) {
  const auto is_named = [&](const KernelKey& key) {
    return variant == nullptr || variant->tile_rows == 0 ||
           (key.kernel == variant->kernel && key.tile_rows == variant->tile_rows &&
            key.num_teams == variant->num_teams);
  };
  const auto has_cache = [&](const KernelKey& key) {
    return is_named(key) && (key.codes == CacheCodes::kNone) == (call.codes == CacheCodes::kNone);
  };
  const std::string whose = variant == nullptr ? "" : " for \"" + std::string(variant->name) + "\"";
  const auto dtype_text = [](const KernelKey& key) { return std::string(DTypeName(key.dtype)); };
  const bool has_codes = call.codes != CacheCodes::kNone;
  const auto has_dims = [&](const KernelKey& key) {
    return key.d_ckv == call.d_ckv && key.d_kpe == call.d_kpe;
  };
  const auto is_like = [&](const KernelKey& key) { return has_cache(key) && has_dims(key); };
  if (variant != nullptr && !HasRow(is_like)) {
    const auto ckv_text = [](const KernelKey& key) { return std::to_string(key.d_ckv); };
    const bool wants_codes = HasRow(
        [&](const KernelKey& key) { return is_named(key) && key.codes != CacheCodes::kNone; });
    const std::string cache =
        wants_codes ? "an FP8 cache" : "a cache in " + AllOf(is_named, dtype_text);
    return "needs " + cache + " with d_ckv = " + AllOf(is_named, ckv_text) + whose + ", got " +
           (has_codes ? KvFormatName(shape.kv_format) : DTypeName(call.dtype)) + " with " +
           std::to_string(call.d_ckv);
  }
  const auto has_dtype = [&](const KernelKey& key) {
    return has_cache(key) && key.dtype == call.dtype;
  };
  if (!HasRow(has_dtype)) {
    const std::string dtypes = AllOf(has_cache, dtype_text);
    return (has_codes ? "needs queries in " + dtypes + " or float8_e4m3fn with an FP8 cache"
                      : "needs " + dtypes) +
           whose + ", got " + DTypeName(call.dtype);
  }
  if (!HasRow([&](const KernelKey& key) { return has_dtype(key) && has_dims(key); })) {
    const auto dims_text = [](const KernelKey& key) { return DimsText(key.d_ckv, key.d_kpe); };
    return "needs d_ckv, d_kpe = " + AllOf(has_dtype, dims_text) + ", got " +
           DimsText(call.d_ckv, call.d_kpe);
  }
  KernelKey with_boxes = call;
  with_boxes.load = KvLoad::kBoxes;
  if (variant != nullptr) with_boxes.num_teams = variant->num_teams;
  if (call.load != KvLoad::kBoxes && FindKernel(with_boxes) != nullptr) {
    return "needs pages of a multiple of " + std::to_string(kScheduleBlock) + " tokens" + whose +
           ", got " + std::to_string(shape.page_size);
  }
  return "has no kernel for such a call";
}

std::string WhyNot(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  if (problem.device.compute_capability() != kComputeCapability) {
    return "needs compute capability 9.0, got " + std::to_string(problem.device.cc_major) + "." +
           std::to_string(problem.device.cc_minor);
  }
  const Variant* variant = FindVariant(problem.variant);
  if (variant == nullptr && !problem.variant.empty()) {
    return "has no kernel \"" + std::string(problem.variant) + "\"";
  }
  const bool has_units = HasUnits(shape);
  KernelKey key = KeyOf(problem, has_units);
  const Kernel* kernel = FindKernel(key);
  // One team may stand in for two in a call for which two would depend on the batch.
  if (variant != nullptr) key.num_teams = variant->num_teams;
  if (kernel == nullptr || FindKernel(key) == nullptr) return WhyNoKernel(key, shape, variant);
  if (shape.HasMasks()) return "has no kernel with a sliding window or a soft cap";
  if (has_units && !kernel->takes_units) {
    return std::string("needs bfloat16 for ragged steps, got ") + DTypeName(shape.dtype);
  }
  return "";
}

// Whether the kernel writes a step's new rows, of which there is one a sequence.
bool CanAppend(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  const append::AppendParams& rows = *problem.new_rows;
  if (shape.q_len != 1 || rows.dtype != shape.dtype || !append::IsVector(rows)) return false;
  const Kernel* kernel = FindKernel(KeyOf(problem, /*has_units=*/false));
  return kernel != nullptr && kernel->appends;
}

SplitPlan PlanUnits(const DecodeParams& params, const DecodeProblem& problem) {
  const KernelKey key = KeyOf(problem, /*has_units=*/true);
  const int num_sms = problem.device.num_sms;
  return MakeSplitPlan(params, key.kernel == KernelKind::kWide
                                   ? UnitSplit(problem.shape, num_sms)
                                   : NarrowSplit(problem.shape, key.tile_rows, num_sms));
}

std::string Launch(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  const Kernel* kernel = FindKernel(KeyOf(problem, params.units.units != nullptr));
  if (kernel == nullptr) return "no kernel was found for a call that was taken";
  return kernel->launch(params, problem, stream);
}

}  // namespace
}  // namespace sm90

const DecodeBackend kSm90Backend = {
    .name = "sm90",
    .why_not = sm90::WhyNot,
    .can_append = sm90::CanAppend,
    .launch = sm90::Launch,
    .plan_units = sm90::PlanUnits,
};

}  // namespace jax_mla::decode
