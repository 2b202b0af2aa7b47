"""What is installed for NVIDIA GPUs on this machine, and what a user has to add.

GPUs are found without JAX, because a JAX without its CUDA plugin does not see them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess

GPU_FOLDERS = pathlib.Path("/proc/driver/nvidia/gpus")
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
REBUILD = "pip install --force-reinstall --no-deps ."
Version = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
      name: product name.
      compute_capability: (major, minor), or None if it is not known.
    """

    name: str
    compute_capability: Version | None = None


def gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine."""
    return _gpus_from_tool() or _gpus_from_driver()


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU; starts no program if the driver says so."""
    return bool(_gpus_from_driver() or _gpus_from_tool())


def _gpus_from_driver() -> list[Gpu]:
    found = []
    for path in sorted(GPU_FOLDERS.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        found.append(Gpu(model[1].strip() if model else "NVIDIA GPU"))
    return found


def _gpus_from_tool() -> list[Gpu]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    found = []
    for line in result.stdout.splitlines():
        name, _, capability = line.rpartition(",")
        major, _, minor = capability.strip().partition(".")
        is_known = major.isdigit() and minor.isdigit()
        found.append(Gpu(name.strip(), (int(major), int(minor)) if is_known else None))
    return found


def driver_cuda_version() -> Version | None:
    """Return the newest CUDA version that the driver supports, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def has_cuda_plugin() -> bool:
    """Return whether JAX's CUDA plugin is installed."""
    return any(importlib.util.find_spec(name) is not None for name in CUDA_PLUGINS)


def plugin_advice(driver: Version | None) -> str:
    """Say how to install JAX's CUDA plugin, for the CUDA version that the driver supports."""
    extra = "cuda12" if driver is not None and driver < (13, 0) else "cuda13"
    return (
        f'jax has no CUDA plugin; install the extra {extra}: pip install "jax[{extra}]", or in a '
        f'clone of jax_mla pip install ".[{extra}]"'
    )


def why_jax_has_no_gpu() -> str:
    """Say what is missing if this machine has a GPU that JAX does not see; otherwise return ""."""
    if has_cuda_plugin() or not has_gpu():
        return ""
    return f"this machine has an NVIDIA GPU, but {plugin_advice(driver_cuda_version())}"


def has_code_for(architectures: str, capability: Version) -> bool:
    """Return whether a build for some CUDA architectures runs on a GPU.

    Args:
      architectures: as CMake writes them, for example "80-real 90a-real 90-virtual".
      capability: compute capability (major, minor) of the GPU.
    """
    wanted = 10 * capability[0] + capability[1]
    for architecture in architectures.split():
        match = re.fullmatch(r"(\d+)([a-z]*)(-real|-virtual)?", architecture)
        if match is None:  # such as "all"
            return True
        number, suffix, kind = match.groups()
        built = int(number)
        if suffix == "a":  # runs on this one architecture only
            if built == wanted:
                return True
            continue
        # Machine code runs on later GPUs of the same generation, PTX on all later GPUs.
        if kind != "-virtual" and built // 10 == wanted // 10 and built <= wanted:
            return True
        if kind != "-real" and built <= wanted:
            return True
    return False


def missing(
    found: list[Gpu],
    driver: Version | None,
    *,
    has_plugin: bool,
    build: dict[str, object],
) -> list[str]:
    """List what keeps jax_mla from the GPUs of this machine, each with what to do about it.

    Args:
      found: the GPUs of this machine.
      driver: newest CUDA version that the driver supports.
      has_plugin: whether JAX's CUDA plugin is installed.
      build: `build_info()` of the extension.
    """
    if not found:
        return []
    advice = []
    if driver is None:
        advice.append("the NVIDIA driver's library libcuda.so.1 is not found; install the driver")
    if not has_plugin:
        advice.append(plugin_advice(driver))
    if not build["cuda"]:
        advice.append(
            "jax_mla was built without its CUDA part; install the CUDA toolkit 12.5 or newer, put "
            f"nvcc on PATH, and in a clone of jax_mla run JAX_MLA_CUDA=ON {REBUILD}"
        )
        return advice
    toolkit = str(build["cuda_version"])
    major, minor = (int(number) for number in toolkit.split(".")[:2])
    if driver is not None and driver < (major, minor):
        advice.append(
            f"the driver supports CUDA {driver[0]}.{driver[1]}, but jax_mla was built with CUDA "
            f"{major}.{minor}; install a newer driver, or rebuild with an older nvcc, 12.5 at least"
        )
    architectures = str(build["cuda_archs"])
    for capability in sorted({gpu.compute_capability for gpu in found} - {None}):  # type: ignore[type-var]
        if capability < (8, 0):
            advice.append(
                f"a GPU has compute capability {capability[0]}.{capability[1]}, but jax_mla needs "
                "8.0 or newer"
            )
        elif not has_code_for(architectures, capability):
            advice.append(
                f"a GPU has compute capability {capability[0]}.{capability[1]}, but jax_mla was "
                f"built for {architectures}; in a clone of jax_mla run "
                f"JAX_MLA_CUDA_ARCHS=native {REBUILD}"
            )
    return advice
