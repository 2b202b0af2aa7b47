// The producer warp of the prefill kernel: it takes items and copies their queries, keys and
// values.
#pragma once

#include "prefill/sm90/params.cuh"

namespace jax_mla::prefill::sm90 {

template <class C>
__device__ __forceinline__ void CopyQueries(const TensorMaps& maps, const Item& item) {
  const uint32_t full = SharedAddress(&Shared<C>().q_full);
  gpu::sm90::MbarrierArriveExpectTx(full, C::kKeyChunks * C::kQueryChunkBytes);
  gpu::sm90::TmaLoad4d(&maps.q_nope, SharedAddress(Shared<C>().q[0]), full, 0, item.head,
                       item.q_row, 0, gpu::sm90::kCacheEvictFirst);
  gpu::sm90::TmaLoad4d(&maps.q_pe, SharedAddress(Shared<C>().q[C::kNopeChunks]), full, 0, item.head,
                       item.q_row, 0, gpu::sm90::kCacheEvictFirst);
}

template <class C>
__device__ __forceinline__ void CopyKeys(const TensorMaps& maps, const Item& item, int32_t k_row,
                                         int stage) {
  const uint32_t full = SharedAddress(&Shared<C>().k_full[stage]);
  gpu::sm90::MbarrierArriveExpectTx(full, C::kKeyChunks * C::kChunkBytes);
  gpu::sm90::TmaLoad4d(&maps.k_nope, SharedAddress(Shared<C>().k[stage][0]), full, 0, item.head,
                       k_row, 0, gpu::sm90::kCacheEvictNormal);
  gpu::sm90::TmaLoad4d(&maps.kpe, SharedAddress(Shared<C>().k[stage][C::kNopeChunks]), full, 0, 0,
                       k_row, 0, gpu::sm90::kCacheEvictNormal);
}

template <class C>
__device__ __forceinline__ void CopyValues(const TensorMaps& maps, const Item& item, int32_t k_row,
                                           int stage) {
  const uint32_t full = SharedAddress(&Shared<C>().v_full[stage]);
  gpu::sm90::MbarrierArriveExpectTx(full, C::kValueChunks * C::kChunkBytes);
  gpu::sm90::TmaLoad4d(&maps.v, SharedAddress(Shared<C>().v[stage][0]), full, 0, item.head, k_row,
                       0, gpu::sm90::kCacheEvictNormal);
}

// Blocks of an item are copied from the last to the first, because the last one is masked. An item
// without keys is left out if its result is the prior one, in the same memory.
template <class C>
__device__ __forceinline__ void ProducerRole(const KernelParams& params, const TensorMaps& maps) {
  const PrefillParams& call = params.call;
  const int lane = threadIdx.x % kWarpThreads;
  const int32_t num_tiles = CountTiles(call, lane);
  RingPlace ring;
  uint32_t q_phase = 0;
  int32_t item_idx = blockIdx.x;
  for (;;) {
    int32_t next = 0;
    if (lane == 0) next = static_cast<int32_t>(gridDim.x) + atomicAdd(call.next_item, 1);
    const Item item = FindItem<C>(call, params.heads_per_group, num_tiles, item_idx, lane);
    const bool is_in_place = call.prior_out == call.out && call.prior_lse == call.lse;
    const bool is_done = is_in_place && item.num_rows > 0 && item.num_blocks == 0;
    if (lane == 0 && !is_done) {
      gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().q_empty), q_phase ^ 1);
      Shared<C>().item = item;
      if (item.num_blocks == 0) {
        gpu::sm90::MbarrierArrive(SharedAddress(&Shared<C>().q_full));
      } else {
        CopyQueries<C>(maps, item);
      }
      for (int32_t block = item.num_blocks - 1; block >= 0; --block) {
        const int32_t k_row = item.k_row + block * C::kBlockN;
        gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().k_empty[ring.stage]), ring.phase ^ 1);
        CopyKeys<C>(maps, item, k_row, ring.stage);
        gpu::sm90::MbarrierWait(SharedAddress(&Shared<C>().v_empty[ring.stage]), ring.phase ^ 1);
        CopyValues<C>(maps, item, k_row, ring.stage);
        ring.Next();
      }
    }
    __syncwarp();
    if (item.num_rows == 0) return;
    if (!is_done) q_phase ^= 1;
    item_idx = __shfl_sync(kAllLanes, next, 0);
  }
}

}  // namespace jax_mla::prefill::sm90
