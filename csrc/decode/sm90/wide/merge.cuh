// Merge of split sequences inside the wide kernel, behind a grid barrier.
//
// The combine kernel would start cold after this one, since nothing fits beside a CTA that takes
// the whole SM. So the kernel is launched cooperatively (all CTAs run at once, the driver provides
// the barrier's memory), and after its last item every CTA merges as much as it has computed: of a
// sequence of which it holds part i of n, slice i of n of its row tile. The n pieces of a slice are
// contiguous: one bulk copy each into the KV buffers, which are idle by then.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// Partials that this kernel merges itself are half as wide as the combine kernel's: writing and
// reading them is most of what a merge costs. [slot][row tile][row][d_ckv] f16, each row and half
// of d_ckv normalised to a largest magnitude of kPackedMax and followed, in another region, by the
// scale that undoes it. f16 keeps 11 bits of that, three more than a bf16 output. A thread's 8
// values of 32 dims (wgmma's accumulator layout) are one vector: vector v of a row holds dims 32 (v
// / 4) + 2 (v % 4) + {0, 1, 8, 9, 16, 17, 24, 25}.
struct PackedPartials {
  static constexpr int kVector = 8;       // elements
  static constexpr int kVectorDims = 32;  // that four of them hold
  static constexpr float kPackedMax = 32768.0f;

  __half* out;
  float* scales;  // [slot][row tile][row][half]

  // The scratch has room for f32: out takes the first half of that, the scales begin the second.
  __device__ explicit PackedPartials(const PartialBuffers& partials)
      : out(reinterpret_cast<__half*>(partials.out)),
        scales(partials.out + (partials.lse_log2 - partials.out) / 2) {}
};

// What lies in the buffers that the main loop leaves behind: in kv the parts' vectors
// [part][slice], in q the rest. Parts are at most as many as SMs, and n parts have at most 64 + 3 n
// rows in a slice.
struct MergeScratch {
  static constexpr int kMaxRows = 1024;
  float lse_log2[kMaxRows];                                   // [part][row of the slice]
  float2 weights[kMaxRows];                                   // ... of a packed value, by half
  float4 sums[PackedPartials::kVector / 4][kNumMathThreads];  // on their way to the first group
};

// This CTA's share of a sequence: slice part_idx of num_parts.
template <class C>
struct Slice {
  static constexpr int kVectorsPerRow = C::kDCkv / PackedPartials::kVector;
  int length, begin, end;   // vectors of the row tile
  int first_row, num_rows;  // that they touch

  __device__ __forceinline__ Slice(const RowTile& tile, const WorkItem& item) {
    const int num_vectors = tile.num_rows * kVectorsPerRow;
    length = CeilDiv(num_vectors, item.num_parts);
    begin = min(item.part_idx * length, num_vectors);
    end = min(begin + length, num_vectors);
    first_row = begin / kVectorsPerRow;
    num_rows = (end + kVectorsPerRow - 1) / kVectorsPerRow - first_row;
  }
};

__device__ __forceinline__ void JoinMath() { gpu::sm90::NamedBarrierSync(kMerge, kNumMathThreads); }

// Starts the copies of all parts of the slice. One warp.
template <class C>
__device__ __forceinline__ void FetchParts(const PartialBuffers& partials, const RowTile& tile,
                                           const WorkItem& item, const Slice<C>& slice) {
  const uint32_t full = SharedAddress(&Shared<C>().merge_full);
  const uint32_t target = SharedAddress(Shared<C>().kv);
  const __half* source = PackedPartials(partials).out + slice.begin * PackedPartials::kVector;
  const int num_bytes = (slice.end - slice.begin) * static_cast<int>(sizeof(uint4));
  if (threadIdx.x == 0) gpu::sm90::MbarrierArriveExpectTx(full, num_bytes * item.num_parts);
  __syncwarp();
  for (int part = threadIdx.x; part < item.num_parts && num_bytes > 0; part += kWarpThreads) {
    const int64_t row = partials.RowIndex(item.slot_of(part), tile.idx);
    gpu::sm90::BulkLoad(target + part * slice.length * static_cast<int>(sizeof(uint4)),
                        source + row * C::kDCkv, num_bytes, full);
  }
}

