// How a Hopper kernel brings KV into shared memory.
#pragma once

#include <cstdint>

namespace jax_mla::decode::sm90 {

enum class KvLoad : uint8_t {
  kTma,        // tensor-map boxes of 8 to 64 tokens: page sizes that are multiples of 8
  kTmaBlocks,  // tensor-map boxes of 64 tokens, a block's: page sizes that are multiples of 64
  kGather,     // 16-byte cp.async by four warps: any page size
};

}  // namespace jax_mla::decode::sm90
