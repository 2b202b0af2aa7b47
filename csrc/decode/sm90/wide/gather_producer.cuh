// Copies KV 16 bytes a thread, for page sizes that make too many boxes or none: four warps of the
// wide kernel, which walk the items together. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

// Each warp copies 16 tokens of a block: lane l looks token l % 16 up. Eight threads copy a line at
// once, a warp four tokens.
template <class C>
struct GatherCopier : Producer<C> {
  static constexpr int kVectorBytes = 16;
  static constexpr int kRowThreads = C::kRowBytes / kVectorBytes;              // of a chunk's row
  static constexpr int kKpeThreads = C::kDKpe * kElementBytes / kVectorBytes;  // the rest is unread
  static constexpr int kPassRows = kWarpThreads / kRowThreads;                 // of a warp's pass
  static constexpr int kWarpRows = kBlockN / C::kCopyWarps;
  static constexpr int kPasses = kWarpRows / kPassRows;
  static constexpr uint32_t kAbsent = ~0u;
  static_assert(kWarpRows == 16, "a warp's tokens have 16 bits of `owned`");
  static_assert(kPassRows == 4, "a pass is half of the swizzle's period");

  Source next;  // this lane's token of the block that is copied next

  using Producer<C>::Producer;

  static __device__ __forceinline__ int Warp() {  // of those that copy
    return threadIdx.x % kNumProducerThreads / kWarpThreads;
  }

  __device__ __forceinline__ Source LookUp(const Item& item, int32_t block) const {
    const auto place = this->FindPlace(item, block, Warp() * kWarpRows + this->lane % kWarpRows);
    return {this->LoadPageId(item, place), place.token};
  }
  __device__ __forceinline__ void BeginItem(const Item& item) {
    next = LookUp(item, item.block_begin);
  }

  // Copies one group, once its slots are free. rows: where the tokens of this thread's passes lie,
  // as rows of the layer, whose pages are contiguous. What can be computed is before the wait: the
  // time from there to the last copy adds to every refill.
  template <bool kIsKpe>
  __device__ __forceinline__ void LoadGroup(int block, int group,
                                            const uint32_t (&rows)[kPasses]) const {
    constexpr int kNumChunks = kIsKpe ? 1 : C::kChunksPerGroup;
    const KvStream& stream = kIsKpe ? this->params.decode.kpe : this->params.decode.ckv;
    const int first_chunk = group * C::kChunksPerGroup;
    const uint32_t thread = Opaque(threadIdx.x) % kNumProducerThreads;
    const uint32_t column = thread % kRowThreads, row = thread % kWarpThreads / kRowThreads;
    const uint32_t first_byte = (kIsKpe ? 0 : first_chunk * C::kRowBytes) + column * kVectorBytes;
    const char* source = static_cast<const char*>(stream.base) +
                         (this->layer * stream.layer_stride * kElementBytes + first_byte);
    asm volatile("" : "+l"(source));  // one multiplication and addition a row
    const uint32_t stride = Opaque(static_cast<uint32_t>(stream.token_stride) * kElementBytes);
    const uint32_t target = Opaque(this->Chunk(block, first_chunk) +
                                   (thread / kWarpThreads * kWarpRows + row) * C::kRowBytes +
                                   (column ^ row) * kVectorBytes);
    // (ptxas 13.0 encodes an illegal instruction where it takes a part of the address from a
    // uniform register: tools/compiler_gate.py looks for that.)
    const uint32_t odd_target = target ^ kPassRows * kVectorBytes;  // of passes 1 and 3
    const uint32_t full = this->FullBarrier(block, group);
    trace::Enter(Phase::kWaitSlot);
    gpu::sm90::MbarrierWait(this->EmptyBarrier(block, group), this->phases >> block & 1);
    trace::Enter(Phase::kIssue);
    if (!kIsKpe || column < kKpeThreads) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const char* from = source + uint64_t{rows[i]} * stride;  // not read if absent
#pragma unroll
        for (int c = 0; c < kNumChunks; ++c) {
          gpu::sm90::CopyAsync16((i % 2 == 0 ? target : odd_target) + c * C::kChunkBytes +
                                     i * kPassRows * C::kRowBytes,
                                 from + c * C::kRowBytes, rows[i] != kAbsent, kKvCachePolicy);
        }
      }
    }
    gpu::sm90::CopyAsyncArrive(full);
    if (this->lane == 0) gpu::sm90::MbarrierArrive(full);  // releases `owned`
  }

  // Copies a block in the order in which its consumer reads it: rope first or last. Nothing but the
  // ring's barriers joins the warps.
  __device__ __forceinline__ void LoadBlock(int pair, int slot, const Item& item, int32_t block) {
    trace::Enter(Phase::kLookUp);
    const int ring_block = C::RingBlock(pair, slot);
    const int32_t page = this->LocalPage(next);
    const bool present = page != kOutside;
    const uint32_t first = static_cast<uint32_t>(page) * this->params.decode.page_size;
    const uint32_t mine = present ? first + next.token : kAbsent;
    const uint32_t owned = __ballot_sync(kAllLanes, next.token < 0 || present);
    uint32_t rows[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      rows[i] = __shfl_sync(kAllLanes, mine, i * kPassRows + this->lane / kRowThreads);
    }
    if (this->lane == 0) {  // this warp's 16 bits
      reinterpret_cast<uint16_t*>(&Shared<C>().owned[pair][slot])[Warp()] = owned;
    }
    next = LookUp(item, block + 1);
    if (slot == 0) LoadGroup<true>(ring_block, C::kKpeGroup, rows);
    const int first_group = slot == 0 ? 0 : C::FollowGroup(0);
#pragma unroll 1
    for (int i = 0; i < C::kCkvGroups; ++i) {
      LoadGroup<false>(ring_block, (first_group + i) % C::kCkvGroups, rows);
    }
    if (slot == 1) LoadGroup<true>(ring_block, C::kKpeGroup, rows);
    this->phases ^= 1u << ring_block;
  }
};

}  // namespace jax_mla::decode::sm90::wide
