// How a Hopper kernel brings KV into shared memory.
#pragma once

#include <cstdint>

#include "decode/schedule/schedule.h"

namespace jax_mla::decode::sm90 {

enum class KvLoad : uint8_t {
  kBoxes,   // TMA, a whole block a box: page sizes that are multiples of a block
  kGather,  // 16-byte cp.async by four warps: any page size
};

constexpr KvLoad LoadOf(int32_t page_size) {
  return page_size % kScheduleBlock == 0 ? KvLoad::kBoxes : KvLoad::kGather;
}

}  // namespace jax_mla::decode::sm90
