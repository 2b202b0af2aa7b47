// Which pages exist here, and under which local id.
#pragma once

#include <cstdint>

#include "decode/params.h"
#include "decode/sm90/common/tensor_map.h"

namespace jax_mla::decode::sm90 {

// Pages [page_begin, page_begin + num_pages) of a layer inside the pool. Any value may come from
// the device.
struct OwnedPages {
  int32_t layer;
  int32_t page_begin;

  // Local id, or kOutside.
  __device__ __forceinline__ int32_t Local(const DecodeParams& p, int32_t page_id) const {
    const uint32_t local = static_cast<uint32_t>(page_id) - static_cast<uint32_t>(page_begin);
    const bool is_owned = page_id >= page_begin &&  // else the difference may wrap into the pool
                          local < static_cast<uint32_t>(p.num_pages) &&
                          static_cast<uint32_t>(layer) < static_cast<uint32_t>(p.num_layers);
    return is_owned ? static_cast<int32_t>(local) : kOutside;
  }
};

// The same on its way from memory: `layer` in lane 0, `page_begin` in the others. One load that is
// taken apart when the work is found. A value that all lanes share would go to a uniform register
// at once, and the load of the lengths would wait for that.
struct PendingOwnedPages {
  int32_t value;

  static __device__ __forceinline__ PendingOwnedPages Load(const DecodeParams& p) {
    constexpr int kWarpThreads = 32;
    const int32_t *layer = p.layer, *page_begin = p.page_begin;
    asm("" : "+l"(layer), "+l"(page_begin));  // else an indexed load of a parameter: slow
    return {__ldg(threadIdx.x % kWarpThreads == 0 ? layer : page_begin)};
  }
  __device__ __forceinline__ OwnedPages Get() const {
    constexpr uint32_t kAllLanes = 0xffffffffu;
    return {__shfl_sync(kAllLanes, value, 0), __shfl_sync(kAllLanes, value, 1)};
  }
};

}  // namespace jax_mla::decode::sm90
