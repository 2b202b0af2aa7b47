"""Which backend takes a call: asks the extension's tables, and words the answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import _ffi

REFERENCE = "reference"
# Platforms with handlers: JAX's name -> the extension's.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """What one backend says to a call.

    Attributes:
      name: as in `backend=`.
      platform: JAX platform it runs on; "any" for the reference.
      reason: why it declines; empty if it would run.
      chosen: whether `backend=None` picks it.
    """

    name: str
    platform: str
    reason: str
    chosen: bool

    def __str__(self) -> str:
        """One line: name, platform, verdict."""
        verdict = "runs" if self.chosen else "can run" if not self.reason else self.reason
        return f"{self.name} ({self.platform}): {verdict}"


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """The static part of a decode call; what backends judge by."""

    dtype: str
    batch: Any
    q_len: int
    num_heads: int
    d_ckv: int
    d_kpe: int
    page_size: int
    max_pages_per_seq: Any
    num_splits: int = 0
    batch_invariant: bool = False

    def shape(self, batch: int | None = None) -> Any:
        """As the extension's DecodeShape.

        Symbolic dimensions (`jax.export`) become 1, but the page table's width: it only bounds the
        lengths, and scratch has to do for the longest.
        """
        fields = dataclasses.asdict(self)
        if batch is not None:
            fields["batch"] = batch
        for name, value in fields.items():
            if not isinstance(value, int | str):
                fields[name] = _WIDEST_PAGE_TABLE if name == "max_pages_per_seq" else 1
        return _ffi.extension().DecodeShape(**fields)


_WIDEST_PAGE_TABLE = 1 << 22
_MANY_SEQUENCES = 1 << 20  # more than there are workers


@functools.cache
def _known() -> dict[str, str]:
    """All backends of this build: name -> platform."""
    probe = DecodeCall("bfloat16", 1, 1, 1, 512, 64, 64, 1)
    names = {name: platform for platform in PLATFORMS for name, _ in _answers(platform, probe)}
    return names | {REFERENCE: "any"}


def check_name(op: str, backend: str | None, *, has_variants: bool = True) -> str:
    """Return the FFI attribute for `backend=`; it is empty if the backend is chosen for the user.

    Args:
      op: name of the calling op, for the message.
      backend: what the user passed, "name" or "name:variant".
      has_variants: whether the op has variants; only its CUDA backends do.

    Raises:
      ValueError: there is no such backend, or it has no variants.
    """
    if backend is None:
        return ""
    known = _known()
    name, colon, _ = backend.partition(":") if isinstance(backend, str) else ("", "", "")
    if known.get(name) == "cuda" and colon and not has_variants:
        raise ValueError(
            f"{op}: backend: expected a name without a variant, such as {name!r}, got {backend!r}; "
            "only decode has variants"
        )
    if name not in known or (colon and known[name] != "cuda"):
        built = "" if _has_cuda() else " (this build has no CUDA part)"
        raise ValueError(
            f"{op}: backend: expected None or one of {', '.join(known)}{built}, got {backend!r}"
        )
    return backend


def uses_reference(op: str, backend: str, platform: str) -> bool:
    """Return whether a call asks for the reference.

    Args:
      op: name of the op, for messages.
      backend: the FFI attribute, as `check_name` returns it.
      platform: the platform that the call is lowered for.

    Raises:
      ValueError: the named backend does not run on this platform, or no backend is named and the
        platform has none but the reference.
    """
    home = _known().get(backend.split(":")[0], "any")
    if backend and home not in ("any", platform):
        raise ValueError(
            f"{op}: backend: expected one that runs on {platform}, got {backend!r}, which runs on "
            f"{home}"
        )
    if not backend and platform not in PLATFORMS:
        raise ValueError(
            f"{op}: platform: expected one of {', '.join(PLATFORMS)}, got {platform}, for which "
            'there is no kernel; backend="reference" runs everywhere, but slowly'
        )
    return backend == REFERENCE


def _has_cuda() -> bool:
    return bool(_ffi.extension().build_info()["cuda"])


def _compute_capability() -> int:
    """10 * major + minor of this process's first GPU; 0 without one (export): any."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return 0
    major, _, minor = str(device.compute_capability).partition(".")
    return 10 * int(major) + int(minor or 0)


