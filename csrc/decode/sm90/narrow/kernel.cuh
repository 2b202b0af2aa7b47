// Narrow decode kernel for Hopper: tiles of 8 or 16 query rows against a long paged cache, and of
// 64 against a cache of codes.
//
// The operands of wgmma are swapped: a block of 64 tokens is the M side, and the query rows are N.
// A small number of rows does not waste a tile of 64. S^T = K Q^T reads a chunk of the cache
// K-major, and O^T += V^T P^T reads the same bytes MN-major. The cache streams through a ring of
// stages of one chunk (64 tokens x 64 dims, 8 KB): the rope chunk of a block first, then its latent
// chunks. The two math warpgroups share every block by dims. Warpgroup w owns the latent chunks c
// with c % 2 == w in both products, and half of the rope chunk in the first one. Each adds the
// other's partial scores to its own through shared memory. S, P and the statistics are then bitwise
// equal in both (P but for the tile scales, see below), every chunk but rope has one reader, and an
// item ends without a merge of the two. The softmax is online with a lazy maximum
// (FlashAttention-4's idea; gpu/online_softmax.cuh). decode/split/schedule.h says which parts of
// which sequences a CTA takes, and decode/split/combine.h what becomes of the partial results.
//
// Roles: warps 0-3 math warpgroup WG0, warps 4-7 WG1, warp 8 producer. Where page_size
// is no multiple of a block, four producer warps gather with cp.async. The producer finds
// the CTA's work and tells the math about it. Until then idle math warps prefetch the page table
// and what will most likely be the CTA's first block (first_block.cuh). They do nothing else,
// because whatever they execute delays the producer's cold code. Where the kernel appends a step's
// new rows (Config::kAppends), warp 9 writes them to the cache (new_row.cuh) and, where the call
// says so, rotates the queries (rotate_queries.cuh).
// A cache of codes has chunks of 128 dims, and A operands that the math warps make of the codes in
// registers (codes.cuh). What then differs is marked "codes" below. Tiles of 64 rows, which only
// such a cache has, are "pairs" with 256 dims: the warpgroups share no block's scores, but take two
// blocks at a time, one each (block_pairs.cuh), and each multiplies both P's with its dims of V.
// Rows of kDsMla have a scale for each token and latent chunk (Config::kHasTileScales). They come
// with the rope chunk, and go on the chunk's part of the scores and into a P of the chunk's own, or
// with query codes on V.
// With two "teams" (Config::kTeams) warps 8-15 are two more math warpgroups, and warp 16 is the
// producer. The teams take blocks in turn, so that the tensor cores have the one's products in the
// other's softmax. Each has stages and a softmax of its own, and at the end of an item the first
// team adds the second one's part (MergeTeams). The queries and the item are common to both, all
// else below is of each team.
// Tiles of 64 rows with 512 dims are "query codes" below (Config::kHasQueryCodes): queries are
// multiplied as codes, or as sums of two. Warps 8-11 are a third math warpgroup, SWG, for the
// scores and the softmax of all blocks (scores.cuh, with tile scales tile_scores.cuh); WG0 and WG1
// multiply V alone (values.cuh). Warp 12 is the producer, and what is said of warps 8 and 9 below
// is true of warps 12 and 13. Rows of "query codes" take the place of those above them. Of the rows
// of math_all and wg, those of results are true of WG0 and WG1; the statistics there are
// `scored`'s.
// clang-format off
//
// Barrier     kind      arrivals           who arrives, when              who waits, before what          protects             fence
// q_full[s]   mbarrier  1, tx kQueryBytes  producer: item told, Q loading WG0, WG1: item, QK              q, items written     tx (async)
//             rotated   2, tx: the latent  producer; warp 9: rope chunk   the same                        the same             proxy.async (2)
//                       chunks' bytes      rotated; without blocks or
//                                          an item: producer twice
//             query     1, tx kQueryBytes  the same                       SWG: item; WG0, WG1: item,     the same             tx (async)
//             codes                                                       queries become codes
// q_rope_full mbarrier  1, tx              producer: rope chunk of Q      warp 9: rotation                q: rope chunk        tx (async)
//   [s]       rotated   kQueryChunkBytes   loading
// q_empty[s]  mbarrier  kMathWarpgroups    WG0, WG1: last block done      producer: next item, its Q      q, items reusable    -
//             pairs, teams                 the same                       the same                        q reusable; items (4)
//             query     1 + kTeamWarps     SWG: last block's scores sent; the same                        the same
//             codes                        warps of WG0, WG1: item seen
// kv_full[s]  mbarrier  kFullArrivals,     producer: boxes loading        owner (rope: WG0, WG1): QK      kv, key_mask written tx (async)
//                       tx kChunkBytes
//             gather    kFullArrivals      producer: copies landed        the same                        the same             proxy.async
//             query     kFullArrivals,     the same                       SWG: key_mask, QK; owner: V    the same             tx (async)
//             codes     tx kChunkBytes
// kv_empty[s] mbarrier  1                  owner: PV retired; rope: WG0,  producer: refill of the stage   kv, key_mask         (1)
//             codes     kEmptyArrivals     past math_all                                                  reusable
//             pairs     kEmptyArrivals     owner: V read; rope: WG0, past the same                        the same             (1)
//                                          math_all; empty block: half
//                                          WG0, half WG1: key_mask read
//             teams     kEmptyArrivals     empty block: owner: landed,     the same                        key_mask             -
//                                          with no data
//             query     kEmptyArrivals     owner's warps: V read; SWG's   the same                        the same             (1)
//             codes                        warps: scored; rope and empty
//                                          block: SWG's warps, twice each
// full[p]     mbarrier  kWarpgroupWarps    SWG's warps: P stored; end of  WG0, WG1: PV; end of an item:   p, scored,           proxy.async (2)
//                                          an item: its sums, references  its result                      scale_tables
// empty[p]    mbarrier  kTeamWarps         warps of WG0, WG1: PV retired; SWG: factors, P, or what        p, scored reusable;  -
//                                          result written                 belongs to an item's end        scale_tables (5)
// scores      named 14  kTeamThreads +     WG0, WG1: queries are codes    SWG: QK                         q, query_scale       proxy.async (2)
//                       kWarpgroupThreads
//                       kWarpgroupThreads  SWG: an item's end sent        SWG: q_empty                    q, items             -
//                                          tile scales: table made        SWG: its scores are multiplied  scale_tables;        -
//                                                                                                         tile_scales reusable
// math_all    named 3   kTeamThreads       WG0, WG1: partial S stored     WG0, WG1: adding the other's    exchange             -
//                                          no pairs: empty block:         WG0: kv_empty                   key_mask             -
//                                          key_mask read
//                                          partial result stored: vote    WG0, WG1: ScalePartial, if any  exchange, row_stats  -
//                                          whether it fits float16        row does not fit                reusable
//                                          ScalePartial: magnitudes       WG0, WG1: each row's factor     exchange as scratch  -
//                                          stored; rows scaled: vote      WG0, WG1: storing again, if any row_stats, reference -
//                                          whether any row changed        row changed                     scaled
//                                          pairs: exponents of queries    WG0, WG1: the row's factor      exchange as scratch  -
//                                          pairs: queries are float16     WG0, WG1: QK                    q, softmax           proxy.async (2)
//                                          pairs: vote whether the        WG0, WG1: raising them, P       p, row_stats         -
//                                          references have to rise                                        reusable
//                                          pairs: maxima stored           WG0, WG1: new references        row_stats            -
//                                          pairs: P stored, V rows zeroed WG0, WG1: PV                    p, kv, softmax       proxy.async (2)
//                                          pairs: sums stored             WG0, WG1: result                row_stats            -
//                                          pairs: result written          WG0, WG1: next item             row_stats, softmax   -
// wg          named     kWarpgroupThreads  own WG: vote whether the       own WG: raising them            row_stats reusable   -
//             1 + w                        references have to rise
//                                          codes: own part of q is        own WG: QK                      q, query_scale       proxy.async (2)
//                                          float16, its factors stored
//                                          maxima stored                  own WG: new references          row_stats            -
//                                          P stored, V rows zeroed        own WG: PV                      p, kv                proxy.async (2)
//                                          sums stored                    own WG: q_empty, result         row_stats, reference -
//                                          result written                 own WG: next item's statistics  the same, reusable   -
//                                          pairs: empty block: key_mask   own WG: kv_empty               key_mask             -
//                                          read; V rows zeroed            own WG: V is loaded            kv                   -
//                                          query codes: V rows zeroed     own WG: V is loaded            kv                   proxy.async (1)
// exchange_   named 10  kTeamThreads       tile scales and teams: a WG    the team's other WG: storing    exchange             -
//   read[wg]  to 13                        has read its partial S; start  its partial S
// teams       named 9   kMathThreads       first team: q is float16, its  both teams: QK                  q, query_scale       proxy.async (2)
//                                          factors stored, last result    second team: the item           exchange, row_stats, -
//                                          written                                                        reference
//                                          sums of the item stored        second team: storing its O      p, exchange: scratch -
//                                          second team: O stored          first team: adding it           p, exchange, stats,  -
//                                                                                                         reference
// kAppendTold named 4   warps 8 and 9      producer: append_task written  warp 9: the task                append_task          -
// kAppendDone named 5   warps 8 and 9      warp 9: new row written        producer: its block's copy      the row in the pool, proxy.async (3)
//                                                                                                         append_task
// CTA         named 0   all                barriers initialised; warp 9   all but warp 9: first use       barriers             mbarrier_init
//                                          at once: it uses none of them,
//                                          unless it rotates queries
//
// clang-format on
// (1) V rows that the math zeroes are fenced with P, or with query codes at once, long before the
//     TMA write that refills them.
// (2) Between the stores and the barrier: wgmma reads q, P and V through the asynchronous proxy.
// (3) Of global memory, between the stores and the barrier: TMA reads the row.
// (4) items have two generations there, because the item is read again when its queries are free.
// (5) Blocks take the four tables in turn. Before SWG makes one, it has waited for PV of the third
//     block before.
// Named barriers of the second team have ids that are larger by kSecondTeam.
// Phases: *_full start at 0; the producer first waits on *_empty with parity 1, which passes at
// once, and so does SWG on empty[p]. With two buffers that blocks use in turn, `exchange` needs no
// barrier that says it is empty: a block's reads precede the next block's math_all. Registers: at
// most Config::kMaxRegisters a thread, in all roles; no setmaxnreg. Pairs: 168 at the launch, then
// 200 a math thread and 104 in the producer's warpgroup, whose other warps are idle unless one
// appends. Teams: 96, then 104 and 64. Query codes: 128, then 184 for the values, 88 for the scores
// and 56 for the producer's warpgroup; with units 80 and 64; with tile scales 176, 104 and 56, or
// with units 96 and 64. Shared memory: sizeof(SharedMemory<Config>). launch.cuh asserts that the
// combine kernel fits beside it; beside pairs, teams and query codes there is no room.
#pragma once

