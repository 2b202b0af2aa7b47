// The portable MLA decode kernel. It uses mma.sync, ldmatrix and cp.async, and runs on every GPU
// from sm_80 on.
//
// Algorithm. A CTA is one worker of the schedule for one row tile of kBlockM query rows. For each
// of the worker's items (a part of one sequence), it goes over the part's tokens in KV tiles of
// kBlockN tokens. The tiles are copied ahead into a ring of num_stages stages. For each KV tile:
//   1. S[kBlockM, kBlockN] = Q K^T. The warps divide the tokens (and many rows) among themselves:
//      each score is computed once.
//   2. P = exp2(S - m), where m is the row's reference. P goes to shared memory, because every warp
//      needs all of it for the next product.
//   3. O[kBlockM, d_ckv] += P V. The warps divide the latent dimensions: each has d_ckv / 8.
// At the end of an item, O is normalised and written to out and lse. If the sequence has several
// parts, it is a partial result and goes to the item's slot in scratch instead.
//
// Two ideas come from elsewhere: dividing the tokens of QK and gathering P (FlashInfer's
// "QK_SHARD"), and raising a row's reference only when a score exceeds it by more than 8, a factor
// of 2^8 (FlashAttention-4).
//
// Roles: all 8 warps do the same: they copy, multiply and store. A token is absent if it lies past
// the length or on a page of another device. cp.async then writes zeros without reading anything,
// and a bit in `present` masks the token's scores.
//
// FP8 caches: the tile in its stage is that of a plain cache, because each warp turns the codes
// that it copied into bf16 before the barrier tile_full (codes.cuh). Scales go into the scores and
// into the output (ComputeScores, ScoreScale, StoreItem).
//
// clang-format off
// Barrier      what is complete before it                          what may come after it
// first_item   thread 0: the first item is in shared memory        the item's first copies
// item_begin   all threads: the query is copied, the item's        query to registers; row_limits reset;
//              scales are stored, and the previous item's result   thread 0 fetches the next item
//              no longer needs row_limits
// tile_full    all threads: tile t is copied, and in bf16;         QK of t; copies into the stage of t - 1
//              PV of tile t - 1
// p_full       P of tile t is stored. The barrier also tells       PV of t, or first the slow path
//              whether any row has outgrown its reference          (RaiseReferences)
// raise_max    row_max of every warp                               new references and row_scale
// raise_scale  references and row_scale                            O and sums are rescaled; P is stored again
// raise_p      P of tile t is stored again                         PV of t
// item_end     PV of the last tile, row_sum, and the next item     copies of the next item; StoreItem
// clang-format on
// Each is a __syncthreads (p_full: __syncthreads_or), and all threads reach it on every path.
//
// cp.async groups of a thread, with S stages: the query, then tiles 0 to S - 2, before the loop
// over tiles; then one group for each tile, empty when no tile is left to copy. At the top of an
// iteration, "at most S - 2 groups pending" therefore always means that the iteration's tile has
// arrived.
//
// Budgets. Registers: C::kMaxRegisters a thread, without spills (tools/compiler_gate.py checks it).
// Shared memory: sizeof(SharedMemoryPlan<C>) + num_stages * C::kStageBytes;
// docs/kernels/decode_sm80.md has the table for each row tile and GPU.
#pragma once

#include "decode/params.h"
#include "decode/schedule/find_work.cuh"
#include "decode/schedule/load_units.cuh"
#include "decode/schedule/plan.h"
#include "decode/schedule/schedule.h"
#include "decode/sm80/config.h"
#include "decode/sm80/load.cuh"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"
#include "gpu/pack.cuh"
#include "gpu/sm80.cuh"

