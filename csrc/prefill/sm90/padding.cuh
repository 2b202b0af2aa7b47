// Writes the results of padding, which are the queries of no sequence: 0 and -inf.
#pragma once

#include "prefill/sm90/params.cuh"

namespace jax_mla::prefill::sm90 {

// Called by a warp. The CTAs share the queries.
template <class C, class Out>
__device__ __forceinline__ void ZeroPaddingRole(const PrefillParams& p) {
  const int lane = threadIdx.x % kWarpThreads;
  for (int32_t row = blockIdx.x; row < p.num_queries; row += gridDim.x) {
    bool is_used = false;
    for (int32_t first = 0; first < p.num_seqs && !is_used; first += kWarpThreads) {
      bool is_mine = false;
      if (first + lane < p.num_seqs) {
        const Range queries = QueriesOf(p, first + lane);
        is_mine = row >= queries.begin && row - queries.begin < queries.size;
      }
      is_used = __any_sync(kAllLanes, is_mine);
    }
    if (is_used) continue;
    const int64_t first_head = static_cast<int64_t>(row) * p.num_heads;
    for (int32_t head = lane; head < p.num_heads; head += kWarpThreads) {
      p.lse[first_head + head] = gpu::NegativeInfinity();
    }
    constexpr int kVectorElements = sizeof(uint4) / sizeof(Out);
    uint4* out = reinterpret_cast<uint4*>(static_cast<Out*>(p.out) + first_head * C::kDV);
    for (int32_t i = lane; i < p.num_heads * (C::kDV / kVectorElements); i += kWarpThreads) {
      out[i] = uint4{};
    }
  }
}

}  // namespace jax_mla::prefill::sm90
