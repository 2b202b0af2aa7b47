// The "sm90" backend: Hopper's two decode kernels, chosen by the number of query rows that share
// one KV stream and the work there is (choice.h).
#include "decode/backend.h"

#include <string>
#include <string_view>

#include "append/encode.h"
#include "decode/sm90/choice.h"
#include "decode/sm90/common/kv_load.h"
#include "decode/sm90/narrow/launch.h"
#include "decode/sm90/tuning.h"
#include "decode/sm90/wide/launch.h"
#include "decode/split/schedule.h"

namespace jax_mla::decode {
namespace sm90 {
namespace {

constexpr int kComputeCapability = 90;  // sm_90a code runs on no other
// Variants: a kernel, and of the narrow one also a tile that is repeated until it holds all rows,
// and the number of teams. "scores" is the narrow kernel with a warpgroup for the scores.
constexpr std::string_view kNarrow = "narrow", kNarrow8 = "narrow8", kNarrow16 = "narrow16",
                           kNarrow16Teams = "narrow16x2", kScores = "scores", kWide = "wide";

bool HasDims(const DecodeShape& shape, int d_ckv, int d_kpe) {
  return shape.d_ckv == d_ckv && shape.d_kpe == d_kpe;
}

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
  Tiling by_rows =
      has_codes ? CodesTilingByRows(problem.num_rows()) : TilingByRows(problem.num_rows());
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

std::string WhyNot(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  if (problem.device.compute_capability() != kComputeCapability) {
    return "needs compute capability 9.0, got " + std::to_string(problem.device.cc_major) + "." +
           std::to_string(problem.device.cc_minor);
  }
  if (shape.kv_format != KvFormat::kPlain) {
    if (shape.dtype != DType::kBf16) {
      return std::string("needs queries in bfloat16 or float8_e4m3fn with an FP8 cache, got ") +
             DTypeName(shape.dtype);
    }
    if (shape.page_size % kScheduleBlock != 0) {
      return "needs pages of a multiple of " + std::to_string(kScheduleBlock) +
             " tokens with an FP8 cache, got " + std::to_string(shape.page_size);
    }
  }
  if (shape.dtype == DType::kF32) return "needs bfloat16 or float16, got float32";
  if (!HasDims(shape, 512, 64) && !HasDims(shape, 256, 32)) {
    return "needs d_ckv, d_kpe = 512, 64 or 256, 32, got " + std::to_string(shape.d_ckv) + ", " +
           std::to_string(shape.d_kpe);
  }
  if (!problem.variant.empty() && problem.variant != kNarrow && problem.variant != kNarrow8 &&
      problem.variant != kNarrow16 && problem.variant != kNarrow16Teams &&
      problem.variant != kScores && problem.variant != kWide) {
    return "has no kernel \"" + std::string(problem.variant) + "\"";
  }
  if (problem.variant == kNarrow16Teams && !HasTeams(shape, /*has_units=*/false)) {
    const bool is_plain = shape.kv_format == KvFormat::kPlain;
    return "needs an FP8 cache with d_ckv = " + std::to_string(kTeamsDCkv) +
           " for \"narrow16x2\", got " +
           (is_plain ? DTypeName(shape.dtype) : KvFormatName(shape.kv_format)) + " with " +
           std::to_string(shape.d_ckv);
  }
  if (problem.variant == kScores && !HasScoresWarpgroup(shape)) {
    return "needs an FP8 cache with d_ckv = " + std::to_string(kScoresDCkv) + " for \"scores\"";
  }
  return "";
}

template <DType kDType, int kDCkv, int kDKpe, KvStorage kStorage, KvLoad kLoad>
std::string LaunchTiling(const DecodeParams& params, const DecodeProblem& problem,
                         cudaStream_t stream) {
  const Tiling tiling = TilingOf(problem, params.units.units != nullptr);
  if (tiling.is_wide) {
    return wide::Launch<wide::Config<kDType, kDCkv, kDKpe, kStorage, kLoad>>(params, problem,
                                                                             stream);
  }
  using narrow::QueryStorage;
  const auto launch = [&]<int kRows, KvStorage kOwnStorage, int kTeams = 1,
                          QueryStorage kQueries = QueryStorage::kPlain>() {
    using C = narrow::Config<kDType, kDCkv, kDKpe, kRows, kOwnStorage, kLoad, false,
                             RowAppend::kNone, kTeams, kQueries>;
    return narrow::Launch<C>(params, problem, stream);
  };
  const auto launch_rows = [&]<KvStorage kOwnStorage>() {
    if constexpr (kOwnStorage != KvStorage::kPlain) {
      if (tiling.tile_rows == kLargeTileRows) {
        if constexpr (kDCkv != kScoresDCkv) {
          return launch.template operator()<kLargeTileRows, kOwnStorage>();
        } else if (problem.shape.has_query_codes) {
          return launch.template operator()<kLargeTileRows, kOwnStorage, 1, QueryStorage::kCodes>();
        } else {
          return launch
              .template operator()<kLargeTileRows, kOwnStorage, 1, QueryStorage::kTwoCodes>();
        }
      }
      if constexpr (kDCkv == kTeamsDCkv) {
        if (tiling.num_teams == 2) return launch.template operator()<16, kOwnStorage, 2>();
      }
    }
    return tiling.tile_rows == 8 ? launch.template operator()<8, kOwnStorage>()
                                 : launch.template operator()<16, kOwnStorage>();
  };
  if constexpr (kStorage == KvStorage::kFp8 && kDCkv == DsMla::kDCkv) {
    if (params.kv_format == KvFormat::kDsMla) {
      return launch_rows.template operator()<KvStorage::kFp8Tiles>();
    }
  }
  return launch_rows.template operator()<kStorage>();
}

template <DType kDType, int kDCkv, int kDKpe, KvStorage kStorage>
std::string LaunchLoad(const DecodeParams& params, const DecodeProblem& problem,
                       cudaStream_t stream) {
  const auto launch = [&]<KvLoad kLoad>() {
    return LaunchTiling<kDType, kDCkv, kDKpe, kStorage, kLoad>(params, problem, stream);
  };
  if (params.page_size % kScheduleBlock == 0) {
    return launch.template operator()<KvLoad::kTmaBlocks>();
  }
  if constexpr (kStorage == KvStorage::kPlain) {
    return params.page_size % kMinBoxTokens == 0 ? launch.template operator()<KvLoad::kTma>()
                                                 : launch.template operator()<KvLoad::kGather>();
  }
  return "an FP8 cache in pages that are no multiple of a block";  // WhyNot has refused it
}

template <DType kDType, KvStorage kStorage = KvStorage::kPlain>
std::string LaunchDims(const DecodeParams& params, const DecodeProblem& problem,
                       cudaStream_t stream) {
  return HasDims(problem.shape, 512, 64)
             ? LaunchLoad<kDType, 512, 64, kStorage>(params, problem, stream)
             : LaunchLoad<kDType, 256, 32, kStorage>(params, problem, stream);
}

// Where one warp copies whole blocks, another one can write their new rows.
bool CanAppend(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  if (shape.q_len != 1 || shape.page_size % kScheduleBlock != 0) return false;
  const append::AppendParams& rows = *problem.new_rows;
  if (append::HasEncoding(rows) && (rows.dtype != shape.dtype || !append::IsVector(rows))) {
    return false;
  }
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
  if (problem.shape.kv_format != KvFormat::kPlain) {
    return LaunchDims<DType::kBf16, KvStorage::kFp8>(params, problem, stream);
  }
  return problem.shape.dtype == DType::kBf16 ? LaunchDims<DType::kBf16>(params, problem, stream)
                                             : LaunchDims<DType::kF16>(params, problem, stream);
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
