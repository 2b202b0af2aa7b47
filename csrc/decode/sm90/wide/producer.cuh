// The producer of the wide kernel. It finds the CTA's work, tells the math warpgroups about it and
// copies queries and KV. KV is copied by a class derived from Producer, in box_producer.cuh or
// gather_producer.cuh. Roles and barriers: kernel.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode/schedule/find_work.cuh"
#include "decode/schedule/load_units.cuh"
#include "decode/schedule/schedule.h"
#include "decode/sm90/common/load/queries.cuh"
#include "decode/sm90/common/load/token_source.cuh"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/wide/item_end.h"
#include "decode/sm90/wide/merge/grid.cuh"
#include "decode/sm90/wide/params.cuh"
#include "decode/trace.cuh"
#include "gpu/launch.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::wide {

// The place of a token, or of a box that begins with it, in the cache.
struct Source {
  int32_t page_id;  // global
  int32_t token;    // its index in the page; negative: past the end of the sequence or the item
};

template <class C>
struct Producer {
  const WideParams& params;
  const typename C::Maps& maps;
  const uint32_t base;  // address of the CTA's shared memory
  const int32_t lane;
  const bool is_first_warp;  // of the warps that copy
  const bool is_leader;      // the elected lane of the first warp
  OwnedPages owned_pages{};
  uint32_t phases = ~0u;        // parities to wait for on kv_empty, one bit a ring block
  Source next[kBlocksPerPair];  // this lane's lookups for the next block pair

  __device__ Producer(const WideParams& wide_params, const typename C::Maps& tensor_maps)
      : params(wide_params),
        maps(tensor_maps),
        base(SharedAddress(&Shared<C>())),
        lane(threadIdx.x % kWarpThreads),
        is_first_warp(threadIdx.x / kWarpThreads == kProducerWarp),
        is_leader(gpu::sm90::ElectOne() && is_first_warp) {}  // every election picks the same lane

  using Item = typename C::Item;

  // A token's page, as an index into the sequence's row of the page table, and its index in that
  // page.
  struct Place {
    int32_t page_idx;
    int32_t token;  // negative: past the item's end
  };
  // The place of token `offset` of a block of the item.
  __device__ __forceinline__ Place FindPlace(const Item& item, int32_t block,
                                             int32_t offset) const {
    const TokenSource source{params.decode, params.page_size};
    const int32_t token = block * kBlockN + offset;
    const int32_t page_idx = source.PageOf(token);
    const bool is_past = block >= item.block_end || token >= item.seq_len;
    return {page_idx, is_past ? -1 : source.InPage(token, page_idx)};
  }

  // Looks up token `offset` of both blocks of the block pair that begins with `first_block`.
  __device__ __forceinline__ void LookUp(const Item& item, int32_t first_block, int32_t offset) {
#pragma unroll
    for (int i = 0; i < kBlocksPerPair; ++i) {
      const Place place = FindPlace(item, first_block + i, offset);
      const TokenSource source{params.decode, params.page_size};
      next[i] = {source.LoadPageId(item.seq_idx, place.page_idx, place.token >= 0), place.token};
    }
  }

  // The page's local id, or kOutside for an absent page and for a token past the end. Both are
  // copied as zeros.
  __device__ __forceinline__ int32_t LocalPage(const Source& source) const {
    const int32_t page = owned_pages.Local(params.decode, source.page_id);
    return source.token >= 0 ? page : kOutside;
  }

  __device__ __forceinline__ uint32_t FullBarrier(int block, int group) const {
    return base + static_cast<uint32_t>(offsetof(SharedMemory<C>, kv_full)) +
           (block * C::kNumCopyGroups + group) * static_cast<uint32_t>(sizeof(uint64_t));
  }
  __device__ __forceinline__ uint32_t EmptyBarrier(int block, int group) const {
    return FullBarrier(block, group) + static_cast<uint32_t>(offsetof(SharedMemory<C>, kv_empty) -
                                                             offsetof(SharedMemory<C>, kv_full));
  }
  __device__ __forceinline__ uint32_t Chunk(int block, int chunk) const {
    return base + static_cast<uint32_t>(offsetof(SharedMemory<C>, kv)) +
           (block * C::kChunks + chunk) * C::kChunkBytes;
  }

