# ruff: noqa: E501
"""`python -m jax_mla`, and what it says about machines that are not this one."""

import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import jax_mla
from jax_mla import __main__
from jax_mla._runtime import _backends, _environment, _ffi
from jax_mla._runtime._environment import Gpu
from jax_mla.testing.run import num_gpus

BUILT = {"cuda": True, "cuda_version": "13.0.48", "cuda_archs": "80-real 90a-real 90-virtual"}
NOT_BUILT = {"cuda": False, "cuda_version": "", "cuda_archs": ""}
H200, V100, L4 = Gpu("NVIDIA H200", (9, 0)), Gpu("Tesla V100", (7, 0)), Gpu("NVIDIA L4", (8, 9))


@pytest.mark.parametrize(
    ("found", "driver", "has_plugin", "build", "advice"),
    [
        ([], None, False, NOT_BUILT, []),
        ([H200], (13, 0), True, BUILT, []),
        ([H200], (13, 0), False, BUILT, ['jax has no CUDA plugin; .* pip install "jax.cuda13.", .* ".\\[cuda13\\]"']),
        ([H200], (12, 8), False, BUILT | {"cuda_version": "12.8.1"}, ['pip install "jax.cuda12."']),
        ([H200], (13, 0), True, NOT_BUILT, ["without its CUDA part; .* nvcc .* JAX_MLA_CUDA=ON pip install"]),
        ([H200], (12, 8), True, BUILT, ["driver supports CUDA 12.8, but jax_mla was built with CUDA 13.0"]),
        ([H200], None, True, BUILT, ["libcuda.so.1 is not found; install the driver"]),
        ([V100], (13, 0), True, BUILT, ["capability 7.0, but jax_mla needs 8.0"]),
        ([L4], (13, 0), True, BUILT | {"cuda_archs": "90a-real"}, ["capability 8.9, but .* built for 90a-real; .*JAX_MLA_CUDA_ARCHS=native"]),
        ([Gpu("NVIDIA GPU")], (13, 0), True, BUILT, []),
        ([H200], (13, 0), False, NOT_BUILT, ["jax has no CUDA plugin", "without its CUDA part"]),
    ],
)  # fmt: skip
def test_what_is_missing(found, driver, has_plugin, build, advice) -> None:
    got = _environment.missing(found, driver, has_plugin=has_plugin, build=build)
    assert len(got) == len(advice)
    for text, pattern in zip(got, advice, strict=True):
        assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("80-real", (8, 0), True),
        ("80-real", (8, 9), True),  # a later GPU of the same generation
        ("86-real", (8, 0), False),
        ("80-real", (9, 0), False),
        ("90a-real", (9, 0), True),
        ("90a-real", (10, 0), False),
        ("90-virtual", (12, 0), True),
        ("90-virtual", (8, 9), False),
        ("90", (12, 0), True),  # machine code and PTX
        ("80-real 120-real", (12, 1), True),
        ("all", (8, 0), True),
    ],
)
def test_code_for_a_gpu(architectures, capability, runs) -> None:
    assert _environment.has_code_for(architectures, capability) == runs


