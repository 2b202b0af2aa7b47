"""Which backend takes a call. The extension decides; this module asks it and phrases the answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jax_mla._runtime import _environment, _ffi

REFERENCE = "reference"
# The platforms with handlers: JAX's name and the extension's name.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """What one backend says about a call.

    Attributes:
      name: name in `backend=`.
      platform: JAX platform on which it runs; "any" for the reference.
      reason: why it does not take the call; empty if it does.
      chosen: whether `backend=None` selects it.
      by_name_only: why it runs only if `backend=` names it; empty if it may be chosen.
    """

    name: str
    platform: str
    reason: str
    chosen: bool
    by_name_only: str = ""

    def __str__(self) -> str:
        """Return name, platform and verdict in one line."""
        verdict = "runs" if self.chosen else "can run" if not self.reason else self.reason
        note = f"by name only: {self.by_name_only}; " if self.by_name_only else ""
        return f"{self.name} ({self.platform}): {note}{verdict}"


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """The static part of a decode call, from which backends decide whether they take it."""

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
    max_seq_len: int = 0  # 0: the page table alone bounds the lengths
    row_alignment: int = 16  # bytes, see kv_cache.row_alignment
    kv_format: str = ""  # see kv_cache.stored_format
    packed_width: int = 0  # see kv_cache.packed_width
    sliding_window: int = 0  # 0: every token may be seen
    has_soft_cap: bool = False

    def shape(self, batch: int | None = None) -> Any:
        """Return the extension's DecodeShape, with another batch size if one is given.

        A symbolic dimension (`jax.export`) becomes 1. The symbolic width of a page table becomes
        the largest one instead, because scratch must suffice for the longest sequence.
        """
        fields = dataclasses.asdict(self)
        if batch is not None:
            fields["batch"] = batch
        for name, value in fields.items():
            if not isinstance(value, int | str):
                fields[name] = _WIDEST_PAGE_TABLE if name == "max_pages_per_seq" else 1
        return _ffi.extension().DecodeShape(**fields)


@dataclasses.dataclass(frozen=True)
class IndexTopkCall:
    """The static part of a call of index_topk on CUDA."""

    q_dtype: str
    key_dtype: str  # float8_e4m3fn for keys in FP8
    num_tokens: Any
    num_heads: int
    d: int
    k: int
    page_size: int
    max_seq_len: Any
    is_ragged: bool


_WIDEST_PAGE_TABLE = 1 << 22
_MANY_SEQUENCES = 1 << 20  # more than any GPU has workers


@functools.cache
def _known() -> dict[str, str]:
    """Return the platform of every backend in this build, by name."""
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
            f"{op.removeprefix('jax_mla.')} has no variants"
        )
    if name not in known or (colon and known[name] != "cuda"):
        build = _ffi.extension().build_info()
        cuda = f"is for CUDA {build['cuda_archs']}" if build["cuda"] else "has no CUDA part"
        raise ValueError(
            f"{op}: backend: expected None or one of {', '.join(known)} (this build {cuda}), got "
            f"{backend!r}"
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
    """Return 10 * major + minor of this process's first GPU; 0 without one, as for an export."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return 0
    major, _, minor = str(device.compute_capability).partition(".")
    return 10 * int(major) + int(minor or 0)


def _answers(platform: str, call: DecodeCall) -> list[tuple[str, str]]:
    capability = _compute_capability() if platform == "cuda" else 0
    return _ffi.extension().decode_backends(PLATFORMS[platform], call.shape(), capability)


@functools.cache
def _by_name_only() -> dict[str, str]:
    """Return the backends that run only if `backend=` names them, and why."""
    return dict(_ffi.extension().backends_by_name())


def _require_cuda_build(op: str, platform: str) -> None:
    if platform == "cuda" and not _has_cuda():
        raise ValueError(
            f"{op}: platform: expected a build with CUDA to lower for cuda, got one without; "
            'rebuild with JAX_MLA_CUDA=ON, or pass backend="reference"'
        )


