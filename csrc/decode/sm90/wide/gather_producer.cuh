// Copies KV 16 bytes a thread, for page sizes that make too many boxes or none: four warps of the
// wide kernel, which walk the items together. Roles and barriers: kernel.cuh.
#pragma once

#include <cstdint>

#include "decode/sm90/wide/producer.cuh"

namespace jax_mla::decode::sm90::wide {

template <class C>
struct GatherCopier : Producer<C> {
  static constexpr int kVectorBytes = 16;
  static constexpr int kRowVectors = C::kRowBytes / kVectorBytes;
  static constexpr int kRowThreads = kRowVectors / 2;  // each copies vectors i and i + kRowThreads
  static constexpr int kPassRows = kNumProducerThreads / kRowThreads;          // rows a pass
  static constexpr int kPasses = kBlockN / kPassRows;                          // passes a chunk
  static constexpr int kKpeVectors = C::kDKpe * kElementBytes / kVectorBytes;  // the rest is unread
  static constexpr int kTokensPerLane = kBlockN / kWarpThreads;
  static_assert(kPassRows % 8 == 0, "a thread's rows share their place in the swizzle");
  static_assert(kKpeVectors % kRowThreads == 0, "rope is one half of a chunk or all of it");

  // Of a block: lane l of every warp looks up tokens l, l + 32.
  using Tokens = Source[kTokensPerLane];
  int32_t page_ids[kBlocksInFlight][kTokensPerLane];  // of the next two blocks

  using Producer<C>::Producer;

  // This thread's row of the first pass, and its first vector of the row.
  static __device__ __forceinline__ int Row() {
    return threadIdx.x % kNumProducerThreads / kRowThreads;
  }
  static __device__ __forceinline__ int Column() { return threadIdx.x % kRowThreads; }

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

  // Of the tokens that this thread copies, from the lanes that looked them up: where its columns
  // lie in one stream; absent ones get the stream's start, which is not read. Made once for the
  // latent dims and once for rope: both at a time do not fit into the registers.
  struct Addresses {
    const char* of_pass[kPasses];
    uint32_t present;  // one bit a pass
  };
  __device__ __forceinline__ Addresses FindAddresses(const KvStream& stream,
                                                     const Tokens& tokens) const {
    Addresses addresses;
    addresses.present = 0;
    const char* start =
        static_cast<const char*>(stream.base) +
        (this->layer * stream.layer_stride * kElementBytes + Column() * kVectorBytes);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const Source& of_lane = tokens[i * kPassRows / kWarpThreads];
      const int from = Row() + i * kPassRows % kWarpThreads;
      const int32_t page = __shfl_sync(kAllLanes, of_lane.page_id, from);
      const int32_t token = __shfl_sync(kAllLanes, of_lane.token, from);
      const int64_t element = page * stream.page_stride + token * stream.token_stride;
      const bool present = page != kOutside;
      addresses.of_pass[i] =
          present ? start + element * kElementBytes : static_cast<const char*>(stream.base);
      addresses.present |= static_cast<uint32_t>(present) << i;
    }
    return addresses;
  }

  // Copies one group, of the latent dims or rope, once its slots are free.
  template <bool kIsKpe>
  __device__ __forceinline__ void LoadGroup(int block, int group,
                                            const Addresses& addresses) const {
    const int first_chunk = group * kChunksPerGroup;
    const uint32_t chunks = this->Chunk(block, first_chunk);
    const int first_byte = kIsKpe ? 0 : first_chunk * C::kRowBytes;
    trace::Enter(Phase::kWaitSlot);
    gpu::sm90::MbarrierWait(this->EmptyBarrier(block, group), this->phases >> block & 1);
    trace::Enter(Phase::kIssue);
    const uint32_t row = Row() * C::kRowBytes;
    const uint32_t targets[] = {row + (Column() ^ Row() % 8) * kVectorBytes,
                                row + ((Column() + kRowThreads) ^ Row() % 8) * kVectorBytes};
#pragma unroll
    for (int c = 0; c < (kIsKpe ? 1 : kChunksPerGroup); ++c) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
#pragma unroll
        for (int half = 0; half < (kIsKpe ? kKpeVectors / kRowThreads : 2); ++half) {
          // Both halves of a row's line in turn: DRAM should see one access.
          gpu::sm90::CopyAsync16Line(
              chunks + targets[half] + c * C::kChunkBytes + i * kPassRows * C::kRowBytes,
              addresses.of_pass[i] + first_byte + c * C::kRowBytes +
                  half * kRowThreads * kVectorBytes,
              addresses.present >> i & 1);
        }
      }
    }
    const uint32_t full = this->FullBarrier(block, group);
    gpu::sm90::CopyAsyncArrive(full);
    if (this->is_leader) gpu::sm90::MbarrierArrive(full);  // releases `owned`
  }

  __device__ __forceinline__ void LoadKpe(int block, const Tokens& tokens) const {
    LoadGroup<true>(block, C::kKpeGroup, FindAddresses(this->params.decode.kpe, tokens));
  }

  // Copies a block in the order in which its consumer reads it: rope first or last. Nothing but the
  // ring's barriers joins the warps.
  __device__ __forceinline__ void LoadBlock(int slot, int generation, const Item& item,
                                            int32_t block) {
    trace::Enter(Phase::kLookUp);
    Tokens tokens;
    uint64_t owned = 0;
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int32_t token = this->FindPlace(item, block, this->lane + i * kWarpThreads).token;
      tokens[i] = {this->LocalPage({page_ids[0][i], token}), token};
      page_ids[0][i] = page_ids[1][i];
      const bool is_owned = token < 0 || tokens[i].page_id != kOutside;
      owned |= static_cast<uint64_t>(__ballot_sync(kAllLanes, is_owned)) << (i * kWarpThreads);
    }
    if (this->is_leader) Shared<C>().owned[generation][slot] = owned;
    LookUp(item, block + kBlocksInFlight, page_ids[1]);
    if (slot == 0) LoadKpe(slot, tokens);
    const Addresses ckv = FindAddresses(this->params.decode.ckv, tokens);
    const int first_group = slot == 0 ? 0 : C::FollowGroup(0);
#pragma unroll 1
    for (int i = 0; i < C::kCkvGroups; ++i) {
      LoadGroup<false>(slot, (first_group + i) % C::kCkvGroups, ckv);
    }
    if (slot == 1) LoadKpe(slot, tokens);
    this->phases ^= 1u << slot;
  }
};

}  // namespace jax_mla::decode::sm90::wide