namespace jax_mla::decode::sm80 {

// Whether the architecture that is being compiled has this tile. If not, the kernel is empty, and
// ChooseClass (backend.cc) never picks it.
template <class C>
inline constexpr bool kIsCompiledHere =
#if defined(__CUDA_ARCH__)
    HasTile(__CUDA_ARCH__ / 10, C::kBlockM, C::kBlockN);
#else
    true;
#endif

template <class C>
using Scores = float[C::kQkMTiles][C::kQkNTiles][4];  // a thread's share, as mma leaves it
template <class C>
using Output = float[C::kPvMTiles][C::kPvNTiles][4];
// A value for each row of this thread's scores: [m_tile][0: row mma_row, 1: row mma_row + 8].
template <class C>
using RowValues = float[C::kQkMTiles][2];

// Adds Q K^T over the dimensions of ckv, or of kpe, to the scores: kSteps steps of 16 dimensions.
// `keys` is the shared address of that part of the stage.
template <class C, int kSteps, int kRowBytes, int kFirstStep>
__device__ __forceinline__ void AccumulateScores(const Query<C>& query, uint32_t keys,
                                                 const Thread<C>& thread,
                                                 Scores<C> (&s)[C::kQkChains]) {
  using Core = gpu::TensorCore<C::kDType>;
  // One ldmatrix.x4 loads 16 tokens x 16 dimensions if the warp has 16 tokens, else 8 tokens x 32
  // dimensions.
  constexpr bool kTwoTiles = C::kQkNTiles == 2;
  constexpr int kStepsPerLoad = kTwoTiles ? 1 : 2;
  const int lane_token = thread.lane % 8 + (kTwoTiles ? thread.lane / 16 * 8 : 0);
  const int lane_chunk = kTwoTiles ? thread.lane / 8 % 2 : thread.lane / 8;
  const uint32_t lane_offset =
      gpu::SwizzledOffset<kRowBytes>(thread.score_token + lane_token, lane_chunk);
  // Query fragments that stay in registers need constant indices, so the loop is unrolled fully. A
  // query that is read again from shared memory needs registers for loads in flight, so less is
  // unrolled. Rows without rotary part have no steps there.
  constexpr int kUnroll = C::kQueryInRegisters ? (kSteps > 0 ? kSteps : 1) : kMaxQkUnroll;
#pragma unroll kUnroll
  for (int step = 0; step < kSteps; step += kStepsPerLoad) {
    uint32_t key[4];
    gpu::LoadMatrix(key, keys + ShiftChunks(lane_offset, 2 * step));
#pragma unroll
    for (int sub = 0; sub < kStepsPerLoad; ++sub) {
      const int query_step = kFirstStep + step + sub;
#pragma unroll
      for (int m = 0; m < C::kQkMTiles; ++m) {
        const auto multiply = [&](const uint32_t (&q)[4]) {
#pragma unroll
          for (int n = 0; n < C::kQkNTiles; ++n) {
            const int first = kTwoTiles ? 2 * n : 2 * sub;
            Core::Mma(s[query_step % C::kQkChains][m][n], q, key[first], key[first + 1]);
          }
        };
        if constexpr (C::kQueryInRegisters && kFirstStep < C::kCkvSteps) {
          multiply(query.fragments[query_step]);
        } else {
          uint32_t loaded[4];
          query.Load(loaded, query_step, m);
          multiply(loaded);
        }
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void Multiply(Scores<C> (&chains)[C::kQkChains], float factor) {
#pragma unroll
  for (Scores<C>& s : chains) {
#pragma unroll
    for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kQkNTiles; ++n) {
#pragma unroll
        for (float& score : s[m][n]) score *= factor;
      }
    }
  }
}

// scores = Q K^T. With an FP8 cache, kpe's part is multiplied by `kpe_scale`. So it comes first,
// and ckv's part is added to it: accumulators of its own would need more registers.
template <class C>
__device__ __forceinline__ void ComputeScores(const Query<C>& query, uint32_t stage,
                                              float kpe_scale, const Thread<C>& thread,
                                              Scores<C>& scores) {
  Scores<C> chains[C::kQkChains] = {};
  const auto add_ckv = [&] {
    AccumulateScores<C, C::kCkvSteps, C::kCkvRowBytes, 0>(query, stage, thread, chains);
  };
  const auto add_kpe = [&] {
    AccumulateScores<C, C::kKpeSteps, C::kKpeRowBytes, C::kCkvSteps>(
        query, stage + C::kBlockN * C::kCkvRowBytes, thread, chains);
  };
  if constexpr (C::kDKpe == 0) {
    add_ckv();
  } else if constexpr (C::kStorage == KvStorage::kFp8) {
    add_kpe();
    Multiply<C>(chains, kpe_scale);
    add_ckv();
  } else {
    add_ckv();
    add_kpe();
  }
#pragma unroll
  for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kQkNTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[m][n][e] = chains[0][m][n][e];
        if constexpr (C::kQkChains == 2) scores[m][n][e] += chains[1][m][n][e];
      }
    }
  }
}

