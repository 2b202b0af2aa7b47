// The CPU decode kernel, written once with the compiler's vector extension and compiled for each
// instruction set by a file that defines MLA_CPU_KERNEL (the kernel's symbol), MLA_CPU_NAME and
// MLA_CPU_LANES. Everything here has internal linkage and nothing of the standard library is
// called: an inline function compiled for AVX-512 must never be the copy that the linker keeps for
// everyone.
//
// For each tile of kTileTokens tokens:
//   1. gather: find the tile's tokens in the pages this pool owns; absent tokens take no place.
//   2. convert: ckv | kpe rows to float32, as tile[dim block][token][kDimBlock].
//   3. scores: S[token][row] = K Q, with the rows in the vector lanes, so that nothing is reduced
//      across lanes; Q was scaled by sm_scale * log2(e) and transposed once.
//   4. softmax: online, base 2.
//   5. values: acc[dim][row] = 2^(old max - new max) * acc + V P, rows in the lanes again. While
//   one
//      dim block is multiplied, rows of the next tile are prefetched.
// Steps 3 and 5 keep an (rows x columns) block of accumulators in registers; each step of their
// inner loop is one load of row lanes and one scalar broadcast per column.
//
// Special values: a score is -inf where the row must not see the key, and then the value is
// skipped, not multiplied by zero, because 0 * NaN is NaN.

#include "decode/cpu_kernel.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function that is not inlined

#define MLA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define MLA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MLA_UNROLL _Pragma("GCC unroll 64")
#endif

namespace jax_mla::decode {
namespace {

constexpr float kInf = __builtin_inff();
constexpr float kLog2E = 1.44269504f;

// Accumulator registers of a block: half of the register file, or what hides the FMA latency.
#if defined(__AVX512F__)
constexpr int kNumAccumulators = 16;
#else
constexpr int kNumAccumulators = 8;
#endif

template <int kLanes>
struct Simd {
  typedef float Float __attribute__((vector_size(kLanes * sizeof(float))));
  typedef int32_t Int __attribute__((vector_size(kLanes * sizeof(float))));

  static MLA_INLINE Float Load(const float* from) {
    Float v;
    __builtin_memcpy(&v, from, sizeof(v));
    return v;
  }
  static MLA_INLINE void Store(float* to, Float v) { __builtin_memcpy(to, &v, sizeof(v)); }
  static MLA_INLINE Int Load(const int32_t* from) {
    Int v;
    __builtin_memcpy(&v, from, sizeof(v));
    return v;
  }
  static MLA_INLINE Float Broadcast(float x) { return x - Float{}; }