  // Waits until the first copy group of the CTA's first block has landed.
  __device__ __forceinline__ void WaitFirstCopyGroup() const {
    trace::Enter(Phase::kWaitStage);
    gpu::sm90::MbarrierWait(FullBarrier(0, C::LeadCopyGroup(0)), 0);
  }

  // Whether the math warpgroups arrive at the grid barrier with this item. Each CTA arrives once,
  // as soon as it has no more partial result to write. A kept item writes none, and only a CTA's
  // last item is ever kept. So a CTA arrives with the item before its kept one, and otherwise with
  // its last item. If the kept item is the only one, the CTA arrives with it, before it waits there
  // for the other part.
  static __device__ __forceinline__ bool ArrivesWith(const Item& item, int item_idx, bool has_next,
                                                     const Item& next) {
    if (has_next) return next.end == ItemEnd::kKept;
    return item.end != ItemEnd::kKept || item_idx == 0;
  }

  // Where the tile's queries lie. Of a unit within one token, rows behind the token's become zeros:
  // they are not read, and the products with them take less energy.
  __device__ __forceinline__ QuerySource FindQueries(const Item& item, const RowTile& tile) const {
    if constexpr (C::kHasUnits) {
      const Unit& unit = item.unit;
      if (unit.first_head + unit.num_rows <= params.num_heads.value()) {
        const int32_t token = params.num_heads.Floor(unit.row_begin);
        return {&maps.token_q_nope, &maps.token_q_pe, unit.first_head + tile.row_begin, token};
      }
      return {&maps.q_nope, &maps.q_pe, unit.row_begin + tile.row_begin, 0};
    } else {
      return {&maps.q_nope, &maps.q_pe, tile.row_begin, item.seq_idx};
    }
  }

