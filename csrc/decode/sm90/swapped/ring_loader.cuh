// What both ways to load the cache into the ring of the kernels with swapped operands share: pages
// are looked up, and the math warpgroups are told about items and empty blocks. Roles and barriers:
// each kernel's kernel.cuh.
#pragma once

#include "decode/schedule/find_work.cuh"
#include "decode/schedule/load_units.cuh"
#include "decode/schedule/schedule.h"
#include "decode/sm90/common/limits.cuh"
#include "decode/sm90/common/load/queries.cuh"
#include "decode/sm90/common/load/token_source.cuh"
#include "decode/sm90/common/tensor_map.h"
#include "decode/sm90/swapped/params.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

template <class C>
struct RingLoader {
  using Shared = typename C::Shared;
  using Cursor = KvCursor<C>;
  using Work = typename C::Work;

  __device__ static TokenSource SourceOf(const KernelParams& params) {
    return {params.decode, params.page_size};
  }
  // The global page id of `token`; 0 if the token lies past the end of the sequence.
  __device__ static int32_t LoadPageIdOf(const KernelParams& params, const Work& work,
                                         int32_t token) {
    int32_t seq_idx = work.seq_idx;
    if constexpr (C::kHasUnits) seq_idx = work.unit.seq_idx;
    const TokenSource source = SourceOf(params);
    return source.LoadPageId(seq_idx, source.PageOf(token), token < work.seq_len);
  }

  // What a worker begins with.
  struct First {
    WorkIterator rest;
    Work item;
    bool has_item;
  };
  // Finds it. `look_up` gets the item as soon as what has to be loaded is known.
  template <class LookUp>
  __device__ static First FindFirstWork(const KernelParams& params, LookUp look_up) {
    const int32_t worker = WorkerOf(params.schedule, blockIdx.x);
    if constexpr (C::kHasUnits) {
      First first{};
      if (params.schedule.num_splits > 0) {
        first.rest = FindFixedWork(worker);
      } else {
        UnitStart start = LoadStart(params.decode.units, blockIdx.x);
        first.item.unit = start.first;
        first.has_item = TakeFirstUnit(params.schedule, start, &first.item);
        first.rest = start.work;
      }
      if (!first.has_item) first.has_item = NextWork(params, first.rest, &first.item);
      if (first.has_item) look_up(first.item);
      return first;
    } else {
      const FirstPart first = FindFirst(params.schedule, worker, look_up);
      return {first.rest, first.item, first.has_item};
    }
  }
  __device__ static bool NextWork(const KernelParams& params, WorkIterator& iterator, Work* work) {
    if constexpr (C::kHasUnits) {
      if (!NextUnit(params.schedule, iterator, work)) return false;
      work->unit = LoadUnit(params.decode, work->seq_idx);
      return true;
    } else {
      return iterator.Next(params.schedule, work);
    }
  }

  // Hides the schedule from the compiler, which would otherwise compute a part of the next item
  // before the block that is copied first, and keep it.
  __device__ static void DelaySearch(WorkIterator& iterator) {
    asm volatile("" : "+r"(iterator.policy.worker_cost), "+r"(iterator.policy.cost_step));
  }

  // Tells the math about an item, and starts the copy of its queries. Without work it tells that
  // there is none left. Called by one thread.
  __device__ static void SendItem(const KernelParams& params, const TensorMaps& maps,
                                  Shared& shared, const QueryCursor<C>& cursor, const Work& work,
                                  bool has_work, int row_tile) {
    trace::Enter(Phase::kSendItem);
    const QueryBarriers barriers = QueryBarriersOf<C>(shared, cursor.stage);
    const uint32_t q = hw::SharedAddress(shared.q[cursor.stage]);
    hw::MbarrierWait(hw::SharedAddress(&shared.q_empty[cursor.stage]), cursor.parity ^ 1);
    typename C::Item& item = shared.items[ItemIndex<C>(cursor)];
    static_cast<sm90::Item&>(item) = {
        .seq_idx = work.seq_idx,
        .num_blocks = has_work ? work.block_end - work.block_begin : kNoMoreItems,
        .tokens_left = work.seq_len - work.block_begin * kBlockN,
        .slot = work.is_final() ? kFinal : work.slot()};
    if constexpr (C::kHasUnits) item.unit = work.unit;
    if (!has_work) {
      for (int i = 0; i < QueryFullArrivals<C>(params.new_rows); ++i) {
        hw::MbarrierArrive(barriers.full);
      }
      return;
    }
    int32_t row_begin = row_tile * C::kTileRows, seq_idx = work.seq_idx;
    if constexpr (C::kHasUnits) row_begin += work.unit.row_begin, seq_idx = 0;
    constexpr uint32_t kNopeBytes = C::kCkvQueryChunks * C::kQueryChunkBytes;
    const QueryTile tile{q, q + kNopeBytes, kNopeBytes, C::kRopeQueryBytes};
    LoadQueryTile<C>({&maps.q_nope, &maps.q_pe, row_begin, seq_idx}, params.new_rows, tile,
                     barriers, work.block_begin < work.block_end);
  }

  // Sends a block without a single key: one stage of the ring and no copy. Called by every thread
  // that arrives on kv_full. Where threads gather, the leader arrives once more, as it does for
  // every block.
  __device__ static void SendEmptyBlock(Shared& shared, const Cursor& cursor, bool is_leader) {
    const uint32_t full = hw::SharedAddress(&shared.kv_full[cursor.stage]);
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_empty[cursor.stage]), cursor.parity ^ 1);
    if (is_leader) {
      shared.key_mask[cursor.stage] = 0;
      if constexpr (C::kLoad == KvLoad::kGather) hw::MbarrierArrive(full);
    }
    hw::MbarrierArrive(full);
  }
};

}  // namespace jax_mla::decode::sm90
