#include "index/cpu/choose.h"

#include <algorithm>

namespace jax_mla::index::cpu {

void ChooseBest(int32_t* positions, int64_t count, int64_t k, const float* scores) {
  const auto is_better = [scores](int32_t a, int32_t b) {
    const uint32_t order_a = OrderOf(scores[a]), order_b = OrderOf(scores[b]);
    return order_a != order_b ? order_a > order_b : a < b;
  };
  std::nth_element(positions, positions + k, positions + count, is_better);
  std::sort(positions, positions + k);
}

}  // namespace jax_mla::index::cpu
