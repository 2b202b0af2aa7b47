// When the compiler computes a value. These functions emit no instruction: each claims to change
// its operand, so that the compiler can no longer see where the value comes from.
#pragma once

#include <cstdint>

namespace jax_mla::gpu {

// Returns `value`. Whatever is derived from the result is computed after this point, each time that
// control comes here. Otherwise the compiler derives it once, before the surrounding loop, and
// keeps it in registers: tools/compiler_gate.py then reports spills (4 KB of them for the wide
// kernel's wgmma descriptors) and a stack frame.
__device__ __forceinline__ uint32_t RecomputeHere(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Returns `value`, completely computed at this point. Otherwise the compiler leaves a part of the
// computation to every later use, which lengthens the code after a wait.
__device__ __forceinline__ uint32_t CompleteHere(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <class T>
__device__ __forceinline__ T* CompleteHere(T* value) {
  asm volatile("" : "+l"(value));
  return value;
}

// threadIdx.x, read from its special register. Otherwise the compiler keeps it in a register from
// the kernel's start on.
__device__ __forceinline__ uint32_t ThreadIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace jax_mla::gpu