template <class C>
__device__ __forceinline__ int ScoreRow(const Thread<C>& thread, int m_tile, int half) {
  return thread.score_row + m_tile * kMmaM + half * 8 + thread.mma_row;
}

// Scales the scores to log2 units. A score becomes -inf where its row may not see its token.
template <class C>
__device__ __forceinline__ void ScaleAndMask(const DecodeParams& params, const Item& item,
                                             const SharedMemoryPlan<C>& shared,
                                             const uint8_t* present, int32_t tile_token,
                                             float scale_log2, const Thread<C>& thread,
                                             Scores<C>& scores) {
#pragma unroll
  for (int n = 0; n < C::kQkNTiles; ++n) {
    const int token = thread.score_token + n * kMmaN + 2 * thread.quad_lane;
    const uint32_t bits = present[token / C::kTokensPerWarp] >> (token % C::kTokensPerWarp);
#pragma unroll
    for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t visible_end = shared.row_limits[ScoreRow(thread, m, half)].visible_end;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int32_t place = tile_token + token + e;
          float& score = scores[m][n][2 * half + e];
          if constexpr (C::kHasMasks) {
            const bool is_before_end = place < (params.causal ? visible_end : item.work.seq_len);
            const bool visible =
                ((bits >> e) & 1) != 0 && is_before_end && place >= visible_end - WindowOf(params);
            score = visible ? CapScore(params, score * scale_log2) : gpu::NegativeInfinity();
          } else {
            const bool visible = ((bits >> e) & 1) != 0 && place < visible_end;
            score = visible ? score * scale_log2 : gpu::NegativeInfinity();
          }
        }
      }
    }
  }
}

// Stores P = exp2(scores - reference) to shared memory and sets `sums` to the sums over this
// thread's tokens. Returns whether a row has outgrown its reference. Then P and `sums` must be
// computed again.
template <class C>
__device__ __forceinline__ bool StoreProbabilities(const SharedMemoryPlan<C>& shared,
                                                   uint32_t p_shared, const Thread<C>& thread,
                                                   const Scores<C>& scores, RowValues<C>& sums) {
  using T = gpu::Element<C::kDType>;
  bool outgrown = false;
#pragma unroll
  for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = ScoreRow(thread, m, half);
      const float reference = shared.row_limits[row].reference;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < C::kQkNTiles; ++n) {
        const float low = scores[m][n][2 * half], high = scores[m][n][2 * half + 1];
        outgrown |= fmaxf(low, high) > reference + kRescaleThreshold;
        const float p_low = gpu::Exp2(low - reference), p_high = gpu::Exp2(high - reference);
        sum += p_low + p_high;
        const int chunk = thread.score_token / 8 + n;
        gpu::StoreShared32(
            p_shared + gpu::SwizzledOffset<C::kPRowBytes>(row, chunk) + 4 * thread.quad_lane,
            gpu::Pack2<T>(p_low, p_high));
      }
      sums[m][half] = sum;
    }
  }
  return outgrown;
}

