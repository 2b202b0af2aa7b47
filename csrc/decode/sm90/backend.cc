// The "sm90" backend: Hopper's two decode kernels, chosen by the number of query rows that share
// one KV stream and the work there is (choice.h).
#include "decode/backend.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "append/encode.h"
#include "decode/sm90/choice.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/narrow/launch.h"
#include "decode/sm90/tuning.h"
#include "decode/sm90/wide/launch.h"
#include "decode/split/schedule.h"
#include "decode/split/unit_plan.h"

namespace jax_mla::decode {
namespace sm90 {
namespace {

constexpr int kComputeCapability = 90;  // sm_90a code runs on no other
// Variants: a kernel, and of the narrow one also a tile that is repeated until it holds all rows,
// and the number of teams. "scores" is the narrow kernel with a warpgroup for the scores.
constexpr std::string_view kNarrow = "narrow", kNarrow8 = "narrow8", kNarrow16 = "narrow16",
                           kNarrow16Teams = "narrow16x2", kScores = "scores", kWide = "wide";
constexpr std::string_view kVariants[] = {kNarrow,        kNarrow8, kNarrow16,
                                          kNarrow16Teams, kScores,  kWide};

Tiling TilingOf(const DecodeProblem& problem, bool has_units) {
  const DecodeShape& shape = problem.shape;
  if (problem.variant == kWide) return {.is_wide = true, .tile_rows = 0};
  if (problem.variant == kNarrow8) return {.is_wide = false, .tile_rows = 8};
  if (problem.variant == kNarrow16) return {.is_wide = false, .tile_rows = 16};
  if (problem.variant == kScores) {
    return {.is_wide = false, .tile_rows = kLargeTileRows};
  }
  // Then the result may not depend on the batch, and the rows alone decide.
  const bool is_fixed = shape.num_splits != 0 || shape.batch_invariant;
  if (problem.variant == kNarrow16Teams) {
    // Which team takes a block depends on what the CTA has done before, and so on the batch.
    const bool has_teams = !is_fixed && HasTeams(shape, has_units);
    return {.is_wide = false, .tile_rows = 16, .num_teams = has_teams ? 2 : 1};
  }
  const bool has_codes = shape.kv_format != KvFormat::kPlain;
  Tiling by_rows = has_codes ? CodesTilingByRows(shape) : TilingByRows(problem.num_rows());
  if (problem.variant == kNarrow) {
    return {.is_wide = false, .tile_rows = by_rows.is_wide ? kMaxNarrowRows : by_rows.tile_rows};
  }
  if (is_fixed) return by_rows;
  if (has_units) {  // of which only the device knows how many there are and how long
    by_rows.num_teams = ChooseNumTeams(shape, has_units, problem.device.num_sms);
    return by_rows;
  }
  return has_codes ? ChooseCodesTiling(shape, problem.device.num_sms)
                   : ChooseTiling(shape, problem.device.num_sms);
}

// What tells the kernels apart.
struct KernelKey {
  DType dtype;
  int32_t d_ckv, d_kpe;
  bool is_wide;
  int32_t tile_rows;
  KvStorage storage;
  KvLoad load;
  int32_t num_teams;
  narrow::QueryStorage queries;

