// Ampere-level (sm_80 and later) instruction wrappers, one PTX instruction per function, and the
// element types they work on. Nothing here knows an op.
//
// Shared memory is addressed by 32-bit shared-window addresses (`SharedAddress32`).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::gpu {

__device__ __forceinline__ uint32_t SharedAddress32(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- cp.async: 16-byte copies from global to shared memory

// Copies 16 bytes, or writes 16 zero bytes without reading `source` if !present. L1 is bypassed:
// the cache is read once.
__device__ __forceinline__ void CopyAsync16(uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of this thread's most recent groups are still in flight.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// The same for a pending count that is uniform but not a constant, 0 to 3 (more waits for more).
__device__ __forceinline__ void CopyAsyncWait(int pending) {
  if (pending >= 3) {
    CopyAsyncWait<3>();
  } else if (pending == 2) {
    CopyAsyncWait<2>();
  } else if (pending == 1) {
    CopyAsyncWait<1>();
  } else {
    CopyAsyncWait<0>();
  }
}

// ---- Warp matrix loads: four 8x8 matrices of 16-bit elements; lane l gives row l % 8 of matrix l
// / 8

__device__ __forceinline__ void LoadMatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrixTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void StoreShared32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ---- Products

template <DType kDType>
struct TensorCore;

template <>
struct TensorCore<DType::kBf16> {
  // d[16x8] += a[16x16] b[16x8], float32 accumulators.
  static __device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct TensorCore<DType::kF16> {
  static __device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// ---- Swizzled rows

// Byte offset of 16-byte chunk `chunk` of row `row` in a matrix of kRowBytes a row. Chunks are
// permuted inside groups so that 8 consecutive rows of one chunk column fall into 8 different bank
// groups: ldmatrix and row-wise copies are free of conflicts. The matrix must start at a multiple
// of 128 bytes.
template <int kRowBytes>
__device__ __forceinline__ uint32_t SwizzledOffset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "no conflict-free permutation is defined");
  const int key = kRowBytes == 64 ? (row >> 1) & 3 : row & 7;
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ key) << 4));
}

}  // namespace jax_mla::gpu
