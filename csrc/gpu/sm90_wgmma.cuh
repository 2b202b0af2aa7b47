// Wrappers of wgmma and of the descriptors of its operands (sm90.cuh has the other instructions and
// the conventions).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace jax_mla::gpu::sm90 {

// The descriptor of an operand in shared memory with rows of 128 bytes (64 elements of 16 bits) in
// the 128-byte swizzle. Groups of 8 rows lie kGroupStrideBytes apart. It serves both uses of such a
// tile (measured, docs/kernels/decode_sm90.md):
//   K-major   rows are M or N, columns are K; a step of 16 columns is 32 bytes.
//   MN-major  rows are K; a step of 16 rows is 2 * kGroupStrideBytes.
// `address` is a multiple of 1024 plus such steps. kAtomStrideBytes is the distance from one atom
// of 64 elements to the next along M or N of an MN-major operand. It is ignored if the operand is
// one atom wide.
template <int kGroupStrideBytes = 1024, int kAtomStrideBytes = 16>
__device__ __forceinline__ uint64_t SharedDescriptor(uint32_t address) {
  constexpr uint32_t kHigh = (kGroupStrideBytes >> 4) | (1u << 30);  // bits 62-63: 128-byte swizzle
  constexpr uint32_t kLeadingOffset = static_cast<uint32_t>(kAtomStrideBytes >> 4) << 16;
  return (static_cast<uint64_t>(kHigh) << 32) | kLeadingOffset | ((address & 0x3FFFF) >> 4);
}

// The descriptor of an operand `bytes` further on. This is one addition. A new descriptor would
// take a chain of five instructions, which lasts longer than the wgmma before it.
__device__ __forceinline__ uint64_t AdvanceDescriptor(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

using Major = cute::SM90::GMMA::Major;

template <typename T, int N, Major kMajorA, Major kMajorB>
struct WgmmaAtom;

#define MLA_WGMMA_ATOM(N)                                                           \
  template <Major kMajorA, Major kMajorB>                                           \
  struct WgmmaAtom<__nv_bfloat16, N, kMajorA, kMajorB> {                            \
    using SS = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<kMajorA, kMajorB>;  \
    using RS = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<Major::K, kMajorB>; \
  };                                                                                \
  template <Major kMajorA, Major kMajorB>                                           \
  struct WgmmaAtom<__half, N, kMajorA, kMajorB> {                                   \
    using SS = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<kMajorA, kMajorB>;    \
    using RS = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<Major::K, kMajorB>;   \
  };
MLA_WGMMA_ATOM(8)
MLA_WGMMA_ATOM(16)
MLA_WGMMA_ATOM(64)
MLA_WGMMA_ATOM(128)
MLA_WGMMA_ATOM(256)
#undef MLA_WGMMA_ATOM

// acc[64, N] (+)= A[64, 16] B[16, N] with both operands in shared memory. If `accumulate` is false,
// acc is overwritten.
template <typename T, int N, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void WgmmaSS(uint64_t a, uint64_t b, float (&acc)[N / 2],
                                        bool accumulate) {
  using Atom = typename WgmmaAtom<T, N, kMajorA, kMajorB>::SS;
  const auto scale =
      accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    Atom::fma(a, b, acc[kIndex]..., scale);
  }(std::make_index_sequence<N / 2>{});
}

// The same with A in registers: four registers of two elements each, in mma's fragment layout.
template <typename T, int N, Major kMajorB>
__device__ __forceinline__ void WgmmaRS(const uint32_t (&a)[4], uint64_t b, float (&acc)[N / 2],
                                        bool accumulate) {
  using Atom = typename WgmmaAtom<T, N, Major::K, kMajorB>::RS;
  const auto scale =
      accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    Atom::fma(a[0], a[1], a[2], a[3], b, acc[kIndex]..., scale);
  }(std::make_index_sequence<N / 2>{});
}

template <int N>
struct WgmmaCodesAtom;
#define MLA_WGMMA_ATOM(N)                                             \
  template <>                                                         \
  struct WgmmaCodesAtom<N> {                                          \
    using SS = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>; \
    using RS = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_RS_TN<>; \
  };
MLA_WGMMA_ATOM(64)
MLA_WGMMA_ATOM(128)
#undef MLA_WGMMA_ATOM

// acc[64, N] (+)= A[64, 32] B[32, N], both of e4m3, K-major, in shared memory. The sums have 13
// bits.
template <int N>
__device__ __forceinline__ void WgmmaCodes(uint64_t a, uint64_t b, float (&acc)[N / 2],
                                           bool accumulate) {
  using Atom = typename WgmmaCodesAtom<N>::SS;
  const auto scale =
      accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    Atom::fma(a, b, acc[kIndex]..., scale);
  }(std::make_index_sequence<N / 2>{});
}

// The same with A in registers: four registers of four codes each, in mma's fragment layout.
template <int N>
__device__ __forceinline__ void WgmmaCodesRS(const uint32_t (&a)[4], uint64_t b,
                                             float (&acc)[N / 2], bool accumulate) {
  using Atom = typename WgmmaCodesAtom<N>::RS;
  const auto scale =
      accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    Atom::fma(a[0], a[1], a[2], a[3], b, acc[kIndex]..., scale);
  }(std::make_index_sequence<N / 2>{});
}

// To be called before the first wgmma that follows a change of its registers or shared operands.
__device__ __forceinline__ void WgmmaArrive() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void WgmmaCommit() { cute::warpgroup_commit_batch(); }

// Waits until at most kPending commit groups are in flight.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  cute::warpgroup_wait<kPending>();
}

// Keeps the compiler from moving accesses of an accumulator across this point. The compiler does
// not know that wgmma writes the registers later than it is issued.
template <int kSize>
__device__ __forceinline__ void WgmmaFenceOperand(float (&registers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(registers[i]);
}

}  // namespace jax_mla::gpu::sm90