#include <type_traits>

#include "decode/params.h"
#include "decode/sm90/common/first_block.cuh"
#include "decode/sm90/narrow/block_pairs.cuh"
#include "decode/sm90/narrow/box_producer.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/gather_producer.cuh"
#include "decode/sm90/narrow/math.cuh"
#include "decode/sm90/narrow/output.cuh"
#include "decode/sm90/narrow/params.cuh"
#include "decode/sm90/narrow/scores_role.cuh"
#include "decode/sm90/narrow/values.cuh"
#include "decode/trace.cuh"
#include "gpu/launch.h"
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
    if constexpr (C::kTakesPairs) {
      ProcessBlockPairs(math);
    } else {
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
    }
    WriteItem(math);
    math.query.Advance(1);
  }
}

// Writes new rows, and rotates queries.
template <class C>
__device__ __forceinline__ void AppendRole(const KernelParams& params, SharedMemory<C>& shared,
                                           int row_tile) {
  const int rows_left = params.decode.num_heads - row_tile * C::kBlockM;
  Append::Run<C>(
      params.decode, params.new_rows, params.page_size, shared.append_task,
      [&](const AppendTask& task, float2 cos_sin) {
        uint8_t* rope_chunk = shared.q[task.query_stage] + C::kCkvQueryChunks * C::kQueryChunkBytes;
        RotateQueries<C::kDType, C::kDKpe>(params.new_rows.call.rope_interleaved, cos_sin, task,
                                           QueryBarriersOf<C>(shared, task.query_stage), rope_chunk,
                                           MinI32(rows_left, C::kBlockM));
      });
}

