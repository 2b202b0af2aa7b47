// The CPU decode kernel. It is written once, with the compiler's vector extension, and compiled for
// each instruction set by a file that defines MLA_KERNEL (the symbol), MLA_KERNEL_NAME and
// MLA_KERNEL_LANES (floats in a vector). Everything here has internal linkage and calls nothing of
// the standard library: the linker keeps one copy of an inline function for all files, and a copy
// that was compiled for AVX-512 must not be the one that other processors run.
//
// For each KV tile of kTileTokens tokens:
// 1. gather: find the tile's tokens in the pages of this pool. Absent tokens take no place in it.
// 2. convert: ckv | kpe to float32, as tile[chunk][token][kDimChunk]. The first query rows do this
//    inside step 3, chunk by chunk, just before they use a chunk. Scales that a row holds are
//    applied here; a scale of the whole cache is in the queries and in what is written at the end.
// 3. scores: S[token][row] = K Q. Query rows lie in the lanes of a vector, so no sum crosses lanes.
//    Q was multiplied by sm_scale * log2(e) and the scales, and transposed when the task began.
// 4. softmax: online, base 2; the soft cap first, if there is one.
// 5. values: acc[dim][row] = 2^(old max - new max) * acc + V P, again with rows in the lanes.
//    Between two chunks, tokens of the next tile are prefetched.
// Steps 3 and 5 keep a tile of columns x row vectors of accumulators in registers. A step of their
// inner loops loads the row vectors once and broadcasts one scalar for each column.
//
// NaN and infinity: where a row may not see a token, its score becomes -inf and the value is
// skipped. It is not multiplied by zero, because 0 * NaN is NaN.

#include "decode/cpu/kernel.h"
#include "decode/cpu/simd.h"
#include "decode/cpu/tokens.h"

namespace jax_mla::decode::cpu {
namespace {

// What a row may see of a tile: all tokens, those in front of its end, or those of its window.
enum class Mask { kNone, kEnd, kWindow };

constexpr int64_t kTileChunkFloats = int64_t{kTileTokens} * kDimChunk;

// One task, of a cache that stores ckv and kpe as these types. A vector holds kLanes query rows.
template <DType kCkv, DType kKpe, bool kHasTileScales>
class Attention {
  static constexpr int kLanes = MLA_KERNEL_LANES;
  using V = Simd<kLanes>;
  using Float = typename V::Float;
  static constexpr int64_t kCkvBytes = ElementBytes(kCkv);
  static constexpr int64_t kKpeBytes = ElementBytes(kKpe);

 public:
  Attention(const DecodeParams& p, const Task& task, float* scratch, const Partial& partial)
      : p_(p),
        task_(task),
        partial_(partial),
        num_rows_(task.padded_rows),
        ckv_chunks_(RoundUp(p.d_ckv, kDimChunk) / kDimChunk),
        num_chunks_(ckv_chunks_ + RoundUp(p.d_kpe, kDimChunk) / kDimChunk),
        queries_(scratch),
        tile_(queries_ + int64_t{num_chunks_} * kDimChunk * num_rows_),
        scores_(tile_ + num_chunks_ * kTileChunkFloats) {}

  void Run() {
    if (!task_.has_queries) LoadQueries();
    for (int32_t r = 0; r < num_rows_; ++r) {
      partial_.max_log2[r] = -kInf;
      partial_.sum[r] = 0.0f;
      FindLimits(r);
    }
    __builtin_memset(partial_.acc, 0, int64_t{ckv_chunks_} * kDimChunk * num_rows_ * sizeof(float));

    TokenCursor<kCkvBytes, kKpeBytes> cursor(p_, task_);
    TokenTile tokens[2];
    cursor.Next(tokens[0]);
    for (int32_t i = 0; tokens[i].num_tokens > 0; i = 1 - i) {
      cursor.Next(tokens[1 - i]);
      const Mask mask = MaskOf(tokens[i]);
      int32_t r = 0;
      for (; r + kLanes < num_rows_; r += 2 * kLanes) {
        RowVectors<2>(r, tokens[i], mask, tokens[1 - i]);
      }
      if (r < num_rows_) RowVectors<1>(r, tokens[i], mask, tokens[1 - i]);
    }
  }

