#include "decode/sm90/kernels.h"

#include <algorithm>

#include "decode/sm90/codes64/launch.h"
#include "decode/sm90/narrow/launch.h"
#include "decode/sm90/pairs/launch.h"
#include "decode/sm90/wide/launch.h"

namespace jax_mla::decode::sm90 {
namespace {

template <class C>
constexpr Kernel Row(const KernelKey& key, decltype(Kernel::launch) launch) {
  return {key, C::kMayTakeUnits, C::kMayAppend, launch};
}

template <class C>
constexpr Kernel NarrowRow() {
  return Row<C>({C::kDType, C::kDCkv, C::kDKpe, KernelKind::kNarrow, C::kTileRows, C::kCodes,
                 C::kLoad, C::kTeams, QueryOperand::k16Bit},
                narrow::Launch<C>);
}
template <class C>
constexpr Kernel PairsRow() {
  return Row<C>({C::kDType, C::kDCkv, C::kDKpe, KernelKind::kPairs, C::kTileRows, C::kCodes,
                 C::kLoad, 1, QueryOperand::k16Bit},
                pairs::Launch<C>);
}
template <class C>
constexpr Kernel Codes64Row() {
  return Row<C>({C::kDType, C::kDCkv, C::kDKpe, KernelKind::kCodes64, C::kTileRows, C::kCodes,
                 C::kLoad, 1, C::kQueries},
                codes64::Launch<C>);
}
template <class C>
constexpr Kernel WideRow() {
  return Row<C>({C::kDType, C::kDCkv, C::kDKpe, KernelKind::kWide, wide::kTileRows,
                 CacheCodes::kNone, C::kLoad, 1, QueryOperand::k16Bit},
                wide::Launch<C>);
}

constexpr Kernel kKernels[] = {
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, tile_rows, codes, load, teams)                           \
  NarrowRow<narrow::Config<DType::dtype, d_ckv, d_kpe, tile_rows, CacheCodes::codes, KvLoad::load, \
                           teams>>(),
#include "decode/sm90/narrow/instances.inc"
#undef MLA_INSTANCE
#define MLA_INSTANCE(dtype, d_ckv, d_kpe) PairsRow<pairs::Config<DType::dtype, d_ckv, d_kpe>>(),
#include "decode/sm90/pairs/instances.inc"
#undef MLA_INSTANCE
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, codes, load, queries)                           \
  Codes64Row<codes64::Config<DType::dtype, d_ckv, d_kpe, CacheCodes::codes, KvLoad::load, \
                             QueryOperand::queries>>(),
#include "decode/sm90/codes64/instances.inc"
#undef MLA_INSTANCE
#define MLA_INSTANCE(dtype, d_ckv, d_kpe, load) \
  WideRow<wide::Config<DType::dtype, d_ckv, d_kpe, KvLoad::load>>(),
#include "decode/sm90/wide/instances.inc"
#undef MLA_INSTANCE
};

}  // namespace

std::span<const Kernel> Kernels() { return kKernels; }

const Kernel* FindKernel(const KernelKey& key) {
  const auto found = std::ranges::find(kKernels, key, &Kernel::key);
  return found == std::end(kKernels) ? nullptr : &*found;
}

}  // namespace jax_mla::decode::sm90
