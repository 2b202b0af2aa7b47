// Loads the ring with TMA, for page sizes that are multiples of a block: one warp, and one box a
// chunk.
#pragma once

#include "decode/sm90/swapped/ring_loader.cuh"

namespace jax_mla::decode::sm90 {

template <class C>
struct BoxLoader : RingLoader<C> {
  using Base = RingLoader<C>;
  using typename Base::Cursor;
  using typename Base::Shared;
  using typename Base::Work;

  // The page ids of 32 blocks, one in each lane, loaded ahead of their use.
  struct PageBatch {
    int32_t first_token;  // of this lane's block
    int32_t page_id;      // global, may be any value
  };
  // Where this lane's block lies.
  struct BlockPlace {
    int32_t page;   // local, or kOutside
    int32_t token;  // of the page
  };

  __device__ static PageBatch LoadPages(const KernelParams& params, const Work& work,
                                        int32_t batch_begin, int lane) {
    const int32_t token = batch_begin + lane * kBlockN;
    return {token, Base::LoadPageIdOf(params, work, token)};
  }

  // Which tokens of a block are keys. Bit 0 of `owned` is set if its page is here.
  __device__ static uint64_t KeyMask(uint32_t owned, int tokens_left) {
    return LowBits(tokens_left) & (0 - uint64_t{owned & 1});
  }

  // Tells the appending warp about an item with queries at `cursor`, if it has a task there.
  __device__ static void TellAppend(const KernelParams& params, Shared& shared, const Work& work,
                                    const QueryCursor<C>& cursor) {
    if constexpr (C::kAppends) {
      if (Append::HasTask<C>(params.new_rows, work)) {
        Append::Tell(shared.append_task, work, cursor.stage, cursor.parity);
      }
    }
  }

  // What the producer finds out before the CTA's barriers exist: the first item. Its page ids are
  // on their way.
  struct Start {
    PendingOwnedPages owned_pages;
    typename Base::First first;
    PageBatch pages;
  };
  __device__ static Start Begin(const KernelParams& params, Shared& shared) {
    trace::Enter(Phase::kFindWork);
    const int lane = threadIdx.x % kWarpThreads;
    Start start{.owned_pages = PendingOwnedPages::Load(params.decode)};
    start.first = Base::FindFirstWork(params, [&](const Work& item) {
      start.pages = LoadPages(params, item, item.block_begin * kBlockN, lane);
      TellAppend(params, shared, item, {});
    });
    return start;
  }

  // Copies a block, or only announces it if `has_keys` is false. Lane i takes chunk i, so that the
  // stages of all chunks are tested and announced at once. Only the TMA instructions themselves are
  // issued one by one. `places`: of the blocks of this lane's batch, of which it is number
  // `batch_block`.
  __device__ static void LoadBlock(const KernelParams& params, const typename C::Maps& maps,
                                   Shared& shared, const Cursor& block, uint64_t mask,
                                   const BlockPlace& places, int batch_block, bool has_keys,
                                   int32_t layer, int tile_scale_idx, int lane) {
    const Cursor cursor = block.Ahead(lane < C::kChunks ? lane : 0);
    const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
    const uint32_t empty = hw::SharedAddress(&shared.kv_empty[cursor.stage]);
    const uint32_t parity = cursor.parity ^ 1;
    const uint32_t destination = hw::SharedAddress(shared.kv[cursor.stage]);
    const int32_t page = __shfl_sync(~0u, places.page, batch_block);
    const int32_t token = __shfl_sync(~0u, places.token, batch_block);
    const bool is_rope = C::kHasRope && lane == 0;
    const CUtensorMap* map = is_rope ? &maps.kpe : &maps.ckv;
    const int dim = is_rope ? 0 : (lane - C::kFirstLatentChunk) * C::kLatentChunkDims;
    bool pending = lane < C::kChunks;
    while (true) {
      const bool ready = pending && hw::MbarrierTest(empty, parity);
      trace::Enter(Phase::kIssue);
      if (ready) {
        if (lane == 0) shared.key_mask[cursor.stage] = mask;
        const bool has_scales = C::kHasTileScales && lane == 0;
        hw::MbarrierArriveExpectTx(
            full, (has_keys ? kChunkBytes : 0) + (has_scales ? kTileScaleBytes : 0));
        if (has_keys) {
          hw::TmaLoad4d(map, destination, full, dim, token, page, layer, kKvCachePolicy);
        }
        if constexpr (C::kHasTileScales) {
          if (has_scales) {
            const auto& scales = shared.tile_scales.blocks[tile_scale_idx];
            hw::TmaLoad4d(&maps.tile_scales, hw::SharedAddress(scales), full, 0, token, page, layer,
                          kKvCachePolicy);
          }
        }
      }
      pending = pending && !ready;
      const uint32_t pending_lanes = __ballot_sync(~0u, pending);
      if (pending_lanes == 0) break;
      const int first = __ffs(pending_lanes) - 1;
      trace::Enter(Phase::kWaitStage);
      hw::MbarrierWait(__shfl_sync(~0u, empty, first), __shfl_sync(~0u, parity, first));
    }
  }

