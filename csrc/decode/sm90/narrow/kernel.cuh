// Narrow decode kernel for Hopper: tiles of 8 or 16 query rows against a long paged cache.
//
// The operands of wgmma are swapped: a block of 64 tokens is the M side, and the query rows are N,
// so a small number of rows does not waste a tile of 64. S^T = K Q^T reads a chunk of the cache
// K-major, and O^T += V^T P^T reads the same bytes MN-major. The cache streams through a ring of
// stages of one chunk (64 tokens x 64 dims, 8 KB): the rope chunk of a block first, then its latent
// chunks. The two math warpgroups share every block by dims. Warpgroup w owns the latent chunks c
// with c % 2 == w in both products, and half of the rope chunk in the first one. Each adds the
// other's partial scores to its own through shared memory. S, P and the statistics are then bitwise
// equal in both (P but for the tile scales), every chunk but rope has one reader, and an item ends
// without a merge of the two. Rows without rotary part have no rope chunk: their first latent chunk
// has the key mask, both warpgroups wait for it, and its owner frees it. The softmax is online with
// a lazy maximum (FlashAttention-4's idea; gpu/online_softmax.cuh). decode/schedule/schedule.h says
// which parts of which sequences a CTA takes, and decode/merge/combine.h what becomes of the
// partial results.
//
// Roles: warps 0-3 math warpgroup WG0, warps 4-7 WG1, warp 8 producer. Where page_size is no
// multiple of a block, four producer warps gather with cp.async. The producer finds the CTA's work
// and tells the math about it. Until then idle math warps prefetch the page table and what will
// most likely be the CTA's first block (first_block.cuh). They do nothing else, because whatever
// they execute delays the producer's cold code. Where the kernel appends a step's new rows
// (Config::kAppends), warp 9 writes them to the cache (new_row.cuh) and, where the call says so,
// rotates the queries (rotate_queries.cuh).
// A cache of codes has chunks of 128 dims, and A operands that the math warps make of the codes in
// registers (codes.cuh): "codes" below. Tile scales come with the rope chunk.
// With two "teams" (Config::kTeams) warps 8-15 are two more math warpgroups, and warp 16 is the
// producer. The teams take blocks in turn, so that the tensor cores have the one's products in the
// other's softmax. Each has stages and a softmax of its own, and at the end of an item the first
// team adds the second one's part (MergeTeams). The queries and the item are common to both, all
// else below is of each team.
// clang-format off
//
// Barrier       kind       arrivals          who arrives, when                 who waits, before what        protects             fence
// q_full[s]     mbarrier   1, tx kQueryBytes producer: item told, Q loading    WG0, WG1: item, QK            q, items written     tx (async)
//               rotated    2, tx: the latent producer; warp 9: rope chunk      the same                      the same             proxy.async (1)
//                          chunks' bytes     rotated; no blocks, no item: producer twice
// q_rope_full   rotated    1, tx: the rope   producer: rope chunk of Q loading warp 9: rotation              q: rope chunk        tx (async)
// q_empty[s]    mbarrier   kQueryEmptyArr.   every math WG: last block done    producer: next item, its Q    q, items reusable    -
// kv_full[s]    mbarrier   kFullArrivals, tx producer: boxes loading           owner (first: WG0, WG1): QK   kv, key_mask written tx (async)
//               gather     kFullArrivals     producer: copies landed           the same                      the same             proxy.async
// kv_empty[s]   mbarrier   kEmptyArrivals    owner: PV retired; rope: WG0,     producer: refill of the stage kv, key_mask         (2)
//                                            past math_all; teams, empty block: owner, landed without data   reusable
// math_all      named 3    kTeamThreads      WG0, WG1: partial S stored; empty WG0, WG1: adding the other's; exchange, key_mask   -
//                                            block: key_mask read              WG0: kv_empty
//                                            partial result stored: vote       WG0, WG1: ScalePartial        exchange, row_stats  -
//                                            ScalePartial: magnitudes; vote    WG0, WG1: factors; stores     exchange as scratch  -
// wg            named 1+w  kWarpgroupThreads codes: own part of q is float16   own WG: QK                    q, query_scale       proxy.async (1)
//                                            vote to raise; maxima stored      own WG: raising them          row_stats            -
//                                            P stored, V rows zeroed           own WG: PV                    p, kv                proxy.async (1)
//                                            sums stored; result written       own WG: result; next item     row_stats, reference -
// exchange_read named 10+w kTeamThreads      tile scales and teams: a WG has   the team's other WG: storing  exchange             -
//                                            read its partial S; start         its partial S
// teams         named 9    kMathThreads      team 0: q is float16, last result both: QK; team 1: the item    q, query_scale, rest proxy.async (1)
//                                            sums stored; team 1: O stored     team 1: its O; team 0: adding p, exchange, stats   -
// kAppendTold   named 4    warps 8 and 9     producer: append_task written     warp 9: the task              append_task          -
// kAppendDone   named 5    warps 8 and 9     warp 9: new row written           producer: its block's copy    the row in the pool  proxy.async, global
// CTA           named 0    all               barriers initialised; warp 9 at   all but warp 9: first use     barriers             mbarrier_init
//                                            once, unless it rotates queries
//
// clang-format on
// (1) Between the stores and the barrier: wgmma reads q, P and V through the asynchronous proxy.
// (2) V rows that the math zeroes are fenced with P, long before the TMA write that refills them.
// Named barriers of the second team have ids that are larger by kTeamBarriers. With one query
// stage (teams) items have two generations, because the item is read again when its queries are
// free.
// Phases: *_full start at 0; the producer first waits on *_empty with parity 1, which passes at
// once. With two buffers that blocks use in turn, `exchange` needs no barrier that says it is
// empty: a block's reads precede the next block's math_all. Registers, stages and what fits beside
// a CTA: kBudgets. Shared memory: sizeof(SharedMemory<Config>).
#pragma once

