// A math warpgroup of the score kernel: 64 tokens times the heads of a window's queries.
#pragma once

#include "gpu/sm80.cuh"
#include "gpu/sm90_wgmma.cuh"
#include "index/key.cuh"
#include "index/sm90/params.cuh"

namespace jax_mla::index::sm90 {

// A thread's place in its warpgroup. In wgmma's accumulator layout it computes for the tokens `row`
// and row + 8 of a tile, and of every 8 heads for the two that begin with 2 * quad. Of the two
// tokens it stores one, and of several queries the lower or the upper half.
struct Thread {
  int group, lane, quad;
  bool is_odd, is_upper;
  int token;            // of a tile: the one whose scores it stores
  uint32_t key_offset;  // in a tile: what it gives to ldmatrix, see LoadKeys

  __device__ Thread()
      : group(__shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0)),
        lane(threadIdx.x % kWarpThreads),
        quad(lane % 4),
        is_odd(lane % 2 != 0),
        is_upper(lane / 2 % 2 != 0) {
    const int first_row = threadIdx.x % kGroupThreads / kWarpThreads * 16;
    token = first_row + lane / 4 + (is_odd ? 8 : 0);
    // Lane l gives a row of matrix l / 8: rows 0-7, rows 8-15, the same 16 bytes further.
    key_offset = gpu::SwizzledOffset<kRowBytes>(first_row + lane % 16, lane / 16);
  }
};

// What a thread knows of the tile whose products it adds up.
struct Tile {
  float scale;         // of the token that it stores
  bool is_present;     // whether the pool has the token
  int32_t num_behind;  // of the token: the window's query i sees it if num_behind + i > 0
  uint32_t* out;       // the token's key of the first query, or of the upper half's first one
};

template <class C>
struct Math {
  const KernelParams& params;
  const Thread thread;
  uint32_t keys[C::kSteps][4];  // of a tile, in mma's fragment layout
  Tile tile;

  __device__ explicit Math(const KernelParams& p) : params(p) {}

