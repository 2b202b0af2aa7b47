// How a Hopper kernel brings KV into shared memory.
#pragma once

#include <cstdint>

namespace jax_mla::decode::sm90 {

// Page sizes that are multiples of this are loaded in TMA boxes, others are gathered. Boxes of 8
// tokens would also keep the swizzle's phase. But a block then has 72 of them, and to issue them
// takes longer than to process the block (128 x 4096, H200: 16 heads 248 us with boxes of 8, 156
// gathered, 153 with boxes of 16; 128 heads 395, 283, 273).
inline constexpr int kMinBoxTokens = 16;

enum class KvLoad : uint8_t {
  kTma,        // tensor-map boxes of 16 or 32 tokens: page sizes that are multiples of 16, not 64
  kTmaBlocks,  // tensor-map boxes of a whole block: page sizes that are multiples of 64
  kGather,     // 16-byte cp.async by four warps: any page size
};

}  // namespace jax_mla::decode::sm90
