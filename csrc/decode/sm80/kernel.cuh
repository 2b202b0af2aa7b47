// Portable MLA decode kernel: mma.sync + ldmatrix + cp.async, any GPU from sm_80.
//
// Algorithm (one CTA = one worker of the schedule x one tile of kBlockM query rows):
//   for each item (a range of one sequence's tokens):
//     stream KV tokens, kBlockN a stage, through a ring of num_stages stages;
//     S[kBlockM, kBlockN] = Q K^T, split over tokens (and rows) between the warps, so that no warp
//     repeats another's scores; P = exp2(S - m) goes to shared memory, where all warps gather it;
//     O[kBlockM, d_ckv] += P V, split over latent dimensions: each warp owns d_ckv / 8 of them.
//   The result is written to out/lse, or, if the sequence has several parts, to a partial slot.
// Ideas from elsewhere: splitting QK over tokens with an all-gather of P (FlashInfer's "QK_SHARD");
// raising the reference m only when a row has outgrown it by 2^8 (FlashAttention-4).
//
// Roles: none; all 8 warps copy, multiply and store. Tokens that are absent (past the length, or on
// a page this pool does not own) are zero-filled by cp.async and masked by a bit: nothing there is
// read.
//
// clang-format off
// Barrier      what is complete before it                          what comes after it
// first_item   thread 0 found the first item                       its copies
// item_begin   query copied; previous epilogue read its row data   query -> registers; row data reset
// tile_full    tile t copied by all threads; PV of tile t-1        QK of t; refill of the stage of t-1
// p_full       P of tile t stored, and the vote "a row outgrew     PV of t, or the slow path:
//              its reference" (one barrier for both)
// raise_max    row_max of all warps                                new reference and scale
// raise_scale  row_scale                                           rescale O and sums; P anew
// raise_p      P                                                   PV of t
// item_end     PV of the last tile; row_sum; the next item         next item's copies; epilogue
// clang-format on
// All are __syncthreads (p_full with a vote) and reached by all threads on every path.
//
// cp.async groups, a thread: [query][tile 0]..[tile S-2] from the prologue, then one a tile (empty
// at the end), so "at most S - 2 pending" always means that the tile about to be used has landed.
// Registers: at most C::kMaxRegisters, no spills (tools/compiler_gate.py). Shared memory:
// sizeof(SharedMemoryPlan) + num_stages * kStageBytes; the table is in docs/kernels/decode_sm80.md.
#pragma once

#include "decode/params.h"
#include "decode/sm80/config.h"
#include "decode/sm80/load.cuh"
#include "decode/split/plan.h"
#include "decode/split/find_work.cuh"
#include "decode/split/schedule.h"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"
#include "gpu/pack.cuh"
#include "gpu/sm80.cuh"

namespace jax_mla::decode::sm80 {

// Kernels of the other tiles are empty, and ChooseClass (backend.cc) never picks them.
template <class C>
inline constexpr bool kIsCompiledHere =
#if defined(__CUDA_ARCH__)
    HasTile(__CUDA_ARCH__ / 10, C::kBlockM, C::kBlockN);
#else
    true;
#endif

template <class C>
using Scores = float[C::kQkMTiles][C::kQkNTiles][4];  // of one warp, mma accumulator layout
template <class C>
using Output = float[C::kPvMTiles][C::kPvNTiles][4];
// A value for each row of this thread's scores: [m_tile][0: row group, 1: row group + 8].
template <class C>
using RowValues = float[C::kQkMTiles][2];

// Adds the products of one stream (ckv or kpe) to partial scores: kSteps steps of 16 dimensions.
template <class C, int kSteps, int kRowBytes, int kFirstStep>
__device__ __forceinline__ void AccumulateScores(const Query<C>& query, uint32_t keys,
                                                 const Thread<C>& thread,
                                                 Scores<C> (&s)[C::kQkChains]) {
  using Core = gpu::TensorCore<C::kDType>;
  // One ldmatrix.x4 brings 16 tokens x 16 dimensions, or 8 tokens x 32 dimensions.
  constexpr bool kTwoTiles = C::kQkNTiles == 2;
  constexpr int kStepsPerLoad = kTwoTiles ? 1 : 2;
  const int lane_token = thread.lane % 8 + (kTwoTiles ? thread.lane / 16 * 8 : 0);
  const int lane_chunk = kTwoTiles ? thread.lane / 8 % 2 : thread.lane / 8;
  const uint32_t lane_offset =
      gpu::SwizzledOffset<kRowBytes>(thread.score_token + lane_token, lane_chunk);
  // Fragments in registers need constant indices; else less unrolling keeps fewer loads in flight.
  constexpr int kUnroll = C::kQueryInRegisters ? kSteps : kMaxQkUnroll;
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
__device__ __forceinline__ void ComputeScores(const Query<C>& query, uint32_t stage,
                                              const Thread<C>& thread, Scores<C>& scores) {
  Scores<C> chains[C::kQkChains] = {};
  AccumulateScores<C, C::kCkvSteps, C::kCkvRowBytes, 0>(query, stage, thread, chains);
  AccumulateScores<C, C::kKpeSteps, C::kKpeRowBytes, C::kCkvSteps>(
      query, stage + C::kBlockN * C::kCkvRowBytes, thread, chains);
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
  return thread.score_row + m_tile * kMmaM + half * 8 + thread.group;
}

// Scores to log2 units; -inf where the row may not see the token.
template <class C>
__device__ __forceinline__ void ScaleAndMask(const SharedMemoryPlan<C>& shared,
                                             const uint8_t* present, int32_t tile_token,
                                             float scale_log2, const Thread<C>& thread,
                                             Scores<C>& scores) {
#pragma unroll
  for (int n = 0; n < C::kQkNTiles; ++n) {
    const int token = thread.score_token + n * kMmaN + 2 * thread.quad;
    const uint32_t bits = present[token / C::kTokensPerWarp] >> (token % C::kTokensPerWarp);
#pragma unroll
    for (int m = 0; m < C::kQkMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t visible_end = shared.row_limits[ScoreRow(thread, m, half)].visible_end;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool visible = ((bits >> e) & 1) != 0 && tile_token + token + e < visible_end;
          float& score = scores[m][n][2 * half + e];
          score = visible ? score * scale_log2 : gpu::NegativeInfinity();
        }
      }
    }
  }
}

