// Kernel launches and device facts. No op knowledge.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace jax_mla::gpu {

// What the choice of a backend and a launch depend on. `ordinal` is -1 for a device that is only
// described (a compute capability named at lowering time), not present.
struct DeviceFacts {
  int32_t ordinal;
  int32_t cc_major;
  int32_t cc_minor;
  int32_t num_sms;
  int32_t max_smem_per_block_bytes;  // dynamic shared memory a block may opt in to

  int32_t compute_capability() const { return cc_major * 10 + cc_minor; }
};

// Facts of a device of this process, read once each; null if the device cannot be queried.
const DeviceFacts* GetDeviceFacts(int32_t ordinal);
// Facts of the device that is current on this thread.
const DeviceFacts* GetCurrentDeviceFacts();
// Typical facts of a compute capability, for questions asked without such a device.
DeviceFacts DescribeComputeCapability(int32_t cc_major, int32_t cc_minor);

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  int32_t smem_bytes = 0;
  cudaStream_t stream = nullptr;
  // Allow this kernel to start before its predecessor in the stream has finished. The kernel must
  // then call gpu::PdlWait() before it touches memory that anything earlier in the stream writes or
  // reads.
  bool programmatic = false;
  // Start all CTAs together or not at all; an error if they do not fit on the device at once. Only
  // then may they wait for each other: without it, two kernels that each hold a part of the SMs
  // (two branches of a CUDA graph, say) would wait for ever.
  bool cooperative = false;
  dim3 cluster = dim3(1, 1, 1);
};

// Launches `kKernel`. Raises its dynamic shared memory limit where it must, once per device.
// Only capturable calls: fit for a stream that records a graph.
template <auto kKernel, typename... Args>
cudaError_t Launch(const LaunchConfig& config, const Args&... args) {
  constexpr int kDefaultSmemBytes = 48 * 1024, kMaxDevices = 64;
  static std::array<std::atomic<int32_t>, kMaxDevices> prepared_bytes{};  // by device
  if (config.smem_bytes > kDefaultSmemBytes) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    std::atomic<int32_t>& prepared = prepared_bytes[device % kMaxDevices];
    if (config.smem_bytes > prepared.load(std::memory_order_relaxed)) {
      cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
      if (error != cudaSuccess) return error;
      prepared.store(config.smem_bytes, std::memory_order_relaxed);
    }
  }

  cudaLaunchAttribute attributes[3];
  int num_attributes = 0;
  if (config.programmatic) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cooperative) {
    attributes[num_attributes].id = cudaLaunchAttributeCooperative;
    attributes[num_attributes++].val.cooperative = 1;
  }
  if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes].val.clusterDim.x = config.cluster.x;
    attributes[num_attributes].val.clusterDim.y = config.cluster.y;
    attributes[num_attributes++].val.clusterDim.z = config.cluster.z;
  }
  cudaLaunchConfig_t launch{};
  launch.gridDim = config.grid;
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.smem_bytes;
  launch.stream = config.stream;
  launch.attrs = attributes;
  launch.numAttrs = num_attributes;
  return cudaLaunchKernelEx(&launch, kKernel, args...);
}

#if defined(__CUDACC__)
// Programmatic dependent launch, device side. Both are no-ops below sm_90 and in ordinary launches.
// PdlWait: everything earlier in the stream is complete and visible from here on.
__device__ __forceinline__ void PdlWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// PdlLaunchDependents: the next kernel of the stream may start. Call it after PdlWait, so that the
// chain stays transitive: who waits for this kernel has waited for everything before it.
__device__ __forceinline__ void PdlLaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif  // __CUDACC__

}  // namespace jax_mla::gpu
