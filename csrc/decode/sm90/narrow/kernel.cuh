// Narrow MLA decode for Hopper: few query rows against a long paged cache (swap-AB).
//
// A block of 64 tokens is the M side of every wgmma and the query rows are N, so 8 to 32 rows do
// not pay for a 64-row tile: S^T = K Q^T (A = K chunk, K-major), O^T += V^T P^T (A = the same
// bytes, MN-major). The cache streams through a ring of 8 KB chunks (64 tokens x 64 dims): of each
// block first the rope chunk, then the latent chunks.
// The math warpgroups share every block by dims: warpgroup w owns the latent chunks c = w mod 2 in
// both products and half of the rope chunk, and adds the other's partial scores through shared
// memory. S, P and softmax statistics are then bitwise equal in both, each chunk has one reader,
// and nothing is merged at the end of an item. The softmax is online with a lazy maximum (as in
// FlashAttention-4). Schedule: decode/split/schedule.h. Parts of split sequences:
// decode/split/combine.h.
//
// Roles: WG0, WG1 math. Producer: one warp that issues TMA boxes; four where pages are smaller than
// a block, each with one box of every chunk, or gathering with cp.async if no box fits. It finds
// the CTA's work and tells the math about it; until then warps of WG1 prefetch the page table and
// what will most likely be its first block (first_block.cuh), and no more: whatever they execute
// delays the producer's cold code.
//
// Barrier     kind      arrivals           who arrives, when    who waits, before  protects  fence
// q_full[s]   mbarrier  1, tx kQueryBytes  producer: item told, WG0, WG1: reading  sQ, items tx
//                                          Q under way          the item, QK       written   (TMA)
// q_empty[s]  mbarrier  kNumMathWgs        WG0, WG1: Q and item producer: next     sQ, items -
//                                          no longer needed     item's Q           reusable
// kv_full[s]  mbarrier  kFullArrivals, tx  producer: chunk on   the chunk's owner  kv,       tx, or
//                       kChunkBytes        its way; gather:     (rope: WG0, WG1):  key_mask  proxy.
//                                          a thread's copies    QK on it           written   async
// kv_empty[s] mbarrier  1                  owner: PV retired;   producer: refill   kv,       (1)
//                                          rope: WG0, past      of the slot        key_mask
//                                          math_all                                reusable
// math_all    named 3   kNumMathThreads    WG0, WG1: partial S  WG0, WG1: adding   exchange  -
//                                          stored; or no key in the other's; or    written,
//                                          the block: mask read slot freed         key_mask
// wg          named     kWarpgroupThreads  own WG: vote; maxima own WG: rescale,   row_stats (2)
//             1 + w                        or sums stored; P    PV, writing the    sP, V
//                                          stored               item               rows zero
// (1) Rows zeroed by the math are fenced (proxy.async) with P, before the next TMA write.
// (2) proxy.async between the P stores and the barrier: wgmma reads P and the zeroed rows.
// Phases: *_full start at 0; the producer first waits on *_empty with parity 1 (passes at once).
// The exchange buffer needs no empty barrier: it alternates, and a block's reads precede the next
// block's math_all.
// Registers: up to 79 (gathering 96), 96, 144 a thread for kBlockM 8, 16, 32, no setmaxnreg. Shared
// memory: sizeof(SharedMemory<Config>), and launch.cuh asserts that the combine kernel fits beside
// it.
#pragma once

#include <cuda.h>

#include <cfloat>
#include <type_traits>

#include "decode/params.h"
#include "decode/sm90/common/first_block.cuh"
#include "decode/sm90/narrow/box_producer.cuh"
#include "decode/sm90/narrow/config.h"
#include "decode/sm90/narrow/gather_producer.cuh"
#include "decode/sm90/narrow/params.cuh"
#include "decode/split/partial_range.cuh"
#include "decode/trace.cuh"
#include "gpu/element.h"
#include "gpu/launch.h"
#include "gpu/online_softmax.cuh"
#include "gpu/sm90.cuh"
#include "gpu/sm90_wgmma.cuh"

