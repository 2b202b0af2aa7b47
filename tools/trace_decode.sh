#!/usr/bin/env bash
# Traces decode calls on this machine's Hopper GPU and draws them:
#   tools/trace_decode.sh OUT_DIR "16 1 8192" "64 8 4096" ...
# Each call: HEADS BATCH LENGTH [Q_LEN [PAGE_SIZE [VARIANT [KV_FORMAT [QUERIES]]]]]; a LENGTH of
# skewed:MEAN stands for the lengths that the benchmark draws. Makes NAME.json (ui.perfetto.dev),
# NAME.png and NAME.txt (median duration of every phase). Needs nvcc, nvidia-cutlass and, for the PNG, matplotlib. TRACE_BUILD_DIR
# keeps the programs; they are built if they are not there.
set -euo pipefail
out=${1:?usage: tools/trace_decode.sh OUT_DIR "HEADS BATCH LENGTH [Q_LEN [PAGE_SIZE [VARIANT [KV_FORMAT [QUERIES]]]]]"...}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
build=${TRACE_BUILD_DIR:-$(mktemp -d)}
mkdir -p "$out" "$build"

# $1: program, further arguments: for nvcc.
build_program() {
  local cutlass instances
  cutlass=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/cutlass_library/source/include
  instances=$(python3 "$root/tools/kernel_instances.py" "$build" csrc/decode/sm90)
  # shellcheck disable=SC2086
  (cd "$root" && nvcc -std=c++20 -O3 -t 0 --expt-relaxed-constexpr -DNDEBUG -DJAX_MLA_WITH_CUDA \
    -DJAX_MLA_WITH_SM90A -gencode=arch=compute_90a,code=sm_90a -Icsrc -I"$cutlass" "${@:2}" \
    tools/decode_trace.cu csrc/decode/schedule/plan.cc csrc/append/append.cu csrc/append/encode.cu csrc/gpu/*.cc \
    csrc/decode/{merge,sm90}/combine.cu csrc/decode/sm90/*.cc csrc/decode/sm90/*/*.cc $instances -o "$1")
}
[[ -x $build/decode_trace ]] || build_program "$build/decode_trace" -DJAX_MLA_TRACE
[[ -x $build/decode_time ]] || build_program "$build/decode_time"

for call in "$@"; do
  name=$(tr ' ' _ <<<"$call")
  read -ra args <<<"$call"
  if [[ ${args[2]} == skewed:* ]]; then
    args[2]=$(cd "$root/benchmarks" && python3 -c 'import sys; from grid import pareto_lengths
print(*pareto_lengths(*map(int, sys.argv[1:])), sep=",")' "${args[1]}" "${args[2]#skewed:}")
  fi
  { "$build/decode_time" /dev/null "${args[@]}" | sed 's/us/us untraced/'; "$build/decode_trace" "$build/$name.dump" "${args[@]}"; } |
    tee "$out/$name.txt"
  python3 "$root/tools/trace_to_perfetto.py" "$build/$name.dump" --json "$out/$name.json" --png "$out/$name.png" >>"$out/$name.txt"
done