def require(platform: str, call: DecodeCall, backend: str, *, op: str = "jax_mla.decode") -> None:
    """Raise ValueError with the reason of every backend if none takes the call on `platform`."""
    _require_cuda_build(op, platform)
    wanted = backend.split(":")[0]
    answers = [(n, why) for n, why in _answers(platform, call) if wanted in ("", n)]
    if not wanted:
        notes = {n: f"runs by name only ({why})" for n, why in _by_name_only().items()}
        answers = [(n, why or notes.get(n, "")) for n, why in answers]
    if any(not why for _, why in answers):
        return
    reasons = "".join(f"\n  {name}: {why}" for name, why in answers)
    raise ValueError(
        f'{op}: no backend takes this call on {platform} (backend="reference" always does):'
        f"{reasons}"
    )


def require_append(platform: str) -> None:
    """Raise ValueError if append cannot run on `platform`; where it can, it serves every call."""
    _require_cuda_build("jax_mla.append", platform)


def require_index_append(platform: str, d: Any) -> None:
    """Raise ValueError if index_append cannot run on `platform`.

    Args:
      platform: JAX platform.
      d: width of a key.
    """
    op = "jax_mla.index_append"
    _require_cuda_build(op, platform)
    if platform == "cuda" and d != 128:
        raise ValueError(
            f"{op}: k: expected keys of 128 values on cuda, got {d}; the CPU and "
            'backend="reference" take others'
        )


def why_no_prefill_kernel(*, dtype: str, d_nope: int, d_kpe: int, d_v: int) -> str:
    """Return why this process's GPU does not run the prefill kernel on such a call, or ""."""
    return _ffi.extension().prefill_why_not(
        compute_capability=_compute_capability(), dtype=dtype, d_nope=d_nope, d_kpe=d_kpe, d_v=d_v
    )


def scratch_shape(op: str, call: DecodeCall, backend: str = "") -> tuple[Any, ...]:
    """Return the shape of a CUDA call's scratch result, in bytes; symbolic if the batch is.

    Args:
      op: name of the op, for messages.
      call: the call.
      backend: the FFI attribute, as `check_name` returns it.

    Raises:
      ValueError: q_len or num_heads is symbolic, or batch or the width of the page table is and the
        backend runs by name only.
    """
    numbers = {"q_len": call.q_len, "num_heads": call.num_heads}
    on = "on cuda"
    if backend in _by_name_only():
        numbers |= {"batch": call.batch, "max_pages_per_seq": call.max_pages_per_seq}
        on = f"for backend={backend!r}"
    for name, dim in numbers.items():
        if not isinstance(dim, int):
            raise ValueError(f"{op}: {name}: expected a number {on}, got {dim}")
    size = functools.partial(_ffi.extension().decode_scratch_bytes, backend=backend)
    if isinstance(call.batch, int):
        return (size(call.shape()),)
    if call.num_splits == 0 and not call.batch_invariant:
        return (size(call.shape(_MANY_SEQUENCES)),)  # workers have slots, and they are bounded
    # Every sequence has slots. Two dimensions, because JAX multiplies sizes in 32 bits.
    return (call.batch, size(call.shape(1)))