  // Hands an item and its queries to the math warpgroups, after they have freed the queries of the
  // one before.
  __device__ __forceinline__ void PublishItem(const Item& item, const RowTile& tile, int item_idx,
                                              bool has_next, const Item& next) const {
    if (C::kCopyWarps > 1 && !is_first_warp) return;
    trace::Enter(Phase::kSendItem);
    if (!gpu::sm90::ElectOne()) return;
    const int parity = item_idx & 1;
    const QuerySource source = FindQueries(item, tile);
    gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_empty), parity ^ 1);
    Shared<C>().items[parity] = item;
    Shared<C>().has_next[parity] = has_next;
    if (C::kMerge == Merge::kInside) {
      Shared<C>().arrives[parity] =
          ArrivesWith(item, item_idx, has_next, next) && Shared<C>().merges;
    }
    constexpr int kRopeBytes = C::kHasRope ? C::kChunkBytes : 0;
    const QueryTile queries{SharedAddress(Shared<C>().q[0]),
                            SharedAddress(Shared<C>().q[C::kHasRope ? C::kKpeChunk : 0]),
                            C::kQueryBytes - kRopeBytes, kRopeBytes};
    LoadQueryTile<C>(source, params.new_rows, queries, QueryBarriersOf<C>(), /*has_blocks=*/true);
  }

  // Tells the math warpgroups that the CTA has no work, and arrives at the grid barrier for them.
  __device__ __forceinline__ void PublishNothing() const {
    if (!is_leader) return;
    Shared<C>().items[0] = {};
    if (C::kMerge == Merge::kInside && Shared<C>().merges) {
      ArriveFor(kNumMathWarpgroups, /*has_lead=*/true);
    }
    for (int i = 0; i < QueryFullArrivals<C>(params.new_rows); ++i) {
      gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().q_full));
    }
  }

  // Writes the result of a sequence of length 0: out = 0, lse = -inf.
  __device__ __forceinline__ void WriteEmpty(int32_t seq_idx, const RowTile& tile) const {
    if constexpr (C::kHasUnits) gpu::PdlWait();
    constexpr int kVectors = C::kDCkv * kElementBytes / 16;
    uint64_t row = uint64_t{static_cast<uint32_t>(seq_idx)} *
                       static_cast<uint32_t>(params.decode.q_len * params.decode.num_heads) +
                   tile.row_begin;
    int32_t num_rows = tile.num_rows;
    if constexpr (C::kHasUnits) {
      const Unit unit = LoadUnit(params.decode, seq_idx);
      row = static_cast<uint32_t>(unit.row_begin + tile.row_begin);
      num_rows = min(unit.num_rows - tile.row_begin, params.rows_per_tile);
    }
    uint4* out = static_cast<uint4*>(params.decode.out) + row * kVectors;
#pragma unroll 1
    for (int i = lane; i < num_rows * kVectors; i += kWarpThreads) out[i] = uint4{};
#pragma unroll 1
    for (int i = lane; i < num_rows; i += kWarpThreads) {
      params.decode.lse[row + i] = -INFINITY;
    }
  }

  // Decides what becomes of the item's result. The CTA's merge task, which follows from the same
  // decision, is left in shared memory.
  __device__ __forceinline__ Item TakeItem(const WorkItem& work, const SchedulePolicy& policy,
                                           const Unit& unit) const {
    int32_t num_rows = params.rows_per_tile;
    if constexpr (C::kHasUnits) num_rows = min(num_rows, unit.num_rows);
    const ItemEnd end = EndOfItem<C::kMerge>(work, policy, num_rows);
    Item item{work.seq_idx, work.seq_len, work.block_begin, work.block_end, 0, end};
    if constexpr (C::kHasUnits) {
      item.unit = unit;
      item.seq_idx = unit.seq_idx;
    }
    if (end == ItemEnd::kPart) item.slot = work.slot();
    if (end == ItemEnd::kKept) item.slot = work.slot_of(0);
    const int32_t first_part = policy.first_merging_part();
    if (C::kMerge == Merge::kInside && end == ItemEnd::kPart && work.part_idx >= first_part &&
        is_leader) {
      Shared<C>().merge = {work.seq_idx, work.num_parts, work.slot_base, work.part_idx - first_part,
                           work.num_parts - first_part};
    }
    return item;
  }
  __device__ __forceinline__ Item TakeItem(const WorkItem& work,
                                           const SchedulePolicy& policy) const {
    Unit unit{};
    if constexpr (C::kHasUnits) unit = LoadUnit(params.decode, work.seq_idx);
    return TakeItem(work, policy, unit);
  }
  // Finds the worker's next item that has KV, and writes the results of empty sequences on the way.
  // Returns false if there is none.
  __device__ __forceinline__ bool NextItem(WorkIterator& work, const RowTile& tile,
                                           Item* item) const {
    trace::Enter(Phase::kFindWork);
    WorkItem next;
    const ScheduleParams& schedule = params.plan.schedule;
    const auto find_next = [&] {
      if constexpr (C::kHasUnits) return NextUnit(schedule, work, &next);
      return C::kMerge == Merge::kInside ? work.NextAutomatic(schedule, &next)
                                         : work.Next(schedule, &next);
    };
    while (find_next()) {
      if (next.block_begin < next.block_end) {
        *item = TakeItem(next, work.policy);
        return true;
      }
      if (is_first_warp) WriteEmpty(next.seq_idx, tile);
    }
    return false;
  }
};

// What a producer finds out before the CTA's barriers are initialised: the worker's first item,
// whose page ids it has begun to load. `has_item` is false if the first item is empty, if there is
// none, or with a fixed number of parts. ProducerLoop then asks `work` for it.
template <class Copier>
struct ProducerStart {
  Copier producer;
  WorkIterator work;
  typename Copier::Item item;
  bool has_item;
  // The call has at most 5/4 blocks a CTA, so that memory idles after the first blocks.
  bool is_small;

  // Takes over what FindFirstOf found. An empty item is given back to `work`: NextItem then finds
  // it again and writes its result.
  __device__ __forceinline__ void TakeFirst(const ScheduleParams& schedule,
                                            const FirstPart& first) {
    work = first.rest;
    is_small = first.total_blocks <= static_cast<int32_t>(gridDim.x * gridDim.y * 5 / 4);
    has_item = first.has_item && first.item.block_begin < first.item.block_end;
    if (has_item) {
      item = producer.TakeItem(first.item, work.policy);
    } else if (first.has_item) {
      work.StepBack(schedule, first.item);
    }
  }
};

