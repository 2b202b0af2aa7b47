#!/usr/bin/env bash
# Serves a small model on the GPU of a machine without a network, and judges its tokens:
#   tools/serving_gpu.sh [cuda|cpu]
# The wheels that the machine lacks lie in .whl/, in the folders engine/ and, if tokamax is to be tried
# as well, tokamax/ (docs/integrations.md says how they get there). HF_PYTHON has torch and
# transformers, ENGINE_PYTHON has jax; both are python3 unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda}
hf_python=${HF_PYTHON:-python3} engine_python=${ENGINE_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf '\n=== [%4ds] %s\n' "$SECONDS" "$*"; }

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
path=$work/engine:$PWD:$PWD/tests/serving

if [[ "$device" == cuda ]] && ! PYTHONPATH=$path "$engine_python" -c '
import sys, jax_mla._ffi as ffi; sys.exit(not ffi.extension().build_info()["cuda"])' 2>/dev/null; then
  step "jax_mla for this GPU"
  PYTHONPATH=$path JAX_MLA_JOBS=$(nproc) tools/dev_build.sh "$(command -v "$engine_python")" \
    -DJAX_MLA_CUDA=ON -DJAX_MLA_CUDA_ARCHS=native
fi
PYTHONPATH=$path "$engine_python" -c '
import flax, jax, numpy; print("jax", jax.__version__, "flax", flax.__version__, "numpy", numpy.__version__)'

step "checkpoint, and what Hugging Face answers"
PYTHONPATH=tests/serving "$hf_python" tests/serving/gpu_check.py make "$work/model"

serve() {  # $1: name, $2: PYTHONPATH, then arguments of the server
  step "server $1"
  PYTHONPATH=$2 "$engine_python" tests/serving/gpu_check.py serve "$work/model" "$device" "$1" "${@:3}" ||
    { tail -n 40 "$work/model/$1.log"; return 1; }
}
names=(jax jax_cached)
serve jax "$path"
if [[ "$device" == cuda && $(nvidia-smi -L | wc -l) -gt 1 ]]; then
  serve two_gpus "$path" --tp-size=2
  names+=(two_gpus two_gpus_cached)
fi
if [[ -d .whl/tokamax ]]; then
  if serve tokamax "$path:$work/tokamax"; then names+=(tokamax tokamax_cached); else echo "tokamax failed"; fi
fi

step "tokens"
PYTHONPATH=tests/serving "$hf_python" tests/serving/gpu_check.py judge "$work/model" "${names[@]}"
step "done"
