"""Sets up JAX: eight virtual CPU devices, no autotuning on a GPU, a cache of compiled programs."""

import gc
import hashlib
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

# Most of the time is XLA compiling small programs, so LLVM optimises none of them on the CPU. On a
# GPU, autotuning the products in the references takes five times as long as the rest of a test.
# The caller's flags come later and win.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_gpu_autotune_level=0",
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    )
)

import jax
import pytest
from gpu_params import gpu_params
from quick import beyond_values

from jax_mla._runtime import _ffi
from jax_mla.testing.run import clear_expected, device_of, num_gpus


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `full` as well")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Use one process where there is a GPU: several would compete for its memory."""
    return 0 if num_gpus() else None


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs, most of which many tests and all runs have in common.

    Each worker has a folder of its own: JAX does not write the files of its cache atomically.
    """
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is None or num_gpus():
        return
    module = pathlib.Path(str(_ffi.extension().__file__))
    digest = hashlib.sha256(module.read_bytes()).hexdigest()[:16]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    folder = cache.mkdir(f"xla-{jax.__version__}-{digest}-{worker}")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with an argument `backend` on all backends of this machine.

    Those that compare a result with the reference's leave that one out.
    """
    if "backend" in metafunc.fixturenames:
        compares = metafunc.definition.get_closest_marker("against_reference") is not None
        on_cpu = ["cpu"] if compares else ["reference", "cpu"]
        metafunc.parametrize("backend", [*on_cpu, *gpu_params()])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what nobody asked for, and skip what this build cannot run."""
    has_cuda = _ffi.extension().build_info()["cuda"]
    asked_for = config.option.markexpr or ""
    has_gpu = num_gpus() > 0
    is_quick = not (has_gpu or config.option.all or config.option.keyword or asked_for)
    # What is named on the command line by its id is asked for.
    is_quick &= not any("::" in arg for arg in config.args)
    dropped = set()
    if not (has_gpu or "gpu" in asked_for or "sanitizer" in asked_for):
        dropped.update(item for item in items if item.get_closest_marker("gpu"))
    if is_quick:
        dropped.update(item for item in items if item.get_closest_marker("full"))
        dropped.update(beyond_values([item for item in items if item not in dropped]))
    for item in items:
        if item.get_closest_marker("gpu") and not num_gpus():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("cuda_build") and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="this build has no CUDA part"))
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    """Exempt modules and tests from Python's garbage collections, a twentieth of the time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget a file's compiled programs at its end: a process would grow past 4 GB."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
        clear_expected()


# What a backend leaves to the next one by design, in the words of its refusals.
LEFT_TO_OTHERS = {
    "sm90": (
        "needs bfloat16 for ragged steps",
        "needs queries in the type of the keys",  # of index_topk
        "needs a page_size of",  # of index_topk
    )
}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Skip a test of a call that its backend does not take by design.

    A backend by name only takes few; the others name theirs in LEFT_TO_OTHERS.
    """
    try:
        return (yield)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        name = str(params.get("backend", params.get("gpu_backend")))
        is_by_name_only = name in dict(_ffi.extension().backends_by_name())
        is_left_to_others = any(words in str(error) for words in LEFT_TO_OTHERS.get(name, ()))
        if "no backend takes this call" in str(error) and (is_by_name_only or is_left_to_others):
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
