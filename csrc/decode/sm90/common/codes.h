// What tells Hopper's kernels apart when the cache holds codes of e4m3.
#pragma once

#include <cstdint>

#include "core/kv_format.h"

namespace jax_mla::decode::sm90 {

// Codes of the cache, by the scales that they have. Whether kpe is codes too, kernels ask at run
// time (DecodeParams::kv_format).
enum class CacheCodes : uint8_t {
  kNone,        // ckv is 16-bit values
  kOneScale,    // KvFormat::kE4m3, kE4m3KpeBf16: one scale a sequence
  kTileScales,  // KvFormat::kDsMla: a scale for each token and 128 dims
};

constexpr CacheCodes CodesOf(KvFormat format) {
  return format == KvFormat::kPlain   ? CacheCodes::kNone
         : format == KvFormat::kDsMla ? CacheCodes::kTileScales
                                      : CacheCodes::kOneScale;
}

// What the queries are in the products of scores. They always come as 16-bit values.
enum class QueryOperand : uint8_t {
  k16Bit,
  kCodes,     // the codes of e4m3 that they stand for
  kTwoCodes,  // sums of two codes each, times a power of two for each row
};

}  // namespace jax_mla::decode::sm90
