// Where the tokens of a sequence lie: which pages it has, which of them exist here, and under which
// local id. A list of slots, as in sparse attention, is a table of pages of one token.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "decode/params.h"
#include "decode/sm90/common/sizes.h"
#include "decode/sm90/common/tensor_map.h"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90 {

// The page table, read token by token.
struct TokenSource {
  const DecodeParams& decode;
  const Divisor& page_size;

  __device__ __forceinline__ int32_t PageOf(int32_t token) const { return page_size.Floor(token); }
  // The token's index in its page.
  __device__ __forceinline__ int32_t InPage(int32_t token, int32_t page_idx) const {
    return token - page_idx * decode.page_size;
  }
  __device__ __forceinline__ int32_t InPage(int32_t token) const {
    return InPage(token, PageOf(token));
  }
  // The global id of page `page_idx` of a sequence. Reads nothing and returns 0 unless `is_inside`
  // is set.
  __device__ __forceinline__ int32_t LoadPageId(int32_t seq_idx, int32_t page_idx,
                                                bool is_inside) const {
    const uint64_t row =
        uint64_t{static_cast<uint32_t>(seq_idx)} * static_cast<uint32_t>(decode.max_pages_per_seq);
    return gpu::sm90::LoadReadOnly(decode.page_table + row + static_cast<uint32_t>(page_idx),
                                   is_inside);
  }
};

// The pool holds the pages [page_begin, page_begin + num_pages). Page ids, page_begin and the layer
// come from the device, and may have any value.
struct OwnedPages {
  int32_t layer;
  int32_t page_begin;

  // The page's id in the pool, or kOutside if it is not there.
  __device__ __forceinline__ int32_t Local(const DecodeParams& p, int32_t page_id) const {
    const uint32_t local = static_cast<uint32_t>(page_id) - static_cast<uint32_t>(page_begin);
    const bool is_owned = page_id >= page_begin &&  // the difference may wrap into the pool
                          local < static_cast<uint32_t>(p.num_pages) &&
                          static_cast<uint32_t>(layer) < static_cast<uint32_t>(p.num_layers);
    return is_owned ? static_cast<int32_t>(local) : kOutside;
  }
};

// OwnedPages on their way from memory: `layer` in lane 0, `page_begin` in the other lanes. One load
// brings both, and Get takes it apart when the work is found. A value that is the same in all lanes
// would go to a uniform register at once, and the load of the lengths would wait for that.
struct PendingOwnedPages {
  int32_t value;

  static __device__ __forceinline__ PendingOwnedPages Load(const DecodeParams& p) {
    const int32_t *layer = p.layer, *page_begin = p.page_begin;
    KeepInRegisters(layer, page_begin);
    return {__ldg(threadIdx.x % kWarpThreads == 0 ? layer : page_begin)};
  }
  __device__ __forceinline__ OwnedPages Get() const {
    constexpr uint32_t kAllLanes = 0xffffffffu;
    return {__shfl_sync(kAllLanes, value, 0), __shfl_sync(kAllLanes, value, 1)};
  }

 private:
  // The compiler would otherwise choose between the two by an indexed load of a kernel parameter,
  // which is slow.
  static __device__ __forceinline__ void KeepInRegisters(const int32_t*& a, const int32_t*& b) {
    asm("" : "+l"(a), "+l"(b));
  }
};

}  // namespace jax_mla::decode::sm90