  // 2^x for x <= 0, relative error 1e-7; 0 below the normal range, NaN for NaN.
  static MLA_INLINE Float Exp2(Float x) {
    constexpr float kMinExponent = -126.0f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Float y = x < kMinExponent ? Broadcast(kMinExponent) : x;
    const Float shifted = y + kRound;
    const Float f = y - (shifted - kRound);
    Float p = Broadcast(0x1.44e956p-13f);
    p = p * f + 0x1.5f082p-10f;
    p = p * f + 0x1.3b2b54p-7f;
    p = p * f + 0x1.c6af5ep-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
    const Int n = (Int)shifted - 0x4b400000;  // bits of kRound
    const Float scale = (Float)((n + 127) << 23);
    return x < kMinExponent ? Float{} : p * scale;
  }
};

using Block = Simd<kDimBlock>;
typedef uint16_t Half16 __attribute__((vector_size(kDimBlock * sizeof(uint16_t))));
typedef uint32_t Word16 __attribute__((vector_size(kDimBlock * sizeof(uint32_t))));

// f16 in the low halves of words -> float32, in integer arithmetic: the thread may flush denormals.
MLA_INLINE Block::Float HalfToFloat(Word16 x) {
  const Word16 sign = (x & 0x8000u) << 16;
  const Word16 magnitude = x & 0x7fffu;
  const Block::Float tiny = __builtin_convertvector((Block::Int)magnitude, Block::Float) * 0x1p-24f;
  Word16 bits = (magnitude << 13) + 0x38000000u;
  bits = magnitude >= 0x7c00u ? bits + 0x38000000u : bits;  // infinity and NaN
  bits = magnitude < 0x0400u ? (Word16)tiny : bits;
  return (Block::Float)(bits | sign);
}

// Element i of every block of `row` goes to to[block * block_stride + i * element_stride].
template <DType kDType, int kElementStride>
MLA_INLINE void ConvertRow(const void* row, int32_t d, float* to, int64_t block_stride,
                           int64_t element_stride) {
  constexpr int64_t kBytes = ElementBytes(kDType);
  for (int32_t i = 0; i < d; i += kDimBlock, to += block_stride) {
    const char* from = static_cast<const char*>(row) + i * kBytes;
    const int32_t n = d - i < kDimBlock ? d - i : kDimBlock;
    Block::Float values;
    if constexpr (kDType == DType::kF32) {
      values = Block::Float{};
      __builtin_memcpy(&values, from, n == kDimBlock ? sizeof(values) : n * kBytes);
    } else {
      Half16 raw = {};
      __builtin_memcpy(&raw, from, n == kDimBlock ? sizeof(raw) : n * kBytes);
      const Word16 words = __builtin_convertvector(raw, Word16);
      values = kDType == DType::kBf16 ? (Block::Float)(words << 16) : HalfToFloat(words);
    }
    if constexpr (kElementStride == 1) {
      Block::Store(to, values);
    } else {
      for (int32_t j = 0; j < kDimBlock; ++j) to[j * element_stride] = values[j];
    }
  }
}

// The tokens of one tile that exist in this pool.
struct TileRows {
  int32_t num_tokens = 0;
  int32_t position[kTileTokens];  // in the sequence, increasing
  const char* ckv[kTileTokens];
  const char* kpe[kTileTokens];
};

// Walks the tokens [begin, end) of one sequence page by page.
class TokenCursor {
 public:
  TokenCursor(const DecodeParams& p, const CpuTask& task)
      : p_(p),
        pages_(p.page_table + int64_t{task.seq_idx} * p.max_pages_per_seq),
        position_(task.token_begin),
        end_(task.token_end),
        element_bytes_(ElementBytes(p.dtype)) {
    if (*p.layer < 0 || *p.layer >= p.num_layers) position_ = end_;  // no such layer: owns nothing
  }

  // Fills `rows` with the next tokens; fewer than kTileTokens only at the end.
  void Next(TileRows& rows) {
    rows.num_tokens = 0;
    while (rows.num_tokens < kTileTokens && position_ < end_) {
      const int32_t page_idx = position_ / p_.page_size;
      const int64_t page_end = (int64_t{page_idx} + 1) * p_.page_size;
      const int32_t run_end = page_end < end_ ? static_cast<int32_t>(page_end) : end_;
      const int64_t page = int64_t{pages_[page_idx]} - *p_.page_begin;
      if (page < 0 || page >= p_.num_pages) {
        position_ = run_end;
        continue;
      }
      const int64_t slot = position_ - int64_t{page_idx} * p_.page_size;
      const char* ckv = Address(p_.ckv, page, slot);
      const char* kpe = Address(p_.kpe, page, slot);
      for (; position_ < run_end && rows.num_tokens < kTileTokens; ++position_) {
        const int32_t t = rows.num_tokens++;
        rows.position[t] = position_;
        rows.ckv[t] = ckv;
        rows.kpe[t] = kpe;
        ckv += p_.ckv.token_stride * element_bytes_;
        kpe += p_.kpe.token_stride * element_bytes_;
      }
    }
  }

