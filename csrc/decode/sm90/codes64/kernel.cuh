// Decode kernel for Hopper with query codes: tiles of 64 query rows against a cache of codes with
// 512 dims. Codes are multiplied by codes for the scores, and become 16-bit values in registers, as
// operand A, for O^T += V^T P^T (swapped/codes.cuh).
//
// The cache streams through a ring of chunks of 64 tokens x 128 codes, the rope chunk of a block
// first. Rows without rotary part have none: then the key mask goes with the first latent chunk. A
// warpgroup of its own (SWG) has the scores and the softmax of all blocks (scores.cuh, with tile
// scales tile_scores.cuh). Two others multiply V with its P, half of the dims each (values.cuh).
// Tile scales come with the rope chunk.
//
// Roles: warps 0-3 WG0, warps 4-7 WG1, warps 8-11 SWG, warp 12 producer, warp 13 appends
// (Config::kAppends), and the rest of the producer's warpgroup is idle: it gives its registers.
// Where page_size is no multiple of a block, all four of its warps gather.
// clang-format off
//
// Barrier     kind      arrivals          who arrives, when               who waits, before what          protects             fence
// q_full[s]   mbarrier  1, tx kQueryBytes producer: item told, Q loading  SWG: item; WG0, WG1: item,      q, items written     tx (async)
//             rotated   2, tx: the latent producer; warp 13: rope chunk   queries become codes
//                       chunks' bytes     rotated; no blocks, no item: producer twice
// q_rope_full rotated   1, tx: rope chunk producer: it is loading         warp 13: rotation               q: rope chunk        tx (async)
// q_empty[s]  mbarrier  kQueryEmptyArr.   SWG: last block's scores sent;  producer: next item, its Q      q reusable; items (3) -
//                                         warps of WG0, WG1: item seen
// kv_full[s]  mbarrier  kFullArrivals, tx producer: boxes loading,        SWG: key_mask, QK; owner: V     kv, key_mask written tx (async); gather:
//                                         or copies landed                                                                     proxy.async
// kv_empty[s] mbarrier  kEmptyArrivals    owner's warps: V read; SWG's    producer: refill                kv, key_mask         (2)
//                                         warps: scored; rope and empty block: SWG's warps, twice each    reusable
// full[p]     mbarrier  kWarpgroupWarps   SWG's warps: P stored; end of   WG0, WG1: PV; end of an item:   p, scored,           proxy.async (1)
//                                         an item: its sums, references   its result                      scale_tables
// empty[p]    mbarrier  kTeamWarps        warps of WG0, WG1: PV retired;  SWG: factors, P, or what        p, scored reusable;  -
//                                         result written                  belongs to an item's end        scale_tables (4)
// scores      named 14  kTeamThreads +    WG0, WG1: queries are codes     SWG: QK                         q, query_scale       proxy.async (1)
//                       kWarpgroupThreads
//                       kWarpgroupThreads SWG: item's end sent; table     SWG: q_empty; scores are        q, items,            -
//                                         made                            multiplied                      scale_tables, tile_scales reusable
// math_all    named 3   kTeamThreads      partial result stored: vote     WG0, WG1: ScalePartial          exchange, scored     -
//                                         ScalePartial: magnitudes; vote  WG0, WG1: factors; stores       exchange as scratch  -
//                                         result written                  WG0, WG1: next item             exchange, scored     -
// wg          named 1+w kWarpgroupThreads V rows zeroed                   own WG: V is loaded             kv                   proxy.async (2)
// kAppendTold named 4   warps 12 and 13   producer: append_task written   warp 13: the task               append_task          -
// kAppendDone named 5   warps 12 and 13   warp 13: new row written        producer: its block's copy      the row in the pool  proxy.async, global
// CTA         named 0   all               barriers initialised; warp 13   all but warp 13: first use      barriers             mbarrier_init
//                                         at once, unless it rotates queries
//
// clang-format on
// (1) Between the stores and the barrier: wgmma reads q and P through the asynchronous proxy.
// (2) V rows that the math zeroes are fenced at once, long before the TMA write that refills them.
// (3) Items have two generations, because the item is read again when its queries are free.
// (4) Blocks take the tables in turn. Before SWG makes one, it has waited for PV of the third block
//     before.
// Phases: *_full start at 0; the producer first waits on *_empty with parity 1, which passes at
// once, and so does SWG on empty[p]. Registers and stages: kBudgets. Shared memory:
// sizeof(SharedMemory<Config>).
#pragma once

#include "decode/sm90/codes64/config.h"
#include "decode/sm90/codes64/scores_role.cuh"
#include "decode/sm90/codes64/values.cuh"
#include "decode/sm90/swapped/roles.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::codes64 {

// Grid: (workers of the schedule, row tiles).
template <class C>
__global__ void __maxnreg__(C::kBudget.registers)
    Codes64Decode(const __grid_constant__ KernelParams params,
                  const __grid_constant__ typename C::Maps maps) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
  // The shuffle tells the compiler that it is uniform; wgmma's descriptors, which depend on it,
  // then live in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0);
  const int row_tile = blockIdx.y;

  trace::Begin(params.decode, warp < kWarpgroupWarps  ? TraceRole::kMath0
                              : warp < C::kValueWarps ? TraceRole::kMath1
                              : warp < C::kMathWarps  ? TraceRole::kHelper
                              : warp < C::kAppendWarp ? TraceRole::kProducer
                                                      : TraceRole::kHelper);
  typename Loader<C>::Start start;
  const auto init_barriers = [&] {
    InitRings<C>(params.new_rows, shared);
#pragma unroll
    for (int place = 0; place < kScoredPlaces; ++place) {
      hw::MbarrierInit(hw::SharedAddress(&shared.scored.full[place]), kWarpgroupWarps);
      hw::MbarrierInit(hw::SharedAddress(&shared.scored.empty[place]), kTeamWarps);
    }
    hw::MbarrierInitFence();
  };
  if (BeginCta<C>(params, shared, warp, row_tile, init_barriers, start)) {
    if (warp >= C::kMathWarps) [[likely]] {
      Loader<C>::Run(params, maps, shared, start, row_tile);
    } else if (warp >= C::kValueWarps) {
      hw::SetMaxRegistersDown<C::kScoresRegisters>();
      ScoresRole(params, shared, warp, row_tile);
    } else {
      hw::SetMaxRegistersUp<C::kBudget.math_registers>();
      ValuesRole(params, shared, warp, row_tile);
    }
  }
  trace::End();
}

template <class C>
struct Kernel {
  static constexpr auto kFunction = Codes64Decode<C>;
};

}  // namespace jax_mla::decode::sm90::codes64
