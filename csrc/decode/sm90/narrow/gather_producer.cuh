// The producer of the narrow kernel that gathers KV, for any page size: four warps, of which every
// thread copies 16 bytes at a time. Roles and barriers: kernel.cuh.
#pragma once

#include "decode/sm90/narrow/producer.cuh"

namespace jax_mla::decode::sm90::narrow {

template <class C>
struct GatherProducer : ProducerBase<C> {
  using Base = ProducerBase<C>;
  using typename Base::Cursor;
  using typename Base::Shared;
  using typename Base::T;
  using typename Base::Work;

  // A row is a token's 128 bytes of a chunk. All threads together copy kPassRows rows in a pass.
  static constexpr int kRowLanes = kChunkRowBytes / kCopyBytes;
  static constexpr int kPassRows = C::kProducerThreads / kRowLanes;
  static constexpr int kPasses = kBlockN / kPassRows;
  static constexpr int kRopeLanes = C::kDKpe * kElementBytes / kCopyBytes;  // nobody reads the rest
  static_assert(kPassRows % 8 == 0, "the swizzle is the same in every pass");
  static_assert(kWarpThreads % kPassRows == 0, "a pass lies in one half of the lanes' tokens");

  static constexpr int kCopyGroupChunks = 2;  // latent chunks that are copied together
  static constexpr uint32_t kAbsent = ~0u;    // the row of a token that is no key

  // Where a block's tokens lie: lane l of every warp knows tokens l and l + 32.
  struct TokenPlaces {
    int32_t page_id[2];  // global, may be any value
    int32_t offset[2];   // token of the page
  };

  __device__ static TokenPlaces LookUp(const KernelParams& params, const Work& work,
                                       int32_t block_token, int lane) {
    TokenPlaces places;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t token = block_token + lane + half * kWarpThreads;
      places.page_id[half] = Base::LoadPageIdOf(params, work, token);
      places.offset[half] = token - params.page_size.Floor(token) * params.decode.page_size;
    }
    return places;
  }

  __device__ static void WaitFree(Shared& shared, const Cursor& cursor) {
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
  }

