// The decode kernel for AVX-512 F, BW, DQ and VL: the build compiles this file with these
// instructions.
#if defined(__x86_64__)
#define MLA_KERNEL kAvx512
#define MLA_KERNEL_NAME "avx512"
#define MLA_KERNEL_LANES 16
#include "decode/cpu/kernel_impl.h"
#endif
