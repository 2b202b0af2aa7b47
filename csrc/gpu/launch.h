// Kernel launches and facts about devices. Nothing here knows an op.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace jax_mla::gpu {

// What the choice of a backend and a launch depend on. `ordinal` is -1 for a device that is only
// described, by a compute capability that was named at lowering.
struct DeviceFacts {
  int32_t ordinal;
  int32_t cc_major;
  int32_t cc_minor;
  int32_t num_sms;
  int32_t max_smem_per_block_bytes;  // dynamic shared memory that a CTA may opt in to

  int32_t compute_capability() const { return cc_major * 10 + cc_minor; }
};

// The facts of this thread's current device, which are read once for each device. Null if the
// device cannot be queried; then `error` says why, in every call.
const DeviceFacts* GetCurrentDeviceFacts(cudaError_t* error);
// Typical facts of a compute capability, for answers without such a device.
DeviceFacts DescribeComputeCapability(int32_t cc_major, int32_t cc_minor);

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  int32_t smem_bytes = 0;
  cudaStream_t stream = nullptr;
  // Allow this kernel to start before its predecessor in the stream has ended. The kernel must call
  // gpu::PdlWait() before it touches memory that earlier work in the stream writes or reads, which
  // tools/compiler_gate.py checks. (What the predecessor itself has waited for may be read
  // earlier.) Ignored where the kernel's code cannot wait (CodeArchitecture).
  bool programmatic = false;
  // Start all CTAs together or not at all. It is an error if they do not fit on the device at once.
  // Only then may CTAs wait for each other. Otherwise two kernels that each hold some of the SMs,
  // such as two branches of a CUDA graph, could wait for ever.
  bool cooperative = false;
  dim3 cluster = dim3(1, 1, 1);
};

inline constexpr int kMaxDevices = 64;  // of a process

// Raises a kernel's limit of dynamic shared memory if it needs more, once for each device.
template <auto kKernel>
cudaError_t AllowSharedMemory(int32_t smem_bytes) {
  constexpr int kDefaultSmemBytes = 48 * 1024;
  static std::array<std::atomic<int32_t>, kMaxDevices> prepared_bytes{};  // by device
  if (smem_bytes <= kDefaultSmemBytes) return cudaSuccess;
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::atomic<int32_t>& prepared = prepared_bytes[device % kMaxDevices];
  if (smem_bytes <= prepared.load(std::memory_order_relaxed)) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess) prepared.store(smem_bytes, std::memory_order_relaxed);
  return error;
}

// Shared memory of a CTA on Hopper, at most.
inline constexpr int32_t kHopperSharedBytes = 227 * 1024;

// One number for each device, at least 0. It is asked for until it is known, and then kept.
class PerDevice {
 public:
  // The current device's number. `ask` returns it, or less than 0 if it is not known; so does Get.
  template <class Ask>
  int32_t Get(Ask ask) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return -1;
    std::atomic<int32_t>& known = answers_plus_one_[device % kMaxDevices];
    if (known.load(std::memory_order_relaxed) == 0) {
      known.store(ask() + 1, std::memory_order_relaxed);
    }
    return known.load(std::memory_order_relaxed) - 1;
  }

 private:
  std::array<std::atomic<int32_t>, kMaxDevices> answers_plus_one_{};
};

// The architecture, __CUDA_ARCH__ / 10, for which the code of `kKernel` on the current device was
// compiled; less than 0 if it is not known. It is less than the compute capability if the driver
// compiled the code from older PTX. Such code lacks what the preprocessor left out of that PTX.
template <auto kKernel>
int32_t CodeArchitecture() {
  static PerDevice architecture;
  return architecture.Get([] {
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel));
    return error == cudaSuccess ? attributes.ptxVersion : -1;
  });
}

// How many clusters of two CTAs of `kKernel` the current device runs at once; less than 0 if that
// is not known. The kernel must always be launched with the same threads and shared memory.
template <auto kKernel>
int32_t MaxActiveClusters(int32_t num_threads, int32_t smem_bytes) {
  static PerDevice max_clusters;
  return max_clusters.Get([&] {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(2);
    launch.blockDim = dim3(num_threads);
    launch.dynamicSmemBytes = smem_bytes;
    launch.attrs = &cluster;
    launch.numAttrs = 1;
    int num_clusters = -1;
    if (AllowSharedMemory<kKernel>(smem_bytes) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&num_clusters, kKernel, &launch) != cudaSuccess) {
      return -1;
    }
    return num_clusters;
  });
}

inline constexpr int32_t kPdlArchitecture = 90;  // the first whose code can wait (PdlWait)

// Launches `kKernel`. It makes only calls that a stream allows while it records a graph.
template <auto kKernel, typename... Args>
cudaError_t Launch(const LaunchConfig& config, const Args&... args) {
  if (cudaError_t error = AllowSharedMemory<kKernel>(config.smem_bytes); error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[3];
  int num_attributes = 0;
  if (config.programmatic && CodeArchitecture<kKernel>() >= kPdlArchitecture) {
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
// Programmatic dependent launch on the device. Both functions do nothing in code for architectures
// before sm_90, on whatever GPU it runs, and in launches that are not programmatic.
// PdlWait: after it, all earlier work of the stream is complete and visible.
__device__ __forceinline__ void PdlWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// PdlLaunchDependents: the next kernel of the stream may start. Call it after PdlWait. Then a
// kernel that has waited for this one has also waited for all before it.
__device__ __forceinline__ void PdlLaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif  // __CUDACC__

}  // namespace jax_mla::gpu
