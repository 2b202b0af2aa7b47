"""Sets up JAX before its import: eight virtual CPU devices, and no autotuning on a GPU."""

import os
import pathlib
import subprocess
import sys

# `python -m pytest` puts the source tree first on the path. If the tree has no extension of its own
# (tools/dev_build.sh), the installed package is what is tested; examples/ is only in the tree.
ROOT = pathlib.Path(__file__).resolve().parents[1]
if not any((ROOT / "jax_mla").glob("_extension.*")):
    sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry).resolve() != ROOT]
    sys.path.append(str(ROOT))

# Autotuning the products in the references takes five times as long as the rest of a GPU test.
# The caller's flags come later and win.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_gpu_autotune_level=0",
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    )
)

import jax
import pytest
from gpu_params import gpu_params

from jax_mla import _ffi
from jax_mla.testing.run import device_of, num_gpus


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with an argument `backend` on all backends of this machine."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ["reference", "cpu", *gpu_params()])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_cuda = _ffi.extension().build_info()["cuda"]
    for item in items:
        if item.get_closest_marker("gpu") and not num_gpus():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("cuda_build") and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="this build has no CUDA part"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Skip a test of a call that a backend by name only does not take: it takes few."""
    try:
        return (yield)
    except ValueError as error:
        params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        name = params.get("backend", params.get("gpu_backend"))
        by_name_only = dict(_ffi.extension().backends_by_name())
        if name in by_name_only and "no backend takes this call" in str(error):
            pytest.skip(str(error).splitlines()[-1].strip())
        raise


@pytest.fixture(autouse=True)
def cpu_by_default(request: pytest.FixtureRequest):
    """Run tests without the mark `gpu` on the CPU, also on a machine with a GPU."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def no_rank_promotion():
    """Run the test in a program that forbids implicit broadcasts to a higher rank."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def on_device(cpu_by_default, backend: str):
    """Run the test with the default device that its backend needs."""
    with jax.default_device(device_of(backend)):
        yield


@pytest.fixture
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test import the modules of benchmarks/ by name."""
    # At the end of the path, so that the folder's short module names hide no other module.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])


@pytest.fixture(scope="session")
def kernel_instances(tmp_path_factory: pytest.TempPathFactory):
    """A function that writes the source files of the kernel instances below a folder."""

    def write(folder: str) -> list[pathlib.Path]:
        directory = tmp_path_factory.mktemp("instances")
        command = [sys.executable, str(ROOT / "tools/kernel_instances.py"), str(directory), folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return [pathlib.Path(line) for line in done.stdout.split()]

    return write
