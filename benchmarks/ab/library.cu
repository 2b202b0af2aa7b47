// One tree's Hopper decode behind a C function, for `compare.py`, which loads the libraries of
// several trees into one process. It is compiled with each tree's headers and sources, so it names
// only what all of them have.
#include <cstring>
#include <string>

#include "decode/backend.h"
#include "decode/schedule/plan.h"

using namespace jax_mla;  // NOLINT: a program

// What compare.py says of a call; the same struct is declared there. A packed pool of bf16.
struct AbCall {
  const void* q_nope;
  const void* q_pe;
  const void* pool;
  const int32_t* page_table;
  const int32_t* seq_lens;
  const int32_t* zero;
  void* out;
  float* lse;
  void* scratch;
  int64_t scratch_bytes;
  int32_t batch, q_len, num_heads, page_size, max_pages_per_seq, num_pages;
  float sm_scale;
};

namespace {

constexpr int32_t kDCkv = 512, kDKpe = 64;

decode::DecodeParams ParamsOf(const AbCall& call) {
  const int64_t width = kDCkv + kDKpe, page_stride = call.page_size * width;
  decode::DecodeParams p = {};
  p.q_nope = call.q_nope;
  p.q_pe = call.q_pe;
  p.page_table = call.page_table;
  p.seq_lens = call.seq_lens;
  p.layer = p.page_begin = call.zero;
  p.ckv = {call.pool, 0, page_stride, width};
  p.kpe = {static_cast<const char*>(call.pool) + kDCkv * ElementBytes(DType::kBf16), 0, page_stride,
           width};
  p.out = call.out;
  p.lse = call.lse;
  p.scratch = call.scratch;
  p.scratch_bytes = call.scratch_bytes;
  p.batch = call.batch;
  p.q_len = call.q_len;
  p.num_heads = call.num_heads;
  p.d_ckv = kDCkv;
  p.d_kpe = kDKpe;
  p.max_pages_per_seq = call.max_pages_per_seq;
  p.num_layers = 1;
  p.num_pages = call.num_pages;
  p.page_size = call.page_size;
  p.max_seq_len = call.max_pages_per_seq * call.page_size;
  p.sm_scale = call.sm_scale;
  p.causal = true;
  p.dtype = DType::kBf16;
  return p;
}

}  // namespace

extern "C" int64_t AbScratchBytes(const AbCall* call) {
  return decode::DecodeScratchBytes(decode::ShapeOf(ParamsOf(*call)));
}

// Enqueues the call. Returns 0, or 1 with a message in `error`.
extern "C" int AbDecode(const AbCall* call, void* stream, char* error, size_t error_size) {
  const decode::DecodeParams params = ParamsOf(*call);
  cudaError_t query_error;
  const gpu::DeviceFacts* device = gpu::GetCurrentDeviceFacts(&query_error);
  std::string message = device == nullptr ? cudaGetErrorString(query_error) : "";
  if (message.empty()) {
    const decode::DecodeProblem problem{*device, decode::ShapeOf(params), ""};
    message = decode::kSm90Backend.why_not(problem);
    if (message.empty()) {
      message =
          decode::kSm90Backend.launch(params, problem, reinterpret_cast<cudaStream_t>(stream));
    }
  }
  std::strncpy(error, message.c_str(), error_size);
  return message.empty() ? 0 : 1;
}
