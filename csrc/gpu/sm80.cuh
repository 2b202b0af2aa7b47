// Instructions of sm_80 and later, one PTX instruction a function. Nothing here knows an op.
//
// Shared memory is addressed by 32-bit addresses of the shared window (`SharedAddress32`).
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

// Copies 16 bytes. If not `present`, it writes 16 zero bytes and does not read `source`. The copy
// bypasses L1, because the KV cache is read only once.
__device__ __forceinline__ void CopyAsync16(uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the last `kPending` groups of this thread are still in flight.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// The same for a number, 0 to 3, that is not a constant but equal for all threads. For a larger
// number it waits as for 3, which is longer than needed.
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

// ---- Warp matrix loads of four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row
// l % 8 of matrix l / 8.

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

__device__ __forceinline__ void StoreShared128(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint32_t LoadShared32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint2 LoadShared64(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// ---- Matrix products

template <DType kDType>
struct TensorCore;

template <>
struct TensorCore<DType::kBf16> {
  // d[16 x 8] += a[16 x 16] b[16 x 8], with float32 accumulators.
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

// Byte offset of chunk `chunk` (16 bytes) of row `row`, in a matrix with kRowBytes a row. The
// chunks of a row are permuted within 128 bytes (64 where a row has no more), such that the same
// chunk of 8 consecutive rows lies in 8 different sets of banks. So neither ldmatrix nor copies of
// rows have bank conflicts. The matrix must start at a multiple of 128 bytes.
template <int kRowBytes>
__device__ __forceinline__ uint32_t SwizzledOffset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "no conflict-free permutation is defined");
  const int key = kRowBytes == 64 ? (row >> 1) & 3 : row & 7;
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ key) << 4));
}

}  // namespace jax_mla::gpu
