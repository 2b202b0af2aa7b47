// The decode kernel for AVX2, FMA and F16C. The build compiles this file with those instructions.
#if defined(__x86_64__)
#define MLA_CPU_KERNEL kCpuAvx2
#define MLA_CPU_NAME "avx2"
#define MLA_CPU_LANES 8
#include "decode/cpu/kernel_impl.h"
#endif
