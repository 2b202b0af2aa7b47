// What tells Hopper's decode kernels apart.
#pragma once

#include <cstdint>

#include "core/kv_format.h"
#include "decode/sm90/common/codes.h"
#include "decode/sm90/common/kv_load.h"

namespace jax_mla::decode::sm90 {

// The kernels: a folder each. Their names in backend="sm90:name" are in backend.cc.
enum class KernelKind : uint8_t {
  kNarrow,   // tiles of 8 or 16 query rows
  kPairs,    // 64, against a cache of codes with 256 dims
  kCodes64,  // 64, against a cache of codes with 512 dims
  kWide,     // 64, against a cache of 16-bit values
};

// A row of an instances.inc: what a kernel is compiled for.
struct KernelKey {
  DType dtype;
  int32_t d_ckv, d_kpe;
  KernelKind kernel;
  int32_t tile_rows;
  CacheCodes codes;
  KvLoad load;
  int32_t num_teams;
  QueryOperand queries;

  bool operator==(const KernelKey&) const = default;
};

}  // namespace jax_mla::decode::sm90
