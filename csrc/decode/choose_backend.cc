// The ordered table of CUDA backends, and the choice among them.
#include "decode/choose_backend.h"

#include <array>
#include <vector>

#include "decode/backend_answers.h"
#include "decode/schedule/plan.h"
#include "gpu/launch.h"

namespace jax_mla::decode {
namespace ffi = xla::ffi;

namespace {

constexpr char kVariantSeparator = ':';

constexpr std::array kBackends = {
#ifdef JAX_MLA_WITH_SM90A
    &kSm90Backend,
#endif
    &kSm80Backend,
#ifdef JAX_MLA_WITH_SM100A
    &kSm100Backend,
#endif
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

// Why a backend does not take a call; "" if it does.
std::string WhyNot(const DecodeBackend& backend, const DecodeProblem& problem) {
  std::string reason = backend.why_not(problem);
  if (reason.empty() && problem.shape.row_alignment != kPieceBytes) {
    reason = "needs rows of kv_pages that are a multiple of 16 bytes, got a multiple of " +
             std::to_string(problem.shape.row_alignment) + " at most";
  }
  return reason;
}

// The same of a call with backend=`name`, which is empty if the call names none.
std::string WhyNotBy(std::string_view name, const DecodeBackend& backend,
                     const DecodeProblem& problem) {
  if (!name.empty() && name != backend.name) {
    return "not asked for (backend='" + std::string(name) + "')";
  }
  const std::string reason = WhyNot(backend, problem);
  if (reason.empty() && name.empty() && backend.by_name_only != nullptr) {
    return std::string("runs by name only (") + backend.by_name_only + ")";
  }
  return reason;
}

// The backend that runs the call. Null if there is none; then `reasons` says why each one declines.
const DecodeBackend* Choose(const DecodeProblem& problem, std::string_view name,
                            std::string& reasons) {
  for (const DecodeBackend* backend : CudaDecodeBackends()) {
    const std::string reason = WhyNotBy(name, *backend, problem);
    if (reason.empty()) return backend;
    reasons += std::string(reasons.empty() ? "" : "; ") + backend->name + ": " + reason;
  }
  return nullptr;
}

std::vector<BackendAnswer> Answers(const DecodeShape& shape, const gpu::DeviceFacts& device) {
  std::vector<BackendAnswer> answers;
  for (const DecodeBackend* backend : CudaDecodeBackends()) {
    answers.push_back({backend->name, WhyNot(*backend, {device, shape, ""})});
  }
  return answers;
}

std::string CannotQuery(cudaError_t error) {
  return std::string("the GPU cannot be queried: ") + cudaGetErrorString(error);
}

}  // namespace

std::span<const DecodeBackend* const> CudaDecodeBackends() { return kBackends; }

int64_t ScratchBytes(const DecodeBackend& backend, const DecodeShape& shape) {
  return backend.scratch_bytes == nullptr ? DecodeScratchBytes(shape)
                                          : backend.scratch_bytes(shape);
}

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
  std::vector<BackendAnswer> answers = Answers(shape, device);
  for (BackendAnswer& answer : answers) {
    if (is_unusable) answer.reason = CannotQuery(query_error);
  }
  return answers;
}

std::vector<BackendAnswer> DescribedBackends(const DecodeShape& shape, int compute_capability) {
  return Answers(shape,
                 gpu::DescribeComputeCapability(compute_capability / 10, compute_capability % 10));
}

std::vector<std::pair<std::string, std::string>> CudaBackendsByName() {
  std::vector<std::pair<std::string, std::string>> found;
  for (const DecodeBackend* backend : CudaDecodeBackends()) {
    if (backend->by_name_only != nullptr) found.emplace_back(backend->name, backend->by_name_only);
  }
  return found;
}

int64_t CudaScratchBytes(const DecodeShape& shape, std::string_view attribute) {
  const Request request = ParseRequest(attribute);
  for (const DecodeBackend* backend : CudaDecodeBackends()) {
    if (request.backend == backend->name) return ScratchBytes(*backend, shape);
  }
  return DecodeScratchBytes(shape);
}

ffi::ErrorOr<BackendChoice> ChooseBackend(const Checker& check, const DecodeShape& shape,
                                          std::string_view attribute) {
  cudaError_t query_error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&query_error);
  if (device == nullptr) {
    return ffi::Unexpected(
        ffi::Error::Internal(std::string(check.target()) + ": " + CannotQuery(query_error)));
  }
  const Request request = ParseRequest(attribute);
  const DecodeProblem problem{*device, shape, request.variant};
  std::string reasons;
  const DecodeBackend* backend = Choose(problem, request.backend, reasons);
  if (backend == nullptr) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(check.target()) +
                                                       ": no backend takes this call: " + reasons));
  }
  return BackendChoice{backend, problem};
}

ffi::Error LaunchResult(const Checker& check, const DecodeBackend& backend,
                        const std::string& error) {
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(check.target()) + ": " + backend.name + ": " + error);
}

ffi::Error CheckAlignment(const Checker& check, const DecodeParams& p) {
  return check.Aligned({{"q_nope", p.q_nope},
                        {"q_pe", p.q_pe},
                        {"ckv", p.ckv.base},
                        {"kpe", p.kpe.base},
                        {"out", p.out},
                        {"scratch", p.scratch}});
}

ffi::Error CheckTableLimits(const Checker& check, const DecodeShape& shape, int64_t num_seqs) {
  constexpr int64_t kMaxTokens = int64_t{1} << 30;       // of a sequence: token indices are 32-bit
  constexpr int64_t kMaxBatchBlocks = int64_t{1} << 30;  // the schedule adds up blocks in 32 bits
  const int64_t max_tokens = int64_t{shape.max_pages_per_seq} * shape.page_size;
  if (max_tokens > kMaxTokens) {
    return check.Fail("page_table", "at most 2^30 tokens a sequence", std::to_string(max_tokens));
  }
  const int64_t batch_blocks = num_seqs * (shape.max_seq_len / kScheduleBlock + 1);
  if (batch_blocks > kMaxBatchBlocks) {
    return check.Fail("page_table", "at most 2^36 tokens a batch",
                      std::to_string(batch_blocks * kScheduleBlock));
  }
  return ffi::Error::Success();
}

ffi::Error CheckScratch(const Checker& check, const DecodeParams& p, int64_t bytes) {
  if (p.scratch_bytes >= bytes) return ffi::Error::Success();
  return check.Fail("scratch", std::to_string(bytes) + " bytes", std::to_string(p.scratch_bytes));
}

}  // namespace jax_mla::decode
