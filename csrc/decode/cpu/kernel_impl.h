// The CPU decode kernel, written once with the compiler's vector extension and compiled for each
// instruction set by a file that defines MLA_CPU_KERNEL (the kernel's symbol), MLA_CPU_NAME and
// MLA_CPU_LANES. All of it has internal linkage and calls nothing of the standard library: an
// inline function compiled for AVX-512 must never be the copy that the linker keeps for everyone.
//
// For each tile of kTileTokens tokens:
// 1. gather: find the tile's tokens in the pages this pool owns; absent tokens take no place.
// 2. convert: ckv | kpe rows to float32, as tile[dim block][token][kDimBlock]. Step 3 of the first
//    rows does it, just before it uses a block.
// 3. scores: S[token][row] = K Q, rows in the vector lanes: nothing is reduced across lanes. Q was
//    scaled by sm_scale * log2(e) and transposed once.
// 4. softmax: online, base 2.
// 5. values: acc[dim][row] = 2^(old max - new max) * acc + V P, rows in the lanes again. Between
//    dim blocks, rows of the next tile are prefetched.
// Steps 3 and 5 keep a (columns x rows) register block of accumulators; a step of their inner loops
// loads the row lanes once and broadcasts one scalar for each column.
//
// Special values: where a row must not see a key, its score becomes -inf and the value is skipped,
// not multiplied by zero, because 0 * NaN is NaN.

#include "decode/cpu/kernel.h"
#include "decode/cpu/simd.h"
#include "decode/cpu/tokens.h"

namespace jax_mla::decode {
namespace {

constexpr int64_t kTileBlockFloats = int64_t{kTileTokens} * kDimBlock;

// One task. kLanes rows lie in a vector.
template <DType kDType>
class Attention {
  static constexpr int kLanes = MLA_CPU_LANES;
  using V = Simd<kLanes>;
  using Float = typename V::Float;
  static constexpr int64_t kElementBytes = ElementBytes(kDType);

 public:
  Attention(const DecodeParams& p, const CpuTask& task, float* scratch, const CpuPartial& partial)
      : p_(p),
        task_(task),
        partial_(partial),
        num_rows_(task.padded_rows),
        ckv_blocks_(RoundUp(p.d_ckv, kDimBlock) / kDimBlock),
        num_blocks_(ckv_blocks_ + RoundUp(p.d_kpe, kDimBlock) / kDimBlock),
        queries_(scratch),
        tile_(queries_ + int64_t{num_blocks_} * kDimBlock * num_rows_),
        scores_(tile_ + num_blocks_ * kTileBlockFloats) {}

  void Run() {
    if (!task_.has_queries) LoadQueries();
    for (int32_t r = 0; r < num_rows_; ++r) {
      partial_.max_log2[r] = -kInf;
      partial_.sum[r] = 0.0f;
      row_end_[r] = RowEnd(r);
    }
    __builtin_memset(partial_.acc, 0, int64_t{ckv_blocks_} * kDimBlock * num_rows_ * sizeof(float));

    TokenCursor<kElementBytes> cursor(p_, task_);
    TileRows rows[2];
    cursor.Next(rows[0]);
    for (int32_t i = 0; rows[i].num_tokens > 0; i = 1 - i) {
      cursor.Next(rows[1 - i]);
      const bool is_ragged = rows[i].position[rows[i].num_tokens - 1] >= min_row_end_;
      int32_t r = 0;
      for (; r + kLanes < num_rows_; r += 2 * kLanes) {
        RowBlock<2>(r, rows[i], is_ragged, rows[1 - i]);
      }
      if (r < num_rows_) RowBlock<1>(r, rows[i], is_ragged, rows[1 - i]);
    }
  }

 private:
  // Row r sees the keys before this position.
  int32_t RowEnd(int32_t r) {
    if (r >= task_.num_rows) return 0;
    const int32_t q_idx = (task_.row_begin + r) / p_.num_heads;
    const int32_t end = p_.causal ? task_.seq_len - p_.q_len + q_idx + 1 : task_.seq_len;
    if (end < min_row_end_) min_row_end_ = end;
    return end;
  }

  // Transposes the queries to [dim][row], scaled so that scores are base-2 exponents. Lanes past
  // the last row keep whatever they hold: nothing crosses lanes.
  void LoadQueries() {
    const int64_t first_row = int64_t{task_.seq_idx} * p_.q_len * p_.num_heads + task_.row_begin;
    const char* q_nope = static_cast<const char*>(p_.q_nope) + first_row * p_.d_ckv * kElementBytes;
    const char* q_pe = static_cast<const char*>(p_.q_pe) + first_row * p_.d_kpe * kElementBytes;
    for (int64_t r = 0; r < task_.num_rows; ++r) {
      LoadQuery(q_nope + r * p_.d_ckv * kElementBytes, p_.d_ckv, 0, r);
      LoadQuery(q_pe + r * p_.d_kpe * kElementBytes, p_.d_kpe, ckv_blocks_, r);
    }
  }

