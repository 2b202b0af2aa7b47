"""Runs cases on backends, for tests and benchmarks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_mla
from jax_mla.kv_cache import FP8_DS_MLA, FP8_E4M3
from jax_mla.testing.cases import Case, RaggedCase
from jax_mla.testing.compare import assert_close, decode_exactly, decode_in_dtype
from jax_mla.testing.ragged import RaggedInputs
from jax_mla.testing.sparse import SparseCase, SparseInputs

GPU_PLATFORM = "cuda"


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs that JAX sees."""
    try:
        return len(jax.devices(GPU_PLATFORM))
    except RuntimeError:
        return 0


def gpu_statuses() -> list[jax_mla.BackendStatus]:
    """Return what the CUDA backends say to this GPU, or nothing on a machine without one."""
    statuses = jax_mla.backends(platform=GPU_PLATFORM) if num_gpus() else []
    return [s for s in statuses if s.platform == GPU_PLATFORM]


def gpu_backends() -> list[str]:
    """Return the names of the CUDA backends, or nothing on a machine without a GPU."""
    return [s.name for s in gpu_statuses()]


def device_of(backend: str) -> Any:
    """Return the device on which a backend is tested."""
    if backend == "cpu":
        return jax.devices("cpu")[0]
    if backend == "reference":
        return jax.devices()[0]
    return jax.devices(GPU_PLATFORM)[0]


def cpu_mesh(
    sizes: Sequence[int], names: Sequence[str], kinds: Sequence[AxisType] | None = None
) -> Mesh:
    """Make a mesh of virtual CPU devices; its axes are Auto unless `kinds` is given."""
    devices = np.array(jax.devices("cpu")[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, tuple(names), axis_types=tuple(kinds or (AxisType.Auto,) * len(names)))


@functools.cache
def expected(
    case: Case, seed: int = 0
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return out and lse of a case by definition, and those of the yardstick."""
    inputs = case.inputs(seed)
    return (
        decode_exactly(inputs, **case.mask()),
        decode_in_dtype(inputs, **case.mask()),
    )


def run(case: Case, backend: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse of one jitted call on a backend."""
    inputs = case.inputs(seed)
    with jax.default_device(device_of(backend)):
        fun = functools.partial(
            jax_mla.decode,
            **inputs.kwargs(),
            **case.options(),
            return_lse=True,
            backend=backend,
        )
        out, lse = jax.jit(fun)(*inputs.args())
        return np.asarray(out), np.asarray(lse)


def why_not(case: Case | RaggedCase | SparseCase, backend: str) -> str:
    """Return why a backend does not take a case; empty if it does."""
    if backend == "reference":
        return ""
    inputs = case.inputs()
    if isinstance(inputs, SparseInputs):
        inputs = inputs.by_token()
    mask = {"sliding_window": None, "soft_cap": None}
    if not isinstance(case, SparseCase):
        mask = {name: getattr(case, name) for name in mask}
    q_nope, q_pe = inputs.q_nope, inputs.q_pe
    if isinstance(inputs, RaggedInputs):  # a token a sequence, of which only the shape is used
        # With a window two, which need a mask, unless the step itself has one a sequence.
        num_seqs = len(inputs.page_table)
        is_decode = inputs.cu_q_lens is None and len(inputs.q_nope) == num_seqs
        tokens = (num_seqs, 2) if mask["sliding_window"] and not is_decode else (num_seqs,)
        q_nope, q_pe = (np.zeros((*tokens, *x.shape[1:]), x.dtype) for x in (q_nope, q_pe))
    statuses = jax_mla.backends(
        q_nope,
        q_pe if q_pe.shape[-1] else None,
        inputs.kv_pages,
        inputs.page_table,
        layer=inputs.layer,
        packs=inputs.kwargs().get("packs", False),
        num_splits=None if isinstance(case, SparseCase) else case.num_splits,
        **mask,
        batch_invariant=case.batch_invariant,
        kv_format=inputs.kv_format,
        platform="cpu" if backend == "cpu" else GPU_PLATFORM,
    )
    return next(s.reason for s in statuses if s.name == backend)


def may_multiply_codes(case: Case | RaggedCase | SparseCase, backend: str) -> bool:
    """Whether a backend may sum scores of a case with 13 bits (docs/numerics.md)."""
    is_fp8 = case.kv_format in (FP8_E4M3, FP8_DS_MLA) and case.d_ckv == 512
    return is_fp8 and backend in ("sm90", "sm90:narrow", "sm90:scores")


def _check_result(
    case: Case | RaggedCase,
    backend: str,
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    yardsticks: tuple[np.ndarray | None, np.ndarray | None],
) -> None:
    """Compare out and lse with those of the reference; `yardsticks` are those of `expected`."""
    out, lse = got
    yardstick, lse_yardstick = yardsticks
    assert out.dtype == case.inputs().dtype and lse.dtype == np.float32
    assert_close(
        out,
        lse,
        *want,
        dtype=case.dtype,
        yardstick=yardstick,
        lse_yardstick=lse_yardstick if may_multiply_codes(case, backend) else None,
    )


def check(case: Case, backend: str, seed: int = 0) -> None:
    """Raise AssertionError unless the result of a backend is right."""
    got = run(case, backend, seed)
    want, yardsticks = expected(case, seed)
    _check_result(case, backend, got, want, yardsticks)


def run_ragged(case: RaggedCase, backend: str, seed: int = 0) -> list[np.ndarray]:
    """Return out, lse and the new pools of one jitted call on a backend."""
    inputs = case.inputs(seed)
    with jax.default_device(device_of(backend)):
        fun = functools.partial(
            jax_mla.ragged_paged_attention,
            **inputs.kwargs(),
            **case.options(),
            return_lse=True,
            backend=backend,
        )
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fun)(*inputs.args()))]


def defined_ragged(inputs: RaggedInputs, **mask: Any) -> list[np.ndarray]:
    """Return out, lse and the new pools of the reference."""
    with jax.default_device(device_of("reference")):
        fun = functools.partial(
            jax_mla.reference.ragged_paged_attention, **inputs.kwargs(), **mask, return_lse=True
        )
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fun)(*inputs.args()))]


@functools.cache
def expected_ragged(
    case: RaggedCase, seed: int = 0
) -> tuple[list[np.ndarray], tuple[np.ndarray | None, np.ndarray | None]]:
    """Return out, lse and the new pools of a case by definition, and the yardstick's out and lse.

    A case with wild values has no yardstick, which would follow page ids without checking them.
    """
    inputs = case.inputs(seed)
    if case.is_wild:
        return defined_ragged(inputs, **case.mask()), (None, None)
    pools = inputs.new_pools()
    by_token = inputs.token_by_token(pools)
    mask = case.mask()
    (out, lse), yardsticks = decode_exactly(by_token, **mask), decode_in_dtype(by_token, **mask)
    return [out[:, 0], lse[:, 0], *pools], (yardsticks[0][:, 0], yardsticks[1][:, 0])


def clear_expected() -> None:
    """Forget the results that are kept for further backends."""
    expected.cache_clear()
    expected_ragged.cache_clear()


def check_ragged(case: RaggedCase, backend: str, seed: int = 0) -> None:
    """Raise AssertionError unless the result of a backend is right: the cache bit for bit."""
    out, lse, *pools = run_ragged(case, backend, seed)
    (want_out, want_lse, *want_pools), yardsticks = expected_ragged(case, seed)
    for pool, want in zip(pools, want_pools, strict=True):
        np.testing.assert_array_equal(pool.view(np.uint8), want.view(np.uint8))
    _check_result(case, backend, (out, lse), (want_out, want_lse), yardsticks)
