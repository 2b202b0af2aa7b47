// The kernels of a call, in order: the places of its queries, and then, slab by slab, scores and
// choice. Scores have two kernels, Hopper's and the portable one.
#include "index/choose_backend.h"

#include <algorithm>

#include "index/launch.h"
#include "index/sm80/launch.h"
#include "index/why_not.h"
#if defined(JAX_MLA_WITH_SM90A)
#include "index/sm90/launch.h"
#endif

namespace jax_mla::index {
namespace {

std::string TextOf(cudaError_t error) {
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

TopkShape ShapeOf(const TopkParams& p) {
  return {.q_dtype = p.q_dtype,
          .key_dtype = p.key_dtype,
          .num_heads = p.num_heads,
          .d = p.d,
          .k = p.k,
          .page_size = p.page_size};
}

std::string WhyNotSm80(const TopkShape& shape, int compute_capability) {
  if (compute_capability < 80) return "needs a GPU of compute capability 8.0 or newer";
  if (shape.d != kDim) return "needs keys of 128 dimensions, got " + std::to_string(shape.d);
  if (shape.num_heads < 1 || shape.num_heads > kMaxHeads) {
    return "needs 1 to 64 index heads, got " + std::to_string(shape.num_heads);
  }
  if (shape.k > kMaxTopk) return "needs k of at most 4096, got " + std::to_string(shape.k);
  if (shape.key_dtype != DType::kE4m3 && shape.key_dtype != DType::kBf16) {
    return std::string("needs keys in bfloat16 or FP8, got ") + DTypeName(shape.key_dtype);
  }
  const bool has_codes = shape.key_dtype == DType::kE4m3 && shape.q_dtype == DType::kE4m3;
  if (shape.q_dtype != DType::kBf16 && !has_codes) {
    return std::string("needs queries in bfloat16, or in float8_e4m3fn with FP8 keys, got ") +
           DTypeName(shape.q_dtype);
  }
  return "";
}

std::string WhyNotSm90([[maybe_unused]] const TopkShape& shape,
                       [[maybe_unused]] int compute_capability) {
#if defined(JAX_MLA_WITH_SM90A)
  if (compute_capability != 90) return "needs a GPU of compute capability 9.0 (Hopper)";
  if (std::string why_not = WhyNotSm80(shape, compute_capability); !why_not.empty()) return why_not;
  if (shape.q_dtype != shape.key_dtype) {
    return std::string("needs queries in the type of the keys, ") + DTypeName(shape.key_dtype) +
           ", got " + DTypeName(shape.q_dtype);
  }
  return sm90::WhyNotPageSize(shape.page_size);
#else
  return "this build has no code for compute capability 9.0 (JAX_MLA_CUDA_ARCHS without 90a)";
#endif
}

std::string LaunchScores(const TopkParams& p, const Slab& slab, [[maybe_unused]] bool is_sm90,
                         const gpu::DeviceFacts& device, cudaStream_t stream) {
#if defined(JAX_MLA_WITH_SM90A)
  if (is_sm90) return sm90::LaunchScores(p, slab, device, stream);
#endif
  return TextOf(sm80::LaunchScores(p, slab, device, stream));
}

}  // namespace

std::string WhyNot(const TopkShape& shape, int compute_capability, std::string_view backend) {
  const std::string sm90 = WhyNotSm90(shape, compute_capability);
  const std::string sm80 = WhyNotSm80(shape, compute_capability);
  if (backend == "sm90") return sm90.empty() ? "" : "sm90: " + sm90;
  if (backend == "sm80") return sm80.empty() ? "" : "sm80: " + sm80;
  return sm90.empty() || sm80.empty() ? "" : "sm90: " + sm90 + "; sm80: " + sm80;
}

std::string RunCuda(const TopkParams& p, std::string_view backend, const gpu::DeviceFacts& device,
                    cudaStream_t stream) {
  if (p.num_tokens == 0) return "";
  const int32_t capability = device.compute_capability();
  if (std::string why_not = WhyNot(ShapeOf(p), capability, backend); !why_not.empty()) {
    return why_not;
  }
  if (std::string why_not = WhyNotChoose(p.max_seq_len, device); !why_not.empty()) return why_not;
  const bool is_sm90 = backend != "sm80" && WhyNotSm90(ShapeOf(p), capability).empty();
  const int64_t place_bytes = PlaceBytes(p.num_tokens, p.cu_q_lens != nullptr);
  const bool has_scores = p.max_seq_len > p.k;
  Slab slab{
      .begin = 0,
      .num_rows = p.num_tokens,
      .score_keys = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.scratch) + place_bytes),
      .stride = ScoreStride(p.max_seq_len)};
  int32_t slab_rows = p.num_tokens;
  if (has_scores) {
    slab_rows = SlabRows(p.num_tokens, p.max_seq_len, p.scratch_bytes - place_bytes);
    // Slabs of about equal size.
    const int32_t num_slabs = (p.num_tokens + slab_rows - 1) / slab_rows;
    slab_rows = (p.num_tokens + num_slabs - 1) / num_slabs;
  }
  std::string problem = TextOf(LaunchPlaces(p, stream));
  while (problem.empty() && slab.begin < p.num_tokens) {
    slab.num_rows = std::min(slab_rows, p.num_tokens - slab.begin);
    if (has_scores) problem = LaunchScores(p, slab, is_sm90, device, stream);
    if (problem.empty()) problem = TextOf(LaunchChoose(p, slab, device, stream));
    slab.begin += slab.num_rows;
  }
  return problem;
}

}  // namespace jax_mla::index
