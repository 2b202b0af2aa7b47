// What the math warpgroups of the kernel with query codes know: SWG a Context, WG0 and WG1 an
// Output and the statistics that SWG left. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/codes64/config.h"
#include "decode/sm90/swapped/context.cuh"
#include "decode/sm90/swapped/finish.cuh"
#include "gpu/codegen.cuh"

namespace jax_mla::decode::sm90::codes64 {

using ScoredCursor = RingCursor<kScoredPlaces>;

template <class C>
struct Math : Output<C> {
  using Base = Output<C>;
  using Base::query, Base::shared, Base::thread;

  uint32_t rows_with_keys;  // bit j: the thread's row j has seen a key

  __device__ __forceinline__ Math(const KernelParams& kernel_params, SharedMemory<C>& shared_memory,
                                  int warp, int tile)
      : Base(kernel_params, shared_memory, Thread(0, warp), tile) {}

  // ---- the rows' statistics, which StoreStats left: finish.cuh asks for them

  __device__ __forceinline__ auto& SumsOfItem() const {
    return shared.scored.sums[ItemIndex<C>(query)];
  }
  __device__ __forceinline__ float SumOfRow(int row) const { return SumsOfItem()[row]; }
  __device__ __forceinline__ float& ReferenceOf(int row) const {
    return shared.scored.references[ItemIndex<C>(query)][row];
  }
  __device__ __forceinline__ bool HasKey(int j) const { return rows_with_keys >> j & 1; }
  // Read again: kept, what follows from it would be spilled.
  static __device__ __forceinline__ int RowOfThread() {
    return static_cast<int>(gpu::ThreadIndex());
  }
  static __device__ __forceinline__ bool LooksAfterRow(int row) { return row < C::kTileRows; }
  static __device__ __forceinline__ void ScaleStats(int, float, float) {}
  template <class ScaleLog2Of>
  __device__ __forceinline__ void ScaleRowStats(ScaleLog2Of scale_log2_of) const {
    if (const int row = RowOfThread(); LooksAfterRow(row)) {
      const float scale_log2 = scale_log2_of(row);
      SumsOfItem()[row] *= hw::Exp2(-scale_log2);
      ReferenceOf(row) += scale_log2;
    }
  }
  // Otherwise what RangeOfRows makes of them would be kept in registers.
  __device__ __forceinline__ void ForgetRows() {
    rows_with_keys = gpu::RecomputeHere(rows_with_keys);
  }
};

}  // namespace jax_mla::decode::sm90::codes64