 private:
  const char* Address(const KvStream& stream, int64_t page, int64_t slot) const {
    const int64_t element =
        *p_.layer * stream.layer_stride + page * stream.page_stride + slot * stream.token_stride;
    return static_cast<const char*>(stream.base) + element * element_bytes_;
  }

  const DecodeParams& p_;
  const int32_t* pages_;
  int32_t position_;
  int32_t end_;
  int64_t element_bytes_;
};

constexpr int64_t kTileBlockFloats = int64_t{kTileTokens} * kDimBlock;

// One task. kLanes rows lie in a vector.
template <int kLanes>
class Attention {
  using V = Simd<kLanes>;
  using Float = typename V::Float;

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

  template <DType kDType>
  void Run() {
    if (!task_.has_queries) LoadQueries<kDType>();
    for (int32_t r = 0; r < num_rows_; ++r) {
      partial_.max_log2[r] = -kInf;
      partial_.sum[r] = 0.0f;
      row_end_[r] = RowEnd(r);
    }
    __builtin_memset(partial_.acc, 0, int64_t{ckv_blocks_} * kDimBlock * num_rows_ * sizeof(float));

    TokenCursor cursor(p_, task_);
    TileRows rows[2];
    cursor.Next(rows[0]);
    for (int32_t i = 0; rows[i].num_tokens > 0; i = 1 - i) {
      cursor.Next(rows[1 - i]);
      ConvertTile<kDType>(rows[i]);
      const bool is_ragged = rows[i].position[rows[i].num_tokens - 1] >= min_row_end_;
      int32_t r = 0;
      for (; r + 2 * kLanes < num_rows_; r += 2 * kLanes) {
        RowBlock<2>(rows[i], is_ragged, r, nullptr);
      }
      if (r + kLanes < num_rows_) {
        RowBlock<2>(rows[i], is_ragged, r, &rows[1 - i]);
      } else {
        RowBlock<1>(rows[i], is_ragged, r, &rows[1 - i]);
      }
    }
  }

 private:
  // Row r sees the keys before this position.
  int32_t RowEnd(int32_t r) {
    if (r >= task_.num_rows) return 0;
    const int32_t seq_len_raw = p_.seq_lens[task_.seq_idx];
    const int32_t seq_len = seq_len_raw < p_.max_seq_len ? seq_len_raw : p_.max_seq_len;
    const int32_t q_idx = (task_.row_begin + r) / p_.num_heads;
    const int32_t end = p_.causal ? seq_len - p_.q_len + q_idx + 1 : seq_len;
    if (end < min_row_end_) min_row_end_ = end;
    return end;
  }

  // Transposes the queries to [dim][row], scaled so that scores are base-2 exponents. Lanes past
  // the last row keep whatever they hold: nothing crosses lanes.
  template <DType kDType>
  void LoadQueries() {
    const int64_t first_row = int64_t{task_.seq_idx} * p_.q_len * p_.num_heads + task_.row_begin;
    const int64_t bytes = ElementBytes(kDType);
    const char* q_nope = static_cast<const char*>(p_.q_nope) + first_row * p_.d_ckv * bytes;
    const char* q_pe = static_cast<const char*>(p_.q_pe) + first_row * p_.d_kpe * bytes;
    float* to_kpe = queries_ + int64_t{ckv_blocks_} * kDimBlock * num_rows_;
    for (int32_t r = 0; r < task_.num_rows; ++r) {
      ConvertRow<kDType, 0>(q_nope + r * p_.d_ckv * bytes, p_.d_ckv, queries_ + r,
                            int64_t{kDimBlock} * num_rows_, num_rows_);
      ConvertRow<kDType, 0>(q_pe + r * p_.d_kpe * bytes, p_.d_kpe, to_kpe + r,
                            int64_t{kDimBlock} * num_rows_, num_rows_);
    }
    const float scale = p_.sm_scale * kLog2E;
    for (int64_t i = 0; i < int64_t{num_blocks_} * kDimBlock * num_rows_; ++i) queries_[i] *= scale;
  }

