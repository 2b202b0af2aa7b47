// In-kernel trace: which phase each warp is in, and since when. It is off by default: without
// -DJAX_MLA_TRACE every function here is empty and leaves no trace in the machine code.
//
// A traced warp is always in exactly one phase, so one event is enough to end a phase and begin the
// next, and hooks are single statements: Begin(params, role) first in the kernel, Enter(phase)
// where a phase begins, End() last. Lane 0 of every warp writes them into a track of global memory
// that belongs to its CTA and warp. Events past the end of a track are dropped.
//
// The position in the track is a PTX register that Begin declares for the whole kernel, so hooks
// need no argument and no shared memory. All functions that contain hooks must therefore be
// inlined. ptxas reports an error if one is not.
#pragma once

#include <cstdint>

namespace jax_mla::gpu::trace {

inline constexpr int kMaxWarps = 20;       // of a CTA
inline constexpr int kTrackEvents = 8192;  // header included
inline constexpr int kEventBytes = 8;
inline constexpr int kTrackBytes = kTrackEvents * kEventBytes;

// Kernels of one call that may run at the same time have separate regions.
enum Region : int32_t { kMain, kMerge, kNumRegions };

// An event. Its phase lasts until the next event.
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

// Where the tracks are: a member of the kernels' parameters in traced builds.
struct Buffer {
  uint8_t* tracks;   // [kNumRegions][num_ctas][kMaxWarps][kTrackBytes], zeros, kTrackBytes aligned
  int32_t num_ctas;  // CTAs that have tracks; 0: no trace
};

#if defined(__CUDACC__)

#if defined(JAX_MLA_TRACE)

__device__ __forceinline__ uint64_t GlobalNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// trace_next is the address of the next event. Its low bits are 0 when the track is full, and in
// threads that write no events.
template <class Phase>
__device__ __forceinline__ void Enter(Phase phase) {
  asm volatile(
      "{\n"
      ".reg .pred writes;\n"
      ".reg .b32 clock, low, high;\n"
      "mov.b64 {low, high}, trace_next;\n"
      "and.b32 low, low, %1;\n"
      "setp.ne.b32 writes, low, 0;\n"
      "mov.u32 clock, %%clock;\n"
      "@writes st.global.v2.b32 [trace_next], {clock, %0};\n"
      "@writes add.u64 trace_next, trace_next, %2;\n"
      "}" ::"r"(static_cast<uint32_t>(phase)),
      "n"(kTrackBytes - 1), "n"(kEventBytes)
      : "memory");
}

// Params: anything with a Buffer `trace`.
template <class Params, class Role>
__device__ __forceinline__ void Begin(const Params& params, Role role, Region region = kMain) {
  const Buffer& buffer = params.trace;
  const uint32_t cta = blockIdx.x + blockIdx.y * gridDim.x;
  const uint32_t warp = threadIdx.x / 32;
  uint64_t next = 0;
  if (threadIdx.x % 32 == 0 && cta < static_cast<uint32_t>(buffer.num_ctas)) {
    const uint32_t track = (region * buffer.num_ctas + cta) * kMaxWarps + warp;
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    auto* header = reinterpret_cast<Header*>(buffer.tracks + uint64_t{track} * kTrackBytes);
    *header = {.begin_clock = static_cast<uint64_t>(clock64()),
               .begin_ns = GlobalNs(),
               .sm = sm,
               .cta = cta,
               .warp = static_cast<uint16_t>(warp),
               .role = static_cast<uint16_t>(role)};
    next = reinterpret_cast<uint64_t>(header + 1);
  }
  asm volatile(".reg .b64 trace_next;\nmov.b64 trace_next, %0;" ::"l"(next) : "memory");
  Enter(0);
}

__device__ __forceinline__ void End() {
  uint64_t next;
  asm volatile("mov.b64 %0, trace_next;" : "=l"(next)::"memory");
  if (next == 0) return;
  const uint64_t track = (next - 1) / kTrackBytes * kTrackBytes;  // `next` may be its very end
  auto* header = reinterpret_cast<Header*>(track);
  header->end_clock = clock64();
  header->end_ns = GlobalNs();
  header->num_events = (next - track - sizeof(Header)) / kEventBytes;
}

#else

template <class Phase>
__device__ __forceinline__ void Enter(Phase) {}
template <class Params, class Role>
__device__ __forceinline__ void Begin(const Params&, Role, Region = kMain) {}
__device__ __forceinline__ void End() {}

#endif  // JAX_MLA_TRACE

#endif  // __CUDACC__

}  // namespace jax_mla::gpu::trace
