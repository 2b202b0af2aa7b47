// A math warpgroup of the kernel with pairs of blocks: its rows' scales, references and statistics,
// and the scores of a block. Roles and barriers: kernel.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kv_format.h"
#include "decode/sm90/pairs/config.h"
#include "decode/sm90/swapped/f16_codes.cuh"
#include "decode/sm90/swapped/finish.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::pairs {

// Scores and sums are a warpgroup's own, and so are its dims of O.
template <class C>
struct Math : Output<C> {
  using Base = Output<C>;
  using Base::item, Base::out, Base::query, Base::scales, Base::shared, Base::thread;

  float sum[C::kThreadRows];  // of P, over the thread's tokens of the item
  uint32_t rows_with_keys;    // bit j: the thread's row j has seen a key

  __device__ __forceinline__ Math(const KernelParams& kernel_params, SharedMemory<C>& shared_memory,
                                  int warp, int tile)
      : Base(kernel_params, shared_memory, Thread(0, warp), tile) {}

  static __device__ __forceinline__ void SyncMath() {
    hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
  }

  // Waits for the next item and its queries. False if there is none left.
  __device__ __forceinline__ bool NextItem() {
    trace::Enter(Phase::kWaitItem);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_full[query.stage]), query.parity);
    item = shared.items[ItemIndex<C>(query)];
    if (item.num_blocks == kNoMoreItems) return false;
    this->LoadScales();
    PrepareQueries(*this);
    SyncMath();
    return true;
  }
  __device__ __forceinline__ void ResetSoftmax() {
    this->ResetOut();
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) sum[j] = 0.0f;
  }

  // Both warpgroups' parts of a row have one scale, and kpe's scores are divided by it. Returns the
  // row's biased exponent: the larger one of its parts, raised where kpe's scores would overflow.
  // A raised exponent costs the ckv part bits of float16, which kpe's much larger scores hide. All
  // math threads.
  __device__ __forceinline__ int RowExponent(int row, int latent_exponent) const {
    constexpr int kBias = 127, kMaxRopeExponent = 100;
    static_assert(C::kTileRows == 64 && C::kOwnRopeSteps <= 2,
                  "two threads of a warpgroup have a row");
    auto& exponents = *reinterpret_cast<int (*)[C::kTileRows][2][4]>(shared.exchange);
    const int part = thread.wg * 2 + RowLanes<2>::Part(thread.lane);
    const uint8_t* rope = shared.q[query.stage] + C::kCkvQueryChunks * C::kQueryChunkBytes;
    const int vector = part % (C::kDKpe / 16) * 2;
    const QueryDims dims{*reinterpret_cast<const uint4*>(rope + VectorOffset(row, vector)),
                         *reinterpret_cast<const uint4*>(rope + VectorOffset(row, vector + 1))};
    exponents[row][0][part] = latent_exponent;
    exponents[row][1][part] = static_cast<int>(dims.Magnitude() >> 7);
    hw::NamedBarrierSync(kBarrierMath, kTeamThreads);
    const auto largest = [&](int which) {
      const int4 x = *reinterpret_cast<const int4*>(exponents[row][which]);
      return max(max(x.x, x.y), max(x.z, x.w));
    };
    const int kpe_exponent = __float_as_int(scales.kpe) >> 23 & 255;
    const int rope_exponent = max(largest(1) - kMaxRopeExponent, 0);
    return max(largest(0), kpe_exponent + rope_exponent + kMaxExponent - kBias);
  }
  // `scale` is what scores of float16 queries have to be multiplied by, and `factor` its inverse.
  __device__ __forceinline__ void StoreQueryScale(int row, float scale, float factor) const {
    shared.softmax.score_scale[row] = scale * this->ScaleLog2();
    shared.softmax.rope_factor[row] = scales.kpe * factor;
  }

  // ---- the rows' statistics, behind StoreOverLanes(sum): finish.cuh asks for them

  __device__ __forceinline__ float SumOfRow(int row) const {
    return SumOfWarps(shared.row_stats[0][row]) + SumOfWarps(shared.row_stats[1][row]);
  }
  __device__ __forceinline__ float& ReferenceOf(int row) const {
    return shared.softmax.reference[row];
  }
  __device__ __forceinline__ bool HasKey(int j) const { return rows_with_keys >> j & 1; }
  __device__ __forceinline__ int RowOfThread() const { return thread.idx; }
  __device__ __forceinline__ bool LooksAfterRow(int row) const {
    return thread.wg == 0 && row < C::kTileRows;
  }
  __device__ __forceinline__ void ScaleStats(int j, float factor, float scale_log2) const {
    if (!thread.IsFirstOfRows()) return;
    shared.row_stats[thread.Group()][thread.Row(j)][thread.warp] *= factor;
    if (thread.wg == 0 && thread.warp == 0) ReferenceOf(thread.Row(j)) += scale_log2;
  }
  template <class ScaleLog2Of>
  static __device__ __forceinline__ void ScaleRowStats(ScaleLog2Of) {}
  static __device__ __forceinline__ void ForgetRows() {}
};