namespace jax_mla::decode::sm90::narrow {

template <class C>
struct Math {
  using T = gpu::Element<C::kDType>;
  using Shared = SharedMemory<C>;
  using Cursor = KvCursor<C>;

  // Where a math thread stands. All members but lane and thread are uniform in a warp.
  struct Place {
    int wg, warp, lane, thread;  // warp and thread within the warpgroup

    // In a fragment: first token (then + 8) of the M side ...
    __device__ int FirstToken() const { return warp * kMmaK + lane / 4; }
    // ... and the query row of the tile that register pair j / 2 holds, j in [0, kThreadRows).
    __device__ int Row(int j) const { return (j / 2) * 8 + (lane % 4) * 2 + j % 2; }
    __device__ void SyncWg() const { hw::NamedBarrierSync(kBarrierWg + wg, kWarpgroupThreads); }
  };

  // What a thread keeps between the blocks of an item.
  struct State {
    float acc[C::kOwnChunks][C::kAccumulators];  // O^T of the own latent chunks
    float max_log2[C::kThreadRows];              // lazy running maximum
    float sum[C::kThreadRows];                   // of this thread's tokens only

    __device__ void Reset() {
#pragma unroll
      for (int chunk = 0; chunk < C::kOwnChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) acc[chunk][i] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < C::kThreadRows; ++j) {
        max_log2[j] = gpu::kNoReference;
        sum[j] = 0.0f;
      }
    }
  };

  // Register i of a 64 x kBlockM fragment belongs to row RowOf(i) of kThreadRows.
  __device__ static constexpr int RowOf(int i) { return (i / 4) * 2 + i % 2; }

  // Slot of latent chunk `own` of this warpgroup in the block that starts at `block`.
  __device__ static Cursor OwnChunk(const Cursor& block, const Place& place, int own) {
    return block.Ahead(1 + own * kNumMathWgs + place.wg);
  }

  __device__ static void WaitChunk(Shared& shared, const Cursor& cursor) {
    hw::MbarrierWait(hw::SharedAddress(&shared.kv_full[cursor.stage]), cursor.parity);
    // Gathered chunks were written by the generic proxy; wgmma reads through the asynchronous one.
    if constexpr (C::kLoad == KvLoad::kGather) hw::FenceProxyAsyncShared();
  }

  // scores = this warpgroup's part of S^T: half of the rope chunk, then its latent chunks as they
  // land. The caller has waited for the rope chunk.
  __device__ static void PartialScores(Shared& shared, const Cursor& block, int query_stage,
                                       const Place& place, float (&scores)[C::kAccumulators]) {
    constexpr auto kK = hw::Major::K;
    const uint32_t q = hw::SharedAddress(shared.q[query_stage]);
    const uint32_t rope_begin = place.wg * C::kOwnRopeSteps * kMmaKBytes;
    const uint64_t rope =
        hw::SharedDescriptor(hw::SharedAddress(shared.kv[block.stage]) + rope_begin);
    const uint64_t q_rope =
        hw::SharedDescriptor(q + C::kCkvChunks * C::kQueryChunkBytes + rope_begin);
    trace::Enter(Phase::kQk);
    hw::WgmmaFenceOperand(scores);
    hw::WgmmaArrive();
#pragma unroll
    for (int step = 0; step < C::kOwnRopeSteps; ++step) {
      hw::WgmmaSS<T, C::kBlockM, kK, kK>(hw::AdvanceDescriptor(rope, step * kMmaKBytes),
                                         hw::AdvanceDescriptor(q_rope, step * kMmaKBytes), scores,
                                         step > 0);
    }
#pragma unroll 1
    for (int own = 0; own < C::kOwnChunks; ++own) {
      const Cursor cursor = OwnChunk(block, place, own);
      const int chunk = own * kNumMathWgs + place.wg;
      WaitChunk(shared, cursor);
      hw::WgmmaArrive();
      const uint64_t k_chunk = hw::SharedDescriptor(hw::SharedAddress(shared.kv[cursor.stage]));
      const uint64_t q_chunk = hw::SharedDescriptor(q + chunk * C::kQueryChunkBytes);
#pragma unroll
      for (int step = 0; step < kChunk / kMmaK; ++step) {
        hw::WgmmaSS<T, C::kBlockM, kK, kK>(hw::AdvanceDescriptor(k_chunk, step * kMmaKBytes),
                                           hw::AdvanceDescriptor(q_chunk, step * kMmaKBytes),
                                           scores, true);
      }
      hw::WgmmaCommit();
    }
    trace::Enter(Phase::kWaitMma);
    hw::WgmmaWait<0>();
    hw::WgmmaFenceOperand(scores);
  }

