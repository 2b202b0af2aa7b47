// Decode kernel for Hopper with pairs of blocks: tiles of 64 query rows against a cache of codes
// with 256 dims. (With 512 dims there are query codes, codes64/.)
//
// Operands are swapped as in narrow/: S^T = K Q^T, O^T += V^T P^T, from a ring of chunks of 64
// tokens x 128 codes, the rope chunk of a block first. Codes become float16 in registers, as
// operand A (f16_codes.cuh). The two math warpgroups take a pair of blocks at a time. Each has the
// scores and the softmax of one, and multiplies both P's with its half of V's dims
// (block_pairs.cuh).
//
// Roles: warps 0-3 math warpgroup WG0, warps 4-7 WG1, warp 8 producer, warp 9 appends
// (Config::kAppends), and the rest of the producer's warpgroup is idle: it gives its registers.
// clang-format off
//
// Barrier     kind      arrivals           who arrives, when               who waits, before what      protects              fence
// q_full[s]   mbarrier  1, tx kQueryBytes  producer: item told, Q loading  WG0, WG1: item, QK          q, items written      tx (async)
//             rotated   2, tx: the latent  producer; warp 9: rope chunk    the same                    the same              proxy.async (1)
//                       chunks' bytes      rotated; no blocks, no item: producer twice
// q_rope_full rotated   1, tx: rope chunk  producer: it is loading         warp 9: rotation            q: rope chunk         tx (async)
// q_empty[s]  mbarrier  kQueryEmptyArr.    WG0, WG1: last block done       producer: next item, its Q  q reusable; items (3) -
// kv_full[s]  mbarrier  1, tx kChunkBytes  producer: boxes loading         QK: who has the block; PV:  kv, key_mask written  tx (async)
//                                                                          owner; rope: both
// kv_empty[s] mbarrier  kEmptyArrivals     owner's warps: V read; rope:    producer: refill            kv, key_mask          (2)
//                                          WG0's warps, past math_all;                                 reusable
//                                          empty block: half WG0, half WG1: key_mask read
// math_all    named 3   kTeamThreads       exponents of queries stored     WG0, WG1: the row's factor  exchange as scratch   -
//                                          queries are float16             WG0, WG1: QK                q, softmax            proxy.async (1)
//                                          references are 0                WG0, WG1: softmax           softmax               -
//                                          vote to raise; maxima stored    WG0, WG1: new references, P p, row_stats reusable -
//                                          P stored, V rows zeroed         WG0, WG1: PV                p, kv, softmax        proxy.async (1)
//                                          sums stored; result written     WG0, WG1: result; next item row_stats, softmax    -
//                                          partial result stored: vote     WG0, WG1: ScalePartial      exchange, row_stats   -
//                                          ScalePartial: magnitudes; vote  WG0, WG1: factors; stores   exchange as scratch   -
// wg          named 1+w kWarpgroupThreads  empty block: key_mask read      own WG: kv_empty            key_mask              -
//                                          V rows zeroed                   own WG: V is loaded         kv                    -
// kAppendTold named 4   warps 8 and 9      producer: append_task written   warp 9: the task            append_task           -
// kAppendDone named 5   warps 8 and 9      warp 9: new row written         producer: its block's copy  the row in the pool   proxy.async, global
// CTA         named 0   all                barriers initialised; warp 9 at all but warp 9: first use   barriers              mbarrier_init
//                                          once, unless it rotates queries
//
// clang-format on
// (1) Between the stores and the barrier: wgmma reads q and P through the asynchronous proxy.
// (2) V rows that the math zeroes are fenced with P, long before the TMA write that refills them.
// (3) Items have two generations, because the item is read again when its queries are free.
// Phases: *_full start at 0; the producer first waits on *_empty with parity 1, which passes at
// once. Registers and stages: kBudget. Shared memory: sizeof(SharedMemory<Config>).
#pragma once

#include "decode/sm90/pairs/block_pairs.cuh"
#include "decode/sm90/pairs/config.h"
#include "decode/sm90/pairs/math.cuh"
#include "decode/sm90/swapped/roles.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::pairs {

// Writes the item's result. Its queries were given back behind the last block.
template <class C>
__device__ __forceinline__ void WriteItem(Math<C>& math) {
  trace::Enter(Phase::kWrite);
  math.ReloadItem();
  math.StoreOverLanes(math.sum, [](float a, float b) { return a + b; });
  math.SyncMath();
  WriteStats(math);
  if (math.item.slot == kFinal) {
    WriteFinalVectors(math);
  } else {
    ScaleOutput(math);
    WritePartial(math);
  }
  math.SyncMath();  // before the next item's statistics overwrite this one's
}

// Works on one item after another.
template <class C>
__device__ __forceinline__ void MathRole(const KernelParams& params, SharedMemory<C>& shared,
                                         int warp, int row_tile) {
  Math<C> math(params, shared, warp, row_tile);
#pragma unroll 1
  while (math.NextItem()) {
    math.ResetSoftmax();
    ProcessBlockPairs(math);
    WriteItem(math);
    math.query.Advance(1);
  }
}

// Grid: (workers of the schedule, row tiles).
template <class C>
__global__ void __maxnreg__(C::kBudget.registers)
    PairsDecode(const __grid_constant__ KernelParams params,
                const __grid_constant__ typename C::Maps maps) {
  RunCta<C>(params, maps, [&](SharedMemory<C>& shared, int warp, int row_tile) {
    hw::SetMaxRegistersUp<C::kBudget.math_registers>();
    MathRole(params, shared, warp, row_tile);
  });
}

template <class C>
struct Kernel {
  static constexpr auto kFunction = PairsDecode<C>;
};

}  // namespace jax_mla::decode::sm90::pairs