// The slow path, which is rare after the first tile of an item. It raises every row's reference to
// the row's maximum so far, rescales O and the sums to it, and stores P again. All threads call it.
// When it returns, P is visible to all of them.
template <class C>
__device__ __forceinline__ void RaiseReferences(SharedMemoryPlan<C>& shared, uint32_t p_shared,
                                                const Thread<C>& thread, const Scores<C>& scores,
                                                RowValues<C>& row_sums, Output<C>& out,
                                                RowValues<C>& sums) {
  if (thread.has_scores) {
#pragma unroll
    for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = gpu::kNoReference;
#pragma unroll
        for (int n = 0; n < C::kQkNTiles; ++n) {
          max = fmaxf(max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
        if (thread.quad_lane == 0)
          shared.row_max[thread.token_warp][ScoreRow(thread, m, half)] = max;
      }
    }
  }
  __syncthreads();  // raise_max
  if (threadIdx.x < C::kBlockM) {
    const float old_reference = shared.row_limits[threadIdx.x].reference;
    float reference = old_reference;
#pragma unroll
    for (int w = 0; w < C::kTokenWarps; ++w) {
      reference = fmaxf(reference, shared.row_max[w][threadIdx.x]);
    }
    shared.row_limits[threadIdx.x].reference = reference;
    shared.row_scale[threadIdx.x] = gpu::Exp2(old_reference - reference);
  }
  __syncthreads();  // raise_scale
#pragma unroll
  for (int m = 0; m < C::kPvMTiles; ++m) {
    const float low = shared.row_scale[m * kMmaM + thread.mma_row];
    const float high = shared.row_scale[m * kMmaM + 8 + thread.mma_row];
#pragma unroll
    for (int n = 0; n < C::kPvNTiles; ++n) {
      out[m][n][0] *= low;
      out[m][n][1] *= low;
      out[m][n][2] *= high;
      out[m][n][3] *= high;
    }
  }
  if (thread.has_scores) {
#pragma unroll
    for (int m = 0; m < C::kQkMTiles; ++m) {
      row_sums[m][0] *= shared.row_scale[ScoreRow(thread, m, 0)];
      row_sums[m][1] *= shared.row_scale[ScoreRow(thread, m, 1)];
    }
    StoreProbabilities<C>(shared, p_shared, thread, scores, sums);
  }
  __syncthreads();  // raise_p
}

// Computes a KV tile's scores and P. When it returns, P is visible to all threads.
template <class C>
__device__ __forceinline__ void ComputeProbabilities(
    const DecodeParams& params, const Item& item, SharedMemoryPlan<C>& shared, uint32_t p_shared,
    uint32_t stage, const uint8_t* present, int32_t tile_token, float scale_log2, float kpe_scale,
    const Thread<C>& thread, const Query<C>& query, RowValues<C>& row_sums, Output<C>& out) {
  Scores<C> scores;
  RowValues<C> sums = {};
  bool outgrown = false;
  if (thread.has_scores) {
    ComputeScores<C>(query, stage, kpe_scale, thread, scores);
    ScaleAndMask<C>(params, item, shared, present, tile_token, scale_log2, thread, scores);
    // P is stored before it is known whether a row has outgrown its reference, so that in the
    // common case one barrier serves both.
    outgrown = StoreProbabilities<C>(shared, p_shared, thread, scores, sums);
  }
  if (__syncthreads_or(outgrown)) {  // p_full
    RaiseReferences<C>(shared, p_shared, thread, scores, row_sums, out, sums);
  }
#pragma unroll
  for (int m = 0; m < C::kQkMTiles; ++m) {
    row_sums[m][0] += sums[m][0];
    row_sums[m][1] += sums[m][1];
  }
}