  // Adds the other warpgroup's partial scores. One addition, so both get the same bits.
  __device__ static void ExchangeScores(Shared& shared, int parity, const Place& place,
                                        float (&scores)[C::kAccumulators]) {
    auto& buffer = shared.exchange[parity];
    trace::Enter(Phase::kExchange);
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      buffer[place.wg][j][place.thread] =
          make_float4(scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]);
    }
    hw::NamedBarrierSync(kBarrierMath, kNumMathThreads);
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      const float4 other = buffer[1 - place.wg][j][place.thread];
      scores[4 * j] += other.x;
      scores[4 * j + 1] += other.y;
      scores[4 * j + 2] += other.z;
      scores[4 * j + 3] += other.w;
    }
  }

  // Hides what a row must not see: absent keys, tokens past the end, the causal future.
  __device__ static void MaskScores(const KernelParams& params, uint64_t key_mask, int tokens_left,
                                    int row_tile, const Place& place,
                                    float (&scores)[C::kAccumulators]) {
    const int token = place.FirstToken();
    const bool is_key[] = {(key_mask >> token & 1) != 0, (key_mask >> (token + 8) & 1) != 0};
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      int limit = tokens_left - token;
      if (params.decode.causal) {  // query i of q_len does not see the tokens of the later ones
        const int query = params.num_heads.Floor(row_tile * C::kBlockM + place.Row(j));
        limit += query - (params.decode.q_len - 1);
      }
      const int i = (j / 2) * 4 + j % 2;
      if (!is_key[0] || limit <= 0) scores[i] = -INFINITY;
      if (!is_key[1] || limit <= 8) scores[i + 2] = -INFINITY;
    }
  }

  // Zeroes the own V rows of tokens that are no keys: P is 0 there, and 0 * NaN would not be.
  __device__ static void ZeroAbsentRows(Shared& shared, const Cursor& block, uint64_t key_mask,
                                        const Place& place) {
    constexpr int kRowVectors = kChunkRowBytes / kCopyBytes;
#pragma unroll 1
    for (int own = 0; own < C::kOwnChunks; ++own) {
      uint8_t* chunk = shared.kv[OwnChunk(block, place, own).stage];
#pragma unroll 1
      for (int i = place.thread; i < kBlockN * kRowVectors; i += kWarpgroupThreads) {
        if (key_mask >> (i / kRowVectors) & 1) continue;
        *reinterpret_cast<uint4*>(chunk + i * kCopyBytes) = uint4{};
      }
    }
  }

  // Of the two scores of a row that a thread has.
  __device__ static float MaxOfRow(const float (&scores)[C::kAccumulators], int j) {
    const int i = (j / 2) * 4 + j % 2;
    return fmaxf(scores[i], scores[i + 2]);
  }

  // Combines what the lanes with the same rows have, and leaves it to the other warps. All rows
  // step by step, as their shuffles are then under way together.
  template <class Combine>
  __device__ static void StoreOverLanes(float (&stats)[C::kBlockM][kWarpgroupWarps],
                                        const Place& place, float (&values)[C::kThreadRows],
                                        Combine combine) {
#pragma unroll
    for (int offset = 4; offset < kWarpThreads; offset *= 2) {
#pragma unroll
      for (int j = 0; j < C::kThreadRows; ++j) {
        values[j] = combine(values[j], __shfl_xor_sync(~0u, values[j], offset));
      }
    }
    if (place.lane >= 4) return;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) stats[place.Row(j)][place.warp] = values[j];
  }

  // Raises the running maxima if any score of the warpgroup passes its row's by kRescaleThreshold.
  // An item's first scores do, without a vote; gathering, with one: page size 1 is up to 1 % slower
  // without.
  __device__ static void UpdateMax(Shared& shared, const Place& place,
                                   const float (&scores)[C::kAccumulators], bool is_first,
                                   State& state) {
    bool exceeded = false;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      exceeded |= MaxOfRow(scores, j) > state.max_log2[j] + gpu::kRescaleThreshold;
    }
    const bool is_certain = is_first && C::kLoad != KvLoad::kGather;
    if (!is_certain && !hw::NamedBarrierAny(kBarrierWg + place.wg, kWarpgroupThreads, exceeded)) {
      return;
    }
    auto& stats = shared.row_stats[place.wg];
    float maxima[C::kThreadRows];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) maxima[j] = MaxOfRow(scores, j);
    StoreOverLanes(stats, place, maxima, [](float a, float b) { return fmaxf(a, b); });
    place.SyncWg();
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const float4 warps = *reinterpret_cast<const float4*>(stats[place.Row(j)]);
      const float row_max =
          fmaxf(state.max_log2[j], fmaxf(fmaxf(warps.x, warps.y), fmaxf(warps.z, warps.w)));
      const float rescale = hw::Exp2(state.max_log2[j] - row_max);
      state.max_log2[j] = row_max;
      if (is_first) continue;  // sums and O are 0
      state.sum[j] *= rescale;
