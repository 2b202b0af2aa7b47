// A math warpgroup of the score kernel: 64 tokens times the heads of a window's queries.
#pragma once

#include "gpu/codegen.cuh"
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

  // Of the two tokens, the one whose scores it stores: odd threads take the second.
  __device__ __forceinline__ int OwnToken() const { return token + quad % 2 * 8; }
};

// The token whose scores a thread stores.
struct Token {
  int32_t position;
  float scale;
  bool is_present;
};

template <class C>
struct Math {
  using Products = float[kColumns / 2];
  static constexpr int kQueries = C::kChunkQueries;

  const KernelParams& params;
  const Thread thread;
  uint32_t keys[C::kSteps][4];  // of a tile, in mma's fragment layout
  Token token;

  __device__ explicit Math(const KernelParams& p) : params(p) {}

  // Takes the keys of a stage to registers and gives the stage back.
  __device__ __forceinline__ void LoadKeys(int stage) {
    const uint32_t base = SharedAddress(Shared<C>().keys[stage][0]);
    // ldmatrix: lane l gives a row of matrix l / 8: rows 0-7, rows 8-15, the same 16 bytes further.
    // Computed here for each tile: registers are scarce.
    const int idx = static_cast<int>(gpu::ThreadIndex() % kGroupThreads);
    const int row = idx / kWarpThreads * 16 + idx % 16, upper = idx % kWarpThreads / 16;
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const int half = step / 4, chunk = step % 4 * 2 + upper;
      gpu::LoadMatrix(keys[step],
                      base + half * C::kTileBytes + gpu::SwizzledOffset<kRowBytes>(row, chunk));
    }
    const int own = thread.OwnToken();
    token.is_present = Shared<C>().boxes_present[stage] >> (own >> params.box_tokens_log2) & 1;
    if constexpr (C::kHasCodes) token.scale = Shared<C>().scales[stage][own];
    __syncwarp();
    if (thread.lane == 0) {
      gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().keys_empty[stage]));
    }
  }

  // Issues products = keys x the heads of a chunk.
  __device__ __forceinline__ void Multiply(int slot, int chunk, Products& products) {
    const uint64_t first =
        gpu::sm90::SharedDescriptor(SharedAddress(Shared<C>().queries[slot][chunk][0]));
    gpu::sm90::WgmmaFenceOperand(products);
    gpu::sm90::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const uint64_t heads =
          gpu::sm90::AdvanceDescriptor(first, step / 4 * (kColumns * kRowBytes) + step % 4 * 32);
      if constexpr (C::kHasCodes) {
        gpu::sm90::WgmmaCodesRS<kColumns>(keys[step], heads, products, step > 0);
      } else {
        gpu::sm90::WgmmaRS<__nv_bfloat16, kColumns, gpu::sm90::Major::K>(keys[step], heads,
                                                                         products, step > 0);
      }
    }
    gpu::sm90::WgmmaCommit();
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
  __device__ __forceinline__ void Store(const Products& products, const Token& token, int slot,
                                        int chunk, int32_t row) {
    const auto* weights =
        reinterpret_cast<const float4*>(Shared<C>().weights[slot][chunk]) + thread.quad;
    float sums[kQueries][2] = {};
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 w = weights[four * 4];
      float (&sum)[2] = sums[four * kQueries / 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] = fmaf(w.x, Relu(products[8 * four + 2 * i]), sum[i]);
        sum[i] = fmaf(w.y, Relu(products[8 * four + 2 * i + 1]), sum[i]);
        sum[i] = fmaf(w.z, Relu(products[8 * four + 4 + 2 * i]), sum[i]);
        sum[i] = fmaf(w.w, Relu(products[8 * four + 4 + 2 * i + 1]), sum[i]);
      }
    }
    // Of two queries the upper two threads take the second one.
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
    if constexpr (C::kHasCodes) sum *= token.scale;
    const uint32_t key = token.is_present ? KeyOfScore(sum) : kAbsentKey;
    const Window& window = Shared<C>().work.windows[row];
    if (query < window.num_queries && token.position < window.num_visible + query) {
      params.slab.keys[(row + query) * params.slab.stride + token.position] = key;
    }
  }
};