// O += P V for this warp's latent dimensions.
template <class C>
__device__ __forceinline__ void AccumulateOutput(uint32_t p_shared, uint32_t values,
                                                 const Thread<C>& thread, Output<C>& out) {
  using Core = gpu::TensorCore<C::kDType>;
  const int lane_row = thread.lane % kMmaM, lane_chunk = thread.lane / kMmaM;
  const uint32_t p_offset = gpu::SwizzledOffset<C::kPRowBytes>(lane_row, lane_chunk);
  const uint32_t v_offset = gpu::SwizzledOffset<C::kCkvRowBytes>(lane_row, lane_chunk);
  const int first_chunk = thread.warp * (C::kPvDims * C::kElementBytes / kChunkBytes);
#pragma unroll
  for (int k = 0; k < C::kBlockN / kMmaK; ++k) {
    uint32_t p[C::kPvMTiles][4];
#pragma unroll
    for (int m = 0; m < C::kPvMTiles; ++m) {
      gpu::LoadMatrix(p[m], p_shared + ShiftChunks(p_offset, 2 * k) + m * kMmaM * C::kPRowBytes);
    }
#pragma unroll
    for (int j = 0; j < C::kPvNTiles / 2; ++j) {
      uint32_t v[4];
      gpu::LoadMatrixTransposed(
          v, values + ShiftChunks(v_offset, first_chunk + 2 * j) + k * kMmaK * C::kCkvRowBytes);
#pragma unroll
      for (int m = 0; m < C::kPvMTiles; ++m) {
        Core::Mma(out[m][2 * j], p[m], v[0], v[1]);
        Core::Mma(out[m][2 * j + 1], p[m], v[2], v[3]);
      }
    }
  }
}

// Stores each row's sum over this warp's tokens, for StoreItem.
template <class C>
__device__ __forceinline__ void StoreRowSums(SharedMemoryPlan<C>& shared, const Thread<C>& thread,
                                             const RowValues<C>& row_sums) {
  if (!thread.has_scores) return;
#pragma unroll
  for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sums[m][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (thread.quad_lane == 0) shared.row_sum[thread.token_warp][ScoreRow(thread, m, half)] = sum;
    }
  }
}

// A row's sum over all tokens of the item.
template <class C>
__device__ __forceinline__ float RowSum(const SharedMemoryPlan<C>& shared, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < C::kTokenWarps; ++w) sum += shared.row_sum[w][row];
  return sum;
}

// Normalises O and writes it: to out and lse if the item is a whole sequence, else to the item's
// slot.
template <class C>
__device__ __forceinline__ void StoreItem(const DecodeParams& p, const PartialBuffers& partials,
                                          const Item& item, int row_tile,
                                          const SharedMemoryPlan<C>& shared,
                                          const Thread<C>& thread, const Output<C>& out) {
  using T = gpu::Element<C::kDType>;
  const int first_row = row_tile * C::kBlockM;
  const int num_rows = item.unit.num_rows - first_row;  // of this row tile and those after it
  const bool is_final = item.work.is_final();
  const int64_t target_row = is_final ? int64_t{item.unit.row_begin} + first_row
                                      : partials.RowIndex(item.work.slot(), row_tile);

  const int lse_row = threadIdx.x;
  if (lse_row < MinI32(C::kBlockM, num_rows)) {
    const float lse_log2 =
        gpu::LseLog2(shared.row_limits[lse_row].reference, RowSum(shared, lse_row));
    if (is_final) {
      p.lse[target_row + lse_row] = lse_log2 * gpu::kLn2;
    } else {
      partials.lse_log2[target_row + lse_row] = lse_log2;
    }
  }
#pragma unroll
  for (int m = 0; m < C::kPvMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * kMmaM + half * 8 + thread.mma_row;
      if (row >= num_rows) continue;
      const float inverse_sum = gpu::InverseSum(RowSum(shared, row));
      // A row that sees no token. Its O is 0, or NaN where 0 was multiplied by a NaN or infinity
      // that other rows see.
      const bool is_empty = inverse_sum == 0.0f;
      const float scale =
          C::kStorage == KvStorage::kFp8 ? inverse_sum * item.scales.value : inverse_sum;
      const int64_t target =
          (target_row + row) * C::kDCkv + thread.warp * C::kPvDims + 2 * thread.quad_lane;
#pragma unroll
      for (int n = 0; n < C::kPvNTiles; ++n) {
        const float low = is_empty ? 0.0f : out[m][n][2 * half] * scale;
        const float high = is_empty ? 0.0f : out[m][n][2 * half + 1] * scale;
        if (is_final) {
          auto* element = static_cast<T*>(p.out) + target + n * kMmaN;
          *reinterpret_cast<uint32_t*>(element) = gpu::Pack2<T>(low, high);
        } else {  // another SM reads it soon: keep it in L2 only
          __stcg(reinterpret_cast<float2*>(partials.out + target + n * kMmaN),
                 make_float2(low, high));
        }
      }
    }
  }
}

