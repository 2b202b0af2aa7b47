// Copies KV with TMA, in boxes of 8 to 64 tokens: one warp of the wide kernel. Roles and barriers:
// kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

// Whole chunks: a box is a chunk, one lane copies everything. Else a group's chunks are cut into
// boxes of box_tokens tokens, one a lane: lane i takes box i % boxes_per_chunk of chunk
// i / boxes_per_chunk.
template <class C>
struct BoxCopier : Producer<C> {
  static constexpr bool kWholeChunks = C::kLoad == KvLoad::kTmaBlocks;

  const int32_t chunk;      // of the group, that this lane copies
  const int32_t box_begin;  // first token of this lane's box in the block
  Source next;              // of the block that is copied next

  __device__ BoxCopier(const WideParams& params, const TensorMaps& tensor_maps, int32_t origin)
      : Producer<C>(params, tensor_maps, origin),
        chunk(kWholeChunks ? 0 : this->lane * params.box_tokens / kBlockN),
        box_begin(kWholeChunks ? 0 : this->lane * params.box_tokens % kBlockN) {}

  __device__ __forceinline__ void LookUp(const Item& item, int32_t block) {
    const auto place = this->FindPlace(item, block, box_begin);
    next = {this->LoadPageId(item, place), place.token};
  }
  __device__ __forceinline__ void BeginItem(const Item& item) { LookUp(item, item.block_begin); }

  // Copies one group once its slots are free. The producer is one warp whose latency adds to every
  // refill, so a copy must cost it few instructions.
  __device__ __forceinline__ void LoadGroup(int block, int group, int32_t token,
                                            int32_t page) const {
    const bool is_kpe = group == C::kKpeGroup;
    const int num_chunks = is_kpe ? 1 : kChunksPerGroup;
    const int first_chunk = group * kChunksPerGroup;
    const int first_dim = is_kpe ? 0 : first_chunk * kChunkDims;
    const CUtensorMap* map = is_kpe ? &this->maps.kpe : &this->maps.ckv;
    const uint32_t full = this->FullBarrier(block, group);
    const uint32_t target = this->Chunk(block, first_chunk);
    trace::Enter(Phase::kWaitSlot);
    gpu::sm90::MbarrierWait(this->EmptyBarrier(block, group), this->phases >> block & 1);
    trace::Enter(Phase::kIssue);
    if (kWholeChunks || this->is_leader)
      gpu::sm90::MbarrierArriveExpectTx(full, num_chunks * C::kChunkBytes);
    if constexpr (kWholeChunks) {
      Load(map, target, full, first_dim, token, page);
      if (!is_kpe) Load(map, target + C::kChunkBytes, full, first_dim + kChunkDims, token, page);
    } else {
      __syncwarp();
      if (chunk < num_chunks) {
        Load(map, target + chunk * C::kChunkBytes + box_begin * C::kRowBytes, full,
             first_dim + chunk * kChunkDims, token, page);
      }
    }
  }
  __device__ __forceinline__ void Load(const CUtensorMap* map, uint32_t target, uint32_t full,
                                       int dim, int32_t token, int32_t page) const {
    gpu::sm90::TmaLoad4d(map, target, full, dim, token, page, this->layer,
                         gpu::sm90::kCacheEvictNormal);
  }

  // Copies a block in the order in which its consumer reads it (and, for block 1, in which the
  // halves are freed).
  __device__ __forceinline__ void LoadBlock(int slot, int generation, const Item& item,
                                            int32_t block) {
    trace::Enter(Phase::kLookUp);
    const int32_t page = this->LocalPage(next), token = next.token;
    const bool is_owned = token < 0 || page != kOutside;
    const uint32_t owned =
        kWholeChunks ? 0 - static_cast<uint32_t>(is_owned) : __ballot_sync(kAllLanes, is_owned);
    if (!kWholeChunks && this->is_leader) Shared<C>().owned[generation][slot] = owned;
    LookUp(item, block + 1);
    // The other lanes must not wait for whole chunks: nothing would hold the leader back while one
    // of them is late, and it would miss the phase. They meet again at the next election. (Where
    // only an elected lane gets to, TMA's operands move to uniform registers without a loop.)
    if (!kWholeChunks || gpu::sm90::ElectOne()) {
      if (kWholeChunks) Shared<C>().owned[generation][slot] = owned;
      uint32_t order = C::GroupOrder(slot);
#pragma unroll 1
      for (int i = 0; i < C::kNumGroups; ++i, order >>= 4) {
        LoadGroup(slot, order & 15, token, page);
      }
    }
    this->phases ^= 1u << slot;
  }
};

}  // namespace jax_mla::decode::sm90::wide
