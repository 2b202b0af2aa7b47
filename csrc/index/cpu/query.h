// The index query of one token, and its scores. jax_mla/ops/index_topk/reference.py defines them.
#pragma once

#include <cstdint>

#include "index/params.h"

namespace jax_mla::index::cpu {

// Heads whose products are summed side by side, as vectors: no sum changes its order.
inline constexpr int32_t kHeadLanes = 16;

// Values of `type` as float32. `to` has room for `count`.
void ToFloats(const void* from, DType type, int64_t count, float* to);

// Floats of scratch that a Query needs.
int64_t QueryFloats(const TopkParams& p);

class Query {
 public:
  // The query of `token`. `scratch` has room for QueryFloats(p), which the object uses as long as
  // it lives.
  Query(const TopkParams& p, int64_t token, float* scratch);

  // The score of the key in row `page_row` of a page.
  float Score(const char* page, int64_t page_row) const;

 private:
  // The score of `key`, [d], without its scale.
  float ScoreOfValues(const float* key) const;

  const TopkParams& p_;
  const float* weights_;  // [num_heads]
  float* heads_;          // [num_heads / kHeadLanes rounded up, d, kHeadLanes]
  float* key_;            // [d]
};

}  // namespace jax_mla::index::cpu
