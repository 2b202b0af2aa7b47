// A barrier of all CTAs of a cooperative launch that has nothing to do with a CTA's own barriers:
// cooperative_groups' waits for all threads of a CTA, here any group of threads arrives when it is
// done, and only who needs the others waits. The memory is the driver's, made for the launch and
// used as cooperative_groups does: the top bit flips when all have arrived.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace jax_mla::gpu::grid_barrier {

inline constexpr uint32_t kPhaseBit = 0x80000000u;

__device__ __forceinline__ uint32_t* Word() {
  // The last term is 0, which ptxas does not know: where all lanes have the same address it adds up
  // what they add, in 30 instructions.
  return &cooperative_groups::details::get_grid_workspace()->barrier + (threadIdx.x >> 10);
}

// For `num_groups` groups of threads out of `num_grid_groups`, by one thread behind a barrier of
// theirs: who waits sees what they have written. `is_first`: true in one call of the grid. Returns
// what Wait needs.
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

// One thread, which tells others through a barrier of theirs. `arrival`: its group's.
__device__ __forceinline__ void Wait(uint32_t arrival) {
  uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(Word()) : "memory");
  } while (((now ^ arrival) & kPhaseBit) == 0);
}

}  // namespace jax_mla::gpu::grid_barrier
