// The decode kernel for any processor: SSE2 on x86-64, NEON on AArch64.
#define MLA_CPU_KERNEL kCpuBaseline
#define MLA_CPU_NAME "baseline"
#define MLA_CPU_LANES 4
#include "decode/cpu/kernel_impl.h"