// Finds the worker's first item and begins to look up its pages. Called by every warp that copies.
template <class C, class Copier>
__device__ __forceinline__ ProducerStart<Copier> BeginProducer(const WideParams& params,
                                                               const typename C::Maps& maps) {
  trace::Enter(Phase::kFindWork);
  const ScheduleParams& schedule = params.plan.schedule;
  const auto owned_pages = PendingOwnedPages::Load(params.decode);
  ProducerStart<Copier> start{Copier(params, maps)};
  if (C::kMerge == Merge::kInside && start.producer.is_leader) Shared<C>().merge.num_shares = 0;
  if (C::kMerge == Merge::kCombine && schedule.num_splits > 0) {
    start.work = FindFixedWork(blockIdx.y);
    start.has_item = start.is_small = false;
  } else if constexpr (C::kHasUnits) {
    UnitStart first = LoadStart(params.decode.units, blockIdx.y);
    WorkItem item;
    start.has_item = TakeFirstUnit(schedule, first, &item);
    start.is_small = false;
    start.work = first.work;
    if (start.has_item) {
      start.item = start.producer.TakeItem(item, start.work.policy, first.first);
      start.producer.BeginItem(start.item);
    }
  } else {
    const auto look_up = [&](const WorkItem& item) {
      start.producer.BeginItem(
          {item.seq_idx, item.seq_len, item.block_begin, item.block_end, 0, ItemEnd::kWhole});
    };
    // The host knows only a bound of the lengths. Whether workers are idle is known here.
    const auto pick_worker = [&](const SchedulePolicy& policy, int32_t total_blocks) {
      const bool has_idle =
          HasIdleWorkers(schedule, policy, TotalCost(schedule, policy, total_blocks));
      return WorkerOf(schedule, blockIdx.y, has_idle ? schedule.cta_interleave : 0);
    };
    start.TakeFirst(schedule, FindFirstOf</*kMayBeFixed=*/false>(schedule, pick_worker, look_up));
  }
  start.producer.owned_pages = owned_pages.Get();
  if (C::kMerge == Merge::kInside && start.producer.is_leader) {
    const SchedulePolicy& policy = start.work.policy;
    Shared<C>().merges = params.plan.may_split && policy.may_cut && !policy.is_clustered();
  }
  return start;
}

// Streams the KV of a worker's items. A Copier is a Producer that copies the blocks of an item and
// looks up page ids before they are needed. One piece of code serves all block pairs, the first one
// included, because a kernel fetches code that it has not executed yet at some ten cycles an
// instruction. In a call of units this also waits for the CTA's barriers and for earlier kernels,
// once the item behind the first one is found. The kernel in front writes rows to the cache, and
// has itself waited for whoever wrote what is read until then.
template <class C, class Copier>
__device__ __forceinline__ void ProducerLoop(ProducerStart<Copier>& start, const RowTile& tile) {
  Copier& producer = start.producer;
  typename C::Item& item = start.item;
  if (!start.has_item) item = {};
  int block_pair = 0;  // number of block pairs so far, mod kBlockPairNumbers
  bool has_barriers = !C::kHasUnits;
#pragma unroll 1
  // The next item is found one round ahead, so that an item can say whether another follows.
  for (int item_idx = start.has_item ? 0 : -1;; ++item_idx) {
    typename C::Item next{};
    const bool has_next = producer.NextItem(start.work, tile, &next);
    if (!has_barriers) SyncThreads<C>(kSyncThreads, C::kNumThreads);
    has_barriers = true;
    if constexpr (C::kHasUnits) gpu::PdlWait();  // once it has waited, it costs nothing
    if (item_idx >= 0) producer.PublishItem(item, tile, item_idx, has_next, next);
#pragma unroll 1
    for (int32_t block = item.block_begin; block < item.block_end; block += kBlocksPerPair) {
      // In the CTA's first block pair, block 1 is requested when block 0 begins to land. Requested
      // together, both would land late. (With two block pairs in the ring the wait costs 0.6 %.)
      const bool is_first = item_idx == 0 && block == item.block_begin;
      producer.LoadBlockPair(block_pair, item, block,
                             C::kBlockPairs == 1 && is_first && !start.is_small);
      block_pair = C::NextBlockPair(block_pair);
    }
    if (!has_next) {
      if (item_idx < 0) producer.PublishNothing();
      if constexpr (C::kAppends) Append::TellEnd(Shared<C>().append_task);
      return;
    }
    item = next;
    producer.BeginItem(item);
  }
}

}  // namespace jax_mla::decode::sm90::wide
