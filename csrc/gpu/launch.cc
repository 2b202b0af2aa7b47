#include "gpu/launch.h"

#include <mutex>

namespace jax_mla::gpu {
namespace {

struct CachedFacts {
  std::mutex mutex;
  bool is_known = false;  // set only by a query that succeeded: another one may succeed later
  DeviceFacts facts{};
};

cudaError_t QueryDevice(int32_t ordinal, DeviceFacts& facts) {
  facts.ordinal = ordinal;
  cudaError_t error = cudaSuccess;
  const auto read = [&](cudaDeviceAttr attribute, int32_t& value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, ordinal);
  };
  read(cudaDevAttrComputeCapabilityMajor, facts.cc_major);
  read(cudaDevAttrComputeCapabilityMinor, facts.cc_minor);
  read(cudaDevAttrMultiProcessorCount, facts.num_sms);
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, facts.max_smem_per_block_bytes);
  return error;
}

}  // namespace

const DeviceFacts* GetCurrentDeviceFacts(cudaError_t* error) {
  static std::array<CachedFacts, kMaxDevices> cache;
  int device = 0;
  *error = cudaGetDevice(&device);
  if (*error == cudaSuccess && device >= kMaxDevices) *error = cudaErrorInvalidDevice;
  if (*error != cudaSuccess) return nullptr;
  CachedFacts& entry = cache[device];
  const std::lock_guard lock(entry.mutex);
  if (!entry.is_known) {
    *error = QueryDevice(device, entry.facts);
    entry.is_known = *error == cudaSuccess;
  }
  return entry.is_known ? &entry.facts : nullptr;
}

DeviceFacts DescribeComputeCapability(int32_t cc_major, int32_t cc_minor) {
  constexpr int32_t kKib = 1024;
  const int32_t cc = cc_major * 10 + cc_minor;
  DeviceFacts facts{};
  facts.ordinal = -1;
  facts.cc_major = cc_major;
  facts.cc_minor = cc_minor;
  facts.max_smem_per_block_bytes = cc < 80                ? 64 * kKib
                                   : cc == 80 || cc == 87 ? 163 * kKib
                                   : cc < 90 || cc >= 120 ? 99 * kKib
                                                          : 227 * kKib;
  facts.num_sms = cc < 90 ? 108 : cc < 100 ? 132 : 148;
  return facts;
}

}  // namespace jax_mla::gpu