// What an item's products of query and key are multiplied by, so that they are exponents of 2.
template <class C>
__device__ __forceinline__ float ScoreScale(const DecodeParams& p, const Item& item) {
  const float scale = p.sm_scale * gpu::kLog2E;
  return C::kStorage == KvStorage::kFp8 ? scale * item.scales.score : scale;
}

// The query rows of an item: those of its unit or, in a call without units, of its sequence.
template <class C>
__device__ __forceinline__ Unit UnitOf(const DecodeParams& p, const WorkItem& work) {
  if (p.units.units != nullptr) return LoadUnit<C::kHasMasks>(p, work.seq_idx);
  const int32_t rows = p.q_len * p.num_heads;
  return {.seq_idx = work.seq_idx,
          .row_begin = work.seq_idx * rows,
          .num_rows = rows,
          .first_limit = work.seq_len - p.q_len + 1,
          .first_head = 0,
          .seq_len = work.seq_len};
}

// Finds the worker's next item and stores it in shared memory. Only thread 0 calls it.
template <class C>
__device__ __forceinline__ void FetchItem(const DecodeParams& params,
                                          const ScheduleParams& schedule,
                                          SharedMemoryPlan<C>& shared, Item& item) {
  WorkItem work;
  item.exists = params.units.units != nullptr ? NextUnit(schedule, shared.work, &work)
                                              : shared.work.Next(schedule, &work);
  if (!item.exists) return;
  item.work = work;
  item.unit = UnitOf<C>(params, work);
  item.token_begin = work.block_begin * kScheduleBlock;
  item.token_end = MinI32(work.block_end * kScheduleBlock, work.seq_len);
  if constexpr (C::kHasMasks) {  // in a large page, whole tiles may be before the window
    const int32_t window_begin = MaxI32(WindowBegin(params, item.unit), 0);
    item.token_begin = MaxI32(item.token_begin, window_begin / C::kBlockN * C::kBlockN);
  }
}

