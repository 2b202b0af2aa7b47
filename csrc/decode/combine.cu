// Merge of the partial results of split sequences.
//
// The CTAs are dealt out evenly to the workers that have work, `slices` to each. CTA `slice` of
// worker w walks w's items; of every split sequence that w holds a part of, it merges slice
// (part_idx, slice) of num_parts * slices: rows x d_ckv cut into equal ranges of 4-element vectors.
// So every vector has one owner, the work follows the partials, and a long sequence is merged by as
// many CTAs as computed it.
//
// A slice is shorter than the CTA when there are many parts. Then groups of threads take every
// num_groups-th part each, and the group results are merged in group order: the sum's order depends
// on the sequence alone, which makes it repeatable and independent of the batch.
#include "decode/combine.h"
#include "decode/find_work.cuh"
#include "decode/trace.cuh"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"
#include "gpu/sm80.cuh"

namespace jax_mla::decode {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kVector = 4;       // elements
constexpr int kMinLaneBits = 3;  // consecutive vectors a group reads, log2: 128 bytes
// Parts a thread loads before it uses the first. Four do not fit into sm_80's 64 registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr int kLoadsInFlight = 3;
#else
constexpr int kLoadsInFlight = 4;
#endif
// CTAs a worker: one more for every 8 rows. Fewer and a CTA works in serial rounds, more and they
// do not fit beside the decode kernel (H200, best of 1, 2, 4, 8: 2 at 8 and 16 rows, 4 to 8 at 32,
// 8 at 64). By the rows alone: a batch-invariant result may not depend on anything else.
constexpr int kRowsPerSlice = 8;
constexpr int kMaxSlices = 8;
// In automatic mode a small call is spread over as many CTAs as a large one.
constexpr int kMinWorkers = 132;
// CTAs that start with the decode kernel and wait beside it are worth two rounds of those that only
// fit in when it ends (H200, 64 rows, 1 x 1024: 8.9 us instead of 11.6).
constexpr int kResidentRounds = 2;
constexpr int kMinCtasPerSm = 8;  // caps registers at 64, see kCombineThreads

// Running log-sum-exp weighted mean of one vector.
struct Merged {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};  // sum of weight * partial
  float max = gpu::kNoReference;          // reference of the weights, log2 units
  float sum = 0.0f;                       // sum of weights

  __device__ __forceinline__ void Raise(float new_max) {
    const float scale = gpu::Exp2(max - new_max);
    out = {out.x * scale, out.y * scale, out.z * scale, out.w * scale};
    sum *= scale;
    max = new_max;
  }
  __device__ __forceinline__ void Add(float weight, float weight_sum, const float4& x) {
    out.x += weight * x.x;
    out.y += weight * x.y;
    out.z += weight * x.z;
    out.w += weight * x.w;
    sum += weight_sum;
  }
  __device__ __forceinline__ void Join(const Merged& other) {
    Raise(fmaxf(max, other.max));
    const float weight = gpu::Exp2(other.max - max);
    Add(weight, weight * other.sum, other.out);
  }
};

__device__ __forceinline__ float ShuffleXor(float x, int offset) {
  return __shfl_xor_sync(~0u, x, offset);
}

struct SharedMemoryPlan {
  float4 out[kCombineThreads];
  float2 max_sum[kCombineThreads];
};
static_assert(sizeof(SharedMemoryPlan) + 1024 <= kCombineSharedBytes,
              "raise kCombineSharedBytes: decode kernels leave that much free");

// One vector of the parts first, first + step, ... `row` of the sequence, `element` of the row.
__device__ __forceinline__ Merged MergeParts(const PartialBuffers& partials, const WorkItem& item,
                                             int32_t d_ckv, int row, int element, int first,
                                             int step) {
  // Tiles follow each other, so a row's place in its slot is its number; and so do the parts, after
  // the first. 2^31 rows are 2 TiB.
  const int32_t slot_rows = static_cast<int32_t>(partials.RowIndex(1, 0));
  const int32_t row_of_part0 = item.slot_of(0) * slot_rows + row;
  const int32_t row_of_part1 = item.slot_of(1) * slot_rows + row;
  const int32_t part_rows = (item.slot_of(2) - item.slot_of(1)) * slot_rows;
  const float* out = partials.out + element;
  Merged merged;
#pragma unroll 1
  for (int part = first; part < item.num_parts; part += step * kLoadsInFlight) {
    float lse[kLoadsInFlight];
    float4 x[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      lse[i] = gpu::NegativeInfinity();
      x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (part + i * step >= item.num_parts) continue;
      const int32_t part_row =
          part + i * step == 0 ? row_of_part0 : row_of_part1 + (part + i * step - 1) * part_rows;
      lse[i] = partials.lse_log2[part_row];
      x[i] = *reinterpret_cast<const float4*>(out + int64_t{part_row} * d_ckv);
    }
    float max = merged.max;
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) max = fmaxf(max, lse[i]);
    merged.Raise(max);
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const float weight = gpu::Exp2(lse[i] - max);
      merged.Add(weight, weight, x[i]);
    }
  }
  return merged;
}

