// Copies KV with TMA, where page_size is a multiple of a block. One warp of the wide kernel does
// it. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

// A chunk is one box. All lanes look up the block's page, and one of them copies.
template <class C>
struct BoxCopier : Producer<C> {
  uint32_t query_parity = 0;  // of the next item with a task, if queries are rotated

  using Producer<C>::Producer;

  __device__ __forceinline__ void BeginItem(const typename C::Item& item) {
    this->LookUp(item, item.block_begin, /*offset=*/0);
    if constexpr (C::kAppends) {
      if (Append::HasTask<C>(this->params.new_rows, item)) {
        Append::Tell(Shared<C>().append_task, item, /*query_stage=*/0, query_parity);
        query_parity ^= 1;
      }
    }
  }

  // Copies one copy group, once its chunks are free. Called by one lane. The time from there to the
  // copy adds to every refill, so a copy must cost few instructions.
  __device__ __forceinline__ void LoadCopyGroup(int block, int group, const Source& box) const {
    const bool is_kpe = C::kHasRope && group == C::kKpeCopyGroup;
    const int first_chunk = group * C::kChunksPerCopyGroup;
    const int dim = is_kpe ? 0 : first_chunk * kChunkDims;
    const CUtensorMap* map = is_kpe ? &this->maps.kpe : &this->maps.ckv;
    const uint32_t full = this->FullBarrier(block, group);
    const uint32_t target = this->Chunk(block, first_chunk);
    trace::Enter(Phase::kWaitStage);
    gpu::sm90::MbarrierWait(this->EmptyBarrier(block, group), this->phases >> block & 1);
    trace::Enter(Phase::kIssue);
    gpu::sm90::MbarrierArriveExpectTx(full, (is_kpe ? 1 : C::kChunksPerCopyGroup) * C::kChunkBytes);
    Load(map, target, full, dim, box);
    if (!is_kpe) Load(map, target + C::kChunkBytes, full, dim + kChunkDims, box);
  }
  __device__ __forceinline__ void Load(const CUtensorMap* map, uint32_t target, uint32_t full,
                                       int dim, const Source& box) const {
    gpu::sm90::TmaLoad4d(map, target, full, dim, box.token, box.page_id, this->owned_pages.layer,
                         kKvCachePolicy);
  }

  // Copies a block pair, each block in the order in which it is scored and freed. The pages of both
  // blocks are known beforehand, and those of the next block pair are looked up before the copies.
  // Otherwise the time of the lookup would pass between the last PV with block 1 and its refill,
  // for which both math warpgroups wait. `in_turn`: block 1 is copied after block 0 has begun to
  // land.
  __device__ __forceinline__ void LoadBlockPair(int block_pair, const typename C::Item& item,
                                                int32_t block, bool in_turn) {
    trace::Enter(Phase::kLookUp);
    uint32_t owned[kBlocksPerPair];
    Source box[kBlocksPerPair];
#pragma unroll
    for (int i = 0; i < kBlocksPerPair; ++i) {
      box[i] = {this->LocalPage(this->next[i]), this->next[i].token};
      const bool is_owned = box[i].token < 0 || box[i].page_id != kOutside;
      owned[i] = 0 - static_cast<uint32_t>(is_owned);
    }
    this->LookUp(item, block + kBlocksPerPair, /*offset=*/0);
    const int num_blocks = min(item.block_end - block, kBlocksPerPair);
    if constexpr (C::kAppends) {
      const bool is_last_pair = block + kBlocksPerPair >= item.block_end;
      if (is_last_pair && Append::HasTask<C>(this->params.new_rows, item)) Append::WaitWritten();
    }
    // Only the elected lane waits for free chunks. If the other lanes waited too, nothing would
    // hold the elected one back while one of them is late, and the late one would miss the phase.
    // The lanes meet again at the next election. (And only in a branch that a single lane takes
    // does ptxas move TMA's operands to uniform registers without a loop over lanes.)
    if (gpu::sm90::ElectOne()) {
      Shared<C>().owned[block_pair][0] = owned[0];
      Shared<C>().owned[block_pair][1] = owned[1];
#pragma unroll 1
      for (int i = 0; i < num_blocks; ++i) {
        if (i == 1 && in_turn) this->WaitFirstCopyGroup();
        uint32_t order = C::CopyGroupOrder(i);
#pragma unroll 1
        for (int g = 0; g < C::kNumCopyGroups; ++g, order >>= 4) {
          LoadCopyGroup(C::RingBlock(block_pair, i), order & 15, box[0]);
        }
        box[0] = box[1];  // a variable index would move both to local memory
      }
    }
    this->phases ^= ((1u << num_blocks) - 1) << C::RingBlock(block_pair, 0);
  }
};

}  // namespace jax_mla::decode::sm90::wide
