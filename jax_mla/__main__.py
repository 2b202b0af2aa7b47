"""`python -m jax_mla`: versions, build, devices, backends, and what is missing for the GPUs."""

from __future__ import annotations

import collections
import platform
import textwrap
from collections.abc import Iterable

import jax
import jaxlib.version

import jax_mla
from jax_mla import _backends, _environment, _ffi


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"  {name:<10} {text}" for name, text in rows]
    return "\n".join([title, *lines])


def _wrap(advice: str) -> str:
    return textwrap.fill(
        advice,
        width=96,
        initial_indent="  * ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(names: Iterable[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in collections.Counter(names).items())


def _describe(gpu: _environment.Gpu) -> str:
    if gpu.compute_capability is None:
        return gpu.name
    major, minor = gpu.compute_capability
    return f"{gpu.name} (compute capability {major}.{minor})"


def _jax_devices() -> str:
    """Return what JAX sees, or why it sees nothing."""
    found = list(jax.local_devices(backend="cpu"))
    try:
        default = jax.local_devices()
    except RuntimeError as error:
        return f"{_count(d.platform for d in found)}; {str(error).splitlines()[0]}"
    if default[0].platform != "cpu":
        found = [*default, *found]
    return _count(d.device_kind if d.platform != "cpu" else "cpu" for d in found)


def report() -> str:
    """Return the whole report."""
    build = _ffi.extension().build_info()
    found, driver = _environment.gpus(), _environment.driver_cuda_version()
    cuda = f"{build['cuda_version']} for {build['cuda_archs']}" if build["cuda"] else "no"
    versions = [
        ("jax_mla", jax_mla.__version__),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.version.__version__),
        ("Python", platform.python_version()),
    ]
    built = [("CPU", "yes"), ("CUDA", cuda), ("compiler", build["compiler"])]
    devices = [
        ("NVIDIA", _count(map(_describe, found)) or "none found"),
        ("driver", f"CUDA {driver[0]}.{driver[1]}" if driver else "none found"),
        ("JAX", _jax_devices()),
    ]
    backends = [(s.name, str(s).removeprefix(f"{s.name} ")) for s in jax_mla.backends()]
    why_no_kernel = _backends.why_no_prefill_kernel(dtype="bfloat16", d_nope=128, d_kpe=64, d_v=128)
    advice = _environment.missing(
        found, driver, has_plugin=_environment.has_cuda_plugin(), build=build
    )
    if advice:
        conclusion = "\n".join(["Missing for the GPUs", *map(_wrap, advice)])
    elif found:
        conclusion = "Nothing is missing for the GPUs."
    else:
        conclusion = "No NVIDIA GPU was found: calls run on the CPU."
    return "\n\n".join(
        [
            _section("Versions", versions),
            _section("Build", built),
            _section("Devices", devices),
            _section("Backends of decode", backends),
            _section("Kernel of prefill", [("sm90", why_no_kernel or "runs")]),
            conclusion,
        ]
    )


if __name__ == "__main__":
    print(report())