def ragged_bytes(
    call: DecodeCall, num_tokens: Any, backend: str = "", *, rotates_query: bool = False
) -> tuple[int, int]:
    """Return the sizes of a CUDA ragged call's scratch result and of its plan (0: it takes none).

    Args:
      call: the call; `batch` counts sequences, and `q_len` is 0 unless all have the same.
      num_tokens: tokens of the step.
      backend: the FFI attribute, as `check_name` returns it.
      rotates_query: whether the call rotates q_pe.

    Raises:
      ValueError: a size is symbolic.
    """
    sizes = {"tokens": num_tokens, "seqs": call.batch, "num_heads": call.num_heads}
    for name, dim in {**sizes, "max_pages_per_seq": call.max_pages_per_seq}.items():
        if not isinstance(dim, int):
            raise ValueError(
                f"jax_mla.ragged_paged_attention: {name}: expected a number on cuda, got {dim}"
            )
    extension, shape = _ffi.extension(), call.shape()
    scratch = extension.ragged_scratch_bytes(shape, num_tokens)
    if backend in _by_name_only():  # it takes no calls that need a plan
        scratch = max(scratch, extension.decode_scratch_bytes(shape, backend=backend))
    if rotates_query:
        scratch += extension.rotated_query_bytes(shape, num_tokens)
    return scratch, extension.ragged_plan_bytes(shape, num_tokens)


def index_topk_scratch_bytes(call: IndexTopkCall, backend: str) -> int:
    """Return the size of the scratch result of a CUDA call of index_topk.

    Args:
      call: the call.
      backend: the FFI attribute, as `check_name` returns it.

    Raises:
      ValueError: no CUDA backend takes the call, or a size is symbolic.
    """
    op = "jax_mla.index_topk"
    _require_cuda_build(op, "cuda")
    for name in ("num_tokens", "max_seq_len"):
        size = getattr(call, name)
        if not isinstance(size, int):
            raise ValueError(f"{op}: {name}: expected a number on cuda, got {size}")
    why = _ffi.extension().index_topk_why_not(
        compute_capability=_compute_capability(),
        q_dtype=call.q_dtype,
        key_dtype=call.key_dtype,
        num_heads=call.num_heads,
        d=call.d,
        k=call.k,
        page_size=call.page_size,
        backend=backend,
    )
    if why:
        raise ValueError(
            f'{op}: no backend takes this call on cuda (backend="reference" always does): {why}'
        )
    return _ffi.extension().index_topk_scratch_bytes(
        num_tokens=call.num_tokens,
        max_seq_len=call.max_seq_len,
        k=call.k,
        is_ragged=call.is_ragged,
    )


def check_platform(op: str, platform: str | None) -> None:
    """Raise ValueError if JAX has no platform of this name."""
    known = {"cpu", "cuda", "gpu", "rocm", "tpu"}
    if platform is not None and not isinstance(platform, str):
        raise TypeError(f"{op}: platform: expected a str, got {type(platform).__name__}")
    if platform is None or platform in known:  # also where JAX does not start
        return
    known.add(jax.default_backend())
    if platform not in known:
        raise ValueError(f"{op}: platform: expected one of {sorted(known)}, got {platform!r}")


def statuses(call: DecodeCall | None, platform: str | None = None) -> list[BackendStatus]:
    """Return what every backend says about a call on a platform.

    Args:
      call: the call; None asks only whether the backend can be used at all.
      platform: JAX platform; None for JAX's default.
    """
    wanted = platform or jax.default_backend()
    wanted = "cuda" if wanted == "gpu" else wanted
    gpu_advice = _environment.why_jax_has_no_gpu() if platform is None else ""
    found: list[BackendStatus] = []
    for home in ("cuda", "cpu"):
        advice = f"; {gpu_advice}" if gpu_advice and home == "cuda" else ""
        if home == "cuda" and not _has_cuda():
            why = f"this build has no CUDA part{advice}"
            found.append(BackendStatus("cuda", home, why, chosen=False))
            continue
        # Without a call, one that every CUDA backend takes.
        probe = call or DecodeCall("bfloat16", 1, 1, 16, 512, 64, 128, 1, packed_width=576)
        by_name = _by_name_only()
        for name, why in _answers(home, probe):
            if not why and home != wanted:
                why = f"runs on {home}, not on {wanted}{advice}"
            note = by_name.get(name, "")
            chosen = not why and not note and not any(s.chosen for s in found)
            found.append(BackendStatus(name, home, why, chosen, note))
    return [*found, BackendStatus(REFERENCE, "any", "", chosen=False)]  # it runs only by name
