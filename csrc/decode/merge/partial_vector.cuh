// A vector of a partial result as the combine kernel sees it: where it is, how to load it, and
// where its elements lie in a row of `out`. One struct for each PartialOrder; the last structs take
// it as L.
#pragma once

#include <cstdint>
#include <type_traits>

#include "decode/merge/partial_range.cuh"
#include "decode/schedule/plan.h"
#include "decode/schedule/schedule.h"
#include "gpu/element.h"
#include "gpu/pack.cuh"

namespace jax_mla::decode {

// kRows.
template <DType kDType_>
struct FloatVector {
  static constexpr DType kDType = kDType_;
  static constexpr int kSize = 4;        // elements
  static constexpr int kLoads = 3;       // parts a lane loads before it uses the first
  static constexpr int kLaneParts = 12;  // that a lane takes before other lanes share them
  static constexpr bool kStartsLate = false;
  static constexpr int kMaxSplitSlices = 8;
  static constexpr int kMinCtasPerSm = 8;  // caps registers at 64
  using Raw = float4;
  using RawStats = float;

  static constexpr int kStatsPerRow = 1;
  static __device__ __forceinline__ const float* StatsOf(const PartialBuffers& partials) {
    return partials.lse_log2;
  }
  static __device__ __forceinline__ int64_t StatsIndex(int64_t row, bool) { return row; }
  static __device__ __forceinline__ PartialStats Unpack(float lse_log2) { return {lse_log2, 1.0f}; }
  static __device__ __forceinline__ void Unpack(const Raw& raw, float (&x)[kSize]) {
    x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
  }
  static __device__ __forceinline__ int FirstDim(int vector) { return vector * kSize; }
  static __device__ __forceinline__ void Store(uint16_t* out, const uint32_t (&pairs)[kSize / 2]) {
    if (out != nullptr) *reinterpret_cast<uint2*>(out) = {pairs[0], pairs[1]};
  }
};

// What all vectors of float16 partial results share.
template <DType kDType_, int kSize_>
struct PackedVector {
  static constexpr DType kDType = kDType_;
  static constexpr int kSize = kSize_;
  static constexpr int kBlockPairs = kSize / 2;
  using Raw = std::conditional_t<kSize == 8, uint4, uint2>;
  using RawStats = PartialStats;