// A warpgroup takes every fourth tile of the CTA. Of a window it goes through tiles and chunks, and
// adds up the products of one chunk while the tensor cores work on its next one. With bf16 there
// are not enough registers for that.
template <class C>
struct MathLoop {
  using Products = typename Math<C>::Products;

  Math<C> math;
  RingPlace<C::kStages> keys;
  RingPlace<kSlots> queries;
  int32_t row;              // of the slab, the window's
  int32_t tile, last_tile;  // of the window: the next one, and behind the CTA's last one
  int chunk, num_chunks;    // the next one

  __device__ explicit MathLoop(const KernelParams& params) : math(params) {
    keys.Skip(math.thread.group);
  }

  // Issues the next products.
  __device__ __forceinline__ void Issue(Products& products) {
    if (chunk == 0) {
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().keys_full[keys.idx]), keys.phase);
      math.LoadKeys(keys.idx);
      keys.Skip(kNumMathGroups);
      math.token.position = tile * kTileTokens + math.thread.OwnToken();
    }
    math.Multiply(queries.idx, chunk, products);
  }
  // Goes on to what comes behind them. Returns whether the window has more.
  __device__ __forceinline__ bool Advance() {
    if (++chunk == num_chunks) chunk = 0, tile += kNumMathGroups;
    return tile < last_tile;
  }
  __device__ __forceinline__ void Finish(Products& products) {
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(products);
  }
  __device__ __forceinline__ void Store(const Products& products, const Token& token,
                                        int of_chunk) {
    math.Store(products, token, queries.idx, of_chunk, row);
  }

  // One after the other.
  __device__ __forceinline__ void RunWindow() {
    Products products;
    for (bool has_more = tile < last_tile; has_more;) {
      Issue(products);
      Finish(products);
      Store(products, math.token, chunk);
      has_more = Advance();
    }
  }

  // The sums of `done`, while the next products are on their way to `next`.
  __device__ __forceinline__ void Step(const Products& done, Products& next) {
    const Token last_token = math.token;
    const int last_chunk = last_chunk_;
    last_chunk_ = chunk;
    Issue(next);
    Store(done, last_token, last_chunk);
    Finish(next);
  }
  __device__ __forceinline__ void RunWindowOverlapped() {
    if (tile >= last_tile) return;
    Products even, odd;
    last_chunk_ = chunk;
    Issue(even);
    Finish(even);
    for (;;) {
      if (!Advance()) {
        Store(even, math.token, last_chunk_);
        return;
      }
      Step(even, odd);
      if (!Advance()) {
        Store(odd, math.token, last_chunk_);
        return;
      }
      Step(odd, even);
    }
  }

  __device__ __forceinline__ void Run() {
    Walk walk(Shared<C>().work, math.params.slab.num_rows);
    int ahead = math.thread.group;  // tiles from the window's first one to this warpgroup's
    while (walk.Next(Shared<C>().work)) {
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().queries_full[queries.idx]), queries.phase);
      row = walk.row;
      const int num_queries = Shared<C>().work.windows[row].num_queries;
      num_chunks = (num_queries + C::kChunkQueries - 1) / C::kChunkQueries;
      chunk = 0;
      tile = walk.first_tile + ahead;
      last_tile = walk.last_tile;
      if constexpr (C::kOverlaps) {
        RunWindowOverlapped();
      } else {
        RunWindow();
      }
      ahead = tile - last_tile;
      __syncwarp();
      if (math.thread.lane == 0) {
        gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().queries_empty[queries.idx]));
      }
      queries.Next();
    }
  }

 private:
  int last_chunk_;
};

}  // namespace jax_mla::index::sm90