  void LoadQuery(const char* row, int32_t d, int32_t first_block, int64_t r) {
    const float scale = p_.sm_scale * kLog2E;
    float* to = queries_ + int64_t{first_block} * kDimBlock * num_rows_ + r;
    for (int32_t i = 0; i < d; i += kDimBlock) {
      const char* from = row + i * kElementBytes;
      float values[kDimBlock];
      if (d - i >= kDimBlock) {
        ConvertDims<kDType>(from, values);
      } else {
        ConvertLastDims<kDType>(from, d - i, values);
      }
      for (int32_t j = 0; j < kDimBlock; ++j, to += num_rows_) *to = scale * values[j];
    }
  }

  // Steps 2 to 5 for the rows [row, row + kVecs * kLanes). The first rows' call converts the tile,
  // the last rows' call prefetches the next one.
  template <int kVecs>
  void RowBlock(int32_t row, const TileRows& rows, bool is_ragged, const TileRows& next) {
    constexpr int kColumns = kNumAccumulators / kVecs;
    for (int32_t t = 0; t < rows.num_tokens; t += kColumns) {
      if (row == 0) {
        Scores<kVecs, kColumns, true>(rows, t, row);
      } else {
        Scores<kVecs, kColumns, false>(rows, t, row);
      }
    }
    Float rescale[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      rescale[v] = is_ragged ? Softmax<true>(rows, row + v * kLanes)
                             : Softmax<false>(rows, row + v * kLanes);
    }
    const bool is_last = row + kVecs * kLanes >= num_rows_;
    for (int32_t block = 0; block < ckv_blocks_; ++block) {
      if (is_last) Prefetch(next, block);
      if (is_ragged) {
        BlockValues<kVecs, true>(rows, block, row, rescale);
      } else {
        BlockValues<kVecs, false>(rows, block, row, rescale);
      }
    }
  }