// Log-sum-exp over parts, in the making.
struct RunningLse {
  float max = kNoReference;  // log2 units
  float sum = 0.0f;

  __device__ __forceinline__ void Add(float other_max, float other_sum) {
    const float raised = fmaxf(max, other_max);
    sum = sum * gpu::sm90::Exp2(max - raised) + other_sum * gpu::sm90::Exp2(other_max - raised);
    max = raised;
  }
};

// What every part of every row of the slice counts in the mean; the rows' log-sum-exps. Eight lanes
// a row, so that one round of loads and three exchanges suffice for most shapes.
template <class C>
__device__ __forceinline__ void WeighParts(const WideParams& params, const RowTile& tile,
                                           const WorkItem& item, const Slice<C>& slice,
                                           int64_t out_row, MergeScratch& scratch) {
  constexpr int kRowLanes = 8;
  const PartialBuffers& partials = params.plan.partials;
  const auto* scales = reinterpret_cast<const float2*>(PackedPartials(partials).scales);
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll 1
  for (int first = 0; first < slice.num_rows; first += kNumMathThreads / kRowLanes) {
    const int row = first + threadIdx.x / kRowLanes;
    const int num_parts = row < slice.num_rows ? item.num_parts : 0;
    RunningLse lse;
#pragma unroll 2
    for (int part = lane; part < num_parts; part += kRowLanes) {
      const int64_t source =
          partials.RowIndex(item.slot_of(part), tile.idx) + slice.first_row + row;
      const float part_lse = __ldcg(partials.lse_log2 + source);
      const float2 scale = __ldcg(scales + source);
      scratch.lse_log2[part * slice.num_rows + row] = part_lse;
      scratch.weights[part * slice.num_rows + row] = scale;
      lse.Add(part_lse, 1.0f);
    }
#pragma unroll
    for (int step = 1; step < kRowLanes; step *= 2) {
      lse.Add(__shfl_xor_sync(kAllLanes, lse.max, step), __shfl_xor_sync(kAllLanes, lse.sum, step));
    }
    const float inverse = lse.sum == 0.0f ? 0.0f : 1.0f / lse.sum;  // 0: a row that sees no key
    for (int part = lane; part < num_parts; part += kRowLanes) {
      const int i = part * slice.num_rows + row;
      const float weight = gpu::sm90::Exp2(scratch.lse_log2[i] - lse.max) * inverse;
      scratch.weights[i].x *= weight;
      scratch.weights[i].y *= weight;
    }
    const bool holds_begin = (slice.first_row + row) * Slice<C>::kVectorsPerRow >= slice.begin;
    if (lane == 0 && num_parts > 0 && holds_begin) {
      params.decode.lse[out_row + row] =
          lse.sum == 0.0f ? -INFINITY : (lse.max + log2f(lse.sum)) * kLn2;
    }
  }
  JoinMath();
}

// Adds a part's vector to `sum`.
__device__ __forceinline__ void AddPart(float weight, const uint4& vector,
                                        float (&sum)[PackedPartials::kVector]) {
  const uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < PackedPartials::kVector; i += 2) {
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(pairs[i / 2]));
    sum[i] += weight * x.x;
    sum[i + 1] += weight * x.y;
  }
}

// Writes a merged vector to its row of `out`.
template <class C>
__device__ __forceinline__ void StoreVector(void* out, int64_t row, int vector,
                                            const float (&sum)[PackedPartials::kVector]) {
  using T = std::conditional_t<C::kDType == DType::kBf16, __nv_bfloat16, __half>;
  T* target = static_cast<T*>(out) + row * C::kDCkv + vector / 4 * PackedPartials::kVectorDims +
              vector % 4 * 2;
#pragma unroll
  for (int i = 0; i < PackedPartials::kVector; i += 2) {
    *reinterpret_cast<uint32_t*>(target + 4 * i) = gpu::sm90::Pack2<T>(sum[i], sum[i + 1]);
  }
}

