#!/usr/bin/env bash
# Tests sglang-jax with jax_mla, in an environment of its own:
#   tools/ci_serving.sh PYTHON HF_PYTHON WHEEL
#     PYTHON     3.12 or 3.13, of which the environment is made
#     HF_PYTHON  has torch and transformers; it makes the checkpoints and says what they answer
#     WHEEL      jax_mla
# Where no package can be downloaded it says so and passes. Everything else that fails is a failure.
set -euo pipefail
usage="usage: tools/ci_serving.sh PYTHON HF_PYTHON WHEEL"
python=${1:?$usage} hf_python=${2:?$usage} wheel=${3:?$usage}
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAX_MLA_HF_PYTHON HF_HUB_OFFLINE=1
unset PYTEST_ADDOPTS PYTHONPATH  # of the caller's environment
JAX_MLA_HF_PYTHON=$(realpath --no-symlinks "$hf_python")

"$python" -m venv "$work/venv"
engine=$(grep '^sglang-jax' .ci/requirements-serving.txt)
if ! "$work/venv/bin/pip" download --no-deps -d "$work/downloaded" "$engine" >"$work/log" 2>&1; then
  if grep -q "connection broken by" "$work/log"; then  # what pip says before it tries again
    echo "SKIPPED: no network to the package index, so the serving engine was not tested"
    exit 0
  fi
  cat "$work/log" >&2
  exit 1
fi
"$work/venv/bin/pip" install --quiet --no-deps -r .ci/requirements-serving.txt "$wheel"

# The tests alone: beside the source tree, Python would import jax_mla from there.
mkdir "$work/tests"
cp tests/conftest.py tests/gpu_params.py tests/quick.py "$work/tests/"
cp -r tests/serving "$work/tests/serving"
cd "$work"
"$work/venv/bin/python" -m pytest -q -x -W default -p no:cacheprovider --durations=10 tests/serving
