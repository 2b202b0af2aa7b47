// The decode kernel for AVX2, FMA and F16C: the build compiles this file with these instructions.
#if defined(__x86_64__)
#define MLA_KERNEL kAvx2
#define MLA_KERNEL_NAME "avx2"
#define MLA_KERNEL_LANES 8
#include "decode/cpu/kernel_impl.h"
#endif
