// A barrier of all CTAs of a cooperative launch. It differs from cooperative_groups' in who takes
// part: there all threads of a CTA arrive and wait together. Here any group of threads arrives when
// it is done, and only threads that need the others' results wait.
//
// The barrier is one word that the driver provides for a cooperative launch. Arrivals are added to
// its low 31 bits. The first group of the grid adds what is missing up to the top bit, so that the
// top bit flips when all groups have arrived. The low bits are then 0 again, as cooperative_groups
// expects them.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace jax_mla::gpu::grid_barrier {

inline constexpr uint32_t kPhaseBit = 0x80000000u;

// The driver's word. This is the only use of a function that is private to CUDA: it reads the
// word's address, which the driver passes to a cooperative launch in special registers. Checked in
// the headers of CUDA 12.5 and 13.0, whose cooperative_groups/details/driver_abi.h are the same. If
// a later CUDA renames it, this line does not compile. If a later CUDA uses the word differently,
// the wide kernel hangs or merges partial results too early; it then needs a word of its own in
// scratch memory, zeroed before every launch.
__device__ __forceinline__ uint32_t* DriverWord() {
  return &cooperative_groups::details::get_grid_workspace()->barrier;
}

// The same address in a form that ptxas does not know to be uniform: the added term is always 0.
// For an address that all lanes share ptxas first sums the lanes' addends, in 30 instructions.
__device__ __forceinline__ uint32_t* Word() { return DriverWord() + (threadIdx.x >> 10); }

// Arrives for `num_groups` of the grid's `num_grid_groups` groups of threads. One thread calls
// this, after a barrier with the threads that it stands for; what they have written is then visible
// to every thread that waits. `is_first` is true in exactly one call of the grid. Returns what Wait
// needs.
__device__ __forceinline__ uint32_t Arrive(uint32_t num_groups, uint32_t num_grid_groups,
                                           bool is_first) {
  const uint32_t count = num_groups + (is_first ? kPhaseBit - num_grid_groups : 0);
  uint32_t arrival;
  asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;"
               : "=r"(arrival)
               : "l"(Word()), "r"(count)
               : "memory");
  return arrival;
}

// Waits until all groups have arrived. One thread calls this and then passes a barrier with the
// threads that it waits for. `arrival` is what Arrive returned for its group.
__device__ __forceinline__ void Wait(uint32_t arrival) {
  uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(Word()) : "memory");
  } while (((now ^ arrival) & kPhaseBit) == 0);
}

}  // namespace jax_mla::gpu::grid_barrier