def fake_tool(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(_environment, "GPU_FOLDERS", folder / "none")


def test_gpus_from_the_tool(monkeypatch, tmp_path) -> None:
    fake_tool(monkeypatch, tmp_path, "echo 'NVIDIA H200, 9.0'; echo 'Odd, Name, [N/A]'")
    assert _environment.gpus() == [H200, Gpu("Odd, Name")]
    assert _environment.has_gpu()


def test_a_tool_that_fails_finds_no_gpu(monkeypatch, tmp_path) -> None:
    fake_tool(monkeypatch, tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert _environment.gpus() == []


def test_gpus_from_the_driver(monkeypatch, tmp_path) -> None:
    fake_tool(monkeypatch, tmp_path, "exit 9")
    information = tmp_path / "gpus" / "0000:18:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 331\n")
    monkeypatch.setattr(_environment, "GPU_FOLDERS", tmp_path / "gpus")
    assert _environment.gpus() == [Gpu("NVIDIA H200")] and _environment.has_gpu()


@pytest.fixture
def gpu_that_jax_does_not_see(monkeypatch, tmp_path) -> None:
    fake_tool(monkeypatch, tmp_path, "echo 'NVIDIA H200, 9.0'")
    monkeypatch.setattr(_environment, "CUDA_PLUGINS", ("jax_cuda99_plugin",))
    monkeypatch.setattr(_environment, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(_backends.jax, "default_backend", lambda: "cpu")


def test_backends_name_the_missing_extra(gpu_that_jax_does_not_see) -> None:
    statuses = [s for s in jax_mla.backends() if s.platform == "cuda" and not s.by_name_only]
    assert statuses
    for status in statuses:
        assert "an NVIDIA GPU, but jax has no CUDA plugin" in status.reason
        assert 'pip install "jax[cuda13]"' in status.reason
    assert not any("plugin" in s.reason for s in jax_mla.backends(platform="cpu"))


def test_backends_name_no_extra_without_a_gpu(monkeypatch, tmp_path) -> None:
    fake_tool(monkeypatch, tmp_path, "exit 9")
    monkeypatch.setattr(_environment, "CUDA_PLUGINS", ("jax_cuda99_plugin",))
    assert not any("plugin" in s.reason for s in jax_mla.backends())


def test_report_says_what_is_missing(gpu_that_jax_does_not_see) -> None:
    text = __main__.report()
    assert "NVIDIA     1 x NVIDIA H200 (compute capability 9.0)" in text
    assert "driver     CUDA 13.0" in text
    assert "Missing for the GPUs\n  * jax has no CUDA plugin; install the extra cuda13" in text
    assert max(map(len, text.split("Missing")[1].splitlines())) <= 100


def test_report_without_a_gpu(monkeypatch, tmp_path) -> None:
    fake_tool(monkeypatch, tmp_path, "exit 9")
    assert __main__.report().endswith("No NVIDIA GPU was found: calls run on the CPU.")


def test_devices_without_the_cpu(monkeypatch) -> None:
    """As with JAX_PLATFORMS=cuda on a machine with a GPU."""

    def local_devices(backend: str | None = None) -> list[types.SimpleNamespace]:
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")]

    monkeypatch.setattr(__main__.jax, "local_devices", local_devices)
    assert __main__._jax_devices() == "1 x NVIDIA H200"


def run_python(code: str, **env: str) -> str:
    """Return what code prints in a process of its own, which imports the same jax_mla."""
    path = str(pathlib.Path(_ffi.__file__).parents[2])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"]
    result = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_module(**env: str) -> tuple[str, dict[str, str]]:
    """Return what `python -m jax_mla` prints, and its rows by name."""
    text = run_python("import runpy; runpy.run_module('jax_mla', run_name='__main__')", **env)
    lines = text.splitlines()
    return text, dict(line.split(maxsplit=1) for line in lines if line[:2] == "  ")


def test_module_can_be_run() -> None:
    _, rows = run_module()
    assert rows["jax_mla"] == jax_mla.__version__
    assert rows["compiler"] == _ffi.extension().build_info()["compiler"]
    assert {"jax", "jaxlib", "Python", "NVIDIA", "driver", "JAX", "cpu", "reference"} <= set(rows)


def test_backends_of_a_named_platform_where_jax_does_not_start() -> None:
    names = "(b.name for b in jax_mla.backends(platform='cpu') if not b.reason)"
    printed = run_python(f"import jax_mla; print(*{names})", JAX_PLATFORMS="other")
    assert "cpu" in printed.split()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("platform", "why"),
    [
        ("cuda", "JAX has no such platform here"),
        ("tpu", "Unable to initialize backend 'tpu'"),
        ("other", "Unable to initialize backend 'other'"),
    ],
)
def test_module_says_why_jax_does_not_start(platform, why) -> None:
    if platform == "cuda" and num_gpus():
        pytest.skip("JAX starts on this GPU")
    text, rows = run_module(JAX_PLATFORMS=platform)
    assert rows["JAX"].startswith(f"not started with JAX_PLATFORMS={platform}: {why}")
    assert rows["compiler"] == _ffi.extension().build_info()["compiler"]
    assert rows["cpu"] == "(cpu): runs"
    assert "JAX does not start" in text.splitlines()[-1] or "Missing for the GPUs" in text