 private:
  // The positions that row r may see: from row_begin_ to row_end_.
  void FindLimits(int32_t r) {
    row_begin_[r] = row_end_[r] = 0;
    if (r >= task_.num_rows) return;
    const int32_t q_idx = (task_.row_begin + r) / p_.num_heads;
    const int32_t causal_end = task_.seq_len - task_.q_len + q_idx + 1;
    row_end_[r] = p_.causal ? causal_end : task_.seq_len;
    if (row_end_[r] < min_row_end_) min_row_end_ = row_end_[r];
    if (p_.sliding_window == kNoWindow) return;
    row_begin_[r] = causal_end - p_.sliding_window;
    if (row_begin_[r] > max_row_begin_) max_row_begin_ = row_begin_[r];
  }

  Mask MaskOf(const TokenTile& tokens) const {
    if (tokens.position[0] < max_row_begin_) return Mask::kWindow;
    return tokens.position[tokens.num_tokens - 1] >= min_row_end_ ? Mask::kEnd : Mask::kNone;
  }

  // Transposes the queries to [dim][row] and scales them, so that scores are exponents of 2. Lanes
  // past the last row keep what they hold: no value crosses lanes, so they disturb no other row.
  void LoadQueries() {
    switch (p_.dtype) {
      case DType::kBf16:
        return LoadQueriesOf<DType::kBf16>();
      case DType::kF16:
        return LoadQueriesOf<DType::kF16>();
      case DType::kF32:
        return LoadQueriesOf<DType::kF32>();
      case DType::kE4m3:
        return;  // no type of a call
    }
  }

  template <DType kDType>
  void LoadQueriesOf() {
    constexpr int64_t kElementBytes = ElementBytes(kDType);
    const KvScale kv = KvScaleOf(p_, task_.seq_idx);
    const float scale = p_.sm_scale * kLog2E * QueryScaleOf(p_, task_.seq_idx);
    const int64_t row = task_.first_row;
    const char* q_nope = static_cast<const char*>(p_.q_nope) + row * p_.d_ckv * kElementBytes;
    const char* q_pe = static_cast<const char*>(p_.q_pe) + row * p_.d_kpe * kElementBytes;
    for (int64_t r = 0; r < task_.num_rows; ++r) {
      LoadQuery<kDType>(q_nope + r * p_.d_ckv * kElementBytes, p_.d_ckv, 0, r, scale * kv.ckv);
      LoadQuery<kDType>(q_pe + r * p_.d_kpe * kElementBytes, p_.d_kpe, ckv_chunks_, r,
                        scale * kv.kpe);
    }
  }

  template <DType kDType>
  void LoadQuery(const char* row, int32_t d, int32_t first_chunk, int64_t r, float scale) {
    float* to = queries_ + int64_t{first_chunk} * kDimChunk * num_rows_ + r;
    for (int32_t i = 0; i < d; i += kDimChunk) {
      const char* from = row + i * ElementBytes(kDType);
      float values[kDimChunk];
      if (d - i >= kDimChunk) {
        ConvertDims<kDType>(from, values);
      } else {
        ConvertLastDims<kDType>(from, d - i, values);
      }
      for (int32_t j = 0; j < kDimChunk; ++j, to += num_rows_) *to = scale * values[j];
    }
  }