#pragma unroll
      for (int own = 0; own < C::kOwnChunks; ++own) {
        state.acc[own][(j / 2) * 4 + j % 2] *= rescale;
        state.acc[own][(j / 2) * 4 + j % 2 + 2] *= rescale;
      }
    }
  }

  // P = exp2(scores - max), summed and stored as [row][token] for wgmma's B side.
  __device__ static void StoreP(Shared& shared, const Place& place,
                                float (&scores)[C::kAccumulators], State& state) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) {
      scores[i] = hw::Exp2(scores[i] - state.max_log2[RowOf(i)]);
      state.sum[RowOf(i)] += scores[i];
    }
    // Lane l addresses row l % 8 of 8x8 matrix l / 8; the matrices: token half, then 8 more rows.
    const int row = (C::kBlockM > 8 ? place.lane / 16 * 8 : 0) + place.lane % 8;
    const int token = place.warp * kMmaK + place.lane / 8 % 2 * 8;
    const uint32_t swizzle = place.lane % 8 * kCopyBytes;
    const uint32_t address = hw::SharedAddress(shared.p[place.wg]) + row * kChunkRowBytes +
                             ((token * kElementBytes) ^ swizzle);
    uint32_t packed[C::kAccumulators / 2];
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 2; ++i) {
      packed[i] = hw::Pack2<T>(scores[2 * i], scores[2 * i + 1]);
    }
    if constexpr (C::kBlockM == 8) {
      hw::StoreMatrixX2Transposed(address, packed[0], packed[1]);
    } else {
#pragma unroll
      for (int i = 0; i < C::kBlockM / 16; ++i) {
        hw::StoreMatrixX4Transposed(address + i * 16 * kChunkRowBytes, packed[4 * i],
                                    packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
      }
    }
  }

  // O^T += V^T P^T on the own latent chunks, and their slots go back to the producer.
  __device__ static void AccumulateOutput(Shared& shared, const Cursor& block, const Place& place,
                                          State& state) {
    const uint64_t p = hw::SharedDescriptor(hw::SharedAddress(shared.p[place.wg]));
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) hw::WgmmaFenceOperand(state.acc[own]);
    hw::WgmmaArrive();
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) {
      const uint64_t v =
          hw::SharedDescriptor(hw::SharedAddress(shared.kv[OwnChunk(block, place, own).stage]));
#pragma unroll
      for (int step = 0; step < kBlockN / kMmaK; ++step) {
        hw::WgmmaSS<T, C::kBlockM, hw::Major::MN, hw::Major::K>(
            hw::AdvanceDescriptor(v, step * kMmaK * kChunkRowBytes),
            hw::AdvanceDescriptor(p, step * kMmaKBytes), state.acc[own], true);
      }
    }
    hw::WgmmaCommit();
    hw::WgmmaWait<0>();
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) hw::WgmmaFenceOperand(state.acc[own]);
    if (place.thread < C::kOwnChunks) {
      const Cursor cursor = OwnChunk(block, place, place.thread);
      hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[cursor.stage]));
    }
  }

  __device__ static float SumOfWarps(const float (&stats)[kWarpgroupWarps]) {
    const float4 warps = *reinterpret_cast<const float4*>(stats);
    return (warps.x + warps.y) + (warps.z + warps.w);
  }

  // The largest magnitude of what this thread has of row j.
  __device__ static float MaxOfOutput(const State& state, int j) {
    const int i = (j / 2) * 4 + j % 2;
    float top = 0.0f;
#pragma unroll
    for (int own = 0; own < C::kOwnChunks; ++own) {
      top = fmaxf(top, fmaxf(fabsf(state.acc[own][i]), fabsf(state.acc[own][i + 2])));
    }
    return top;
  }
  // Scales every row of O by a power of two that brings its largest magnitude to about 1, and its
  // statistics with it. Returns whether any row changed. All math threads, after StoreSums.
  __device__ static bool ScalePartial(Shared& shared, const Place& place, State& state) {
    constexpr float kMaxScaleLog2 = 120.0f;  // the factor stays a normal number
    auto& tops = *reinterpret_cast<float (*)[C::kBlockM][kNumMathWarps]>(shared.exchange);
    float top[C::kThreadRows];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      top[j] = MaxOfOutput(state, j);
#pragma unroll
      for (int offset = 4; offset < kWarpThreads; offset *= 2) {
        top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], offset));
      }
      if (place.lane < 4) tops[place.Row(j)][place.wg * kWarpgroupWarps + place.warp] = top[j];
    }
    hw::NamedBarrierSync(kBarrierMath, kNumMathThreads);
    bool changes = false;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
