#!/usr/bin/env bash
# Builds the extension with Bazel, as BUILD.bazel describes it, and checks that the result imports and
# is what CMake builds. Offline: needs Debian's Bazel (installed here if missing) and a Python with
# jaxlib, nanobind and nvidia-cutlass: $JAX_MLA_PYTHON, else python3; missing packages go into a
# temporary environment beside it.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! command -v bazel >/dev/null; then
  sudo=$([[ $EUID -eq 0 ]] || echo sudo)
  $sudo apt-get update -qq
  $sudo apt-get install -qq --yes --no-install-recommends \
    bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-platforms >"$work/apt.log" 2>&1 ||
    { cat "$work/apt.log" >&2; exit 1; }
fi

python=$(command -v "${JAX_MLA_PYTHON:-python3}")
if ! "$python" -c 'import jax, nanobind, cutlass_library' 2>/dev/null; then
  "$python" -m venv --system-site-packages "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet "jax>=0.10" "nanobind>=2.4" nvidia-cutlass==4.2.0.0
fi

export JAX_MLA_PYTHON=$python
bazel=(bazel --output_user_root="${JAX_MLA_BAZEL_ROOT:-$work/bazel}")
# Bazel leaves a server behind, and read-only outputs.
trap '"${bazel[@]}" shutdown >/dev/null 2>&1 || true; chmod -R u+w "$work"; rm -rf "$work"' EXIT
# --symlink_prefix=/: no links into the outputs in the source tree.
build() { JAX_MLA_CUDA_ARCHS=$1 "${bazel[@]}" build --symlink_prefix=/ --jobs="$(nproc)" "${@:2}" //...; }
# The kernels of Hopper and of CUTLASS's library take 20 minutes of a core, which CMake's build has
# spent on them. So their targets are only analysed: each source and each label has to exist.
# JAX_MLA_CUDA_ARCHS names what is built instead of one generic architecture.
build 80,90a,100 --nobuild
build "${JAX_MLA_CUDA_ARCHS:-80}"

mkdir -p "$work/import/jax_mla"
cp jax_mla/_version.py "$work/import/jax_mla/"
cp "$("${bazel[@]}" info bazel-bin 2>/dev/null)"/_extension.*so "$work/import/jax_mla/"
cd "$work/import"
"$python" - <<'EOF'
from jax_mla import _extension, _version

info = _extension.build_info()
assert info["version"] == _version.__version__, info
expected = {"cpu", "CUDA"} if info["cuda"] else {"cpu"}
assert set(_extension.targets()) == expected, _extension.targets()
print("Bazel built", _extension.__file__.rsplit("/", 1)[-1], info)
EOF