  static constexpr int kStatsPerRow = 1;
  static __device__ __forceinline__ const PartialStats* StatsOf(const PartialBuffers& partials) {
    return partials.stats;
  }
  static __device__ __forceinline__ int64_t StatsIndex(int64_t row, bool) { return row; }
  static __device__ __forceinline__ PartialStats Unpack(const PartialStats& stats) { return stats; }
  static __device__ __forceinline__ void Unpack(const Raw& raw, float (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kBlockPairs; ++i) {
      const float2 pair = gpu::Unpack2<PartialElement>(reinterpret_cast<const uint32_t*>(&raw)[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
};

// kWgmma. The kernel that writes them leaves no room for CTAs that wait beside it: all start late,
// and then have registers for many parts at once.
template <DType kDType_, int kLaneParts_>
struct WgmmaVector : PackedVector<kDType_, 8> {
  static constexpr int kLoads = kLaneParts_;
  static constexpr int kLaneParts = kLoads;
  static constexpr bool kStartsLate = true;
  static constexpr int kMinCtasPerSm = kLoads > 8 ? 3 : 4;
  static constexpr int kStatsPerRow = 2;

  static __device__ __forceinline__ int64_t StatsIndex(int64_t row, bool in_second_half) {
    return HalfStatsIndex(row) + (in_second_half ? kBandRows : 0);
  }
  static __device__ __forceinline__ int FirstDim(int vector) {
    return vector / 4 * 32 + vector % 4 * 2;
  }
  static __device__ __forceinline__ void Store(uint16_t* out, const uint32_t (&pairs)[4]) {
    if (out == nullptr) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(out + i * 8) = pairs[i];
  }
};

// kTransposed.
template <DType kDType_, int kSize_>
struct TransposedVector : PackedVector<kDType_, kSize_> {
  using Packed = PackedVector<kDType_, kSize_>;
  using Packed::kBlockPairs;
  static constexpr int kLoads = 4;
  static constexpr int kLaneParts = kLoads;
  static constexpr bool kStartsLate = false;
  static constexpr int kMaxSplitSlices = 5;
  static constexpr int kMinCtasPerSm = 6;  // 80 registers
  static constexpr int kPairDims = 128;    // from one pair to the next

  // The two of a pair are 8 dims apart, those of neighbouring vectors one dim. So the lanes of an
  // even and an odd vector swap halves: the one then has neighbours of the lower 8 dims, the other
  // of the upper 8. All lanes of the warp.
  static __device__ __forceinline__ int FirstDim(int vector) {
    return vector * 2 - vector % 8 + vector % 2 * 7;
  }
  static __device__ __forceinline__ void Store(uint16_t* out,
                                               const uint32_t (&pairs)[kBlockPairs]) {
    const uint32_t selector = threadIdx.x % 2 == 0 ? 0x5410 : 0x3276;
#pragma unroll
    for (int i = 0; i < kBlockPairs; ++i) {
      const uint32_t other = __shfl_xor_sync(~0u, pairs[i], 1);
      const uint32_t pair = __byte_perm(pairs[i], other, selector);
      if (out != nullptr) *reinterpret_cast<uint32_t*>(out + i * kPairDims) = pair;
    }
  }
};

// kPackedRows.
template <DType kDType_, int kSize_>
struct PackedRowVector : TransposedVector<kDType_, kSize_> {
  using PackedVector<kDType_, kSize_>::kBlockPairs;

  static __device__ __forceinline__ int FirstDim(int vector) { return vector * kSize_; }
  static __device__ __forceinline__ void Store(uint16_t* out,
                                               const uint32_t (&pairs)[kBlockPairs]) {
    if (out == nullptr) return;
#pragma unroll
    for (int i = 0; i < kBlockPairs; i += 2) {
      reinterpret_cast<uint2*>(out)[i / 2] = {pairs[i], pairs[i + 1]};
    }
  }
};

// The same behind a kernel that leaves no room for CTAs that wait beside it. A lane that takes few
// parts needs few registers. Then an SM has room for more CTAs than its share, and takes some of
// those of an SM that is not done.
template <DType kDType_, int kSize_, int kLaneParts_>
struct LatePackedRowVector : PackedRowVector<kDType_, kSize_> {
  static constexpr int kLoads = kLaneParts_;
  static constexpr int kLaneParts = kLoads;
  static constexpr bool kStartsLate = true;
  static constexpr int kMinCtasPerSm = kLoads > 8 ? 3 : kLoads > 4 ? 4 : 6;
};

// Where a lane finds the parts first, first + step, ... of a vector.
template <class L>
struct PartPlaces {
  const typename L::Raw* raw[L::kLoads];
  const typename L::RawStats* stats[L::kLoads];
  int64_t raw_step, stats_step;

  __device__ __forceinline__ PartPlaces(const PartialBuffers& partials, const WorkItem& item,
                                        int d_ckv, int row, int vector, int first, int step) {
    // Tiles follow each other, so a row's place in its slot is its number; and so do the parts,
    // after the first. 2^31 rows are 2 TiB.
    const int32_t slot_rows = static_cast<int32_t>(partials.RowIndex(1, 0));
    const int32_t row_step = (item.slot_of(2) - item.slot_of(1)) * step * slot_rows;
    const int64_t first_row = item.slot_of(first) * slot_rows + row;
    const int64_t second_row = item.slot_of(first + step) * slot_rows + row;
    const int row_vectors = d_ckv / L::kSize;
    raw_step = int64_t{row_step} * row_vectors;
    stats_step = int64_t{row_step} * L::kStatsPerRow;
    const auto* vectors = reinterpret_cast<const typename L::Raw*>(partials.out) + vector;
    raw[0] = vectors + first_row * row_vectors;
    raw[1] = vectors + second_row * row_vectors;
    const bool in_second_half = vector >= row_vectors / 2;
    stats[0] = L::StatsOf(partials) + L::StatsIndex(first_row, in_second_half);
    stats[1] = L::StatsOf(partials) + L::StatsIndex(second_row, in_second_half);
    Follow(2);
  }
  // Makes place `begin` and those behind it follow the one before.
  __device__ __forceinline__ void Follow(int begin) {
#pragma unroll
    for (int i = begin; i < L::kLoads; ++i) {
      raw[i] = raw[i - 1] + raw_step;
      stats[i] = stats[i - 1] + stats_step;
    }
  }
  __device__ __forceinline__ void NextPass() {
    raw[0] = raw[L::kLoads - 1] + raw_step;
    stats[0] = stats[L::kLoads - 1] + stats_step;
    Follow(1);
  }
  // Computes them here, where the compiler would rather do it behind a wait.
  __device__ __forceinline__ void Pin() {
#pragma unroll
    for (int i = 0; i < L::kLoads; ++i) asm volatile("" : "+l"(raw[i]), "+l"(stats[i]));
  }
};

// Where the lanes that own a vector store it.
template <class L>
struct Target {
  uint16_t* out;
  float* lse;  // null in all lanes but one of the row

  // `out_row`: of the whole call.
  __device__ __forceinline__ Target(const DecodeParams& p, int64_t out_row, int vector, bool owns) {
    out = owns ? static_cast<uint16_t*>(p.out) + out_row * p.d_ckv + L::FirstDim(vector) : nullptr;
    lse = owns && vector == 0 ? p.lse + out_row : nullptr;
  }
  __device__ __forceinline__ void Pin() { asm volatile("" : "+l"(out), "+l"(lse)); }
};

}  // namespace jax_mla::decode
