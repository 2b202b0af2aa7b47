// Hopper (sm_90a) instruction wrappers: one PTX instruction, or one inseparable group, per
// function.
//
// Nothing here knows an op. Addresses of shared memory are 32-bit addresses of its window
// (`SharedAddress`), and an mbarrier is given by its address. Functions that wait never time out.
//
// MLA_CHAOS (off by default, for tests only) puts a random delay before every operation on a
// barrier of the CTA or its cluster and before every copy. An order that holds only by luck then
// breaks. compute-sanitizer does not find such hazards of the asynchronous proxy.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "gpu/approx.cuh"
#include "gpu/pack.cuh"

namespace jax_mla::gpu::sm90 {

__device__ __forceinline__ void ChaosDelay() {
#ifdef MLA_CHAOS
  uint32_t hash = static_cast<uint32_t>(clock64()) * 2654435761u + threadIdx.x * 40503u;
  hash ^= hash >> 15;
  if ((hash & 3) == 0) __nanosleep((hash >> 8) & 1023);
#endif
}

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers

__device__ __forceinline__ void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the asynchronous proxy and to the cluster. To be called
// once, after the last MbarrierInit, by the thread that initialised them.
__device__ __forceinline__ void MbarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(uint32_t barrier) {
  ChaosDelay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void MbarrierArriveExpectTx(uint32_t barrier, uint32_t num_bytes) {
  ChaosDelay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Waits until the phase of the given parity has completed. Acquires at the scope of the CTA.
__device__ __forceinline__ void MbarrierWait(uint32_t barrier, uint32_t parity) {
  ChaosDelay();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra wait_done;\n"
      "bra wait_loop;\n"
      "wait_done:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Returns whether the phase of the given parity has completed, without waiting.
__device__ __forceinline__ bool MbarrierTest(uint32_t barrier, uint32_t parity) {
  ChaosDelay();
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 is_done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, is_done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- named barriers

__device__ __forceinline__ void NamedBarrierSync(int barrier, int num_threads) {
  ChaosDelay();
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void NamedBarrierArrive(int barrier, int num_threads) {
  ChaosDelay();
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// A named barrier that is also a vote: returns true in every thread if any thread's predicate is
// true.
__device__ __forceinline__ bool NamedBarrierAny(int barrier, int num_threads, bool predicate) {
  ChaosDelay();
  int result;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %1, 0;\n"
      "barrier.cta.red.or.pred.aligned out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}"
      : "=r"(result)
      : "r"(static_cast<int>(predicate)), "r"(barrier), "r"(num_threads)
      : "memory");
  return result != 0;
}

// ---- fences, launch control, registers

// Orders this thread's shared-memory accesses before later ones of the asynchronous proxy (TMA,
// wgmma operands).
__device__ __forceinline__ void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory.
__device__ __forceinline__ void FenceProxyAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void SetMaxRegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void SetMaxRegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in exactly one lane of a converged warp.
__device__ __forceinline__ bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred is_elected;\n"
      "elect.sync _|is_elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, is_elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// ---- copies into shared memory

// L2 eviction policies, encoded as the createpolicy instruction encodes them.
constexpr uint64_t kCacheEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kCacheEvictFirst = 0x12F0000000000000ull;

__device__ __forceinline__ void PrefetchL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prefetches `bytes` into L2. Address and size are multiples of 16.
__device__ __forceinline__ void BulkPrefetchL2(const void* address, int32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
}

// Loads from global memory that nobody writes during the kernel, or returns 0 without reading it if
// `exists` is false. Needs no branch.
__device__ __forceinline__ int32_t LoadReadOnly(const int32_t* address, bool exists) {
  int32_t value;
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.u32 exists, %2, 0;\n"
      "mov.s32 %0, 0;\n"
      "@exists ld.global.nc.s32 %0, [%1];\n"
      "}"
      : "=r"(value)
      : "l"(address), "r"(static_cast<uint32_t>(exists)));
  return value;
}

// Loads the box at the given coordinates of a rank-4 tensor map; c0 is the contiguous dimension.
// The copy completes on `barrier` with the box's bytes.
__device__ __forceinline__ void TmaLoad4d(const CUtensorMap* map, uint32_t destination,
                                          uint32_t barrier, int c0, int c1, int c2, int c3,
                                          uint64_t cache_policy) {
  ChaosDelay();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], "
      "[%2], %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(cache_policy)
      : "memory");
}

// Copies `num_bytes` of global memory. Addresses and size are multiples of 16. The copy completes
// on `barrier` with its bytes.
__device__ __forceinline__ void BulkCopy(uint32_t destination, const void* source,
                                         uint32_t num_bytes, uint32_t barrier,
                                         uint64_t cache_policy) {
  ChaosDelay();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(num_bytes), "r"(barrier), "l"(cache_policy)
      : "memory");
}

// Copies 16 bytes of global memory, or writes zeros without reading the address if `valid` is
// false.
__device__ __forceinline__ void CopyAsync16(uint32_t destination, const void* source, bool valid,
                                            uint64_t policy) {
  ChaosDelay();
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination),
      "l"(source), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// Copies 16 or 8 bytes of global memory, without a cache hint.
__device__ __forceinline__ void CopyAsync16(uint32_t destination, const void* source) {
  ChaosDelay();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}
__device__ __forceinline__ void CopyAsync8(uint32_t destination, const void* source) {
  ChaosDelay();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source)
               : "memory");
}

// Arrives on `barrier` when all of this thread's earlier CopyAsync copies have landed. The
// barrier's count includes this arrival.
__device__ __forceinline__ void CopyAsyncArrive(uint32_t barrier) {
  ChaosDelay();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- register <-> shared matrices

__device__ __forceinline__ void StoreMatrixX4(uint32_t address, uint32_t r0, uint32_t r1,
                                              uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

__device__ __forceinline__ void StoreMatrixX4Transposed(uint32_t address, uint32_t r0, uint32_t r1,
                                                        uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

__device__ __forceinline__ void StoreMatrixX2Transposed(uint32_t address, uint32_t r0,
                                                        uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(r0), "r"(r1)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements held by a warp in mma fragment layout.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t fragment) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

using gpu::Exp2, gpu::Log2, gpu::Pack2, gpu::Reciprocal, gpu::Unpack2;

}  // namespace jax_mla::gpu::sm90
