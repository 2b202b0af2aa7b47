// CUDA handler of "jax_mla_decode" and the ordered table of backends behind it.
//
// The handler has no state: all that a call needs is in its operands and attributes. It enqueues
// kernels and does nothing besides (no allocation, no synchronisation, no read from the device), so
// XLA may record it in a command buffer and never call it again.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/call_counter.h"
#include "decode/backend.h"
#include "decode/backend_answers.h"
#include "decode/binding.h"
#include "decode/split/plan.h"
#include "gpu/launch.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

CallCounter calls("decode_cuda");

constexpr std::string_view kTarget = "jax_mla_decode";
constexpr char kVariantSeparator = ':';

constexpr std::array kBackends = {
#ifdef JAX_MLA_WITH_SM90A
    &kSm90Backend,
#endif
    &kSm80Backend,
};

// What backend= asks for.
struct Request {
  std::string_view backend;  // empty: the first that takes the call
  std::string_view variant;  // empty: the backend chooses
};

Request ParseRequest(std::string_view attribute) {
  const size_t separator = attribute.find(kVariantSeparator);
  if (separator == std::string_view::npos) return {attribute, ""};
  return {attribute.substr(0, separator), attribute.substr(separator + 1)};
}

// Every backend copies queries, cache and results in pieces of this size.
constexpr int32_t kPieceBytes = 16;

// Why a backend does not take a call; "" if it does.
std::string WhyNot(const DecodeBackend& backend, const DecodeProblem& problem) {
  std::string reason = backend.why_not(problem);
  if (reason.empty() && problem.shape.row_alignment != kPieceBytes) {
    reason = "needs kv_pages whose last dimension is a multiple of 16 bytes, got one of " +
             std::to_string(problem.shape.row_alignment);
  }
  return reason;
}

// The backend that runs the call. Null if there is none; then `reasons` says why each one declines.
const DecodeBackend* Choose(const DecodeProblem& problem, std::string_view name,
                            std::string& reasons) {
  for (const DecodeBackend* backend : CudaDecodeBackends()) {
    std::string reason = !name.empty() && name != backend->name
                             ? "not asked for (backend='" + std::string(name) + "')"
                             : WhyNot(*backend, problem);
    if (reason.empty()) return backend;
    reasons += std::string(reasons.empty() ? "" : "; ") + backend->name + ": " + reason;
  }
  return nullptr;
}

std::string CannotQuery(cudaError_t error) {
  return std::string("the GPU cannot be queried: ") + cudaGetErrorString(error);
}

// XLA places its buffers on larger boundaries than a piece, so this fails only if a caller passes
// an address inside a buffer.
ffi::Error CheckAlignment(const Checker& check, const DecodeParams& p) {
  const std::pair<std::string_view, const void*> buffers[] = {
      {"q_nope", p.q_nope}, {"q_pe", p.q_pe}, {"ckv", p.ckv.base},
      {"kpe", p.kpe.base},  {"out", p.out},   {"scratch", p.scratch},
  };
  for (const auto& [name, address] : buffers) {
    const uintptr_t offset_bytes = reinterpret_cast<uintptr_t>(address) % kPieceBytes;
    if (offset_bytes != 0) {
      return check.Fail(name, "an address that is a multiple of 16",
                        std::to_string(offset_bytes) + " bytes past one");
    }
  }
  return ffi::Error::Success();
}

// Limits that hold for every backend.
ffi::Error CheckLimits(const Checker& check, const DecodeParams& p) {
  constexpr int64_t kMaxTokens = int64_t{1} << 30;       // of a sequence: token indices are 32-bit
  constexpr int64_t kMaxBatchBlocks = int64_t{1} << 30;  // the schedule adds up blocks in 32 bits
  constexpr int64_t kMaxSeqElements = int64_t{1} << 32;  // a merge counts vectors of 4 in 32 bits
  const int64_t max_tokens = int64_t{p.max_pages_per_seq} * p.page_size;
  if (max_tokens > kMaxTokens) {
    return check.Fail("page_table", "at most 2^30 tokens a sequence", std::to_string(max_tokens));
  }
  const int64_t batch_blocks = p.batch * (max_tokens / kScheduleBlock + 1);
  if (batch_blocks > kMaxBatchBlocks) {
    return check.Fail("page_table", "at most 2^36 tokens a batch",
                      std::to_string(batch_blocks * kScheduleBlock));
  }
  const int64_t seq_elements = int64_t{p.q_len} * p.num_heads * p.d_ckv;
  if (seq_elements > kMaxSeqElements) {
    return check.Fail("q_nope", "at most 2^32 elements a sequence", std::to_string(seq_elements));
  }
  const int64_t scratch_bytes = DecodeScratchBytes(ShapeOf(p));
  if (p.scratch_bytes < scratch_bytes) {
    return check.Fail("scratch", std::to_string(scratch_bytes) + " bytes",
                      std::to_string(p.scratch_bytes));
  }
  return ffi::Error::Success();
}

ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  DecodeAttrs attrs) {
  calls.Increment();
  const auto params = ParseDecode(args, rets, attrs);
  if (!params) return params.error();
  MLA_RETURN_IF_ERROR(CheckLimits(Checker(kTarget), *params));
  if (params->batch == 0 || params->q_len == 0 || params->num_heads == 0) {
    return ffi::Error::Success();
  }
  cudaError_t query_error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&query_error);
  if (device == nullptr) {
    return ffi::Error::Internal(std::string(kTarget) + ": " + CannotQuery(query_error));
  }

  const Request request = ParseRequest(attrs.backend);
  const DecodeProblem problem{*device, ShapeOf(*params), request.variant};
  std::string reasons;
  const DecodeBackend* backend = Choose(problem, request.backend, reasons);
  if (backend == nullptr) {
    return ffi::Error::InvalidArgument(std::string(kTarget) +
                                       ": no backend takes this call: " + reasons);
  }
  MLA_RETURN_IF_ERROR(CheckAlignment(Checker(kTarget), *params));
  const std::string error = backend->launch(*params, problem, stream);
  if (!error.empty()) {
    return ffi::Error::Internal(std::string(kTarget) + ": " + backend->name + ": " + error);
  }
  return ffi::Error::Success();
}

}  // namespace

std::span<const DecodeBackend* const> CudaDecodeBackends() { return kBackends; }

std::vector<BackendAnswer> CudaBackends(const DecodeShape& shape, int compute_capability) {
  // Without a GPU and without a named capability (jax.export), answer for Hopper.
  constexpr int kDefaultComputeCapability = 90;
  const int cc = compute_capability > 0 ? compute_capability : kDefaultComputeCapability;
  gpu::DeviceFacts device = gpu::DescribeComputeCapability(cc / 10, cc % 10);
  cudaError_t query_error;
  const gpu::DeviceFacts* current = gpu::GetCurrentDeviceFacts(&query_error);
  if (current != nullptr &&
      (compute_capability == 0 || current->compute_capability() == compute_capability)) {
    device = *current;
  }
  // Python names a capability only of a GPU that JAX runs on. If that GPU cannot be queried here,
  // calls would fail.
  const bool is_unusable = current == nullptr && compute_capability > 0;
  std::vector<BackendAnswer> answers;
  for (const DecodeBackend* backend : CudaDecodeBackends()) {
    answers.push_back({backend->name, is_unusable ? CannotQuery(query_error)
                                                  : WhyNot(*backend, {device, shape, ""})});
  }
  return answers;
}

}  // namespace jax_mla::decode

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaDecodeCuda, jax_mla::decode::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_mla::decode::DecodeAttrs>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
