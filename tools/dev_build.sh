#!/usr/bin/env bash
# Builds the extension for one Python and puts it into the source tree, for work without an install:
#   tools/dev_build.sh .venv/bin/python [cmake arguments, e.g. -DJAX_MLA_CUDA=ON -DJAX_MLA_CUDA_ARCHS=90a]
# The Python needs jaxlib, nanobind, cmake and ninja (and nvidia-cutlass for CUDA). CUDA is off unless
# asked for. JAX_MLA_BUILD_DIR says where to build (build/dev-<python version> by default).
# An installed jax_mla, an editable one too, would be imported with its own extension: uninstall it.
set -euo pipefail

python=$(realpath --no-symlinks "${1:?usage: tools/dev_build.sh PYTHON [cmake arguments]}")
shift
root=$(cd "$(dirname "$0")/.." && pwd)
tag=$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
build=${JAX_MLA_BUILD_DIR:-$root/build/dev-$tag}
PATH=$(dirname "$python"):$PATH
mkdir -p "$build"

cmake -S "$root" -B "$build" -G Ninja -DPython_EXECUTABLE="$python" -DJAX_MLA_CUDA=OFF "$@" >"$build.log" 2>&1 ||
  { cat "$build.log" >&2; exit 1; }
cmake --build "$build" --parallel "${JAX_MLA_JOBS:-2}"
# Renamed into place: another process may be running the old module.
for module in "$build"/_extension.*.so; do
  cp "$module" "$root/jax_mla/.$(basename "$module")"
  mv "$root/jax_mla/.$(basename "$module")" "$root/jax_mla/$(basename "$module")"
done
