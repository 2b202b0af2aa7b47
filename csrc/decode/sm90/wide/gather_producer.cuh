// Copies KV with 16-byte copies of single threads, where page_size is no multiple of a block. Four
// warps of the wide kernel do it, and walk the items together. Roles and
// barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

// Each warp copies 16 tokens of a block. Lane l looks up token l % 16 of them. Eight threads copy a
// token's 128-byte row of a chunk at once; a warp copies four tokens in a pass.
template <class C>
struct GatherCopier : Producer<C> {
  static constexpr int kVectorBytes = 16;
  static constexpr int kRowThreads = C::kRowBytes / kVectorBytes;  // that copy a chunk's row
  static constexpr int kKpeThreads = C::kDKpe * kElementBytes / kVectorBytes;  // the rest is unread
  static constexpr int kPassRows = kWarpThreads / kRowThreads;                 // tokens of a pass
  static constexpr int kWarpRows = kBlockN / C::kCopyWarps;
  static constexpr int kPasses = kWarpRows / kPassRows;
  static constexpr uint32_t kAbsent = ~0u;
  static_assert(kWarpRows == 16, "a warp's tokens have 16 bits of `owned`");
  static_assert(kPassRows == 4, "a pass is half of the swizzle's period");

  using Producer<C>::Producer;

  static __device__ __forceinline__ int Warp() {  // its index among the warps that copy
    return threadIdx.x % kNumProducerThreads / kWarpThreads;
  }

  // The token of a block that this lane looks up.
  __device__ __forceinline__ int32_t Token() const {
    return Warp() * kWarpRows + this->lane % kWarpRows;
  }
  __device__ __forceinline__ void BeginItem(const typename C::Item& item) {
    this->LookUp(item, item.block_begin, Token());
  }

  // Copies one copy group, once its chunks are free. `rows` are the tokens of this thread's passes,
  // as rows of the layer, whose pages are contiguous, or kAbsent. Addresses are completed before
  // the wait, since the time from there to the last copy adds to every refill.
  template <bool kIsKpe>
  __device__ __forceinline__ void LoadCopyGroup(int block, int group,
                                                const uint32_t (&rows)[kPasses]) const {
    constexpr int kNumChunks = kIsKpe ? 1 : C::kChunksPerCopyGroup;
    const KvStream& stream = kIsKpe ? this->params.decode.kpe : this->params.decode.ckv;
    const int first_chunk = group * C::kChunksPerCopyGroup;
    const uint32_t thread = RecomputeHere(threadIdx.x) % kNumProducerThreads;
    const uint32_t column = thread % kRowThreads, row = thread % kWarpThreads / kRowThreads;
    const uint32_t first_byte = (kIsKpe ? 0 : first_chunk * C::kRowBytes) + column * kVectorBytes;
    const char* source = gpu::CompleteHere(
        static_cast<const char*>(stream.base) +
        (this->owned_pages.layer * stream.layer_stride * kElementBytes + first_byte));
    const uint32_t stride =
        gpu::CompleteHere(static_cast<uint32_t>(stream.token_stride) * kElementBytes);
    const uint32_t target = gpu::CompleteHere(
        this->Chunk(block, first_chunk) + (thread / kWarpThreads * kWarpRows + row) * C::kRowBytes +
        (column ^ row) * kVectorBytes);
    // If ptxas 13.0 took a part of this address from a uniform register, it would encode an illegal
    // instruction. tools/compiler_gate.py looks for that (BAD_COPY).
    const uint32_t odd_target = target ^ kPassRows * kVectorBytes;  // for passes 1 and 3
    const uint32_t full = this->FullBarrier(block, group);
    trace::Enter(Phase::kWaitStage);
    gpu::sm90::MbarrierWait(this->EmptyBarrier(block, group), this->phases >> block & 1);
    trace::Enter(Phase::kIssue);
    if (!kIsKpe || column < kKpeThreads) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const char* from = source + uint64_t{rows[i]} * stride;  // not read if the row is absent
#pragma unroll
        for (int c = 0; c < kNumChunks; ++c) {
          gpu::sm90::CopyAsync16((i % 2 == 0 ? target : odd_target) + c * C::kChunkBytes +
                                     i * kPassRows * C::kRowBytes,
                                 from + c * C::kRowBytes, rows[i] != kAbsent,
                                 this->params.gather_policy);
        }
      }
    }
    gpu::sm90::CopyAsyncArrive(full);
    if (this->lane == 0) gpu::sm90::MbarrierArrive(full);  // releases the warp's bits of `owned`
  }

  __device__ __forceinline__ void LoadRope(int block, const uint32_t (&rows)[kPasses]) const {
    if constexpr (C::kHasRope) LoadCopyGroup<true>(block, C::kKpeCopyGroup, rows);
  }

  // Copies a block pair, each block in the order in which it is scored: the rope chunk first in
  // block 0 and last in block 1. Pages are looked up as in BoxCopier. Only the ring's barriers keep
  // the warps in step.
  __device__ __forceinline__ void LoadBlockPair(int block_pair, const typename C::Item& item,
                                                int32_t block, bool in_turn) {
    trace::Enter(Phase::kLookUp);
    uint32_t row[kBlocksPerPair], owned = 0;
#pragma unroll
    for (int i = 0; i < kBlocksPerPair; ++i) {
      const Source& source = this->next[i];
      const int32_t page = this->LocalPage(source);
      const bool present = page != kOutside;
      // 32 bits are enough: 2^32 rows of a layer would take terabytes, more than a GPU has.
      const uint32_t first = static_cast<uint32_t>(page) * this->params.decode.page_size;
      row[i] = present ? first + source.token : kAbsent;
      const uint32_t mine = __ballot_sync(kAllLanes, source.token < 0 || present);
      owned |= (mine & ((1u << kWarpRows) - 1)) << (i * kWarpRows);
    }
    this->LookUp(item, block + kBlocksPerPair, Token());
#pragma unroll 1
    for (int i = 0; i < kBlocksPerPair && block + i < item.block_end; ++i) {
      if (i == 1 && in_turn) this->WaitFirstCopyGroup();
      uint32_t rows[kPasses];
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        rows[k] = __shfl_sync(kAllLanes, row[0], k * kPassRows + this->lane / kRowThreads);
      }
      if (this->lane == 0) {  // this warp's bits
        reinterpret_cast<uint16_t*>(&Shared<C>().owned[block_pair][i])[Warp()] = owned;
      }
      const int ring_block = C::RingBlock(block_pair, i);
      if (C::kHasRope && i == 0) LoadRope(ring_block, rows);
      const int first_group = i == 0 ? 0 : C::FollowCopyGroup(0);
#pragma unroll 1
      for (int g = 0; g < C::kCkvCopyGroups; ++g) {
        LoadCopyGroup<false>(ring_block, (first_group + g) % C::kCkvCopyGroups, rows);
      }
      if (C::kHasRope && i == 1) LoadRope(ring_block, rows);
      this->phases ^= 1u << ring_block;
      row[0] = row[1];  // a variable index would move both to local memory
      owned >>= kWarpRows;
    }
  }
};

}  // namespace jax_mla::decode::sm90::wide