  // Steps 2 to 5 for the rows [row, row + kVecs * kLanes). The call for the first rows converts the
  // tile. The call for the last rows prefetches the next tile.
  template <int kVecs>
  void RowVectors(int32_t row, const TokenTile& tokens, Mask mask, const TokenTile& next) {
    constexpr int kColumns = kNumAccumulators / kVecs;
    for (int32_t t = 0; t < tokens.num_tokens; t += kColumns) {
      if (row == 0) {
        Scores<kVecs, kColumns, true>(tokens, t, row);
      } else {
        Scores<kVecs, kColumns, false>(tokens, t, row);
      }
    }
    if (p_.soft_cap > 0.0f) {
      for (int v = 0; v < kVecs; ++v) CapScores(tokens, row + v * kLanes);
    }
    switch (mask) {
      case Mask::kNone:
        return Attend<kVecs, Mask::kNone>(tokens, row, next);
      case Mask::kEnd:
        return Attend<kVecs, Mask::kEnd>(tokens, row, next);
      case Mask::kWindow:
        return Attend<kVecs, Mask::kWindow>(tokens, row, next);
    }
  }

  // Steps 4 and 5 of RowVectors.
  template <int kVecs, Mask kMask>
  MLA_INLINE void Attend(const TokenTile& tokens, int32_t row, const TokenTile& next) {
    Float rescale[kVecs];
    for (int v = 0; v < kVecs; ++v) rescale[v] = Softmax<kMask>(tokens, row + v * kLanes);
    const bool is_last = row + kVecs * kLanes >= num_rows_;
    for (int32_t chunk = 0; chunk < ckv_chunks_; ++chunk) {
      if (is_last) Prefetch(next, chunk);
      ChunkValues<kVecs, kMask>(tokens, chunk, row, rescale);
    }
  }

  // Caps the scores of kLanes rows, which are in log2 units.
  void CapScores(const TokenTile& tokens, int32_t row) {
    const float cap_log2 = p_.soft_cap * kLog2E, inverse_cap = kLn2 / p_.soft_cap;
    float* scores = scores_ + row;
    for (int32_t t = 0; t < tokens.num_tokens; ++t, scores += num_rows_) {
      V::Store(scores, cap_log2 * V::Tanh(V::Load(scores) * inverse_cap));
    }
  }

