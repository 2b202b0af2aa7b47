"""Which devices the engine's processes see: as many as its mesh has, which must span them all."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import os
import re

from sgl_jax.srt.server_args import ServerArgs

from jax_mla._runtime import _environment

_COUNT = "--xla_force_host_platform_device_count"
# With loops in its command buffers, XLA runs those of `jax_mla.mixed_attention` without the host.
_COMMANDS = "--xla_gpu_enable_command_buffer"
# Otherwise XLA for CPUs would unpack the FP8 weights of all layers at once (jax 0.10.2).
_CPU_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"


def default() -> str:
    """Return the platform to serve on; without JAX, which would take the GPU's memory here."""
    return os.environ.get("JAX_PLATFORMS") or ("cuda" if _environment.has_gpu() else "cpu")


def show_to_engine(args: ServerArgs) -> None:
    """Set the environment of the engine's processes, where the user has not.

    Raises:
      ValueError: the mesh has another number of devices than there are, or they are of no kind
        that is served.
    """
    if args.device not in ("cpu", "cuda", "gpu"):
        raise ValueError(
            f"--device (or JAX_PLATFORMS): expected cpu, cuda or gpu, got {args.device}"
        )
    # They must not fall back to a CPU where the GPU does not work.
    os.environ["JAX_PLATFORMS"] = args.device
    flags = os.environ.get("XLA_FLAGS", "")
    name, value = (_CPU_ORDER, "false") if args.device == "cpu" else (_COMMANDS, "+WHILE")
    if name not in flags:
        flags = os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()
    if args.nnodes > 1 or args.device_indexes is not None:
        return
    if args.device == "cpu":
        counts = re.findall(rf"{_COUNT}=(\d+)", flags)
        _check(args.tp_size, int(counts[-1]) if counts else args.tp_size, "XLA_FLAGS")
        if not counts:
            os.environ["XLA_FLAGS"] = f"{flags} {_COUNT}={args.tp_size}".strip()
    elif (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        num_shown = sum(bool(name.strip()) for name in shown.split(","))
        _check(args.tp_size, num_shown, "CUDA_VISIBLE_DEVICES")
    else:
        found = len(_environment.gpus())
        if found < args.tp_size:
            raise ValueError(
                f"--tp-size: expected at most the {found} GPUs here, got {args.tp_size}"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(args.tp_size)))


def _check(wanted: int, shown: int, name: str) -> None:
    if wanted != shown:
        raise ValueError(
            f"--tp-size: expected the number of devices that {name} shows ({shown}), got {wanted}"
        )