  bool operator==(const KernelKey&) const = default;
};

struct Kernel {
  KernelKey key;
  std::string (*launch)(const DecodeParams&, const DecodeProblem&, cudaStream_t);
};

// All kernels of this backend: a row for each row of the files from which they are compiled.
constexpr Kernel kKernels[] = {
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, tile_rows, storage, load, teams, queries)         \
  {{DType::dtype, d_ckv, d_kpe, false, tile_rows, KvStorage::storage, KvLoad::load, teams,  \
    narrow::QueryStorage::queries},                                                         \
   narrow::Launch<narrow::Config<DType::dtype, d_ckv, d_kpe, tile_rows, KvStorage::storage, \
                                 KvLoad::load, teams, narrow::QueryStorage::queries>>},
#include "decode/sm90/narrow/instances.inc"
#undef MLA_INSTANCE
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, load)                                          \
  {{DType::dtype, d_ckv, d_kpe, true, kWideTileRows, KvStorage::kPlain, KvLoad::load, 1, \
    narrow::QueryStorage::kPlain},                                                       \
   wide::Launch<wide::Config<DType::dtype, d_ckv, d_kpe, KvLoad::load>>},
#include "decode/sm90/wide/instances.inc"
#undef MLA_INSTANCE
};

KernelKey KeyOf(const DecodeProblem& problem, bool has_units) {
  using narrow::QueryStorage;
  const DecodeShape& shape = problem.shape;
  const Tiling tiling = TilingOf(problem, has_units);
  const bool has_scores_warpgroup =
      tiling.tile_rows == kLargeTileRows && !tiling.is_wide && HasScoresWarpgroup(shape);
  return {.dtype = shape.dtype,
          .d_ckv = shape.d_ckv,
          .d_kpe = shape.d_kpe,
          .is_wide = tiling.is_wide,
          .tile_rows = tiling.is_wide ? kWideTileRows : tiling.tile_rows,
          .storage = shape.kv_format == KvFormat::kDsMla ? KvStorage::kFp8Tiles
                                                         : StorageOf(shape.kv_format),
          .load = LoadOf(shape.page_size),
          .num_teams = tiling.num_teams,
          .queries = !has_scores_warpgroup   ? QueryStorage::kPlain
                     : shape.has_query_codes ? QueryStorage::kCodes
                                             : QueryStorage::kTwoCodes};
}

const Kernel* FindKernel(const KernelKey& key) {
  const auto found = std::ranges::find(kKernels, key, &Kernel::key);
  return found == std::end(kKernels) ? nullptr : &*found;
}

// The dims that kernels have, as text, and whether a call's are among them.
bool HasDims(const DecodeShape& shape, std::string* all) {
  bool has_them = false;
  for (const Kernel& kernel : kKernels) {
    has_them |= kernel.key.d_ckv == shape.d_ckv && kernel.key.d_kpe == shape.d_kpe;
    const std::string dims =
        std::to_string(kernel.key.d_ckv) + ", " + std::to_string(kernel.key.d_kpe);
    if (all->find(dims) == std::string::npos) *all += (all->empty() ? "" : " or ") + dims;
  }
  return has_them;
}

// What the kernel named by problem.variant needs and the call lacks.
std::string WhyNotVariant(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  const bool is_plain = shape.kv_format == KvFormat::kPlain;
  if (!problem.variant.empty() && !std::ranges::count(kVariants, problem.variant)) {
    return "has no kernel \"" + std::string(problem.variant) + "\"";
  }
  if (problem.variant == kNarrow16Teams && (is_plain || shape.d_ckv != kTeamsDCkv)) {
    return "needs an FP8 cache with d_ckv = " + std::to_string(kTeamsDCkv) +
           " for \"narrow16x2\", got " +
           (is_plain ? DTypeName(shape.dtype) : KvFormatName(shape.kv_format)) + " with " +
           std::to_string(shape.d_ckv);
  }
  if (problem.variant == kNarrow16Teams && LoadOf(shape.page_size) != KvLoad::kBoxes) {
    return "needs pages of a multiple of " + std::to_string(kScheduleBlock) +
           " tokens for \"narrow16x2\", got " + std::to_string(shape.page_size);
  }
  if (problem.variant == kScores && !HasScoresWarpgroup(shape)) {
    return "needs an FP8 cache with d_ckv = " + std::to_string(kScoresDCkv) + " for \"scores\"";
  }
  if (problem.variant == kWide && !is_plain) {
    return std::string("needs a cache in bfloat16 or float16 for \"wide\", got ") +
           KvFormatName(shape.kv_format);
  }
  return "";
}

std::string WhyNot(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  if (problem.device.compute_capability() != kComputeCapability) {
    return "needs compute capability 9.0, got " + std::to_string(problem.device.cc_major) + "." +
           std::to_string(problem.device.cc_minor);
  }
  if (shape.kv_format != KvFormat::kPlain && shape.dtype != DType::kBf16) {
    return std::string("needs queries in bfloat16 or float8_e4m3fn with an FP8 cache, got ") +
           DTypeName(shape.dtype);
  }
  if (shape.dtype == DType::kF32) return "needs bfloat16 or float16, got float32";
  std::string dims;
  if (!HasDims(shape, &dims)) {
    return "needs d_ckv, d_kpe = " + dims + ", got " + std::to_string(shape.d_ckv) + ", " +
           std::to_string(shape.d_kpe);
  }
  if (shape.HasMasks()) return "has no kernel with a sliding window or a soft cap";
  const std::string reason = WhyNotVariant(problem);
  if (!reason.empty()) return reason;
  const bool has_units = HasUnits(shape);
  if (has_units && !TakesSteps(shape.dtype)) {
    return std::string("needs bfloat16 for ragged steps, got ") + DTypeName(shape.dtype);
  }
  if (FindKernel(KeyOf(problem, has_units)) == nullptr) return "has no kernel for such a call";
  return "";
}

// Where one warp copies whole blocks, another one can write their new rows.
bool CanAppend(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  if (!TakesSteps(shape.dtype) || shape.q_len != 1 || LoadOf(shape.page_size) != KvLoad::kBoxes) {
    return false;
  }
  const append::AppendParams& rows = *problem.new_rows;
  if (rows.dtype != shape.dtype || !append::IsVector(rows)) return false;
  const Tiling tiling = TilingOf(problem, /*has_units=*/false);
  return tiling.is_wide || NarrowMayAppend(tiling.num_teams);
}

SplitPlan PlanUnits(const DecodeParams& params, const DecodeProblem& problem) {
  const Tiling tiling = TilingOf(problem, /*has_units=*/true);
  const int num_sms = problem.device.num_sms;
  return MakeSplitPlan(params, tiling.is_wide
                                   ? UnitSplit(problem.shape, num_sms)
                                   : NarrowSplit(problem.shape, tiling.tile_rows, num_sms));
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