template <class C>
__global__ void __maxnreg__(C::kMaxRegisters)
    DecodeKernel(const __grid_constant__ DecodeParams params,
                 const __grid_constant__ SplitPlan plan, const int num_stages) {
  if constexpr (kIsCompiledHere<C>) {
    extern __shared__ __align__(128) uint8_t shared_bytes[];
    SharedMemoryPlan<C>& shared = *reinterpret_cast<SharedMemoryPlan<C>*>(shared_bytes);
    const uint32_t stages =
        gpu::SharedAddress32(shared_bytes) + static_cast<uint32_t>(sizeof(SharedMemoryPlan<C>));
    const uint32_t p_shared = gpu::SharedAddress32(shared.p);
    const Thread<C> thread;
    const int row_tile = blockIdx.x, first_row = row_tile * C::kBlockM;

    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    KvLoader<C> loader(params, thread);
    if (thread.warp == 0) {
      const bool has_starts = params.units.units != nullptr && plan.schedule.num_splits == 0;
      const WorkIterator work = has_starts ? LoadStart(params.units, blockIdx.y).work
                                           : FindWork(plan.schedule, blockIdx.y);
      if (thread.lane == 0) {
        shared.work = work;
        FetchItem(params, plan.schedule, shared, shared.items[0]);
      }
    }
    // A query that moves to registers passes through the stage that is filled last: no tile of the
    // item has been copied there when the query leaves it.
    Query<C> query(C::kQueryInRegisters ? stages + (num_stages - 1) * C::kStageBytes
                                        : gpu::SharedAddress32(shared.query_ckv),
                   gpu::SharedAddress32(shared.query_kpe), thread);
    int32_t next_row = KvLoader<C>::kAbsent;  // what Lookup found for the next tile to be copied
    const auto copy_first_tiles = [&](Item& item) {
      loader.Begin(item);
      int32_t rows[kMaxStages - 1];
#pragma unroll
      for (int t = 0; t < kMaxStages - 1; ++t) {
        rows[t] = loader.Lookup(item.token_begin + t * C::kBlockN);
      }
      query.Copy(params, item.unit, first_row);
      gpu::CopyAsyncCommit();
#pragma unroll
      for (int t = 0; t < kMaxStages - 1; ++t) {
        if (t >= num_stages - 1) break;
        if (item.token_begin + t * C::kBlockN < item.token_end) {
          loader.Copy(rows[t], stages + t * C::kStageBytes, shared.present[t]);
        }
        gpu::CopyAsyncCommit();
      }
      next_row = loader.Lookup(item.token_begin + (num_stages - 1) * C::kBlockN);
      if (C::kStorage == KvStorage::kFp8 && threadIdx.x == 0) {
        item.scales = ScalesOf(params, item.unit.seq_idx);
      }
    };

    __syncthreads();  // first_item
    if (shared.items[0].exists) copy_first_tiles(shared.items[0]);
    for (int item_idx = 0; shared.items[item_idx].exists; item_idx ^= 1) {
      const Item& item = shared.items[item_idx];
      gpu::CopyAsyncWait(num_stages - 1);
      __syncthreads();  // item_begin
      query.LoadFragments();
      if (threadIdx.x < C::kBlockM) {
        const int row = item.unit.first_head + first_row + static_cast<int>(threadIdx.x);
        const int32_t causal_limit = item.unit.first_limit + row / params.RowsPerToken();
        shared.row_limits[threadIdx.x] = {
            gpu::kNoReference, C::kHasMasks || params.causal ? causal_limit : item.work.seq_len};
      }
      if (threadIdx.x == 0) FetchItem(params, plan.schedule, shared, shared.items[item_idx ^ 1]);
      RowValues<C> row_sums = {};
      Output<C> out = {};

      int stage_idx = 0;
      for (int32_t tile = item.token_begin; tile < loader.token_end; tile += C::kBlockN) {
        const uint32_t stage = stages + stage_idx * C::kStageBytes;
        gpu::CopyAsyncWait(num_stages - 2);
        if constexpr (C::kStorage == KvStorage::kFp8) {
          CodeTile<C>(stage).Convert(params.kv_format);
        }
        __syncthreads();  // tile_full
        const int32_t refill = tile + (num_stages - 1) * C::kBlockN;
        if (refill < loader.token_end) {
          const int refill_idx = stage_idx == 0 ? num_stages - 1 : stage_idx - 1;
          loader.Copy(next_row, stages + refill_idx * C::kStageBytes, shared.present[refill_idx]);
          next_row = loader.Lookup(refill + C::kBlockN);
        }
        gpu::CopyAsyncCommit();

        ComputeProbabilities<C>(params, item, shared, p_shared, stage, shared.present[stage_idx],
                                tile, ScoreScale<C>(params, item), item.scales.kpe, thread, query,
                                row_sums, out);
        AccumulateOutput<C>(p_shared, stage, thread, out);
        stage_idx = stage_idx + 1 == num_stages ? 0 : stage_idx + 1;
      }

      StoreRowSums<C>(shared, thread, row_sums);
      __syncthreads();  // item_end
      // The next item's first tiles are copied while this item's result is written.
      Item& next_item = shared.items[item_idx ^ 1];
      if (next_item.exists) copy_first_tiles(next_item);
      StoreItem<C>(params, plan.partials, item, row_tile, shared, thread, out);
    }
  }
}

}  // namespace jax_mla::decode::sm80