  // Copies this thread's part of kNumChunks chunks, from `element` of each token on, into
  // consecutive stages. Rows lie anywhere, so as much of a row as possible is copied at a time.
  // `rows`: the tokens' rows in the layer, whose pages are contiguous, or kAbsent.
  template <int kNumChunks>
  __device__ static void CopyRows(const KvStream& stream, Shared& shared, const Cursor& first,
                                  const uint32_t (&rows)[kPasses], int32_t layer, int element,
                                  int thread) {
    const int column = thread % kRowLanes, row = thread / kRowLanes;
    const uint32_t target = row * kChunkRowBytes + (column ^ row % 8) * kCopyBytes;
    uint32_t chunks[kNumChunks];
    trace::Enter(Phase::kWaitStage);
#pragma unroll
    for (int c = 0; c < kNumChunks; ++c) {
      const Cursor cursor = first.Ahead(c);
      chunks[c] = hw::SharedAddress(shared.kv[cursor.stage]) + target;
      WaitFree(shared, cursor);
    }
    trace::Enter(Phase::kIssue);
    const T* source = static_cast<const T*>(stream.base) + layer * stream.layer_stride + element +
                      column * (kCopyBytes / kElementBytes);
    const uint32_t stride = static_cast<uint32_t>(stream.token_stride);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const T* from = source + uint64_t{rows[i]} * stride;  // not read if the row is absent
#pragma unroll
      for (int c = 0; c < kNumChunks; ++c) {
        hw::CopyAsync16(chunks[c] + i * kPassRows * kChunkRowBytes, from + c * kChunkDims,
                        rows[i] != kAbsent, kKvCachePolicy);
      }
    }
  }

  // Lets kv_full of `count` stages count the copies so far when they land.
  __device__ static void Announce(Shared& shared, const Cursor& first, int count, bool is_leader) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const uint32_t full = hw::SharedAddress(&shared.kv_full[first.Ahead(c).stage]);
      hw::CopyAsyncArrive(full);
      if (is_leader) hw::MbarrierArrive(full);
    }
    // Lanes would drift apart, and then ask for every line in pieces: up to 40 % more time.
    __syncwarp();
  }

  // Copies a block of which `thread` holds one 16-byte column of kPasses rows.
  __device__ static void GatherBlock(const KernelParams& params, Shared& shared,
                                     const Cursor& block, uint64_t mask,
                                     const uint32_t (&rows)[kPasses], int32_t layer, int thread) {
    const bool is_leader = thread == 0;
    if (thread % kRowLanes < kRopeLanes) {
      CopyRows<1>(params.decode.kpe, shared, block, rows, layer, 0, thread);
    } else {
      WaitFree(shared, block);  // nobody may arrive on kv_full of a stage that is not free
    }
    if (is_leader) shared.key_mask[block.stage] = mask;
    Announce(shared, block, 1, is_leader);
#pragma unroll 1
    for (int chunk = 0; chunk < C::kCkvChunks; chunk += kCopyGroupChunks) {
      const Cursor first = block.Ahead(1 + chunk);
      CopyRows<kCopyGroupChunks>(params.decode.ckv, shared, first, rows, layer, chunk * kChunkDims,
                                 thread);
      Announce(shared, first, kCopyGroupChunks, is_leader);
    }
  }

  // What the producer warps find out before the CTA's barriers exist: the first item. The page ids
  // of its first block are on their way.
  struct Start {
    PendingOwnedPages owned_pages;
    typename Base::First first;
    TokenPlaces places;
  };
  __device__ static Start Begin(const KernelParams& params, Shared&) {
    trace::Enter(Phase::kFindWork);
    const int lane = threadIdx.x % kWarpThreads;
    Start start{.owned_pages = PendingOwnedPages::Load(params.decode)};
    start.first = Base::FindFirstWork(params, [&](const Work& item) {
      start.places = LookUp(params, item, item.block_begin * kBlockN, lane);
    });
    return start;
  }

  // Streams this CTA's items. All producer warps walk the same items, and only the ring's barriers
  // keep them together.
  __device__ static void Run(const KernelParams& params, const TensorMaps& maps, Shared& shared,
                             const Start& start, int row_tile) {
    const OwnedPages owned_pages = start.owned_pages.Get();
    WorkIterator iterator = start.first.rest;
    const int lane = threadIdx.x % kWarpThreads;
    const int thread = threadIdx.x - kTeamThreads;
    Cursor kv;
    QueryCursor<C> query;
    Work work = start.first.item;
    TokenPlaces places = start.places;
    bool has_work = start.first.has_item;
#pragma unroll 1
    while (true) {
      if (thread == 0) Base::SendItem(params, maps, shared, query, work, has_work, row_tile);
      __syncwarp();  // see Announce
      if (!has_work) return;
      for (int32_t block = work.block_begin; block < work.block_end; ++block) {
        const int32_t block_token = block * kBlockN;
        trace::Enter(Phase::kLookUp);
        uint32_t row_of[2];
        uint64_t owned = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t page = owned_pages.Local(params.decode, places.page_id[half]);
          const bool is_present =
              page != kOutside && block_token + lane + half * kWarpThreads < work.seq_len;
          // 32 bits are enough: a layer of 2^32 rows would take more than 2 TB.
          row_of[half] = is_present ? static_cast<uint32_t>(page) * params.decode.page_size +
                                          places.offset[half]
                                    : kAbsent;
          owned |= static_cast<uint64_t>(__ballot_sync(~0u, is_present)) << (half * kWarpThreads);
        }
        // The next block's page ids are on their way while this block is copied.
        if (block + 1 < work.block_end) {
          places = LookUp(params, work, block_token + kBlockN, lane);
        }
        if (owned == 0) {
          Base::SendEmptyBlock(shared, kv, thread == 0);
          kv.Advance(1);
          continue;
        }
        uint32_t rows[kPasses];
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          constexpr int kHalfPasses = kWarpThreads / kPassRows;
          rows[i] = __shfl_sync(~0u, row_of[i / kHalfPasses],
                                i % kHalfPasses * kPassRows + thread / kRowLanes);
        }
        GatherBlock(params, shared, kv, owned, rows, owned_pages.layer, thread);
        kv.Advance(C::kChunks);
      }
      query.Advance(1);
      trace::Enter(Phase::kFindWork);
      has_work = Base::NextWork(params, iterator, &work);
      if (has_work) places = LookUp(params, work, work.block_begin * kBlockN, lane);
    }
  }
};

}  // namespace jax_mla::decode::sm90::narrow