  // Streams this CTA's items. 32 blocks are looked up at once, one by each lane.
  __device__ static void Run(const KernelParams& params, const typename C::Maps& maps,
                             Shared& shared, const Start& start, int row_tile) {
    const OwnedPages owned_pages = start.owned_pages.Get();
    WorkIterator iterator = start.first.rest;
    const int lane = threadIdx.x % kWarpThreads;
    Cursor kv;
    int tile_scale_idx = 0;
    QueryCursor<C> query;
    Work work = start.first.item, next_work;
    PageBatch pages = start.pages, next_pages{};
    bool has_work = start.first.has_item, has_next = false;
#pragma unroll 1
    while (true) {
      if (hw::ElectOne()) {
        Base::SendItem(params, maps, shared, query, work, has_work, row_tile);
      }
      if (!has_work) break;
      query.Advance(1);
      const int num_blocks = work.block_end - work.block_begin;
      BlockPlace place{};
      uint32_t owned = 0;
#pragma unroll 1
      for (int block = 0;; ++block) {
        // The next item's page ids are loaded behind this item's first block.
        if (block == MinI32(num_blocks, 1)) {
          trace::Enter(Phase::kFindWork);
          Base::DelaySearch(iterator);
          has_next = Base::NextWork(params, iterator, &next_work);
          if (has_next) {
            next_pages = LoadPages(params, next_work, next_work.block_begin * kBlockN, lane);
          }
        }
        if (block >= num_blocks) break;
        const int32_t block_token = (work.block_begin + block) * kBlockN;
        const int batch_block = block % kWarpThreads;
        if (batch_block == 0) {
          trace::Enter(Phase::kLookUp);
          if (block > 0) pages = LoadPages(params, work, block_token, lane);
          place.page = pages.first_token < work.seq_len
                           ? owned_pages.Local(params.decode, pages.page_id)
                           : kOutside;
          place.token = Base::SourceOf(params).InPage(pages.first_token);
          owned = __ballot_sync(~0u, place.page != kOutside);
        }
        if (C::kAppends && block == num_blocks - 1 && Append::HasTask<C>(params.new_rows, work)) {
          Append::WaitWritten();
        }
        const uint64_t mask = KeyMask(owned >> batch_block, work.seq_len - block_token);
        if (!C::kTakesTurns && mask == 0) {
          if (lane == 0) Base::SendEmptyBlock(shared, kv, /*is_leader=*/true);
          __syncwarp();
          kv.Advance(1);
        } else {
          const bool has_keys = !C::kTakesTurns || mask != 0;
          LoadBlock(params, maps, shared, kv, mask, place, batch_block, has_keys, owned_pages.layer,
                    tile_scale_idx, lane);
          kv.Advance(C::kChunks);
          if constexpr (C::kHasTileScales) {
            tile_scale_idx = NextTileScaleBlock<C>(tile_scale_idx);
          }
        }
      }
      work = next_work;
      pages = next_pages;
      has_work = has_next;
      if (has_work) TellAppend(params, shared, work, query);
    }
    if constexpr (C::kAppends) Append::TellEnd(shared.append_task);
  }
};

}  // namespace jax_mla::decode::sm90
