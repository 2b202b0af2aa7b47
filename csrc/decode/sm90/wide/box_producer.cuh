// Copies KV with TMA, in boxes of 8 to 64 tokens: one warp of the wide kernel. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstdint>
#include <utility>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

// kWholeChunks: a box is a chunk, one lane copies everything. Else a group's chunks are cut into
// boxes of box_tokens tokens, one a lane: lane i takes box i % boxes_per_chunk of chunk
// i / boxes_per_chunk.
template <class C, bool kWholeChunks>
struct BoxCopier : Producer<C> {
  using BlockSource = Source;
  using Producer<C>::base, Producer<C>::lane, Producer<C>::layer, Producer<C>::maps;

  const int32_t chunk;      // of the group, that this lane copies
  const int32_t box_begin;  // first token of this lane's box in the block

  __device__ BoxCopier(const WideParams& params, const TensorMaps& tensor_maps)
      : Producer<C>(params, tensor_maps),
        chunk(lane * params.box_tokens / kBlockN),
        box_begin(lane * params.box_tokens % kBlockN) {}

  __device__ __forceinline__ BlockSource FindBlock(const Item& item, int32_t block) const {
    const auto place = this->FindPlace(item, block, box_begin);
    return {this->LoadPageId(item, place), place.token};
  }

  // Copies one group once its slots are free. Block and group are known at compile time: the
  // producer is one warp whose latency adds to every refill, so a copy must cost it few
  // instructions.
  template <int kBlock, int kGroup>
  __device__ __forceinline__ void LoadGroup(const Source& box, int32_t page) const {
    constexpr bool kIsKpe = kGroup == C::kKpeGroup;
    constexpr int kNumChunks = kIsKpe ? 1 : kChunksPerGroup;
    constexpr int kFirstChunk = kGroup * kChunksPerGroup;
    const CUtensorMap* map = kIsKpe ? &maps.kpe : &maps.ckv;
    const uint32_t full = base + this->FullBarrier(kBlock, kGroup);
    const uint32_t empty = base + this->EmptyBarrier(kBlock, kGroup);
    const uint32_t target = base + this->Chunk(kBlock, kFirstChunk);
    if constexpr (kWholeChunks) {
      // The other lanes must not wait here: nothing would hold the leader back while one of them is
      // late, and it would miss the phase. They meet again at the next block's vote.
      if (!this->is_leader) return;
      trace::Enter(Phase::kWaitSlot);
      gpu::sm90::MbarrierWait(empty, this->phases >> kBlock & 1);
      trace::Enter(Phase::kIssue);
      gpu::sm90::MbarrierArriveExpectTx(full, kNumChunks * C::kChunkBytes);
#pragma unroll
      for (int i = 0; i < kNumChunks; ++i) {
        gpu::sm90::TmaLoad4d(map, target + i * C::kChunkBytes, full,
                             kIsKpe ? 0 : (kFirstChunk + i) * kChunkDims, box.token, page, layer,
                             gpu::sm90::kCacheEvictNormal);
      }
    } else {
      trace::Enter(Phase::kWaitSlot);
      gpu::sm90::MbarrierWait(empty, this->phases >> kBlock & 1);
      trace::Enter(Phase::kIssue);
      if (this->is_leader) gpu::sm90::MbarrierArriveExpectTx(full, kNumChunks * C::kChunkBytes);
      __syncwarp();
      if (chunk >= kNumChunks) return;
      gpu::sm90::TmaLoad4d(map, target + chunk * C::kChunkBytes + box_begin * C::kRowBytes, full,
                           kIsKpe ? 0 : (kFirstChunk + chunk) * kChunkDims, box.token, page, layer,
                           gpu::sm90::kCacheEvictNormal);
    }
  }

  // Copies a block in the order in which its consumer reads it (and, for block 1, in which the
  // halves are freed).
  template <int kBlock>
  __device__ __forceinline__ void LoadBlock(int generation, const Item&, int32_t,
                                            const BlockSource& box) {
    trace::Enter(Phase::kLookUp);
    const int32_t page = this->LocalPage(box);
    const uint32_t owned = __ballot_sync(kAllLanes, box.token < 0 || page != kOutside);
    if (this->is_leader) Shared<C>().owned[generation][kBlock] = owned;
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
      (LoadGroup<kBlock, kBlock == 0 ? C::LeadGroup(kIndex) : C::FollowGroup(kIndex)>(box, page),
       ...);
    }(std::make_integer_sequence<int, C::kNumGroups>{});
    this->phases ^= 1u << kBlock;
  }
};

}  // namespace jax_mla::decode::sm90::wide
