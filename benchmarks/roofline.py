"""The least that a call must move and compute, and how fast a device can do it."""

import dataclasses
import time
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from grid import Case


class Device(Protocol):
    """The fields of a JAX device that are used here."""

    platform: str
    device_kind: str


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The rates that the floor is computed from.

    Attributes:
      name: Where the rates come from, for the report.
      bytes_per_s: Reading random pages from device memory.
      flops_per_s: Dense matrix products in the 16-bit types, on random data.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float


# Measured, not the vendors' figures. H200: bulk copies of random pages, and an 8192^3 bf16 product.
# These are the ceilings of the published table. H100: a device copy, and the same product.
KNOWN_DEVICES = {
    "NVIDIA H200": Ceilings("H200, measured", 4.55e12, 780e12),
    "NVIDIA H100 80GB HBM3": Ceilings("H100 SXM, measured", 3.0e12, 780e12),
}


def num_bytes(case: Case) -> int:
    """Least bytes that a call moves: cache, new rows if written, queries, output, each once."""
    rows = case.num_tokens * case.num_heads
    per_row = case.d_ckv + case.d_kpe + case.d_ckv
    return case.cache_bytes + case.written_bytes + rows * per_row * case.item_bytes


def num_flops(case: Case) -> int:
    """Operations of both matrix products, for each query token and token that it attends to."""
    per_row_and_token = 2 * (case.d_ckv + case.d_kpe) + 2 * case.d_ckv
    return case.num_pairs * case.num_heads * per_row_and_token


def floor_seconds(case: Case, ceilings: Ceilings) -> float:
    """The least time of any implementation: max(bytes / rate, operations / rate)."""
    return max(
        num_bytes(case) / ceilings.bytes_per_s,
        num_flops(case) / ceilings.flops_per_s,
    )


def ceilings_for(
    device: Device, *, tb_per_s: float | None = None, tflop_per_s: float | None = None
) -> Ceilings:
    """Return the ceilings of a device. They are measured now if the device is not known.

    Args:
      device: JAX's default device.
      tb_per_s: Memory rate to use instead.
      tflop_per_s: Arithmetic rate to use instead.
    """
    known = KNOWN_DEVICES.get(device.device_kind)
    if known is None:
        if tb_per_s and tflop_per_s:
            known = Ceilings("", 0.0, 0.0)
        else:
            known = _measure(device)
    if tb_per_s or tflop_per_s:
        return Ceilings(
            "given on the command line",
            tb_per_s * 1e12 if tb_per_s else known.bytes_per_s,
            tflop_per_s * 1e12 if tflop_per_s else known.flops_per_s,
        )
    return known


def _measure(device: Device) -> Ceilings:
    """Time a large sum (reads) and a large matrix product on a device that is not known."""
    on_cpu = device.platform == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    size = 1536 if on_cpu else 8192
    # 256 MB on a CPU, 2 GB on a GPU: larger than every cache.
    data = jnp.ones((2**26 if on_cpu else 2**29,), jnp.float32)
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
    read = _best_seconds(jax.jit(jnp.sum), data)
    product = _best_seconds(jax.jit(lambda m: m @ m), matrix)
    how = "f32 sum and f32 product" if on_cpu else "f32 sum and bf16 product"
    return Ceilings(f"measured now: {how}", data.nbytes / read, 2 * size**3 / product)


def _best_seconds(fn, *args, repeats: int = 5) -> float:
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return float(np.min(times))
