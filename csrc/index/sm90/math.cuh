// A math warpgroup of the score kernel: 64 tokens times the heads of a window's queries.
#pragma once

#include "gpu/sm80.cuh"
#include "gpu/sm90_wgmma.cuh"
#include "index/key.cuh"
#include "index/sm90/params.cuh"

namespace jax_mla::index::sm90 {

// A thread's place in its warpgroup. In wgmma's accumulator layout it owns the tokens `token` and
// token + 8 of a tile, and of every 8 heads the two that begin with 2 * quad.
struct Thread {
  int group, lane, warp, token, quad;

  __device__ Thread()
      : group(__shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0)),
        lane(threadIdx.x % kWarpThreads),
        warp(threadIdx.x % kGroupThreads / kWarpThreads),
        token(warp * 16 + lane / 4),
        quad(lane % 4) {}
};

template <class C>
struct Math {
  static constexpr int kQueries = C::kChunkQueries;

  const KernelParams& params;
  const Thread thread;
  uint32_t keys[C::kSteps][4];  // of a tile, in mma's fragment layout
  float acc[kColumns / 2];
  float scales[2];
  bool is_present[2];

  __device__ explicit Math(const KernelParams& p) : params(p) {}

  // Takes the keys of a stage to registers and gives the stage back.
  __device__ __forceinline__ void LoadKeys(int stage) {
    const uint32_t base = SharedAddress(Shared<C>().keys[stage][0]);
    // ldmatrix: lane l gives a row of matrix l / 8: rows 0-7, rows 8-15, the same 16 bytes further.
    const int row = thread.warp * 16 + thread.lane % 16;
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const int half = step / 4, chunk = step % 4 * 2 + thread.lane / 16;
      gpu::LoadMatrix(keys[step],
                      base + half * C::kTileBytes + gpu::SwizzledOffset<kRowBytes>(row, chunk));
    }
    const uint32_t boxes = Shared<C>().boxes_present[stage];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = thread.token + 8 * i;
      is_present[i] = boxes >> (token >> params.box_tokens_log2) & 1;
      if constexpr (C::kHasCodes) scales[i] = Shared<C>().scales[stage][token];
    }
    __syncwarp();
    if (thread.lane == 0) {
      gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().keys_empty[stage]));
    }
  }

  // acc = keys x the heads of a chunk.
  __device__ __forceinline__ void Multiply(int slot, int chunk) {
    const uint64_t first =
        gpu::sm90::SharedDescriptor(SharedAddress(Shared<C>().queries[slot][chunk][0]));
    gpu::sm90::WgmmaFenceOperand(acc);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const uint64_t heads =
          gpu::sm90::AdvanceDescriptor(first, step / 4 * (kColumns * kRowBytes) + step % 4 * 32);
      if constexpr (C::kHasCodes) {
        gpu::sm90::WgmmaCodesRS<kColumns>(keys[step], heads, acc, step > 0);
      } else {
        gpu::sm90::WgmmaRS<__nv_bfloat16, kColumns, gpu::sm90::Major::K>(keys[step], heads, acc,
                                                                         step > 0);
      }
    }
    gpu::sm90::WgmmaCommit();
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(acc);
  }

  // relu(x), or with codes 2 relu(x). An addition runs at twice the rate of a maximum; that it
  // turns -inf to NaN does not matter there, since a product of codes is finite or NaN.
  static __device__ __forceinline__ float Relu(float x) {
    if constexpr (C::kHasCodes) {
      return x + fabsf(x);
    } else {
      float result;
      asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
      return result;
    }
  }

  // The sums over heads of a chunk's queries, for both of the thread's tokens. A thread adds up its
  // heads, then pairs of threads and then both pairs: the same order for every query of a call.
  __device__ __forceinline__ void StoreChunk(int slot, int chunk, const Walk& walk,
                                             int32_t position) {
    const auto* weights =
        reinterpret_cast<const float4*>(Shared<C>().weights[slot][chunk]) + thread.quad;
    float sums[kQueries][2] = {};
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 w = weights[four * 4];
      float (&sum)[2] = sums[four * kQueries / 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] = fmaf(w.x, Relu(acc[8 * four + 2 * i]), sum[i]);
        sum[i] = fmaf(w.y, Relu(acc[8 * four + 2 * i + 1]), sum[i]);
        sum[i] = fmaf(w.z, Relu(acc[8 * four + 4 + 2 * i]), sum[i]);
        sum[i] = fmaf(w.w, Relu(acc[8 * four + 4 + 2 * i + 1]), sum[i]);
      }
    }
    // Odd threads take the second token, and of two queries the upper two threads the second one.
    const bool is_odd = thread.quad % 2, is_upper = thread.quad / 2;
    float mine[kQueries];
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      const float give = is_odd ? sums[query][0] : sums[query][1];
      const float keep = is_odd ? sums[query][1] : sums[query][0];
      mine[query] = keep + __shfl_xor_sync(kAllLanes, give, 1);
    }
    float sum;
    int query = chunk * kQueries;
    if constexpr (kQueries == 1) {
      sum = mine[0] + __shfl_xor_sync(kAllLanes, mine[0], 2);
      query += is_upper ? kMaxSlabRows : 0;  // the lower two threads store it
    } else {
      const float give = is_upper ? mine[0] : mine[1];
      const float keep = is_upper ? mine[1] : mine[0];
      sum = keep + __shfl_xor_sync(kAllLanes, give, 2);
      query += is_upper;
    }
    if constexpr (C::kHasCodes) sum *= is_odd ? scales[1] : scales[0];
    if (is_odd) position += 8;
    const uint32_t key = (is_odd ? is_present[1] : is_present[0]) ? KeyOfScore(sum) : kAbsentKey;
    if (query < walk.window.num_queries && position < walk.window.num_visible + query) {
      params.slab.keys[(walk.row + query) * params.slab.stride + position] = key;
    }
  }
};

// A warpgroup takes every fourth tile of the CTA.
template <class C>
__device__ __forceinline__ void MathRole(const KernelParams& params, Walk walk) {
  Math<C> math(params);
  RingPlace<C::kStages> keys;
  keys.Skip(math.thread.group);
  RingPlace<kSlots> queries;
  int next = math.thread.group;  // tiles from the window's first one to this warpgroup's next one
  while (walk.Next()) {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().queries_full[queries.idx]), queries.phase);
    const int num_chunks = (walk.window.num_queries + C::kChunkQueries - 1) / C::kChunkQueries;
    for (; next < walk.num_tiles; next += kNumMathGroups) {
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().keys_full[keys.idx]), keys.phase);
      math.LoadKeys(keys.idx);
      keys.Skip(kNumMathGroups);
      const int32_t position = (walk.first_tile + next) * kTileTokens + math.thread.token;
#pragma unroll 1
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        math.Multiply(queries.idx, chunk);
        math.StoreChunk(queries.idx, chunk, walk, position);
      }
    }
    next -= walk.num_tiles;
    __syncwarp();
    if (math.thread.lane == 0) {
      gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().queries_empty[queries.idx]));
    }
    queries.Next();
  }
}

}  // namespace jax_mla::index::sm90