// P = exp2(scores - reference) to shared memory. Sets `sums` to the sums of this thread's columns;
// returns whether a row has outgrown its reference, in which case P and sums are void.
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
        outgrown |= fmaxf(low, high) > reference + gpu::kRescaleThreshold;
        const float p_low = gpu::Exp2(low - reference), p_high = gpu::Exp2(high - reference);
        sum += p_low + p_high;
        const int chunk = thread.score_token / 8 + n;
        gpu::StoreShared32(
            p_shared + gpu::SwizzledOffset<C::kPRowBytes>(row, chunk) + 4 * thread.quad,
            gpu::Pack2<T>(p_low, p_high));
      }
      sums[m][half] = sum;
    }
  }
  return outgrown;
}

// Slow path, rare after the first tile of an item: raises every row's reference to its maximum so
// far, rescales what was accumulated, and stores P anew. All threads call it; ends with P visible.
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
        if (thread.quad == 0) shared.row_max[thread.token_warp][ScoreRow(thread, m, half)] = max;
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
    const float low = shared.row_scale[m * kMmaM + thread.group];
    const float high = shared.row_scale[m * kMmaM + 8 + thread.group];
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

// One tile's scores and probabilities; returns with P of the tile visible to all warps.
template <class C>
__device__ __forceinline__ void ComputeProbabilities(SharedMemoryPlan<C>& shared, uint32_t p_shared,
                                                     uint32_t stage, const uint8_t* present,
                                                     int32_t tile_token, float scale_log2,
                                                     const Thread<C>& thread, const Query<C>& query,
                                                     RowValues<C>& row_sums, Output<C>& out) {
  Scores<C> scores;
  RowValues<C> sums = {};
  bool outgrown = false;
  if (thread.has_scores) {
    ComputeScores<C>(query, stage, thread, scores);
    ScaleAndMask<C>(shared, present, tile_token, scale_log2, thread, scores);
    // Stored before the vote is known, so that the common case needs one barrier for both.
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

// O += P V on this warp's latent dimensions.
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

// Sums of the rows over this warp's tokens, for the epilogue.
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
      if (thread.quad == 0) shared.row_sum[thread.token_warp][ScoreRow(thread, m, half)] = sum;
    }
  }
}

template <class C>
__device__ __forceinline__ float RowSum(const SharedMemoryPlan<C>& shared, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < C::kTokenWarps; ++w) sum += shared.row_sum[w][row];
  return sum;
}

// Normalises O and writes it: to out/lse if the item is the whole sequence, else to its partial
// slot.
template <class C>
__device__ __forceinline__ void StoreItem(const DecodeParams& p, const PartialBuffers& partials,
                                          const WorkItem& item, int row_tile,
                                          const SharedMemoryPlan<C>& shared,
                                          const Thread<C>& thread, const Output<C>& out) {
  using T = gpu::Element<C::kDType>;
  const int first_row = row_tile * C::kBlockM;
  const int num_rows = p.q_len * p.num_heads - first_row;  // from here on; may exceed kBlockM
  const bool is_final = item.is_final();
  const int64_t target_row =
      is_final ? static_cast<int64_t>(item.seq_idx) * p.q_len * p.num_heads + first_row
               : partials.RowIndex(item.slot(), row_tile);

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
      const int row = m * kMmaM + half * 8 + thread.group;
      if (row >= num_rows) continue;
      const float scale = gpu::InverseSum(RowSum(shared, row));
      const bool is_empty =
          scale == 0.0f;  // then O is 0, or NaN from 0 * a value seen by other rows
      const int64_t target =
          (target_row + row) * C::kDimCkv + thread.warp * C::kPvDims + 2 * thread.quad;
#pragma unroll
      for (int n = 0; n < C::kPvNTiles; ++n) {
        const float low = is_empty ? 0.0f : out[m][n][2 * half] * scale;
        const float high = is_empty ? 0.0f : out[m][n][2 * half + 1] * scale;
        if (is_final) {
          auto* element = static_cast<T*>(p.out) + target + n * kMmaN;
          *reinterpret_cast<uint32_t*>(element) = gpu::Pack2<T>(low, high);
        } else {  // read soon, by other SMs: keep it in L2
          __stcg(reinterpret_cast<float2*>(partials.out + target + n * kMmaN),
                 make_float2(low, high));
        }
      }
    }
  }
}

