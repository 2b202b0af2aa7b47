// Copies KV 16 bytes a thread, for page sizes that make too many boxes or none: four warps of the
// wide kernel, which walk the items together. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

template <class C>
struct GatherCopier : Producer<C> {
  static constexpr int kVectorBytes = 16;
  static constexpr int kRowThreads = C::kRowBytes / kVectorBytes;              // of a chunk's row
  static constexpr int kKpeThreads = C::kDKpe * kElementBytes / kVectorBytes;  // the rest is unread
  static constexpr int kPassRows = kNumProducerThreads / kRowThreads;          // rows a pass
  static constexpr int kPasses = kBlockN / kPassRows;                          // passes a chunk
  static constexpr int kTokensPerLane = kBlockN / kWarpThreads;
  static constexpr uint32_t kAbsent = ~0u;
  static_assert(kPassRows % 8 == 0, "a thread's rows share their place in the swizzle");
  static_assert(kWarpThreads % kPassRows == 0, "a lane looks up tokens of one thread's rows");
  static_assert(kPasses == 4, "a thread's rows are one vector");

  int32_t page_ids[kBlocksInFlight][kTokensPerLane];  // of the next two blocks

  using Producer<C>::Producer;

  // This thread's row of the first pass; its vector of every row.
  static __device__ __forceinline__ int Row() {
    return threadIdx.x % kNumProducerThreads / kRowThreads;
  }
  static __device__ __forceinline__ int Column() { return threadIdx.x % kRowThreads; }

  // Lane l of every warp looks up tokens l, l + 32 of a block.
  __device__ __forceinline__ void LookUp(const Item& item, int32_t block,
                                         int32_t (&ids)[kTokensPerLane]) const {
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      ids[i] = this->LoadPageId(item, this->FindPlace(item, block, this->lane + i * kWarpThreads));
    }
  }
  __device__ __forceinline__ void BeginItem(const Item& item) {
    LookUp(item, item.block_begin, page_ids[0]);
    LookUp(item, item.block_begin + 1, page_ids[1]);
  }

  // Writes down where the tokens lie that this warp copies, as rows of the layer, whose pages are
  // contiguous: no registers are left for them. Returns which tokens of the block are not absent.
  __device__ __forceinline__ uint64_t StoreRows(const Item& item, int32_t block) {
    uint64_t owned = 0;
    const int row = this->lane % kPassRows;  // of the first pass
    const bool is_mine =
        row * kRowThreads / kWarpThreads == threadIdx.x % kNumProducerThreads / kWarpThreads;
    __syncwarp();  // all lanes have read the rows of the block before
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int offset = this->lane + i * kWarpThreads;
      const int32_t token = this->FindPlace(item, block, offset).token;
      const int32_t page = this->LocalPage({page_ids[0][i], token});
      const bool present = page != kOutside;
      if (is_mine) {
        const uint32_t first = static_cast<uint32_t>(page) * this->params.decode.page_size;
        Shared<C>().rows[row * kPasses + offset / kPassRows] = present ? first + token : kAbsent;
      }
      const bool is_owned = token < 0 || present;
      owned |= static_cast<uint64_t>(__ballot_sync(kAllLanes, is_owned)) << (i * kWarpThreads);
    }
    __syncwarp();
    return owned;
  }

  // Copies this thread's vectors into consecutive chunks, from `first_byte` of the rows on. Eight
  // threads copy a line at once: with four, two vectors each, every line was asked for twice, which
  // cost up to a fifth. The copies share the load and store unit with the math: few instructions.
  template <int kNumChunks>
  __device__ __forceinline__ void CopyRows(const KvStream& stream, uint32_t chunks,
                                           int first_byte) const {
    const char* source =
        static_cast<const char*>(stream.base) +
        (this->layer * stream.layer_stride * kElementBytes + first_byte + Column() * kVectorBytes);
    asm volatile("" : "+l"(source));  // one multiplication and addition a row
    const uint32_t stride = Opaque(static_cast<uint32_t>(stream.token_stride) * kElementBytes);
    const uint32_t target = chunks + Row() * C::kRowBytes + (Column() ^ Row() % 8) * kVectorBytes;
    const uint4 vector = reinterpret_cast<const uint4*>(Shared<C>().rows)[Row()];
    const uint32_t rows[kPasses] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const char* row = source + uint64_t{rows[i]} * stride;  // not read if absent
#pragma unroll
      for (int c = 0; c < kNumChunks; ++c) {
        gpu::sm90::CopyAsync16(target + c * C::kChunkBytes + i * kPassRows * C::kRowBytes,
                               row + c * C::kRowBytes, rows[i] != kAbsent, kKvCachePolicy);
      }
    }
  }

  // Copies one group, once its slots are free.
  template <bool kIsKpe>
  __device__ __forceinline__ void LoadGroup(int block, int group) const {
    trace::Enter(Phase::kWaitSlot);
    gpu::sm90::MbarrierWait(this->EmptyBarrier(block, group), this->phases >> block & 1);
    trace::Enter(Phase::kIssue);
    const int first_chunk = group * C::kChunksPerGroup;
    const uint32_t chunks = this->Chunk(block, first_chunk);
    if constexpr (!kIsKpe) {
      CopyRows<C::kChunksPerGroup>(this->params.decode.ckv, chunks, first_chunk * C::kRowBytes);
    } else if (Column() < kKpeThreads) {
      CopyRows<1>(this->params.decode.kpe, chunks, 0);
    }
    const uint32_t full = this->FullBarrier(block, group);
    gpu::sm90::CopyAsyncArrive(full);
    if (this->is_leader) gpu::sm90::MbarrierArrive(full);  // releases `owned`
  }

  // Copies a block in the order in which its consumer reads it: rope first or last. Nothing but the
  // ring's barriers joins the warps.
  __device__ __forceinline__ void LoadBlock(int slot, int generation, const Item& item,
                                            int32_t block) {
    trace::Enter(Phase::kLookUp);
    const uint64_t owned = StoreRows(item, block);
    if (this->is_leader) Shared<C>().owned[generation][slot] = owned;
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) page_ids[0][i] = page_ids[1][i];
    LookUp(item, block + kBlocksInFlight, page_ids[1]);
    if (slot == 0) LoadGroup<true>(slot, C::kKpeGroup);
    const int first_group = slot == 0 ? 0 : C::FollowGroup(0);
#pragma unroll 1
    for (int i = 0; i < C::kCkvGroups; ++i) {
      LoadGroup<false>(slot, (first_group + i) % C::kCkvGroups);
    }
    if (slot == 1) LoadGroup<true>(slot, C::kKpeGroup);
    this->phases ^= 1u << slot;
  }
};

}  // namespace jax_mla::decode::sm90::wide
