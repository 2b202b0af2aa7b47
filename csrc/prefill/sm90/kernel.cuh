// Hopper prefill kernel: attention on keys and values of every head.
//
// Algorithm. A CTA serves one item after another: 128 queries of one head, 64 for each of two math
// warpgroups. It streams keys and values in blocks, the last block first. A warpgroup issues
// the scores of a block before it multiplies P and V of the previous one, and computes the softmax
// while the tensor cores work on that product. The warpgroups take turns: one issues both products
// while the other computes its softmax. This is FlashAttention-3's schedule (2024); that a row's
// reference rises only where it must is FlashAttention-4's (2025).
//
// Keys have their rotary part in an array of its own, which all heads share, and so have queries.
// Neither is ever concatenated. Sequences lie end to end in one array: nothing is padded.
//
// Roles. Warps 0-7 are the math warpgroups. Warp 8 is the producer: it takes items from a counter
// in global memory and copies their operands (TMA). Warp 9 writes the results of padding. Warps 10
// and 11 give their registers to the math warpgroups.
//
// clang-format off
//
// Barrier       kind      arrivals        who arrives, when                     who waits, before what  protects   fence
// q_full        mbarrier  1, tx           producer: item told, Q loading;       math: item, first QK    q, item    tx (async)
//                                         without keys, nothing loads
// q_empty       mbarrier  kNumMathGroups  math: last QK done; without keys,     producer: next item     q, item    -
//                                         kGroup passed
// k_full[s]     mbarrier  1, tx           producer: keys loading                math: QK                k[s]       tx (async)
// k_empty[s]    mbarrier  kNumMathGroups  math: QK done                         producer: refill        k[s]       -
// v_full[s]     mbarrier  1, tx           producer: values loading              math: PV                v[s]       tx (async)
// v_empty[s]    mbarrier  kNumMathGroups  math: PV done                         producer: refill        v[s]       -
// kTurn + g     named     256             warpgroup 1 - g: QK and PV issued     warpgroup g: its QK, PV  order     -
// kGroup + g    named     128             warpgroup g: V rows past the end = 0  warpgroup g: its PV     v[s]       proxy.async
//                                         the same: item without keys read      its release of the item item       -
// kSyncThreads  named     384             all: barriers initialised             all: first use          mbarriers  mbarrier_init
//
// clang-format on
// Phases. mbarriers start at phase 0. The producer first waits on *_empty with parity 1, which
// passes at once. Warpgroup 1 arrives at kTurn + 0 before its first item, so that warpgroup 0 has
// the first turn. Both take the same number of turns.
//
// Registers: 232 a math thread, 40 of the others (setmaxnreg). Shared memory: SharedMemory<C>, 208
// KB with DeepSeek's sizes.
#pragma once

#include "prefill/sm90/math.cuh"
#include "prefill/sm90/padding.cuh"
#include "prefill/sm90/params.cuh"
#include "prefill/sm90/producer.cuh"

namespace jax_mla::prefill::sm90 {

template <class C>
__device__ __forceinline__ void MathRole(const PrefillParams& call) {
  Math<C> math(call);
  const int own_turn = kTurn + math.thread.group, other_turn = kTurn + 1 - math.thread.group;
  if (math.thread.group == 1) gpu::sm90::NamedBarrierArrive(other_turn, kNumMathThreads);
  for (;;) {
    math.NextItem();
    if (math.item.num_rows == 0) return;
    math.Begin();
    if (math.item.num_blocks == 0) {
      math.SyncGroup();
      math.Release(Shared<C>().q_empty);
      math.Write();
      continue;
    }
    math.IssueScores();
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(math.scores);
    math.ReleaseKeys();
    if (math.item.num_blocks == 1) math.Release(Shared<C>().q_empty);
    math.Mask(math.item.num_blocks - 1);
    if (math.Softmax()) math.ScaleOut();
    math.PackP();
#pragma unroll 1
    for (int32_t block = math.item.num_blocks - 2; block >= 0; --block) {
      gpu::sm90::NamedBarrierSync(own_turn, kNumMathThreads);
      math.IssueScores();
      math.IssueValues(block == math.item.num_blocks - 2);
      gpu::sm90::NamedBarrierArrive(other_turn, kNumMathThreads);
      gpu::sm90::WgmmaWait<1>();
      gpu::sm90::WgmmaFenceOperand(math.scores);
      math.ReleaseKeys();
      if (block == 0) math.Release(Shared<C>().q_empty);
      if (math.IsMasked(block)) math.Mask(block);
      const bool rescale = math.Softmax();
      gpu::sm90::WgmmaWait<0>();
      gpu::sm90::WgmmaFenceOperand(math.out);
      math.ReleaseValues();
      if (rescale) math.ScaleOut();
      math.PackP();
    }
    math.IssueValues(math.item.num_blocks == 1);
    gpu::sm90::WgmmaWait<0>();
    gpu::sm90::WgmmaFenceOperand(math.out);
    math.ReleaseValues();
    math.Write();
  }
}

// Called by one thread.
template <class C>
__device__ __forceinline__ void InitBarriers() {
  constexpr int kProducer = 1;
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_full), kProducer);
  gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().q_empty), kNumMathGroups);
  for (int stage = 0; stage < kStages; ++stage) {
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().k_full[stage]), kProducer);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().k_empty[stage]), kNumMathGroups);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().v_full[stage]), kProducer);
    gpu::sm90::MbarrierInit(SharedAddress(&Shared<C>().v_empty[stage]), kNumMathGroups);
  }
  gpu::sm90::MbarrierInitFence();
}

// Grid: one CTA an SM, or fewer if there are fewer items.
template <class C>
__global__ void __launch_bounds__(kNumThreads, 1)
    PrefillAttention(const __grid_constant__ KernelParams params,
                     const __grid_constant__ TensorMaps maps) {
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  if (threadIdx.x == 0) InitBarriers<C>();
  gpu::sm90::NamedBarrierSync(kSyncThreads, kNumThreads);
  if (warp < kProducerWarp) {
    gpu::sm90::SetMaxRegistersUp<kMathRegisters>();
    MathRole<C>(params.call);
    return;
  }
  gpu::sm90::SetMaxRegistersDown<kProducerRegisters>();
  if (warp == kProducerWarp) {
    ProducerRole<C>(params, maps);
  } else if (warp == kPaddingWarp) {
    if (params.call.out_is_f32) {
      ZeroPaddingRole<C, float>(params.call);
    } else {
      ZeroPaddingRole<C, typename C::T>(params.call);
    }
  }
}

}  // namespace jax_mla::prefill::sm90
