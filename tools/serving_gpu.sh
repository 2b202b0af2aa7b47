#!/usr/bin/env bash
# Serves small models on the GPUs of a machine without a network, and judges their tokens:
#   tools/serving_gpu.sh [cuda|cpu] [full|small] [all|dense|sparse]
# dense: V3, with weights in FP8 as well, V2 with an FP8 cache and with tokamax's experts; on two GPUs
# also V2 with --tp-size, V3 with --dp-size and with --ep-size; then V2 under load.
# sparse: V3.2, with an FP8 cache as well, and GLM-5; on two GPUs also V3.2 with --dp-size and GLM-5
# with --tp-size; then V3.2 under load. A part that fails does not keep the others from running, and
# the exit status is 1 in the end. small is for a CPU, where the two devices are virtual.
#
# The wheels that the machine lacks lie in .whl/, in the folders engine/ and, if tokamax is to be tried
# as well, tokamax/ (docs/integrations.md says how they get there). HF_PYTHON has torch and
# transformers, ENGINE_PYTHON has jax; both are python3 unless set. LIMIT_SECONDS is for everything
# (480). LOGS names a folder, for an archive of what the servers wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda} size=${2:-full} which=${3:-all}
hf_python=${HF_PYTHON:-python3} engine_python=${ENGINE_PYTHON:-python3}
limit=${LIMIT_SECONDS:-480} judge_seconds=75
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $which in
  all) kinds=(v2 v3 v3_fp8 v32 glm5) ;;
  dense) kinds=(v2 v3 v3_fp8) ;;
  sparse) kinds=(v32 glm5) ;;
  *) echo "expected all, dense or sparse, got $which" >&2; exit 2 ;;
esac
num_gpus=0
if [[ "$device" == cuda ]]; then num_gpus=$(nvidia-smi -L | wc -l); fi
step() { printf '\n=== [%4ds] %s\n' "$SECONDS" "$*"; }

# Runs a command within $1 seconds and notes how it ended. What it printed is shown when it has ended,
# because several parts may run at the same time.
part() {  # $1: seconds, $2: name, then the command
  local left=$1 name=$2 begin=$SECONDS status=0 log
  shift 2
  if ((left > 0)); then
    # KILL is for the whole group: no process of a server is left.
    timeout --signal=KILL "$left" "$@" >"$work/$name.out" 2>&1 || status=$?
  else
    status=124
    echo "no time is left" >"$work/$name.out"
  fi
  for log in "$work"/*/"$name".log; do
    if ((status)) && [[ -f $log ]]; then tail -n 40 "$log" >>"$work/$name.out"; fi
  done
  echo "$name: status $status, $((SECONDS - begin)) s" >>"$work/parts"
  printf '%s\n' "$(step "$name: status $status, $((SECONDS - begin)) s")" "$(cat "$work/$name.out")"
}
check() {  # $1: the Python, $2: PYTHONPATH, $3: seconds, $4: name, then arguments of gpu_check.py
  part "$3" "$4" env PYTHONPATH="$2" "$1" tests/serving/gpu_check.py "${@:5}"
}
serve() {  # $1: serve or load, $2: checkpoint, $3: name, then arguments of the server
  local left=$((limit - SECONDS - judge_seconds)) most=$((limit / 3)) path=$engine_path
  if [[ "$3" == *tokamax ]]; then path=$engine_path:$work/tokamax; fi
  check "$engine_python" "$path" $((left < most ? left : most)) \
    "$3" "$1" "$work/$2" "$device" "${@:3}"
}
on_gpu() {  # $1: number, then a command; where there is only one GPU, it is that one
  if ((num_gpus > 1)); then export CUDA_VISIBLE_DEVICES=$1; fi
  "${@:2}"
}
# GPUs have room for all servers at once, which mostly wait for XLA's compiler.
start() {
  if [[ "$device" == cuda ]]; then "$@" & else "$@"; fi
}

step "packages"
mkdir -p "$work/engine" "$work/tokamax"
for set in engine tokamax; do
  if [[ -d .whl/$set ]]; then
    "$engine_python" -m pip install --quiet --no-index --no-deps --target "$work/$set" .whl/"$set"/*.whl
  fi
done
# tokamax imports a profiler that it needs for its benchmarks only.
mkdir -p "$work/tokamax/xprof/cli/tools"
touch "$work/tokamax/xprof/__init__.py" "$work/tokamax/xprof/cli/__init__.py"
echo "get_kernel_stats_tool = None" >"$work/tokamax/xprof/cli/tools/__init__.py"
engine_path=$work/engine:$PWD:$PWD/tests/serving

if [[ "$device" == cuda ]] && ! PYTHONPATH=$engine_path "$engine_python" -c '
import sys, jax_mla._runtime._ffi as ffi; sys.exit(not ffi.extension().build_info()["cuda"])'; then
  step "jax_mla for this GPU"
  PYTHONPATH=$engine_path JAX_MLA_JOBS=$(nproc) tools/dev_build.sh "$(command -v "$engine_python")" \
    -DJAX_MLA_CUDA=ON -DJAX_MLA_CUDA_ARCHS=native
fi
PYTHONPATH=$engine_path "$engine_python" -c '
import flax, jax, numpy; print("jax", jax.__version__, "flax", flax.__version__, "numpy", numpy.__version__)
import jax_mla._runtime._ffi as ffi; print("jax_mla", ffi.extension().build_info())'

step "checkpoints, and what Hugging Face answers"
for kind in "${kinds[@]}"; do
  start check "$hf_python" tests/serving $((limit - SECONDS)) \
    make_$kind make "$work/$kind" $kind "$size"
done
wait

step "servers"
has_two=$([[ "$device" == cpu ]] || ((num_gpus > 1)) && echo yes || true)
if [[ $which != sparse ]]; then
  start on_gpu 1 serve serve v3 v3
  start on_gpu 1 serve serve v3_fp8 v3_blocks
  start on_gpu 1 serve serve v2 v2_fp8 --kv-cache-dtype=fp8_e4m3
  if [[ "$device" == cuda && -d .whl/tokamax ]]; then start on_gpu 1 serve serve v2 v2_tokamax; fi
  if [[ -n $has_two ]]; then
    start serve serve v2 v2_tp --tp-size=2
    start serve serve v3 v3_dp --tp-size=2 --dp-size=2
    start serve serve v3 v3_ep --tp-size=2 --ep-size=2
  fi
fi
if [[ $which != dense ]]; then
  start on_gpu 0 serve serve glm5 glm5 --attention-backend=dsa_sparse
  start on_gpu 1 serve serve v32 v32_fp8 --attention-backend=dsa_sparse --kv-cache-dtype=fp8_e4m3
  if [[ -n $has_two ]]; then
    start serve serve v32 v32_dp --attention-backend=dsa_sparse --tp-size=2 --dp-size=2
    start serve serve glm5 glm5_tp --attention-backend=dsa_sparse --tp-size=2
  fi
fi
wait

step "load"  # one after the other, because memory is looked at
if [[ $which != sparse ]]; then serve load v2 v2; fi
if [[ $which != dense ]]; then serve load v32 v32 --attention-backend=dsa_sparse; fi

step "tokens"
check "$hf_python" tests/serving $((limit - SECONDS)) \
  judge judge "${kinds[@]/#/$work/}"

if [[ -n "${LOGS:-}" ]]; then
  (cd "$work" && tar -czf - ./*.out ./*/*.log ./*/answers) >"$LOGS/serving.tar.gz"
fi
step "parts"
cat "$work/parts"
if grep -qv "status 0," "$work/parts"; then
  echo "some parts failed"
  exit 1
fi