#pragma unroll
      for (int warp = 0; warp < kNumMathWarps; ++warp) {
        top[j] = fmaxf(top[j], tops[place.Row(j)][warp]);
      }
      const bool has_scale = top[j] >= FLT_MIN && top[j] <= FLT_MAX;  // else 0, or infinite
      const float scale_log2 = has_scale ? fminf(floorf(hw::Log2(top[j])), kMaxScaleLog2) : 0.0f;
      const float factor = hw::Exp2(-scale_log2);
      changes |= scale_log2 != 0.0f;
      const int i = (j / 2) * 4 + j % 2;
#pragma unroll
      for (int own = 0; own < C::kOwnChunks; ++own) {
        state.acc[own][i] *= factor;
        state.acc[own][i + 2] *= factor;
      }
      if (place.wg != 0 || place.lane >= 4) continue;
      shared.row_stats[0][place.Row(j)][place.warp] *= factor;
      if (place.warp == 0) shared.row_max[0][place.Row(j)] += scale_log2;
    }
    return hw::NamedBarrierAny(kBarrierMath, kNumMathThreads, changes);
  }

  // Sums over the warpgroup's tokens, for whoever passes the next barrier.
  __device__ static void StoreSums(Shared& shared, const Place& place, State& state) {
    StoreOverLanes(shared.row_stats[place.wg], place, state.sum,
                   [](float a, float b) { return a + b; });
    if (place.thread < 4) {
#pragma unroll
      for (int j = 0; j < C::kThreadRows; ++j) {
        shared.row_max[place.wg][place.Row(j)] = state.max_log2[j];
      }
    }
  }

  // 1 / sum of row j, from what StoreSums left in shared memory; 0 for a row without a key.
  __device__ static float InverseSum(const Shared& shared, const Place& place, int j) {
    return gpu::InverseSum(SumOfWarps(shared.row_stats[place.wg][place.Row(j)]));
  }

  // One thread a row, from what StoreSums left in shared memory.
  __device__ static void WriteStats(const KernelParams& params, const Shared& shared,
                                    const Item& item, int row_tile, int rows, const Place& place) {
    const int row = place.thread;
    if (place.wg != 0 || row >= C::kBlockM || row >= rows) return;
    const float sum = SumOfWarps(shared.row_stats[0][row]);
    const float reference = shared.row_max[0][row];
    if (item.slot == kFinal) {
      const float lse_log2 = sum != 0.0f ? reference + hw::Log2(sum) : -INFINITY;
      params.decode.lse[params.FirstRow(item.seq_idx, row_tile, C::kBlockM) + row] =
          lse_log2 * gpu::kLn2;
    } else {
      params.partials.stats[params.partials.RowIndex(item.slot, row_tile) + row] = {reference, sum};
    }
  }

  // A partial result as the accumulators lie: what a thread has of a row is a vector
  // (PartialOrder::kTransposed), and the lanes of a warp write whole lines. Returns whether all of
  // it fits float16.
  __device__ static bool WritePartial(const KernelParams& params, const Item& item, int row_tile,
                                      int rows, const Place& place, const State& state) {
    constexpr int kVector = C::kOwnChunks * 2;
    using Vector = std::conditional_t<kVector == 8, uint4, uint2>;
    static_assert(sizeof(Vector) == kVector * kElementBytes);
    const int64_t first_row = params.partials.RowIndex(item.slot, row_tile) + place.Row(0);
    auto* out = reinterpret_cast<PartialElement*>(params.partials.out) + first_row * C::kDCkv +
                (place.wg * (kChunk / 2) + place.warp * 8 + place.lane / 4) * kVector;
    uint32_t top[C::kThreadRows];
#pragma unroll
    for (int j = 0; j < C::kThreadRows; ++j) {
      const int i = (j / 2) * 4 + j % 2;
      alignas(Vector) uint32_t pairs[C::kOwnChunks];
      top[j] = 0;
#pragma unroll
      for (int own = 0; own < C::kOwnChunks; ++own) {
        pairs[own] = hw::Pack2<PartialElement>(state.acc[own][i], state.acc[own][i + 2]);
        top[j] = MaxMagnitude(top[j], pairs[own]);
      }
      const int row_offset = (j / 2) * 8 + j % 2;
      if (place.Row(j) >= rows) continue;
      __stcg(reinterpret_cast<Vector*>(out + row_offset * C::kDCkv),
             *reinterpret_cast<const Vector*>(pairs));
    }
    bool fits = true;
#pragma unroll
    for (int j = 0; j < C::kThreadRows; j += 2) {
      fits &= BothFit(MaxMagnitude(__byte_perm(top[j], top[j + 1], 0x5410),
                                   __byte_perm(top[j], top[j + 1], 0x7632)),
                      state.max_log2[j] != gpu::kNoReference,
                      state.max_log2[j + 1] != gpu::kNoReference);
    }
    return fits;
  }

  // The result of a whole sequence. The fragments of O^T are transposed as 8 x 8 matrices of packed
  // pairs; then a lane has two neighbouring dims of row lane / 4 of eight.
  __device__ static void WriteFinal(const KernelParams& params, const Shared& shared,
                                    const Item& item, int row_tile, int rows, const Place& place,
                                    const State& state) {
    const int row_in_eight = place.lane / 4;
    const int dim = place.wg * kChunk + place.warp * kMmaK + place.lane % 4 * 2;
    const int64_t first_row = params.FirstRow(item.seq_idx, row_tile, C::kBlockM);
    T* out = static_cast<T*>(params.decode.out) + (first_row + row_in_eight) * C::kDCkv + dim;
#pragma unroll
    for (int j = 0; j < C::kBlockM / 8; ++j) {
      const float scale0 = InverseSum(shared, place, 2 * j);
      const float scale1 = InverseSum(shared, place, 2 * j + 1);
#pragma unroll
      for (int i = 0; i < C::kOwnChunks * 2; ++i) {
        const float* acc = &state.acc[i / 2][4 * j + i % 2 * 2];
        const uint32_t pair = hw::TransposeMatrix(hw::Pack2<T>(acc[0] * scale0, acc[1] * scale1));
        T* target = out + j * 8 * C::kDCkv + i / 2 * kNumMathWgs * kChunk + i % 2 * 8;
        if (j * 8 + row_in_eight < rows) *reinterpret_cast<uint32_t*>(target) = pair;
      }
    }
  }

  // Scores, softmax and output of one block.
  __device__ static void ProcessBlock(const KernelParams& params, Shared& shared,
                                      const Cursor& block, uint64_t key_mask, int tokens_left,
                                      int row_tile, int query_stage, int parity, bool is_first,
                                      const Place& place, State& state) {
    float scores[C::kAccumulators];
    PartialScores(shared, block, query_stage, place, scores);
    ExchangeScores(shared, parity, place, scores);
    if (threadIdx.x == 0) {
      hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[block.stage]));  // rope chunk
    }
    trace::Enter(Phase::kSoftmax);
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) scores[i] *= params.scale_log2;
    const int hidden_rows = params.decode.causal ? params.decode.q_len - 1 : 0;
    if (key_mask != ~uint64_t{0} || tokens_left - hidden_rows < kBlockN) {
      MaskScores(params, key_mask, tokens_left, row_tile, place, scores);
      if (key_mask != ~uint64_t{0}) ZeroAbsentRows(shared, block, key_mask, place);
    }
    UpdateMax(shared, place, scores, is_first, state);
    trace::Enter(Phase::kStoreP);
    StoreP(shared, place, scores, state);
    hw::FenceProxyAsyncShared();
    place.SyncWg();
    trace::Enter(Phase::kPv);
    AccumulateOutput(shared, block, place, state);
  }

  __device__ static void Loop(const KernelParams& params, Shared& shared, const Place& place,
                              int row_tile) {
    Cursor kv;
    QueryCursor<C> query;
    State state;
    int parity = 0;
#pragma unroll 1
    while (true) {
      trace::Enter(Phase::kWaitItem);
      hw::MbarrierWait(hw::SharedAddress(&shared.q_full[query.stage]), query.parity);
      const Item item = shared.items[query.stage];
      if (item.num_blocks == kNoMoreItems) return;
      state.Reset();
#pragma unroll 1
      for (int block = 0; block < item.num_blocks; ++block) {
        trace::Enter(Phase::kWaitKv);
        WaitChunk(shared, kv);
        const uint64_t key_mask = shared.key_mask[kv.stage];
        if (key_mask == 0) {  // sent by SendEmptyBlock
          hw::NamedBarrierSync(kBarrierMath, kNumMathThreads);
          if (threadIdx.x == 0) {
            hw::MbarrierArrive(hw::SharedAddress(&shared.kv_empty[kv.stage]));
          }
          kv.Advance(1);
          continue;
        }
        ProcessBlock(params, shared, kv, key_mask, item.tokens_left - block * kBlockN, row_tile,
                     query.stage, parity, block == 0, place, state);
        kv.Advance(C::kChunks);
        parity ^= 1;
      }
      trace::Enter(Phase::kWrite);
      StoreSums(shared, place, state);
      place.SyncWg();
      if (place.thread == 0) {  // every thread is done with item and Q
        hw::MbarrierArrive(hw::SharedAddress(&shared.q_empty[query.stage]));
      }
      const int rows = params.decode.q_len * params.decode.num_heads - row_tile * C::kBlockM;
      WriteStats(params, shared, item, row_tile, rows, place);
      if (item.slot == kFinal) {
        WriteFinal(params, shared, item, row_tile, rows, place, state);
      } else {
        // Found out behind the stores, which take as long: whether they have to be made again.
        while (hw::NamedBarrierAny(kBarrierMath, kNumMathThreads,
                                   !WritePartial(params, item, row_tile, rows, place, state))) {
          if (!ScalePartial(shared, place, state)) break;
          WriteStats(params, shared, item, row_tile, rows, place);
        }
      }
      place.SyncWg();  // before the next item's statistics overwrite this one's
      query.Advance(1);
    }
  }
};

