"""`python -m jax_mla`: versions, build, devices, backends, and what is missing for the GPUs."""

from __future__ import annotations

import argparse
import collections
import contextlib
import platform
import textwrap
from collections.abc import Iterable

import jax
import jaxlib.version

import jax_mla
from jax_mla._runtime import _backends, _environment, _ffi


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


def _why_not_started() -> str:
    """Start JAX; if that fails, start it on the CPU and return why."""
    asked = jax.config.jax_platforms  # type: ignore[attr-defined]
    try:
        jax.local_devices()
    except (AssertionError, RuntimeError) as error:
        # The rest of the report needs a JAX that runs, and asks it for its default platform.
        jax.config.update("jax_platforms", "cpu")
        why = str(error) or "JAX has no such platform here"
        return f"not started with JAX_PLATFORMS={asked}: {why.splitlines()[0]}"
    return ""


def _jax_devices() -> str:
    """Return what JAX sees."""
    found = list(jax.local_devices())
    if found[0].platform != "cpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS=cuda leaves the CPU out
            found += jax.local_devices(backend="cpu")
    return _count(d.device_kind if d.platform != "cpu" else "cpu" for d in found)


def report() -> str:
    """Return the whole report."""
    why_not_started = _why_not_started()
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
        ("JAX", why_not_started or _jax_devices()),
    ]
    backends = [(s.name, str(s).removeprefix(f"{s.name} ")) for s in jax_mla.backends()]
    why_no_kernel = _backends.why_no_prefill_kernel(dtype="bfloat16", d_nope=128, d_kpe=64, d_v=128)
    advice = _environment.missing(
        found, driver, has_plugin=_environment.has_cuda_plugin(), build=build
    )
    if advice:
        conclusion = "\n".join(["Missing for the GPUs", *map(_wrap, advice)])
    elif why_not_started:
        conclusion = "JAX does not start: the backends above are those of JAX_PLATFORMS=cpu."
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
    argparse.ArgumentParser(prog="python -m jax_mla", description=__doc__).parse_args()
    print(report())
