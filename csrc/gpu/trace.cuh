// In-kernel trace: which phase each warp is in, and since when. Off by default: without
// -DJAX_MLA_TRACE every function here is empty and the kernels are the same to the bit.
//
// A traced warp is always in exactly one phase, so one event is enough to end a phase and begin the
// next, and hooks are single statements: Begin(role) first in the kernel, Enter(phase) where a
// phase begins, End() last. Lane 0 of every warp writes them into a track of global memory that
// belongs to its CTA and warp. Events past the end of a track are dropped.
//
// No kernel signature knows of it: every source file has a constant symbol that says where the
// tracks are, which SetBuffer fills. The position in the track is a PTX register that Begin
// declares for the whole kernel: so hooks need no argument, and the compiler no shared memory. All
// functions that contain hooks must therefore be inlined (ptxas objects if one is not).
#pragma once

#include <cstdint>

#if defined(JAX_MLA_TRACE)
#include <cuda_runtime.h>

#include <vector>
#endif

namespace jax_mla::gpu::trace {

inline constexpr int kMaxWarps = 16;       // of a CTA
inline constexpr int kTrackEvents = 8192;  // header included
inline constexpr int kEventBytes = 8;
inline constexpr int kTrackBytes = kTrackEvents * kEventBytes;

// Kernels of one call that may run at the same time have regions of their own.
enum Region : int32_t { kMain, kMerge, kNumRegions };

// An event; the phase lasts until the next one.
struct Event {
  uint32_t clock;  // low half of the SM's cycle counter
  uint32_t phase;
};

// The first events of a track. Two pairs of clocks tie the SM's cycles to the GPU's nanoseconds.
struct Header {
  uint64_t begin_clock, begin_ns;
  uint64_t end_clock, end_ns;
  uint32_t num_events;  // 0: this warp has not run
  uint32_t sm, cta;
  uint16_t warp, role;
};
static_assert(sizeof(Header) % kEventBytes == 0 && sizeof(Event) == kEventBytes,
              "tools/trace_to_perfetto.py reads these");

struct Buffer {
  uint8_t* tracks;   // [kNumRegions][num_ctas][kMaxWarps][kTrackBytes], zeros; fewer than 4 GiB
  int32_t num_ctas;  // CTAs that have tracks
};

#if defined(JAX_MLA_TRACE)

static __constant__ Buffer buffer;  // of this source file

inline std::vector<const void*>& BufferSymbols() {
  static std::vector<const void*> symbols;
  return symbols;
}
static const bool kIsRegistered = (BufferSymbols().push_back(&buffer), true);

// Hands tracks to all kernels of the program; {} turns the trace off.
inline cudaError_t SetBuffer(const Buffer& value) {
  for (const void* symbol : BufferSymbols()) {
    const cudaError_t error = cudaMemcpyToSymbol(symbol, &value, sizeof(value));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

__device__ __forceinline__ uint64_t GlobalNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// trace_next: byte offset of the next event. Its low bits are 0 when the track is full and in
// threads that write none.
template <class Phase>
__device__ __forceinline__ void Enter(Phase phase) {
  asm volatile(
      "{\n"
      ".reg .pred writes;\n"
      ".reg .b32 clock, in_track;\n"
      ".reg .b64 address;\n"
      "and.b32 in_track, trace_next, %2;\n"
      "setp.ne.b32 writes, in_track, 0;\n"
      "cvt.u64.u32 address, trace_next;\n"
      "add.u64 address, address, %0;\n"
      "mov.u32 clock, %%clock;\n"
      "@writes st.global.v2.b32 [address], {clock, %1};\n"
      "@writes add.u32 trace_next, trace_next, %3;\n"
      "}" ::"l"(buffer.tracks),
      "r"(static_cast<uint32_t>(phase)), "n"(kTrackBytes - 1), "n"(kEventBytes)
      : "memory");
}

template <class Role>
__device__ __forceinline__ void Begin(Role role, Region region = kMain) {
  const uint32_t cta = blockIdx.x + blockIdx.y * gridDim.x;
  const uint32_t warp = threadIdx.x / 32;
  uint32_t next = 0;
  if (threadIdx.x % 32 == 0 && cta < static_cast<uint32_t>(buffer.num_ctas)) {
    next = ((region * buffer.num_ctas + cta) * kMaxWarps + warp) * kTrackBytes;
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    *reinterpret_cast<Header*>(buffer.tracks + next) = {
        .begin_clock = static_cast<uint64_t>(clock64()),
        .begin_ns = GlobalNs(),
        .sm = sm,
        .cta = cta,
        .warp = static_cast<uint16_t>(warp),
        .role = static_cast<uint16_t>(role)};
    next += sizeof(Header);
  }
  asm volatile(".reg .b32 trace_next;\nmov.b32 trace_next, %0;" ::"r"(next) : "memory");
  Enter(0);
}

__device__ __forceinline__ void End() {
  uint32_t next;
  asm volatile("mov.b32 %0, trace_next;" : "=r"(next)::"memory");
  if (next == 0) return;
  const uint32_t track = (next - 1) / kTrackBytes * kTrackBytes;  // `next` may be its very end
  auto* header = reinterpret_cast<Header*>(buffer.tracks + track);
  header->end_clock = clock64();
  header->end_ns = GlobalNs();
  header->num_events = (next - track - sizeof(Header)) / kEventBytes;
}

#else

template <class Phase>
__device__ __forceinline__ void Enter(Phase) {}
template <class Role>
__device__ __forceinline__ void Begin(Role, Region = kMain) {}
__device__ __forceinline__ void End() {}

#endif  // JAX_MLA_TRACE

}  // namespace jax_mla::gpu::trace