// Merges the results of the groups of `lanes` threads into those of group 0: first the groups of a
// warp, then the warps. All threads; the order depends on `lanes` alone.
__device__ __forceinline__ void MergeGroups(int lanes, SharedMemoryPlan& shared, Merged* merged) {
#pragma unroll 1
  for (int offset = lanes; offset < kWarpThreads; offset *= 2) {
    merged->Join({{ShuffleXor(merged->out.x, offset), ShuffleXor(merged->out.y, offset),
                   ShuffleXor(merged->out.z, offset), ShuffleXor(merged->out.w, offset)},
                  ShuffleXor(merged->max, offset),
                  ShuffleXor(merged->sum, offset)});
  }
  const int stride = MaxI32(lanes, kWarpThreads);
  if (stride == kCombineThreads) return;
  shared.out[threadIdx.x] = merged->out;
  shared.max_sum[threadIdx.x] = {merged->max, merged->sum};
  __syncthreads();
  if (threadIdx.x < lanes) {
#pragma unroll 1
    for (int other = threadIdx.x + stride; other < kCombineThreads; other += stride) {
      const float2 max_sum = shared.max_sum[other];
      merged->Join({shared.out[other], max_sum.x, max_sum.y});
    }
  }
  __syncthreads();
}

// `element`: the first of four of a partial row; see PartialBuffers::interleave.
template <DType kDType>
__device__ __forceinline__ void StoreMerged(const DecodeParams& p, const WorkItem& item,
                                            int32_t interleave, int row, int element,
                                            const Merged& merged) {
  using E = gpu::Element<kDType>;
  const int64_t out_row = static_cast<int64_t>(item.seq_idx) * (p.q_len * p.num_heads) + row;
  const float scale = merged.sum == 0.0f ? 0.0f : gpu::Reciprocal(merged.sum);
  auto* target = static_cast<typename E::Type*>(p.out) + out_row * p.d_ckv;
  const uint32_t low = E::Pack(merged.out.x * scale, merged.out.y * scale);
  const uint32_t high = E::Pack(merged.out.z * scale, merged.out.w * scale);
  if (interleave == 1) {
    *reinterpret_cast<uint2*>(target + element) = {low, high};
  } else if (interleave == PartialBuffers::kWgmmaOrder) {
    auto* pair = target + (element / 16 * 16 + element % 16 / 2);
    *reinterpret_cast<uint32_t*>(pair) = low;
    *reinterpret_cast<uint32_t*>(pair + 8) = high;
  } else {
    const int shift = __ffs(interleave) - 1;
    const int plane = p.d_ckv >> shift;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int dim = ((element + i) >> shift) + ((element + i) & (interleave - 1)) * plane;
      const uint32_t pair = i < 2 ? low : high;
      reinterpret_cast<uint16_t*>(target)[dim] =
          static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16);
    }
  }
  if (element == 0) {
    const float lse_log2 =
        merged.sum == 0.0f ? gpu::NegativeInfinity() : merged.max + gpu::Log2(merged.sum);
    p.lse[out_row] = lse_log2 * gpu::kLn2;
  }
}

// Merges vectors [begin, end) of one sequence. All threads. Everything that does not depend on the
// partials is computed before the wait for them: instructions behind it are time of the call.
template <DType kDType>
__device__ __forceinline__ void MergeSlice(const DecodeParams& p, const PartialBuffers& partials,
                                           const WorkItem& item, int begin, int end,
                                           SharedMemoryPlan& shared) {
  int lane_bits = kMinLaneBits;  // threads of a group; so that the groups fill the CTA
  while ((1 << lane_bits) < end - begin && (1 << lane_bits) < kCombineThreads) ++lane_bits;
  const int lanes = 1 << lane_bits;
  const int group = threadIdx.x >> lane_bits, num_groups = kCombineThreads >> lane_bits;
  const int row_bits = __ffs(p.d_ckv / kVector) - 1;
#pragma unroll 1
  for (int vector = begin + (threadIdx.x & (lanes - 1)), base = begin; base < end;
       base += lanes, vector += lanes) {
    const bool active = vector < end;
    const int row = vector >> row_bits, element = (vector - (row << row_bits)) * kVector;
    trace::Enter(Phase::kWaitPartial);
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    trace::Enter(Phase::kMerge);
    Merged merged;
    if (active) {
      merged = MergeParts(partials, item, p.d_ckv, row, element, group, num_groups);
    }
    MergeGroups(lanes, shared, &merged);
    if (group == 0 && active) {
      StoreMerged<kDType>(p, item, partials.interleave, row, element, merged);
    }
  }
}