def _answers(platform: str, call: DecodeCall) -> list[tuple[str, str]]:
    capability = _compute_capability() if platform == "cuda" else 0
    return _ffi.extension().decode_backends(PLATFORMS[platform], call.shape(), capability)


def require(platform: str, call: DecodeCall, backend: str) -> None:
    """Raise ValueError, with every backend's reason, if none takes the call on `platform`."""
    op = "jax_mla.decode"
    if platform == "cuda" and not _has_cuda():
        raise ValueError(
            f"{op}: platform: expected a build with CUDA to lower for cuda, got one without; "
            'rebuild with JAX_MLA_CUDA=ON, or pass backend="reference"'
        )
    wanted = backend.split(":")[0]
    answers = [(n, why) for n, why in _answers(platform, call) if wanted in ("", n)]
    if any(not why for _, why in answers):
        return
    reasons = "".join(f"\n  {name}: {why}" for name, why in answers)
    raise ValueError(
        f'{op}: no backend takes this call on {platform} (backend="reference" always does):'
        f"{reasons}"
    )


def require_append(platform: str, dtype: Any) -> None:
    """Raise ValueError if append cannot run on `platform`."""
    op = "jax_mla.append"
    if platform == "cuda" and not _has_cuda():
        raise ValueError(
            f"{op}: platform: expected a build with CUDA to lower for cuda, got one without; "
            'rebuild with JAX_MLA_CUDA=ON, or pass backend="reference"'
        )
    served = ("bfloat16", "float16", "float32")
    if jnp.dtype(dtype).name not in served:
        raise ValueError(
            f"{op}: kv_pages: expected {', '.join(served)} on {platform}, got {jnp.dtype(dtype)}"
        )


def scratch_shape(call: DecodeCall) -> tuple[Any, ...]:
    """Shape of the scratch result of a CUDA call, in bytes; symbolic if the batch is.

    Raises:
      ValueError: the number of query rows of a sequence is symbolic.
    """
    for name, dim in (("q_len", call.q_len), ("num_heads", call.num_heads)):
        if not isinstance(dim, int):
            raise ValueError(f"jax_mla.decode: {name}: expected a number on cuda, got {dim}")
    size = _ffi.extension().decode_scratch_bytes
    if isinstance(call.batch, int):
        return (size(call.shape()),)
    if call.num_splits == 0 and not call.batch_invariant:
        return (size(call.shape(_MANY_SEQUENCES)),)  # slots are of workers, whose number is bounded
    return (call.batch, size(call.shape(1)))  # of every sequence; JAX multiplies in 32 bits


def check_platform(op: str, platform: str | None) -> None:
    """Refuse the name of a platform that JAX does not have."""
    known = ("cpu", "cuda", "gpu", "rocm", "tpu", jax.default_backend())
    if platform is not None and platform not in known:
        raise ValueError(f"{op}: platform: expected one of {sorted(set(known))}, got {platform!r}")


def statuses(call: DecodeCall | None, platform: str | None = None) -> list[BackendStatus]:
    """What every backend says to `call` on a platform, or to being used at all if None."""
    platform = platform or jax.default_backend()
    platform = "cuda" if platform == "gpu" else platform
    found: list[BackendStatus] = []
    for home in ("cuda", "cpu"):
        if home == "cuda" and not _has_cuda():
            found.append(BackendStatus("cuda", home, "this build has no CUDA part", chosen=False))
            continue
        probe = call or DecodeCall("bfloat16", 1, 1, 16, 512, 64, 64, 1)
        for name, why in _answers(home, probe):
            if not why and home != platform:
                why = f"runs on {home}, not on {platform}"
            chosen = not why and not any(s.chosen for s in found)
            found.append(BackendStatus(name, home, why, chosen))
    return [*found, BackendStatus(REFERENCE, "any", "", chosen=False)]  # it runs only by name