// Called by one elected lane: ptxas then knows that the addresses are uniform. For thread 0 it
// would make each barrier a loop over the lanes and a fence: 1,900 cycles, for which everybody
// waits.
template <class C>
__device__ void InitBarriers(const NewRows& new_rows, SharedMemory<C>& shared) {
#pragma unroll 1
  for (int stage = 0; stage < C::kKvStages; ++stage) {
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_full[stage]), C::kFullArrivals);
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_empty[stage]), C::kEmptyArrivals);
  }
#pragma unroll
  for (int stage = 0; stage < C::kQueryStages; ++stage) {
    const QueryBarriers barriers = QueryBarriersOf<C>(shared, stage);
    hw::MbarrierInit(barriers.full, QueryFullArrivals<C>(new_rows));
    if constexpr (C::kAppends) hw::MbarrierInit(barriers.rope_full, 1);
    hw::MbarrierInit(hw::SharedAddress(&shared.q_empty[stage]),
                     C::kHasQueryCodes ? 1 + kTeamWarps : C::kMathWarpgroups);
  }
  if constexpr (C::kHasQueryCodes) {
#pragma unroll
    for (int place = 0; place < kScoredPlaces; ++place) {
      hw::MbarrierInit(hw::SharedAddress(&shared.scored.full[place]), kWarpgroupWarps);
      hw::MbarrierInit(hw::SharedAddress(&shared.scored.empty[place]), kTeamWarps);
    }
  }
  hw::MbarrierInitFence();
}

