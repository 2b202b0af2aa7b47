// The decode kernel for every processor: SSE2 on x86-64, NEON on AArch64.
#define MLA_KERNEL kBaseline
#define MLA_KERNEL_NAME "baseline"
#define MLA_KERNEL_LANES 4
#include "decode/cpu/kernel_impl.h"
