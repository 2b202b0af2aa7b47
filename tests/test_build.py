"""The two builds build the same thing, and the version is written once."""

import importlib.metadata
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from typing import Any

import pytest

import jax_mla
from jax_mla._runtime import _ffi

ROOT = pathlib.Path(__file__).parents[1]
RECALL = ROOT / "examples/deepseek/checkpoints/recall"
SOURCES_CMAKE = (ROOT / "cmake" / "sources.cmake").read_text()
LISTS = re.findall(r"file\(GLOB\w* JAX_MLA_(\w+)", SOURCES_CMAKE)


def expand(patterns: list[str]) -> set[str]:
    return {str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern)}


def cmake_sources(name: str) -> set[str]:
    call = re.search(rf"file\((GLOB|GLOB_RECURSE) JAX_MLA_{name}\b([^)]*)\)", SOURCES_CMAKE)
    assert call, f"cmake/sources.cmake has no JAX_MLA_{name}"
    patterns = re.findall(r"csrc/\S+", call[2])
    if call[1] == "GLOB_RECURSE":
        patterns = ["/**/".join(pattern.rsplit("/", 1)) for pattern in patterns]
    return expand(patterns)


def bazel_sources(name: str) -> set[str]:
    text = (ROOT / "BUILD.bazel").read_text()
    call = re.search(rf"^{name} = glob\(\[(.*?)\]\)", text, re.MULTILINE | re.DOTALL)
    assert call, f"BUILD.bazel has no {name}"
    return expand(re.findall(r'"([^"]+)"', call[1]))


@pytest.mark.parametrize("name", LISTS)
def test_cmake_and_bazel_build_the_same_sources(name: str) -> None:
    assert cmake_sources(name) == bazel_sources(name) != set()


def test_every_source_is_in_exactly_one_list() -> None:
    listed = [source for name in LISTS for source in cmake_sources(name)]
    assert sorted(listed) == sorted(expand(["csrc/**/*.cc", "csrc/**/*.cu"]))


def test_both_builds_compile_every_kernel_instance(tmp_path: pathlib.Path) -> None:
    """The generator finds all tables, and each build splits its files by architecture."""
    command = [sys.executable, str(ROOT / "tools/kernel_instances.py"), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [
        str(table.parent.relative_to(ROOT) / "_".join(re.findall(r"\w+", row)))
        for table in ROOT.rglob("csrc/**/instances.inc")
        for row in re.findall(r"^MLA_INSTANCE\((.*)\)$", table.read_text(), re.MULTILINE)
    ]
    written = [pathlib.Path(line) for line in done.stdout.split()]
    assert sorted(f"{tmp_path / row}.cu" for row in rows) == sorted(map(str, written)) != []
    assert sorted(tmp_path.rglob("*.cu")) == sorted(written)
    cmake = (ROOT / "cmake/instances.cmake").read_text()
    bazel = (ROOT / "tools/bazel/local_config.bzl").read_text()
    assert "tools/kernel_instances.py" in cmake and "//:tools/kernel_instances.py" in bazel
    for folder in ("sm90", "sm100"):
        assert (
            f'MATCHES "/instances/csrc/.*/{folder}/"' in cmake
            and f"instances/**/{folder}/**" in bazel
        )


def test_an_unchanged_instance_is_not_compiled_again(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(ROOT / "tools/kernel_instances.py"), str(tmp_path)]
    first, *_ = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    os.utime(first, ns=(0, 0))
    subprocess.run([*command, "csrc/decode/sm80"], check=True, capture_output=True)
    assert os.stat(first).st_mtime_ns == 0


def test_vector_variants_get_the_same_flags() -> None:
    cmake, bazel = (ROOT / "CMakeLists.txt").read_text(), (ROOT / "BUILD.bazel").read_text()
    for source in ("csrc/decode/cpu/kernel_avx2.cc", "csrc/decode/cpu/kernel_avx512.cc"):
        from_cmake = re.search(rf"SOURCE {source} [A-Z_ ]+\s([^)]*)\)", cmake)
        from_bazel = re.search(rf'"{source}": \[(.*?)\]', bazel, re.DOTALL)
        assert from_cmake and from_bazel
        flags = from_cmake[1].removeprefix("COMPILE_OPTIONS").split()
        assert flags == re.findall(r'"(-[^"]+)"', from_bazel[1]) != []


def test_version_is_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", jax_mla.__version__)
    assert _ffi.extension().build_info()["version"] == jax_mla.__version__


def installed_files() -> list[str]:
    try:
        files = importlib.metadata.files("jax_mla") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    if not files:
        pytest.skip("jax_mla is not installed: its source tree is in use")
    return [str(file) for file in files]


def test_installed_version() -> None:
    installed_files()
    assert importlib.metadata.version("jax_mla") == jax_mla.__version__


def test_wheel_contains_only_the_package_and_the_checkpoint_of_the_demo() -> None:
    files = installed_files()
    if any("editable" in file for file in files):
        pytest.skip("jax_mla is an editable install")
    own = re.compile(r"jax_mla(-[\d.]+\.dist-info)?/")
    assert [file for file in files if not own.match(file)] == []
    modules = [f for f in files if f.startswith("jax_mla/") and "__pycache__" not in f]
    checkpoint = {f"jax_mla/integrations/sglang/recall/{path.name}" for path in RECALL.iterdir()}
    assert checkpoint <= set(modules)
    stray = [f for f in modules if not f.endswith((".py", "/py.typed")) and f not in checkpoint]
    assert len(stray) == 1 and stray[0].startswith("jax_mla/_extension."), stray


def test_build_info_says_what_was_built() -> None:
    info = _ffi.extension().build_info()
    assert info["cuda"] == ("CUDA" in _ffi.extension().targets())
    assert bool(info["cuda_archs"]) == bool(info["cuda_version"]) == info["cuda"]
    assert info["compiler"]


@pytest.mark.parametrize(
    ("wanted", "has_compiler", "asks_for_cutlass"),
    [("", True, True), ("", False, False), ("OFF", True, False), ("on", False, True)],
)
def test_only_cuda_builds_ask_for_cutlass(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    wanted: str,
    has_compiler: bool,
    asks_for_cutlass: bool,
) -> None:
    package: Any = types.ModuleType("scikit_build_core")  # it is not in every environment
    hooks: Any = types.ModuleType("scikit_build_core.build")
    package.build = hooks
    for module in (package, hooks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hooks.get_requires_for_build_wheel = hooks.get_requires_for_build_editable = lambda _: ["ninja"]
    backend = runpy.run_path(str(ROOT / "tools/build_backend.py"))
    (tmp_path / "nvcc").touch(mode=0o755 if has_compiler else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAX_MLA_CUDA", wanted)
    monkeypatch.delenv("CUDACXX", raising=False)
    for kind in ("wheel", "editable"):
        needed = backend[f"get_requires_for_build_{kind}"]()
        assert needed == ["ninja"] + ["nvidia-cutlass==4.2.0.0"] * asks_for_cutlass
    assert f"source/include {backend['CUTLASS']})" in (ROOT / "CMakeLists.txt").read_text()