  // scores[token][row] for kColumns tokens. Converts their rows on the way, block by block, while
  // the block is in L1, if kConvert.
  template <int kVecs, int kColumns, bool kConvert>
  void Scores(const TileRows& rows, int32_t token, int32_t row) {
    static_assert(kTileTokens % kColumns == 0, "a tile must hold whole register blocks");
    Float acc[kColumns][kVecs] = {};
    const float* q = queries_ + row;
    float* k = tile_ + token * kDimBlock;
    for (int32_t block = 0; block < num_blocks_; ++block) {
      if constexpr (kConvert) ConvertBlock<kColumns>(rows, token, block, k);
      for (int32_t i = 0; i < kDimBlock; ++i) {
        Float lanes[kVecs];
        MLA_UNROLL
        for (int v = 0; v < kVecs; ++v) lanes[v] = V::Load(q + v * kLanes);
        MLA_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          MLA_UNROLL
          for (int v = 0; v < kVecs; ++v) acc[c][v] += lanes[v] * k[c * kDimBlock + i];
        }
        q += num_rows_;
      }
      k += kTileBlockFloats;
    }
    float* scores = scores_ + token * num_rows_ + row;
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) V::Store(scores + c * num_rows_ + v * kLanes, acc[c][v]);
    }
  }

  // One dim block of kColumns tokens, from the pages to the tile.
  template <int kColumns>
  MLA_INLINE void ConvertBlock(const TileRows& rows, int32_t token, int32_t block, float* to) {
    const bool is_ckv = block < ckv_blocks_;
    const char* const* from = (is_ckv ? rows.ckv : rows.kpe) + token;
    const int64_t dim = int64_t{is_ckv ? block : block - ckv_blocks_} * kDimBlock;
    const int64_t num_dims = (is_ckv ? p_.d_ckv : p_.d_kpe) - dim;
    const int64_t offset_bytes = dim * kElementBytes;
    if (num_dims >= kDimBlock) {
      for (int c = 0; c < kColumns; ++c) {
        ConvertDims<kDType>(from[c] + offset_bytes, to + c * kDimBlock);
      }
    } else {
      for (int c = 0; c < kColumns; ++c) {
        ConvertLastDims<kDType>(from[c] + offset_bytes, num_dims, to + c * kDimBlock);
      }
    }
  }

  // Turns kLanes rows of scores into weights, updates their maximum and sum and returns the factor
  // for what they accumulated so far. kRagged: some row does not see some token of the tile.
  template <bool kRagged>
  MLA_INLINE Float Softmax(const TileRows& rows, int32_t row) {
    const auto row_end = V::Load(row_end_ + row);
    const Float old_max = V::Load(partial_.max_log2 + row);
    float* scores = scores_ + row;
    Float max = old_max;
    for (int32_t t = 0; t < rows.num_tokens; ++t) {
      Float s = V::Load(scores + t * num_rows_);
      if constexpr (kRagged) {
        s = rows.position[t] < row_end ? s : V::Broadcast(-kInf);
        V::Store(scores + t * num_rows_, s);
      }
      max = s > max ? s : max;
    }
    // A row without a key yet: any finite maximum gives the weights 2^-inf = 0.
    const Float base = max == -kInf ? Float{} : max;
    const Float rescale = V::Exp2(old_max - base);
    Float sum = V::Load(partial_.sum + row) * rescale;
    for (int32_t t = 0; t < rows.num_tokens; ++t) {
      const Float weight = V::Exp2(V::Load(scores + t * num_rows_) - base);
      V::Store(scores + t * num_rows_, weight);
      sum += weight;
    }
    V::Store(partial_.max_log2 + row, max);
    V::Store(partial_.sum + row, sum);
    return rescale;
  }

  // acc[dim][row] for the dims of one block, kColumns at a time.
  template <int kVecs, bool kRagged>
  MLA_INLINE void BlockValues(const TileRows& rows, int32_t block, int32_t row,
                              const Float (&rescale)[kVecs]) {
    constexpr int kColumns = kNumAccumulators / kVecs;
    static_assert(kDimBlock % kColumns == 0, "a dim block must hold whole register blocks");
    for (int32_t column = 0; column < kDimBlock; column += kColumns) {
      Values<kVecs, kColumns, kRagged>(rows, block, column, row, rescale);
    }
  }

  // kColumns of those dims.
  template <int kVecs, int kColumns, bool kRagged>
  MLA_INLINE void Values(const TileRows& rows, int32_t block, int32_t column, int32_t row,
                         const Float (&rescale)[kVecs]) {
    float* out = partial_.acc + (int64_t{block} * kDimBlock + column) * num_rows_ + row;
    const float* values = tile_ + block * kTileBlockFloats + column;
    const float* weights = scores_ + row;
    Float acc[kColumns][kVecs];
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        acc[c][v] = V::Load(out + c * num_rows_ + v * kLanes) * rescale[v];
      }
    }
    for (int32_t t = 0; t < rows.num_tokens; ++t) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const Float weight = V::Load(weights + v * kLanes);
        MLA_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          const Float sum = acc[c][v] + weight * values[c];
          if constexpr (kRagged) {
            const auto visible = rows.position[t] < V::Load(row_end_ + row + v * kLanes);
            acc[c][v] = visible ? sum : acc[c][v];
          } else {
            acc[c][v] = sum;
          }
        }
      }
      weights += num_rows_;
      values += kDimBlock;
    }
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) V::Store(out + c * num_rows_ + v * kLanes, acc[c][v]);
    }
  }

  // Spreads the prefetch of a tile over the dim blocks of the one before.
  MLA_INLINE void Prefetch(const TileRows& next, int32_t block) const {
    constexpr int64_t kLineBytes = 64;
    const int32_t begin = next.num_tokens * block / ckv_blocks_;
    const int32_t end = next.num_tokens * (block + 1) / ckv_blocks_;
    for (int32_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < p_.d_ckv * kElementBytes; i += kLineBytes) {
        __builtin_prefetch(next.ckv[t] + i);
      }
      for (int64_t i = 0; i < p_.d_kpe * kElementBytes; i += kLineBytes) {
        __builtin_prefetch(next.kpe[t] + i);
      }
    }
  }

  const DecodeParams& p_;
  const CpuTask& task_;
  const CpuPartial& partial_;
  const int32_t num_rows_;
  const int32_t ckv_blocks_;
  const int32_t num_blocks_;
  float* const queries_;  // [num_blocks, kDimBlock, num_rows]
  float* const tile_;     // [num_blocks, kTileTokens, kDimBlock]
  float* const scores_;   // [kTileTokens, num_rows]
  int32_t row_end_[kMaxTaskRows];
  int32_t min_row_end_ = INT32_MAX;  // of the real rows
};

void Run(const DecodeParams& p, const CpuTask& task, float* scratch, const CpuPartial& partial) {
  switch (p.dtype) {
    case DType::kBf16:
      return Attention<DType::kBf16>(p, task, scratch, partial).Run();
    case DType::kF16:
      return Attention<DType::kF16>(p, task, scratch, partial).Run();
    case DType::kF32:
      return Attention<DType::kF32>(p, task, scratch, partial).Run();
  }
}

}  // namespace

const CpuKernel MLA_CPU_KERNEL = {.name = MLA_CPU_NAME, .row_lanes = MLA_CPU_LANES, .run = Run};

}  // namespace jax_mla::decode
