// The tensor maps in the parameters of CUTLASS's Blackwell MLA decode kernel, tried on Hopper: what
// they bring is compared with what the model reads through pointers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "sm100_model.cuh"

namespace jax_mla::decode::sm100 {

inline constexpr int kBoxDims = 64;  // of every map: 128 bytes, swizzled
inline constexpr int kMaxBoxRows =
    64;  // half of a tile or of an entry, for each CTA of the cluster
inline constexpr int kValueBoxRows = 32;  // of the map of values

template <class TiledCopy>
inline constexpr int kBitsPerCopy = 0;
template <class Op, class Bits, class... Aux, class... Rest>
inline constexpr int kBitsPerCopy<cute::Copy_Atom<cute::Copy_Traits<Op, Bits, Aux...>, Rest...>> =
    Bits::value;
static_assert(kBitsPerCopy<MlaKernel::TmaLoadCLatent> == 16 * kBoxDims * kMaxBoxRows);
static_assert(kBitsPerCopy<MlaKernel::TmaLoadQLatent> == 16 * kBoxDims * kMaxBoxRows);
static_assert(kBitsPerCopy<MlaKernel::TmaLoadCLatentTranspose> == 16 * kBoxDims * kValueBoxRows);

__device__ inline uint32_t SharedAddress(const void* x) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

// A box in shared memory, and the barrier that its copies arrive at.
struct Box {
  T* rows;  // [kMaxBoxRows, kBoxDims]
  uint64_t* barrier;
  int phase;
};

// Copies `num_rows` rows. False if they do not arrive.
__device__ inline bool CopyBox(const void* map, int dim, int row, int plane, int num_rows,
                               Box& box) {
#if __CUDA_ARCH__ >= 900
  const uint32_t barrier = SharedAddress(box.barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_rows * kBoxDims * kElementBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(SharedAddress(box.rows)),
        "l"(map), "r"(barrier), "r"(dim), "r"(row), "r"(plane)
        : "memory");
  }
  const int phase = box.phase;
  box.phase ^= 1;
  for (int tries = 0; tries < 1000000; ++tries) {
    uint32_t is_done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(barrier), "r"(phase)
        : "memory");
    if (is_done) return true;
  }
#endif
  return false;
}

// Compares a plane of 128 rows through a map with what the model reads: `base` and its strides of
// (row, dim, plane). Returns how many values of this thread differ.
__device__ inline int CompareMap(const void* map, int num_dims, int box_rows, int plane,
                                 const MlaKernel::Element* base,
                                 const MlaKernel::TensorStride& stride, Box& box) {
  int wrong = 0;
  for (int dim = 0; dim < num_dims; dim += kBoxDims) {
    for (int row = 0; row < kTileTokens; row += box_rows) {
      if (!CopyBox(map, dim, row, plane, box_rows, box)) return wrong + 1;
      for (int i = threadIdx.x; i < box_rows * kBoxDims; i += kModelThreads) {
        const int r = i / kBoxDims, d = i % kBoxDims;
        const T got = box.rows[r * kBoxDims + ((d / 8) ^ (r % 8)) * 8 + d % 8];
        const T want = PageRow(base, stride, plane, row + r)[dim + d];
        wrong += __bfloat16_as_ushort(got) != __bfloat16_as_ushort(want);
      }
      __syncthreads();
    }
  }
  return wrong;
}

// Every page of every sequence, and the queries, through the maps that CUTLASS's kernel copies
// with. Grid (tiles, entries). Only on Hopper and newer.
__global__ void __launch_bounds__(kModelThreads) CheckMaps(const __grid_constant__ KernelParams p) {
  __shared__ alignas(1024) uint16_t rows[kMaxBoxRows * kBoxDims];
  __shared__ uint64_t barrier;
  const int tile = blockIdx.x, entry = blockIdx.y;
  if (tile * kTileTokens >= p.mainloop.ptr_seq[entry]) return;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&barrier)));
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
  }
  __syncthreads();
  Box box{reinterpret_cast<T*>(rows), &barrier, 0};
  const int page = PageOf(p, entry, tile);
  const auto& in = p.mainloop;
  const auto& maps = p.mainloop_params;
  int wrong = CompareMap(maps.tma_load_c_latent.get_tma_descriptor(), kDCkv, kMaxBoxRows, page,
                         in.ptr_c_latent, in.stride_c_latent, box);
  wrong += CompareMap(maps.tma_load_c_latent_transpose.get_tma_descriptor(), kDCkv, kValueBoxRows,
                      page, in.ptr_c_latent, in.stride_c_latent, box);
  wrong += CompareMap(maps.tma_load_k_rope.get_tma_descriptor(), kDKpe, kMaxBoxRows, page,
                      in.ptr_k_rope, in.stride_k_rope, box);
  if (tile == 0) {
    wrong += CompareMap(maps.tma_load_q_latent.get_tma_descriptor(), kDCkv, kMaxBoxRows, entry,
                        in.ptr_q_latent, in.stride_q_latent, box);
    wrong += CompareMap(maps.tma_load_q_rope.get_tma_descriptor(), kDKpe, kMaxBoxRows, entry,
                        in.ptr_q_rope, in.stride_q_rope, box);
  }
  if (wrong != 0) atomicAdd(&num_model_errors, wrong);
}

}  // namespace jax_mla::decode::sm100