#include "decode/sm90/narrow/codes.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/math.cuh"
#include "decode/sm90/narrow/output.cuh"
#include "decode/sm90/swapped/roles.cuh"
#include "decode/trace.cuh"
#include "gpu/sm90.cuh"

namespace jax_mla::decode::sm90::narrow {

// Works on one item after another, and on each block by block.
template <class C>
__device__ __forceinline__ void MathRole(const KernelParams& params, SharedMemory<C>& shared,
                                         int warp, int row_tile) {
  Math<C> math(params, shared, warp, row_tile);
  math.FreeExchange();
#pragma unroll 1
  while (math.NextItem()) {
    math.ResetSoftmax();
#pragma unroll 1
    for (int block = 0; block < math.NumBlocks(); ++block) {
      if (math.IsOtherTeams()) {
        math.NextBlock();
        continue;
      }
      trace::Enter(Phase::kWaitKv);
      math.WaitChunk(math.kv);
      const uint64_t key_mask = shared.key_mask[math.kv.stage];
      if (key_mask == 0) {
        math.SkipEmptyBlock();
        continue;
      }
      math.ProcessBlock(block, key_mask);
    }
    WriteItem(math);
    math.query.Advance(1);
  }
}

// Grid: (workers of the schedule, row tiles).
template <class C>
__global__ void __maxnreg__(C::kBudget.registers)
    NarrowDecode(const __grid_constant__ KernelParams params,
                 const __grid_constant__ typename C::Maps maps) {
  RunCta<C>(params, maps, [&](SharedMemory<C>& shared, int warp, int row_tile) {
    if constexpr (C::kMovesRegisters) hw::SetMaxRegistersUp<C::kBudget.math_registers>();
    MathRole(params, shared, warp, row_tile);
  });
}

template <class C>
struct Kernel {
  static constexpr auto kFunction = NarrowDecode<C>;
};

}  // namespace jax_mla::decode::sm90::narrow