// Waits for kpe's scores of a block and brings them to the scale of those of ckv.
template <class M>
__device__ __forceinline__ void ScaleRopeScores(const M& math, typename M::Scores& scores) {
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
#pragma unroll
  for (int i = 0; i < M::Config::kAccumulators; i += 4) {
    const float2 factors = *reinterpret_cast<const float2*>(
        &math.shared.softmax.rope_factor[math.thread.Row(M::RowOf(i))]);
    scores[i] *= factors.x, scores[i + 2] *= factors.x;
    scores[i + 1] *= factors.y, scores[i + 3] *= factors.y;
  }
  hw::WgmmaFenceOperand(scores);
}

// scores = all of S^T of a block, which RowSoftmax::score_scale brings to log2. kpe's scores come
// first, and the others are added to them. Codes are loaded one batch ahead, and the fragments of a
// batch are made while the products with those before run.
template <class M>
__device__ __forceinline__ void ScoresOfBlock(const M& math, const typename M::Cursor& block,
                                              typename M::Scores& scores) {
  using C = typename M::Config;
  constexpr int kSteps = 2, kSets = 2;  // of a batch
  constexpr int kRopeBatches = C::kDKpe / kMmaK / kSteps;
  constexpr int kChunkBatches = C::kLatentChunkDims / kMmaK / kSteps;
  constexpr int kBatches = kRopeBatches + C::kCkvChunks * kChunkBatches;
  const Thread& thread = math.thread;
  trace::Enter(Phase::kQk);
  const uint64_t q = hw::SharedDescriptor(hw::SharedAddress(math.shared.q[math.query.stage]));
  const bool has_rope_codes = math.params.decode.kv_format == KvFormat::kE4m3;
  KeyCodes<kSteps> codes[2];
  KeyFragments<kSteps> keys[kSets];
  const auto load = [&](int batch) {
    const int latent = batch - kRopeBatches;
    const bool is_rope = latent < 0;
    const auto cursor = is_rope ? block : block.Ahead(1 + latent / kChunkBatches);
    const int first_step = is_rope ? batch * kSteps : latent % kChunkBatches * kSteps;
    if (!is_rope && first_step == 0) math.WaitChunk(cursor);
    codes[batch % 2].Load(thread, math.shared.kv[cursor.stage], first_step);
  };
  load(0);
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {
    if (batch + 1 < kBatches) load(batch + 1);
    if (batch >= kSets) hw::WgmmaWait<kSets - 1>();  // products with the set's last contents
    auto& set = keys[batch % kSets];
    if (batch < kRopeBatches) {
      if (has_rope_codes) {
        set.MakeBf16(codes[batch % 2]);
      } else {
        set.Load(thread, math.shared.kv[block.stage], batch * kSteps);
      }
      if (batch == 0) hw::WgmmaFenceOperand(scores);
      set.template Multiply<__nv_bfloat16>(QueriesOf<C>(q, C::kCkvChunks, batch * kSteps), scores,
                                           batch > 0);
    } else {
      const int latent = batch - kRopeBatches;
      set.MakeF16(codes[batch % 2]);
      if (latent == 0) ScaleRopeScores(math, scores);
      set.template Multiply<__half>(
          QueriesOf<C>(q, latent / kChunkBatches, latent % kChunkBatches * kSteps), scores, true);
    }
  }
  trace::Enter(Phase::kWaitMma);
  hw::WgmmaWait<0>();
  hw::WgmmaFenceOperand(scores);
}

}  // namespace jax_mla::decode::sm90::pairs