// One elected lane, as ptxas then knows that addresses are uniform: for thread 0 it makes a loop
// over the lanes and a fence of every barrier, 1,900 cycles in all, for which everybody waits.
template <class C>
__device__ void InitBarriers(SharedMemory<C>& shared) {
#pragma unroll 1
  for (int slot = 0; slot < C::kKvStages; ++slot) {
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_full[slot]), C::kFullArrivals);
    hw::MbarrierInit(hw::SharedAddress(&shared.kv_empty[slot]), 1);
  }
#pragma unroll
  for (int stage = 0; stage < C::kQueryStages; ++stage) {
    hw::MbarrierInit(hw::SharedAddress(&shared.q_full[stage]), 1);
    hw::MbarrierInit(hw::SharedAddress(&shared.q_empty[stage]), kNumMathWgs);
  }
  hw::MbarrierInitFence();
}

// Spreads the page table over the CTAs' prefetches. In 32 bits: where they wrap, less is
// prefetched.
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
                 const __grid_constant__ TensorMaps maps) {
  using P = std::conditional_t<C::kLoad == KvLoad::kGather, GatherProducer<C>, BoxProducer<C>>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
  // Uniform to the compiler too: wgmma descriptors then live in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpThreads, 0);
  const int lane = threadIdx.x % kWarpThreads;
  const int row_tile = blockIdx.y;

  trace::Begin(params.decode, warp >= kNumMathWarps    ? TraceRole::kProducer
                              : warp < kWarpgroupWarps ? TraceRole::kMath0
                                                       : TraceRole::kMath1);
  constexpr int kInitWarp = 1, kTableWarp = kWarpgroupWarps + 1;
  constexpr int kFirstBlockWarp = kNumMathWarps - kFirstBlockWarps<C::kLoad>;
  const bool is_producer = warp >= kNumMathWarps;
  typename P::Start start;
  if (is_producer) [[likely]] {
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    start = P::Begin(params);
  } else {
    // What reads nothing that an earlier kernel may have written comes before the wait for it; a
    // prefetch into L2 does not count. Warps 0 and 4 share the producer's scheduler and do nothing.
    if (warp == kInitWarp) {
      if (hw::ElectOne()) InitBarriers(shared);
    } else if (warp >= kTableWarp && (C::kLoad == KvLoad::kGather || warp < kFirstBlockWarp)) {
      PrefetchPageTable(params.decode, threadIdx.x - kTableWarp * kWarpThreads);
    }
    gpu::PdlWait();
    gpu::PdlLaunchDependents();
    if (warp >= kFirstBlockWarp && row_tile == 0) {
      PrefetchFirstBlock<C::kLoad>(params.decode, params.schedule, params.page_size,
                                   1 << params.box_shift, WorkerOf(params.schedule, blockIdx.x),
                                   threadIdx.x - kFirstBlockWarp * kWarpThreads);
    }
  }
  __syncthreads();
  if (is_producer) [[likely]] {
    P::Run(params, maps, shared, start, row_tile);
  } else {
    Math<C>::Loop(params, shared,
                  {.wg = warp / kWarpgroupWarps,
                   .warp = warp % kWarpgroupWarps,
                   .lane = lane,
                   .thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads},
                  row_tile);
  }
  trace::End();
}

}  // namespace jax_mla::decode::sm90::narrow
