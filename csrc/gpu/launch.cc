#include "gpu/launch.h"

#include <mutex>

namespace jax_mla::gpu {
namespace {

struct CachedFacts {
  std::once_flag once;
  bool known = false;
  DeviceFacts facts{};
};

bool QueryDevice(int32_t ordinal, DeviceFacts& facts) {
  facts.ordinal = ordinal;
  const auto read = [&](cudaDeviceAttr attribute, int32_t& value) {
    return cudaDeviceGetAttribute(&value, attribute, ordinal) == cudaSuccess;
  };
  return read(cudaDevAttrComputeCapabilityMajor, facts.cc_major) &&
         read(cudaDevAttrComputeCapabilityMinor, facts.cc_minor) &&
         read(cudaDevAttrMultiProcessorCount, facts.num_sms) &&
         read(cudaDevAttrMaxSharedMemoryPerBlockOptin, facts.max_smem_per_block_bytes);
}

}  // namespace

const DeviceFacts* GetDeviceFacts(int32_t ordinal) {
  static std::array<CachedFacts, kMaxDevices> cache;
  if (ordinal < 0 || ordinal >= kMaxDevices) return nullptr;
  CachedFacts& entry = cache[ordinal];
  std::call_once(entry.once, [&] { entry.known = QueryDevice(ordinal, entry.facts); });
  return entry.known ? &entry.facts : nullptr;
}

const DeviceFacts* GetCurrentDeviceFacts() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  return GetDeviceFacts(device);
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
