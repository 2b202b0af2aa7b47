// The warps that make bf16 of an FP8 cache: the three of the producer's warpgroup that are idle
// otherwise. They go over the copy groups in the order in which TMA copies them, wait until the
// codes of one have landed, and write bf16 in their place (decode_rows.cuh). The math warpgroups
// wait for them as they wait for TMA where the cache is bf16. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/decode_rows.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// A warp has every third of a block's units of eight tokens.
struct ConverterUnits {
  static constexpr int kUnits = kBlockN / kWarpTokens;
  static constexpr int kCount = CeilDiv(kUnits, kConvertWarps);
  int warp = gpu::ThreadIndex() / kWarpThreads - kConvertWarp;

  __device__ __forceinline__ bool Has(int k) const { return warp + k * kConvertWarps < kUnits; }
  __device__ __forceinline__ int Token(int k) const {
    return (warp + k * kConvertWarps) * kWarpTokens;
  }
};

template <class C>
struct Converter {
  static_assert(C::kChunksPerCopyGroup * kChunkDims == DsMla::kTileDims,
                "a copy group has one scale");
  using Units = ConverterUnits;

  using Decoder = RowDecoder<Units>;

  const DecodeParams& params;

  __device__ __forceinline__ explicit Converter(const DecodeParams& p) : params(p) {}

  // The scales of this lane's rows for a copy group (kDsMla). Rows of an absent page are 0.
  __device__ __forceinline__ void LoadTileScales(int32_t page, int32_t token, int group,
                                                 float (&scales)[Units::kCount]) const {
    const KvStream& stream = params.ckv;
    const char* rows = static_cast<const char*>(stream.base) +
                       __ldg(params.layer) * stream.layer_stride + page * stream.page_stride +
                       DsMla::kScalesOffset + group * sizeof(float);
    const Units units;
    const RowLane lane;
#pragma unroll
    for (int k = 0; k < Units::kCount; ++k) {
      const int32_t row = token + units.Token(k) + lane.row;
      scales[k] = 0.0f;
      if (page == kOutside || !units.Has(k)) continue;
      scales[k] = __ldg(reinterpret_cast<const float*>(rows + row * stream.token_stride));
    }
  }

  // Goes over all blocks that the producer copies.
  __device__ __forceinline__ void Run() const {
    uint32_t phases = 0;  // of the barriers of codes, one bit a ring block
    int block_pair = 0;
#pragma unroll 1
    for (;; block_pair = C::NextBlockPair(block_pair)) {
      const int first = C::RingBlock(block_pair, 0);
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().codes.full[first][C::kKpeCopyGroup]),
                              phases >> first & 1);
      const ConvertTask& task = Shared<C>().codes.tasks[block_pair];
      const int num_blocks = task.num_blocks;
      if (num_blocks == 0) return;
#pragma unroll 1
      for (int i = 0; i < num_blocks; ++i) {
        const int ring_block = C::RingBlock(block_pair, i);
        ConvertBlock(ring_block, C::CopyGroupOrder(i), phases >> ring_block & 1, task.page[i],
                     task.token[i]);
        phases ^= 1u << ring_block;
      }
    }
  }

  __device__ __forceinline__ void ConvertBlock(int ring_block, uint32_t order, uint32_t phase,
                                               int32_t page, int32_t token) const {
    const bool has_tile_scales = params.kv_format == KvFormat::kDsMla;
#pragma unroll 1
    for (int g = 0; g < C::kNumCopyGroups; ++g, order >>= 4) {
      const int group = order & 15;
      const bool is_kpe = group == C::kKpeCopyGroup;
      float tile_scales[Units::kCount] = {};
      if (has_tile_scales && !is_kpe) LoadTileScales(page, token, group, tile_scales);
      trace::Enter(Phase::kWaitKv);
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().codes.full[ring_block][group]), phase);
      trace::Enter(Phase::kConvert);
      const uint32_t chunk =
          SharedAddress(Shared<C>().kv[ring_block][group * C::kChunksPerCopyGroup]);
      if (is_kpe) {
        if (params.kv_format == KvFormat::kE4m3) Decoder::DecodeRope(chunk);
      } else {
        Decoder::DecodeLatent({chunk, chunk + C::kChunkBytes}, has_tile_scales, tile_scales);
      }
      gpu::sm90::FenceProxyAsyncShared();
      __syncwarp();
      if (threadIdx.x % kWarpThreads == 0) {
        gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().kv_full[ring_block][group]));
      }
    }
  }
};

}  // namespace jax_mla::decode::sm90::wide
