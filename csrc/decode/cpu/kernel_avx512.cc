// The decode kernel for AVX-512 F, BW, DQ and VL. The build compiles this file with those
// instructions.
#if defined(__x86_64__)
#define MLA_CPU_KERNEL kCpuAvx512
#define MLA_CPU_NAME "avx512"
#define MLA_CPU_LANES 16
#include "decode/cpu/kernel_impl.h"
#endif