template <DType kDType>
__global__ void __launch_bounds__(kCombineThreads, kMinCtasPerSm)
    CombineKernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ SplitPlan plan) {
  __shared__ SharedMemoryPlan shared;
  trace::Begin(params, TraceRole::kCombine, trace::kMerge);
  const ScheduleParams& schedule = plan.schedule;
  // seq_lens is older than the decode kernel, which waited for it: it may be read before PdlWait.
  SchedulePolicy policy{};
  ScheduleTotals totals{};
  int num_busy = schedule.num_workers;
  if (schedule.num_splits == 0) {
    totals = FindTotals(schedule);
    policy = ChoosePolicy(schedule, totals.total_blocks, totals.max_blocks);
    num_busy = NumBusyWorkers(schedule, policy, totals.total_blocks);
  }
  const int num_slices = FloorDiv(gridDim.x, num_busy);
  const int my_slice = FloorDiv(blockIdx.x, num_busy);
  const int worker = my_slice < num_slices ? blockIdx.x - my_slice * num_busy : num_busy;
  WorkIterator work = schedule.num_splits > 0 ? WorkIterator{policy, worker, worker, 0}
                                              : FindFirstItem(schedule, totals, policy, worker);
  const int num_vectors = params.q_len * params.num_heads * (params.d_ckv / kVector);
  WorkItem item;
  while (my_slice < num_slices && work.Next(schedule, &item)) {
    if (item.is_final()) continue;
    const int slice = item.part_idx * num_slices + my_slice;
    constexpr int kLaneMask = (1 << kMinLaneBits) - 1;
    const int length = (CeilDiv(num_vectors, item.num_parts * num_slices) + kLaneMask) & ~kLaneMask;
    const int begin = slice * length, end = MinI32(begin + length, num_vectors);
    if (begin < end) MergeSlice<kDType>(params, plan.partials, item, begin, end, shared);
  }
  // Also without work: this grid must not end before the decode kernel has, or what follows in the
  // stream could start too early.
  trace::Enter(Phase::kWaitPartial);
  gpu::PdlWait();
  trace::End();
}

int NumCtas(const DecodeParams& params, const SplitPlan& plan) {
  const ScheduleParams& schedule = plan.schedule;
  const int rows = params.q_len * params.num_heads;
  const int num_slices = MinI32(1 + rows / kRowsPerSlice, kMaxSlices);
  if (schedule.num_splits > 0) return schedule.num_workers * num_slices;
  // Does a thread of each resident CTA merge everything in a few rounds? One round is a vector of
  // kLoadsInFlight parts.
  const int64_t vectors = int64_t{rows} * (params.d_ckv / kVector);
  const int64_t groups = MaxI32(params.batch, schedule.num_workers / kLoadsInFlight);
  if (groups * vectors <= int64_t{kResidentRounds} * plan.resident_merges * kCombineThreads) {
    return plan.resident_merges;
  }
  // As many sequences as workers are hardly ever split.
  const bool is_split = params.batch <= schedule.num_workers * 3 / 4;
  const int split_slices = MinI32(1 + rows / 2, kMaxSlices);
  return MaxI32(schedule.num_workers, kMinWorkers) * (is_split ? split_slices : num_slices);
}

}  // namespace

cudaError_t LaunchCombine(const DecodeParams& params, const SplitPlan& plan, cudaStream_t stream) {
  if (!plan.may_split) return cudaSuccess;
  const gpu::LaunchConfig config{
      .grid = dim3(NumCtas(params, plan)),
      .block = dim3(kCombineThreads),
      .stream = stream,
      .programmatic = true,
  };
  return params.dtype == DType::kBf16
             ? gpu::Launch<&CombineKernel<DType::kBf16>>(config, params, plan)
             : gpu::Launch<&CombineKernel<DType::kF16>>(config, params, plan);
}

}  // namespace jax_mla::decode