  template <DType kDType>
  void ConvertTile(const TileRows& rows) {
    for (int32_t t = 0; t < rows.num_tokens; ++t) {
      float* to = tile_ + t * kDimBlock;
      ConvertRow<kDType, 1>(rows.ckv[t], p_.d_ckv, to, kTileBlockFloats, 1);
      ConvertRow<kDType, 1>(rows.kpe[t], p_.d_kpe, to + ckv_blocks_ * kTileBlockFloats,
                            kTileBlockFloats, 1);
    }
  }

  // Steps 3 to 5 for the rows [row, row + kVecs * kLanes). The last of them prefetches `next`.
  template <int kVecs>
  void RowBlock(const TileRows& rows, bool is_ragged, int32_t row, const TileRows* next) {
    constexpr int kColumns = kNumAccumulators / kVecs;
    for (int32_t t = 0; t < rows.num_tokens; t += kColumns) Scores<kVecs, kColumns>(t, row);
    Float rescale[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      rescale[v] = is_ragged ? Softmax<true>(rows, row + v * kLanes)
                             : Softmax<false>(rows, row + v * kLanes);
    }
    for (int32_t block = 0; block < ckv_blocks_; ++block) {
      if (next != nullptr) Prefetch(*next, block);
      for (int32_t column = 0; column < kDimBlock; column += kColumns) {
        if (is_ragged) {
          Values<kVecs, kColumns, true>(rows, block, column, row, rescale);
        } else {
          Values<kVecs, kColumns, false>(rows, block, column, row, rescale);
        }
      }
    }
  }

  // scores[token][row] for kColumns tokens; those past the tile's end are never looked at.
  template <int kVecs, int kColumns>
  void Scores(int32_t token, int32_t row) {
    static_assert(kTileTokens % kColumns == 0, "a block of tokens must not leave the tile");
    Float acc[kColumns][kVecs] = {};
    const float* q = queries_ + row;
    const float* k = tile_ + token * kDimBlock;
    for (int32_t block = 0; block < num_blocks_; ++block) {
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
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        V::Store(scores_ + (token + c) * num_rows_ + row + v * kLanes, acc[c][v]);
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

  // acc[dim][row] for kColumns dims of one block.
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
    const int64_t element_bytes = ElementBytes(p_.dtype);
    for (int32_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < p_.d_ckv * element_bytes; i += kLineBytes) {
        __builtin_prefetch(next.ckv[t] + i);
      }
      for (int64_t i = 0; i < p_.d_kpe * element_bytes; i += kLineBytes) {
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

template <int kLanes>
void RunLanes(const DecodeParams& p, const CpuTask& task, float* scratch,
              const CpuPartial& partial) {
  Attention<kLanes> attention(p, task, scratch, partial);
  switch (p.dtype) {
    case DType::kBf16:
      return attention.template Run<DType::kBf16>();
    case DType::kF16:
      return attention.template Run<DType::kF16>();
    case DType::kF32:
      return attention.template Run<DType::kF32>();
  }
}

// Half-wide vectors where they hold all rows: full ones would compute padding.
constexpr int kWide = MLA_CPU_LANES;
constexpr int kNarrow = MLA_CPU_LANES / 2;

int32_t PaddedRows(int32_t num_rows) {
  return num_rows <= kNarrow ? kNarrow : RoundUp(num_rows, kWide);
}

void Run(const DecodeParams& p, const CpuTask& task, float* scratch, const CpuPartial& partial) {
  if (task.padded_rows == kNarrow) return RunLanes<kNarrow>(p, task, scratch, partial);
  RunLanes<kWide>(p, task, scratch, partial);
}

}  // namespace

const CpuKernel MLA_CPU_KERNEL = {.name = MLA_CPU_NAME, .padded_rows = PaddedRows, .run = Run};

}  // namespace jax_mla::decode