// Merges this CTA's slice of one sequence. All math threads. `phase`: of merge_full. When the slice
// is shorter than the threads are many, groups of them take every num_groups-th part each and are
// added up in their order: the order of every sum depends on the sequence alone.
template <class C>
__device__ __forceinline__ void MergeSplit(const WideParams& params, const RowTile& tile,
                                           const WorkItem& item, int phase) {
  constexpr int kVector = PackedPartials::kVector;
  constexpr int kMinLanes = 8;
  auto& scratch = *reinterpret_cast<MergeScratch*>(Shared<C>().q);
  static_assert(sizeof(scratch) <= sizeof(Shared<C>().q));
  const auto* vectors = reinterpret_cast<const uint4*>(Shared<C>().kv);
  const DecodeParams& d = params.decode;
  const Slice<C> slice(tile, item);
  const int64_t out_row =
      static_cast<int64_t>(item.seq_idx) * d.q_len * d.num_heads + tile.row_begin + slice.first_row;
  if (threadIdx.x < kWarpThreads) FetchParts<C>(params.plan.partials, tile, item, slice);
  WeighParts<C>(params, tile, item, slice, out_row, scratch);
  gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().merge_full), phase);

  const int length = slice.end - slice.begin;
  int lanes = kMinLanes;  // of a group
  while (lanes < length && lanes < kNumMathThreads) lanes *= 2;
  const int num_groups = kNumMathThreads / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
#pragma unroll 1
  for (int base = 0; base < length; base += lanes) {
    const int i = min(base + lane, length - 1);
    const int row = (slice.begin + i) / Slice<C>::kVectorsPerRow - slice.first_row;
    const int vector = (slice.begin + i) % Slice<C>::kVectorsPerRow;
    const bool is_right = vector >= Slice<C>::kVectorsPerRow / 2;
    float sum[kVector] = {};
#pragma unroll 4
    for (int part = group; part < item.num_parts; part += num_groups) {
      const float2 weight = scratch.weights[part * slice.num_rows + row];
      AddPart(is_right ? weight.y : weight.x, vectors[part * slice.length + i], sum);
    }
    if (num_groups > 1) {
      scratch.sums[0][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      scratch.sums[1][threadIdx.x] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      JoinMath();
      for (int g = 1; group == 0 && g < num_groups; ++g) {
#pragma unroll
        for (int k = 0; k < kVector; k += 4) {
          const float4 other = scratch.sums[k / 4][g * lanes + lane];
          sum[k] += other.x, sum[k + 1] += other.y, sum[k + 2] += other.z, sum[k + 3] += other.w;
        }
      }
    }
    if (group == 0 && base + lane < length) StoreVector<C>(d.out, out_row + row, vector, sum);
  }
}

// Waits until all CTAs have written their partials. All threads of the CTA that have not exited.
// After it, the asynchronous proxy may read what any of them wrote.
__device__ __forceinline__ void WaitForAllPartials() {
  trace::Enter(Phase::kWaitPartial);
  gpu::sm90::FenceProxyAsync();
  cooperative_groups::this_grid().sync();
  gpu::sm90::FenceProxyAsync();
}

// Merges this CTA's share of the call's split sequences: at most the worker's first and its last
// item. All math threads, after WaitForAllPartials.
template <class C>
__device__ __forceinline__ void MergeSplits(const WideParams& params, const RowTile& tile) {
  trace::Enter(Phase::kMerge);
  const int num_splits = Shared<C>().num_splits;
#pragma unroll 1
  for (int i = 0; i < num_splits; ++i) {
    if (i > 0) JoinMath();  // the copies overwrite what the slowest thread may still read
    MergeSplit<C>(params, tile, Shared<C>().splits[i], i);
  }
}

}  // namespace jax_mla::decode::sm90::wide
