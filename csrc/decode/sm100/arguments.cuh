// The arguments of CUTLASS's Blackwell MLA decode kernel for one of our calls. Included from the
// package nvidia-cutlass 4.2 (examples/77_blackwell_fmha); docs/kernels/decode_sm100.md argues,
// line by line, what the kernel does with them. Host code: it also compiles for other
// architectures, and tests/cuda/sm100_arguments.cu compares it with a model of the kernel's
// addressing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <iostream>  // the kernel's header uses std::cerr

#include "cutlass/device_kernel.h"
#include "decode/sm100/buffers.h"
#include "kernel/sm100_fmha_mla_tma_warpspecialized.hpp"

namespace jax_mla::decode::sm100 {

// One cluster of two CTAs for each part of an entry. Not the persistent scheduler: with it, the
// kernel of 4.2.0 hangs if a part is empty (see the document).
using MlaKernel = cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<
    cute::Shape<cute::Int<kEntryRows>, cute::Int<kTileTokens>,
                cute::Shape<cute::Int<kDCkv>, cute::Int<kDKpe>>>,
    cutlass::bfloat16_t, float, cutlass::bfloat16_t, float,
    cutlass::fmha::kernel::Sm100MlaIndividualTileScheduler, /*kIsCpAsync=*/false>;

inline MlaKernel::Arguments MakeArguments(const DecodeParams& p, const CallPlan& plan,
                                          const Buffers& b) {
  using Element = MlaKernel::Element;
  const auto element = [](const void* x) { return static_cast<Element*>(const_cast<void*>(x)); };
  // Strides of (row, dim, entry) and, for pages, of (row, dim, page).
  const auto rows_of = [](int64_t width) {
    return MlaKernel::TensorStride{width, {}, kEntryRows * width};
  };
  const MlaKernel::TensorStride page_stride{
      p.ckv.token_stride, {}, kTileTokens * p.ckv.token_stride};
  Element* pages = reinterpret_cast<Element*>(b.pages.base);
  const bool pads = plan.pads_heads;

  MlaKernel::Arguments args{};
  args.problem_shape = {{}, p.max_seq_len, {}, plan.num_entries};
  args.mainloop.softmax_scale = p.sm_scale;
  args.mainloop.ptr_q_latent = element(pads ? b.q_nope : p.q_nope);
  args.mainloop.stride_q_latent = rows_of(kDCkv);
  args.mainloop.ptr_q_rope = element(pads ? b.q_pe : p.q_pe);
  args.mainloop.stride_q_rope = rows_of(kDKpe);
  args.mainloop.ptr_c_latent = pages;
  args.mainloop.stride_c_latent = page_stride;
  args.mainloop.ptr_k_rope = pages + kDCkv;
  args.mainloop.stride_k_rope = page_stride;
  args.mainloop.ptr_seq = b.lens;
  args.mainloop.ptr_page_table = b.table;
  args.mainloop.stride_page_table = {{}, plan.max_tiles};
  args.mainloop.page_count = static_cast<int32_t>(b.pages.num_pages);
  args.mainloop.page_size = kTileTokens;
  args.epilogue.ptr_o = element(pads ? b.out : p.out);
  args.epilogue.stride_o = rows_of(kDCkv);
  args.epilogue.ptr_lse = pads ? b.lse : p.lse;
  args.epilogue.stride_lse = {{}, kEntryRows};
  args.split_kv = 1;  // MakeKernelParams sets it
  args.ptr_split_kv = b.num_parts;
  return args;
}

// What the kernel is launched with. The kernel's own function places partial results by a product
// in 32 bits, which overflows, so it is called for one part and the rest is set here.
inline MlaKernel::Params MakeKernelParams(const DecodeParams& p, const CallPlan& plan,
                                          const Buffers& b) {
  MlaKernel::Params params =
      MlaKernel::to_underlying_arguments(MakeArguments(p, plan, b), /*workspace=*/nullptr);
  const int64_t parts = b.max_parts;
  params.split_kv = b.max_parts;
  params.tile_scheduler.grid.z = b.max_parts;
  params.epilogue.ptr_o_acc = b.part_out;
  params.epilogue.stride_o_acc = {kDCkv * parts, {}, kEntryRows * kDCkv * parts};
  params.epilogue.ptr_lse_acc = b.part_lse;
  params.epilogue.stride_lse_acc = {{}, kEntryRows * b.max_parts};
  return params;
}

// CUTLASS leaves a descriptor at 0 if the driver refuses it. The kernel would trap.
inline bool HasDescriptors(const MlaKernel::Params& params) {
  const auto& maps = params.mainloop_params;
  for (const cute::TmaDescriptor* descriptor :
       {maps.tma_load_q_latent.get_tma_descriptor(), maps.tma_load_q_rope.get_tma_descriptor(),
        maps.tma_load_c_latent.get_tma_descriptor(), maps.tma_load_k_rope.get_tma_descriptor(),
        maps.tma_load_c_latent_transpose.get_tma_descriptor()}) {
    const cute::TmaDescriptor empty{};
    if (std::memcmp(descriptor, &empty, sizeof(empty)) == 0) return false;
  }
  return true;
}

}  // namespace jax_mla::decode::sm100