// Thread 0: the worker's next item, to shared memory.
template <class C>
__device__ __forceinline__ void FetchItem(const ScheduleParams& schedule,
                                          SharedMemoryPlan<C>& shared, Item& item) {
  WorkItem work;
  item.exists = shared.work.Next(schedule, &work);
  if (!item.exists) return;
  item.work = work;
  item.token_begin = work.block_begin * kScheduleBlock;
  item.token_end = MinI32(work.block_end * kScheduleBlock, work.seq_len);
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
      const WorkIterator work = FindWork(plan.schedule, blockIdx.y);
      if (thread.lane == 0) {
        shared.work = work;
        FetchItem(plan.schedule, shared, shared.items[0]);
      }
    }
    // A query that moves to registers passes through the stage that is filled last.
    Query<C> query(C::kQueryInRegisters ? stages + (num_stages - 1) * C::kStageBytes
                                        : gpu::SharedAddress32(shared.query_ckv),
                   gpu::SharedAddress32(shared.query_kpe), thread);
    int32_t next_row = KvLoader<C>::kAbsent;  // lookup for the next tile to be copied
    const auto copy_first_tiles = [&](const Item& item) {
      loader.Begin(item);
      int32_t rows[kMaxStages - 1];
#pragma unroll
      for (int t = 0; t < kMaxStages - 1; ++t) {
        rows[t] = loader.Lookup(item.token_begin + t * C::kBlockN);
      }
      query.Copy(params, item.work.seq_idx, first_row);
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
    };

    __syncthreads();  // first_item
    if (shared.items[0].exists) copy_first_tiles(shared.items[0]);
    for (int item_idx = 0; shared.items[item_idx].exists; item_idx ^= 1) {
      const Item& item = shared.items[item_idx];
      gpu::CopyAsyncWait(num_stages - 1);
      __syncthreads();  // item_begin
      query.LoadFragments();
      if (threadIdx.x < C::kBlockM) {
        const int query_idx = (first_row + static_cast<int>(threadIdx.x)) / params.num_heads;
        const int32_t seq_len = item.work.seq_len;
        shared.row_limits[threadIdx.x] = {
            gpu::kNoReference, params.causal ? seq_len - params.q_len + 1 + query_idx : seq_len};
      }
      if (threadIdx.x == 0) FetchItem(plan.schedule, shared, shared.items[item_idx ^ 1]);
      RowValues<C> row_sums = {};
      Output<C> out = {};

      int stage_idx = 0;
      for (int32_t tile = item.token_begin; tile < loader.token_end; tile += C::kBlockN) {
        gpu::CopyAsyncWait(num_stages - 2);
        __syncthreads();  // tile_full
        const int32_t refill = tile + (num_stages - 1) * C::kBlockN;
        if (refill < loader.token_end) {
          const int refill_idx = stage_idx == 0 ? num_stages - 1 : stage_idx - 1;
          loader.Copy(next_row, stages + refill_idx * C::kStageBytes, shared.present[refill_idx]);
          next_row = loader.Lookup(refill + C::kBlockN);
        }
        gpu::CopyAsyncCommit();

        const uint32_t stage = stages + stage_idx * C::kStageBytes;
        ComputeProbabilities<C>(shared, p_shared, stage, shared.present[stage_idx], tile,
                                params.sm_scale * gpu::kLog2E, thread, query, row_sums, out);
        AccumulateOutput<C>(p_shared, stage, thread, out);
        stage_idx = stage_idx + 1 == num_stages ? 0 : stage_idx + 1;
      }

      StoreRowSums<C>(shared, thread, row_sums);
      __syncthreads();  // item_end
      // The next item's first tiles are under way while this one's result is written.
      const Item& next_item = shared.items[item_idx ^ 1];
      if (next_item.exists) copy_first_tiles(next_item);
      StoreItem<C>(params, plan.partials, item.work, row_tile, shared, thread, out);
    }
  }
}

}  // namespace jax_mla::decode::sm80
