// The "sm100" backend: CUTLASS's Blackwell MLA decode kernel, with kernels of ours around it that
// keep this op's contract (docs/kernels/decode_sm100.md). It is compiled and has never run, because
// there was no such GPU: so it runs by name only.
#include "decode/backend.h"

#include <limits>

#include "decode/sm100/launch.h"

namespace jax_mla::decode {
namespace sm100 {
namespace {

constexpr int kComputeCapability = 100;  // sm_100a code runs on no other
constexpr int32_t kMaxEntries = 65535;   // they are a dimension of the grid
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::string WhyNotTheTokens(const DecodeShape& shape) {
  if (shape.q_len == 0) return "takes no ragged calls (cu_q_lens)";
  if (shape.q_len != 1) return "needs q_len 1, got " + std::to_string(shape.q_len);
  const int64_t entries = CountEntries(shape);
  if (entries > kMaxEntries) {
    return "needs at most 65535 groups of 128 heads in all sequences, got " +
           std::to_string(entries);
  }
  const int64_t tiles = entries * CeilDiv(int64_t{shape.max_seq_len}, kTileTokens);
  if (tiles > kMaxInt32) {
    return "needs at most 2^31 pages of 128 tokens in all groups of 128 heads, got " +
           std::to_string(tiles);
  }
  return "";
}

std::string WhyNot(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  if (problem.device.compute_capability() != kComputeCapability) {
    return "needs compute capability 10.0, got " + std::to_string(problem.device.cc_major) + "." +
           std::to_string(problem.device.cc_minor);
  }
  if (shape.dtype != DType::kBf16) {
    return std::string("needs bfloat16, got ") + DTypeName(shape.dtype);
  }
  if (shape.d_ckv != kDCkv || shape.d_kpe != kDKpe) {
    return "needs d_ckv, d_kpe = 512, 64, got " + std::to_string(shape.d_ckv) + ", " +
           std::to_string(shape.d_kpe);
  }
  if (shape.kv_format != KvFormat::kPlain) {
    return std::string("needs a cache in bfloat16, got ") + KvFormatName(shape.kv_format);
  }
  if (!shape.has_positive_scale) return "needs a positive sm_scale";
  if (shape.HasMasks()) return "has no kernel with a sliding window or a soft cap";
  if (std::string reason = WhyNotTheTokens(shape); !reason.empty()) return reason;
  if (shape.page_size % kTileTokens != 0) {
    return "needs a page_size that is a multiple of 128, got " + std::to_string(shape.page_size);
  }
  if (shape.packed_width == 0) return "needs a packed pool, got ckv and kpe in two";
  if (!problem.variant.empty()) {
    return "has no kernel \"" + std::string(problem.variant) + "\"";
  }
  return "";
}

// What only the parameters show.
std::string WhyNotTheseParams(const DecodeParams& params, const Buffers& buffers,
                              int64_t scratch_bytes) {
  if (params.scratch_bytes < scratch_bytes) {
    return "needs " + std::to_string(scratch_bytes) + " bytes of scratch, got " +
           std::to_string(params.scratch_bytes);
  }
  if (buffers.pages.num_pages > kMaxInt32) {
    return "needs pool and scratch less than 2^31 pages of 128 tokens apart, got " +
           std::to_string(buffers.pages.num_pages);
  }
  return "";
}

std::string Run(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  const CallPlan plan = MakeCallPlan(problem.shape);
  const Buffers buffers = MakeBuffers(params, plan, problem.device.num_sms);
  const std::string reason = WhyNotTheseParams(params, buffers, ScratchBytes(problem.shape));
  if (!reason.empty()) return reason;
  const cudaError_t error = LaunchDecode<DType::kBf16>(params, plan, buffers, stream);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

bool CanAppend(const DecodeProblem&) { return false; }

}  // namespace
}  // namespace sm100

const DecodeBackend kSm100Backend = {
    .name = "sm100",
    .why_not = &sm100::WhyNot,
    .can_append = &sm100::CanAppend,
    .launch = &sm100::Run,
    .plan_units = nullptr,  // why_not declines calls of units
    .scratch_bytes = &sm100::ScratchBytes,
    .by_name_only = "compiled, never run",
};

}  // namespace jax_mla::decode