  // Takes the keys of a stage to registers and gives the stage back.
  __device__ __forceinline__ void LoadKeys(int stage) {
    const uint32_t base = SharedAddress(Shared<C>().keys[stage][0]) + thread.key_offset;
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      // The swizzle is an exclusive or, so a step is one as well.
      gpu::LoadMatrix(keys[step], (base ^ (step % 4 * 32)) + step / 4 * C::kTileBytes);
    }
    tile.is_present =
        Shared<C>().boxes_present[stage] >> (thread.token >> params.box_tokens_log2) & 1;
    if constexpr (C::kHasCodes) tile.scale = Shared<C>().scales[stage][thread.token];
    __syncwarp();
    if (thread.lane == 0) {
      gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().keys_empty[stage]));
    }
  }

  // products = keys x the heads of one chunk, or of two that follow each other.
  template <int kNumChunks>
  __device__ __forceinline__ void Multiply(int slot, int chunk,
                                           float (&products)[kNumChunks * kColumns / 2]) {
    constexpr int kN = kNumChunks * kColumns;
    static_assert(kNumChunks == 1 || C::kHalves == 1, "halves of two chunks do not lie together");
    const uint64_t first =
        gpu::sm90::SharedDescriptor(SharedAddress(Shared<C>().queries[slot][chunk][0]));
    gpu::sm90::WgmmaFenceOperand(products);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const uint64_t heads =
          gpu::sm90::AdvanceDescriptor(first, step / 4 * (kColumns * kRowBytes) + step % 4 * 32);
      if constexpr (C::kHasCodes) {
        gpu::sm90::WgmmaCodesRS<kN>(keys[step], heads, products, step > 0);
      } else {
        gpu::sm90::WgmmaRS<__nv_bfloat16, kN, gpu::sm90::Major::K>(keys[step], heads, products,
                                                                   step > 0);
      }
    }
    gpu::sm90::WgmmaCommit();
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(products);
  }

  // relu(x), or with codes 2 relu(x). An addition runs at twice the rate of a maximum; that it
  // turns -inf to NaN does not matter there, since a product of codes is finite or NaN.
  static __device__ __forceinline__ float Relu(float x) {
    if constexpr (C::kHasCodes) {
      return x + fabsf(x);
    } else {
      return index::Relu(x);
    }
  }

  // The sums over the thread's heads, for its two tokens and each query.
  template <int kNumChunks>
  __device__ __forceinline__ void AddUp(int slot, int chunk,
                                        const float (&products)[kNumChunks * kColumns / 2],
                                        float (&sums)[kNumChunks * C::kChunkQueries][2]) {
    const auto* weights =
        reinterpret_cast<const float4*>(Shared<C>().weights[slot][chunk]) + thread.quad;
    constexpr int kFoursPerQuery = C::kHeads / 16;
#pragma unroll
    for (int four = 0; four < kNumChunks * kColumns / 16; ++four) {
      const float4 w = weights[four * 4];
      float (&sum)[2] = sums[four / kFoursPerQuery];
      const float* product = products + 8 * four;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] = fmaf(w.x, Relu(product[2 * i]), four % kFoursPerQuery == 0 ? 0.0f : sum[i]);
        sum[i] = fmaf(w.y, Relu(product[2 * i + 1]), sum[i]);
        sum[i] = fmaf(w.z, Relu(product[4 + 2 * i]), sum[i]);
        sum[i] = fmaf(w.w, Relu(product[4 + 2 * i + 1]), sum[i]);
      }
    }
  }

  // Computes and stores the scores of the queries of one chunk, or of two. A thread adds up its
  // heads, then pairs of threads and then both pairs: the same order for every query of a call.
  template <int kNumChunks>
  __device__ __forceinline__ void Run(int slot, int chunk, int num_queries) {
    constexpr int kQueries = kNumChunks * C::kChunkQueries;
    float sums[kQueries][2];
    {
      float products[kNumChunks * kColumns / 2];
      Multiply<kNumChunks>(slot, chunk, products);
      AddUp<kNumChunks>(slot, chunk, products, sums);
    }
    float mine[kQueries];
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      const float give = thread.is_odd ? sums[query][0] : sums[query][1];
      const float keep = thread.is_odd ? sums[query][1] : sums[query][0];
      mine[query] = keep + __shfl_xor_sync(kAllLanes, give, 1);
    }
    const int first = chunk * C::kChunkQueries;
    if constexpr (kQueries == 1) {  // the lower two threads store it
      const float sum = mine[0] + __shfl_xor_sync(kAllLanes, mine[0], 2);
      if (!thread.is_upper) Store(sum, first, num_queries);
    } else {
      constexpr int kHalf = kQueries / 2;
#pragma unroll
      for (int query = 0; query < kHalf; ++query) {
        const float give = thread.is_upper ? mine[query] : mine[query + kHalf];
        const float keep = thread.is_upper ? mine[query + kHalf] : mine[query];
        const float sum = keep + __shfl_xor_sync(kAllLanes, give, 2);
        Store(sum, first + query + (thread.is_upper ? kHalf : 0), num_queries);
      }
    }
  }

  __device__ __forceinline__ void Store(float sum, int query, int num_queries) {
    if constexpr (C::kHasCodes) sum *= tile.scale;
    const uint32_t key = tile.is_present ? KeyOfScore(sum) : kAbsentKey;
    if (query < num_queries && tile.num_behind + query > 0) {
      tile.out[query * params.slab.stride] = key;
    }
  }
};

// A warpgroup takes every third tile of the CTA.
template <class C>
__device__ __forceinline__ void MathRole(const KernelParams& params, Walk walk) {
  Math<C> math(params);
  RingPlace<C::kStages> keys;
  keys.Skip(math.thread.group);
  RingPlace<kSlots> queries;
  int next = math.thread.group;  // tiles from the window's first one to this warpgroup's next one
  while (walk.Next()) {
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().queries_full[queries.idx]), queries.phase);
    const int num_queries = walk.window.num_queries;
    const int num_chunks = (num_queries + C::kChunkQueries - 1) / C::kChunkQueries;
    uint32_t* const row = params.slab.score_keys + walk.row * params.slab.stride;
    for (; next < walk.num_tiles; next += kNumMathGroups) {
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().keys_full[keys.idx]), keys.phase);
      math.LoadKeys(keys.idx);
      keys.Skip(kNumMathGroups);
      const int32_t position = (walk.first_tile + next) * kTileTokens + math.thread.token;
      math.tile.num_behind = walk.window.num_visible - position;
      math.tile.out = row + position;
      int chunk = 0;
      if constexpr (C::kHasPairs) {
#pragma unroll 1
        for (; chunk + 1 < num_chunks; chunk += 2) {
          math.template Run<2>(queries.idx, chunk, num_queries);
        }
      }
#pragma unroll 1
      for (; chunk < num_chunks; ++chunk) math.template Run<1>(queries.idx, chunk, num_queries);
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