  // scores[token][row] for kColumns tokens. With kConvert, it also converts these tokens, one chunk
  // at a time, so that each chunk is used while it is in L1.
  template <int kVecs, int kColumns, bool kConvert>
  void Scores(const TokenTile& tokens, int32_t token, int32_t row) {
    static_assert(kTileTokens % kColumns == 0, "a KV tile must be a multiple of the columns");
    Float acc[kColumns][kVecs] = {};
    const float* q = queries_ + row;
    float* k = tile_ + token * kDimChunk;
    for (int32_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if constexpr (kConvert) ConvertChunk<kColumns>(tokens, token, chunk, k);
      for (int32_t i = 0; i < kDimChunk; ++i) {
        Float lanes[kVecs];
        MLA_UNROLL
        for (int v = 0; v < kVecs; ++v) lanes[v] = V::Load(q + v * kLanes);
        MLA_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          MLA_UNROLL
          for (int v = 0; v < kVecs; ++v) acc[c][v] += lanes[v] * k[c * kDimChunk + i];
        }
        q += num_rows_;
      }
      k += kTileChunkFloats;
    }
    float* scores = scores_ + token * num_rows_ + row;
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) V::Store(scores + c * num_rows_ + v * kLanes, acc[c][v]);
    }
  }

  // Converts one chunk of kColumns tokens from the pages into the tile.
  template <int kColumns>
  MLA_INLINE void ConvertChunk(const TokenTile& tokens, int32_t token, int32_t chunk, float* to) {
    if (chunk >= ckv_chunks_) {
      const int64_t dim = int64_t{chunk - ckv_chunks_} * kDimChunk;
      ConvertRows<kKpe, kColumns>(tokens.kpe + token, dim, p_.d_kpe, to);
      return;
    }
    const int64_t dim = int64_t{chunk} * kDimChunk;
    ConvertRows<kCkv, kColumns>(tokens.ckv + token, dim, p_.d_ckv, to);
    if constexpr (kHasTileScales) {
      const int64_t scale_bytes = DsMla::kScalesOffset + dim / DsMla::kTileDims * sizeof(float);
      for (int c = 0; c < kColumns; ++c) {
        float scale;
        __builtin_memcpy(&scale, tokens.ckv[token + c] + scale_bytes, sizeof(scale));
        for (int i = 0; i < kDimChunk; ++i) to[c * kDimChunk + i] *= scale;
      }
    }
  }

  // Converts dimensions from `dim` on, of kColumns rows of `d` dimensions.
  template <DType kDType, int kColumns>
  MLA_INLINE void ConvertRows(const char* const* from, int64_t dim, int64_t d, float* to) {
    const int64_t offset_bytes = dim * ElementBytes(kDType);
    if (d - dim >= kDimChunk) {
      for (int c = 0; c < kColumns; ++c) {
        ConvertDims<kDType>(from[c] + offset_bytes, to + c * kDimChunk);
      }
    } else {
      for (int c = 0; c < kColumns; ++c) {
        ConvertLastDims<kDType>(from[c] + offset_bytes, d - dim, to + c * kDimChunk);
      }
    }
  }

  // Turns the scores of kLanes rows into weights and updates the rows' maximum and sum. Returns the
  // factor that the rows' accumulators must be multiplied by. kMask: what some row may not see of
  // the tile.
  template <Mask kMask>
  MLA_INLINE Float Softmax(const TokenTile& tokens, int32_t row) {
    const auto row_begin = V::Load(row_begin_ + row), row_end = V::Load(row_end_ + row);
    const Float old_max = V::Load(partial_.max_log2 + row);
    float* scores = scores_ + row;
    Float max = old_max;
    for (int32_t t = 0; t < tokens.num_tokens; ++t) {
      Float s = V::Load(scores + t * num_rows_);
      if constexpr (kMask != Mask::kNone) {
        s = IsVisible<kMask>(tokens.position[t], row_begin, row_end) ? s : V::Broadcast(-kInf);
        V::Store(scores + t * num_rows_, s);
      }
      max = s > max ? s : max;
    }
    // For a row that has seen no token, any finite maximum gives the weights 2^-inf = 0.
    const Float base = max == -kInf ? Float{} : max;
    const Float rescale = V::Exp2(old_max - base);
    Float sum = V::Load(partial_.sum + row) * rescale;
    for (int32_t t = 0; t < tokens.num_tokens; ++t) {
      const Float weight = V::Exp2(V::Load(scores + t * num_rows_) - base);
      V::Store(scores + t * num_rows_, weight);
      sum += weight;
    }
    V::Store(partial_.max_log2 + row, max);
    V::Store(partial_.sum + row, sum);
    return rescale;
  }

  // acc[dim][row] for the dimensions of one chunk, kColumns of them at a time.
  template <int kVecs, Mask kMask>
  MLA_INLINE void ChunkValues(const TokenTile& tokens, int32_t chunk, int32_t row,
                              const Float (&rescale)[kVecs]) {
    constexpr int kColumns = kNumAccumulators / kVecs;
    static_assert(kDimChunk % kColumns == 0, "a chunk must be a multiple of the columns");
    for (int32_t column = 0; column < kDimChunk; column += kColumns) {
      Values<kVecs, kColumns, kMask>(tokens, chunk, column, row, rescale);
    }
  }

  // acc[dim][row] for kColumns dimensions.
  template <int kVecs, int kColumns, Mask kMask>
  MLA_INLINE void Values(const TokenTile& tokens, int32_t chunk, int32_t column, int32_t row,
                         const Float (&rescale)[kVecs]) {
    float* out = partial_.acc + (int64_t{chunk} * kDimChunk + column) * num_rows_ + row;
    const float* values = tile_ + chunk * kTileChunkFloats + column;
    const float* weights = scores_ + row;
    Float acc[kColumns][kVecs];
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        acc[c][v] = V::Load(out + c * num_rows_ + v * kLanes) * rescale[v];
      }
    }
    for (int32_t t = 0; t < tokens.num_tokens; ++t) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const Float weight = V::Load(weights + v * kLanes);
        MLA_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          const Float sum = acc[c][v] + weight * values[c];
          if constexpr (kMask != Mask::kNone) {
            const auto visible =
                IsVisible<kMask>(tokens.position[t], V::Load(row_begin_ + row + v * kLanes),
                                 V::Load(row_end_ + row + v * kLanes));
            acc[c][v] = visible ? sum : acc[c][v];
          } else {
            acc[c][v] = sum;
          }
        }
      }
      weights += num_rows_;
      values += kDimChunk;
    }
    MLA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      MLA_UNROLL
      for (int v = 0; v < kVecs; ++v) V::Store(out + c * num_rows_ + v * kLanes, acc[c][v]);
    }
  }

  template <Mask kMask, class Int>
  static MLA_INLINE auto IsVisible(int32_t position, Int row_begin, Int row_end) {
    if constexpr (kMask == Mask::kWindow) return (position >= row_begin) & (position < row_end);
    return position < row_end;
  }

  // Prefetches one chunk's share of the next tile. All chunks together prefetch all of it.
  MLA_INLINE void Prefetch(const TokenTile& next, int32_t chunk) const {
    constexpr int64_t kLineBytes = 64;
    const int32_t begin = next.num_tokens * chunk / ckv_chunks_;
    const int32_t end = next.num_tokens * (chunk + 1) / ckv_chunks_;
    for (int32_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < p_.d_ckv * kCkvBytes; i += kLineBytes) {
        __builtin_prefetch(next.ckv[t] + i);
      }
      for (int64_t i = 0; i < p_.d_kpe * kKpeBytes; i += kLineBytes) {
        __builtin_prefetch(next.kpe[t] + i);
      }
    }
  }

  const DecodeParams& p_;
  const Task& task_;
  const Partial& partial_;
  const int32_t num_rows_;
  const int32_t ckv_chunks_;
  const int32_t num_chunks_;
  float* const queries_;  // [num_chunks, kDimChunk, num_rows]
  float* const tile_;     // [num_chunks, kTileTokens, kDimChunk]
  float* const scores_;   // [kTileTokens, num_rows]
  int32_t row_begin_[kMaxTaskRows], row_end_[kMaxTaskRows];
  int32_t min_row_end_ = INT32_MAX;  // smallest row_end_, padding rows left out
  int32_t max_row_begin_ = 0;        // largest row_begin_; 0 without a window
};

