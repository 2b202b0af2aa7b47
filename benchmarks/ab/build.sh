#!/usr/bin/env bash
# Builds the Hopper decode of one tree as a shared library for compare.py:
#   benchmarks/ab/build.sh TREE LIBRARY.so [nvcc arguments]
# Needs nvcc and, in CUTLASS, the include directory of CUTLASS (by default that of nvidia-cutlass).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$1" && pwd) library=$2
shift 2
cutlass=${CUTLASS:-$(python3 -c 'import cutlass_library, os; print(os.path.dirname(cutlass_library.__file__))')/source/include}
instances=$(mktemp -d)
trap 'rm -rf "$instances"' EXIT
sources=$(python3 "$tree/tools/kernel_instances.py" "$instances" csrc/decode/sm90)
# Other symbols of the tree stay undefined in the library: nobody calls them. Older trees have split/.
nvcc -O3 -std=c++20 --expt-relaxed-constexpr -t 0 -shared -Xcompiler -fPIC \
  -gencode=arch=compute_90a,code=sm_90a -DJAX_MLA_WITH_CUDA -DJAX_MLA_WITH_SM90A \
  -I"$tree/csrc" -I"$cutlass" "$@" -o "$library" "$here/library.cu" $sources \
  $(find "$tree/csrc/decode/sm90" -name '*.cc') \
  $(ls "$tree"/csrc/decode/{split,schedule,merge,sm90}/{combine.cu,plan.cc,unit_plan.cc} 2>/dev/null) \
  "$tree"/csrc/gpu/*.cc
