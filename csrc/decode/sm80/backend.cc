// The backend "sm80": the portable kernel. The variants "227kb", "163kb" and "99kb" force the tiles
// for that much shared memory.
#include "decode/backend.h"

#include <limits>

#include "decode/sm80/launch.h"

namespace jax_mla::decode {
namespace sm80 {
namespace {

constexpr int kMinArchitecture = 80;  // of the GPU, and of the code that it runs

using LaunchFunction = cudaError_t (*)(const DecodeParams&, const gpu::DeviceFacts&,
                                       const SharedMemoryClass&, cudaStream_t);
using CodeFunction = int32_t (*)();

struct Instance {
  bool has_masks;
  DType dtype;
  KvStorage storage;
  int d_ckv;
  int d_kpe;
  LaunchFunction launch;
  CodeFunction code_architecture;
};
constexpr Instance kInstances[] = {
#define MLA_ROW(has_masks, dtype, storage, d_ckv, d_kpe)                     \
  {has_masks,                                                                \
   DType::dtype,                                                             \
   KvStorage::storage,                                                       \
   d_ckv,                                                                    \
   d_kpe,                                                                    \
   &LaunchDecode<DType::dtype, KvStorage::storage, d_ckv, d_kpe, has_masks>, \
   &DecodeArchitecture<DType::dtype, KvStorage::storage, d_ckv, d_kpe, has_masks>},
#define MLA_INSTANCE(...) MLA_ROW(false, __VA_ARGS__)
#include "decode/sm80/instances.inc"
#undef MLA_INSTANCE
#define MLA_INSTANCE(...) MLA_ROW(true, __VA_ARGS__)
#include "decode/sm80/masked/instances.inc"
#undef MLA_INSTANCE
#undef MLA_ROW
};

bool HasTypes(const Instance& instance, const DecodeShape& shape) {
  return instance.has_masks == shape.HasMasks() && instance.dtype == shape.dtype &&
         instance.storage == StorageOf(shape.kv_format);
}

const Instance* FindInstance(const DecodeShape& shape) {
  for (const Instance& instance : kInstances) {
    if (HasTypes(instance, shape) && instance.d_ckv == shape.d_ckv &&
        instance.d_kpe == shape.d_kpe) {
      return &instance;
    }
  }
  return nullptr;
}

// The rows that have an instance for the types of a call, as text.
std::string RowsOf(const DecodeShape& shape) {
  std::string rows;
  for (const Instance& instance : kInstances) {
    if (!HasTypes(instance, shape)) continue;
    rows += (rows.empty() ? "" : " or ") + std::to_string(instance.d_ckv) + ", " +
            std::to_string(instance.d_kpe);
  }
  return rows;
}

// The architecture that the code on the device was compiled for. For a device that is only
// described, the device's own. The problem's shape must have an instance.
int32_t CodeArchitecture(const DecodeProblem& problem) {
  const bool is_present = problem.device.ordinal >= 0;
  return is_present ? FindInstance(problem.shape)->code_architecture()
                    : problem.device.compute_capability();
}

// The tiles to use, for a shape that has an instance. Null if there is no such variant, or if the
// device cannot hold it, or if the code that the device runs does not have it.
const SharedMemoryClass* ChooseClass(const DecodeProblem& problem) {
  const int32_t architecture = CodeArchitecture(problem);
  for (const SharedMemoryClass& smem : kSharedMemoryClasses) {
    const bool fits = smem.bytes <= problem.device.max_smem_per_block_bytes &&
                      HasClass(architecture, smem, problem.shape.d_ckv);
    if (fits && (problem.variant.empty() || problem.variant == smem.name)) return &smem;
  }
  return nullptr;
}

std::string WhyNot(const DecodeProblem& problem) {
  const DecodeShape& shape = problem.shape;
  const int cc = problem.device.compute_capability();
  const std::string capability = std::to_string(cc / 10) + "." + std::to_string(cc % 10);
  if (cc < kMinArchitecture) return "needs compute capability 8.0 or newer, got " + capability;
  if (StorageOf(shape.kv_format) == KvStorage::kFp8 && shape.dtype != DType::kBf16) {
    return std::string("needs queries in bfloat16 or float8_e4m3fn with an FP8 cache, got ") +
           DTypeName(shape.dtype);
  }
  if (shape.dtype != DType::kBf16 && shape.dtype != DType::kF16) {
    return std::string("needs bfloat16 or float16, got ") + DTypeName(shape.dtype);
  }
  if (FindInstance(shape) == nullptr) {
    const std::string masks = shape.HasMasks() ? " with a sliding window or a soft cap" : "";
    const std::string rows = RowsOf(shape);
    if (rows.empty()) {
      return "needs a cache in bfloat16" + masks + ", got " +
             (shape.kv_format == KvFormat::kPlain ? DTypeName(shape.dtype)
                                                  : KvFormatName(shape.kv_format));
    }
    return "needs d_ckv, d_kpe = " + rows + masks + ", got " + std::to_string(shape.d_ckv) + ", " +
           std::to_string(shape.d_kpe);
  }
  if (CodeArchitecture(problem) < kMinArchitecture) {
    return "this build has no code for compute capability " + capability +
           "; rebuild with JAX_MLA_CUDA_ARCHS=" + std::to_string(cc);
  }
  const int smem_bytes = problem.device.max_smem_per_block_bytes;
  if (shape.d_ckv > kMaxRegisterDims && smem_bytes < kMinBytesOfWideRows) {
    return "needs " + std::to_string(kMinBytesOfWideRows) +
           " bytes of shared memory for d_ckv = " + std::to_string(shape.d_ckv) + ", got " +
           std::to_string(smem_bytes);
  }
  if (ChooseClass(problem) == nullptr) {
    return "needs a variant of 227kb, 163kb or 99kb that fits " + std::to_string(smem_bytes) +
           " bytes of shared memory and is compiled for this GPU, got '" +
           std::string(problem.variant) + "'";
  }
  return "";
}

SplitPlan PlanUnits(const DecodeParams& params, const DecodeProblem& problem) {
  return MakeTilePlan(params, problem.device,
                      BlockM(*ChooseClass(problem), problem.shape.d_ckv, problem.num_rows()));
}

std::string Run(const DecodeParams& params, const DecodeProblem& problem, cudaStream_t stream) {
  // The kernel numbers the rows of a layer in 32 bits; addresses are 64-bit. 2^31 rows of 288 bytes
  // or more are larger than the memory of any GPU, so only a wrong pool is refused.
  if (int64_t{params.num_pages} * params.page_size > std::numeric_limits<int32_t>::max()) {
    return "a pool of more than 2^31 tokens";
  }
  const cudaError_t error =
      FindInstance(problem.shape)->launch(params, problem.device, *ChooseClass(problem), stream);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

bool CanAppend(const DecodeProblem&) { return false; }

}  // namespace
}  // namespace sm80

const DecodeBackend kSm80Backend = {
    .name = "sm80",
    .why_not = &sm80::WhyNot,
    .can_append = &sm80::CanAppend,
    .launch = &sm80::Run,
    .plan_units = &sm80::PlanUnits,
};

}  // namespace jax_mla::decode