// A cache in the element type of the call.
void RunPlain(const DecodeParams& p, const Task& task, float* scratch, const Partial& partial) {
  switch (p.dtype) {
    case DType::kBf16:
      return Attention<DType::kBf16, DType::kBf16, false>(p, task, scratch, partial).Run();
    case DType::kF16:
      return Attention<DType::kF16, DType::kF16, false>(p, task, scratch, partial).Run();
    case DType::kF32:
      return Attention<DType::kF32, DType::kF32, false>(p, task, scratch, partial).Run();
    case DType::kE4m3:
      return;  // no type of a call
  }
}

void Run(const DecodeParams& p, const Task& task, float* scratch, const Partial& partial) {
  constexpr DType kE4m3 = DType::kE4m3, kBf16 = DType::kBf16;
  switch (p.kv_format) {
    case KvFormat::kPlain:
      return RunPlain(p, task, scratch, partial);
    case KvFormat::kE4m3:
      return Attention<kE4m3, kE4m3, false>(p, task, scratch, partial).Run();
    case KvFormat::kE4m3KpeBf16:
      return Attention<kE4m3, kBf16, false>(p, task, scratch, partial).Run();
    case KvFormat::kDsMla:
      return Attention<kE4m3, kBf16, true>(p, task, scratch, partial).Run();
  }
}

}  // namespace

const Kernel MLA_KERNEL = {.name = MLA_KERNEL_NAME, .row_lanes = MLA_KERNEL_LANES, .run = Run};

}  // namespace jax_mla::decode::cpu