// Prefetches the page table into L2, a line for each thread of all CTAs. Where a product wraps at
// 32 bits, less is prefetched.
__device__ inline void PrefetchPageTable(const DecodeParams& decode, int thread) {
  constexpr uint32_t kLineInts = 32;
  const uint32_t size = static_cast<uint32_t>(decode.batch) * decode.max_pages_per_seq;
  const uint32_t entry = (blockIdx.x + thread * gridDim.x) * kLineInts;
  if (entry < size) hw::PrefetchL2(decode.page_table + entry);
}

// Grid: (workers of the schedule, row tiles).
template <class C>
__global__ void __maxnreg__(C::kMaxRegisters)
    NarrowDecode(const __grid_constant__ KernelParams params,
                 const __grid_constant__ typename C::Maps maps) {
  using P = std::conditional_t<C::kLoad == KvLoad::kGather, GatherProducer<C>, BoxProducer<C>>;
  static_assert(C::kThreads <= gpu::trace::kMaxWarps * kWarpThreads, "every warp has a track");
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
  // The shuffle tells the compiler that it is uniform; wgmma's descriptors, which depend on it,
  // then live in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0);
  const int row_tile = blockIdx.y;

  constexpr int kFirstScoresWarp = C::kHasQueryCodes ? kTeamWarps : C::kMathWarps;
  trace::Begin(params.decode, warp < kWarpgroupWarps    ? TraceRole::kMath0
                              : warp < kFirstScoresWarp ? TraceRole::kMath1
                              : warp < C::kMathWarps    ? TraceRole::kHelper
                              : warp < C::kAppendWarp   ? TraceRole::kProducer
                                                        : TraceRole::kHelper);
  constexpr int kInitWarp = 1, kTableWarp = kWarpgroupWarps + 1;
  constexpr int kFirstBlockWarp = kTeamWarps - kFirstBlockWarps<C::kLoad>;
  const bool is_producer = warp >= C::kMathWarps;
  const bool is_first_team = warp < kTeamWarps;
  if constexpr (C::kMovesRegisters) {
    if (is_producer) hw::SetMaxRegistersDown<C::kProducerRegisters>();
    if (warp >= C::kFirstIdleWarp) {
      SyncThreads<C>(kSyncThreads, C::kThreads);
      trace::End();
      return;
    }
  }
  if constexpr (C::kAppends) {
    if (warp == C::kAppendWarp) {
      gpu::PdlWait();
      gpu::PdlLaunchDependents();
      SyncAppendWarp<C>(params.new_rows, kSyncThreads, C::kThreads);
      AppendRole(params, shared, row_tile);
      trace::End();
      return;
    }
  }
  typename P::Start start;
  if (is_producer) [[likely]] {
    // In a call of units the kernel in front writes rows to the cache, and has itself waited for
    // whoever wrote what the producer reads to begin with.
    if constexpr (C::kHasUnits) start = P::Begin(params, shared);
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if constexpr (!C::kHasUnits) start = P::Begin(params, shared);
  } else {
    // In front of the wait for earlier kernels stands only what reads nothing that they may have
    // written; a prefetch into L2 does not count as reading. Warps 0 and 4 share the producer's
    // scheduler and do nothing before that wait.
    if (warp == kInitWarp) {
      if (hw::ElectOne()) InitBarriers(params.new_rows, shared);
    } else if (!C::kHasUnits && is_first_team && warp >= kTableWarp &&
               (C::kLoad == KvLoad::kGather || warp < kFirstBlockWarp)) {
      PrefetchPageTable(params.decode, threadIdx.x - kTableWarp * kWarpThreads);
    }
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if (!C::kHasUnits && is_first_team && warp >= kFirstBlockWarp && row_tile == 0) {
      PrefetchFirstBlock<C::kLoad, C::kStorage>(params.decode, params.schedule, params.page_size,
                                                WorkerOf(params.schedule, blockIdx.x),
                                                threadIdx.x - kFirstBlockWarp * kWarpThreads);
    }
  }
  SyncThreads<C>(kSyncThreads, C::kThreads);
  if (is_producer) [[likely]] {
    P::Run(params, maps, shared, start, row_tile);
  } else {
    if constexpr (C::kHasQueryCodes) {
      if (warp >= kFirstScoresWarp) {
        hw::SetMaxRegistersDown<C::kScoresRegisters>();
        ScoresRole(params, shared, warp, row_tile);
      } else {
        hw::SetMaxRegistersUp<C::kMathRegisters>();
        ValuesRole(params, shared, warp, row_tile);
      }
    } else {
      if constexpr (C::kMovesRegisters) hw::SetMaxRegistersUp<C::kMathRegisters>();
      MathRole(params, shared, warp, row_tile);
    }
  }
  trace::End();
}

}  // namespace jax_mla::decode::sm90::narrow
