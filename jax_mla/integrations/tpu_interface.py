"""`mla_ragged_paged_attention`, the entry point of MLA kernels for TPU, served by jax_mla.

Engines in JAX call one function a layer: it writes a step's new rows and attends. Its operands
exist in three forms, and each has a function here that takes the place of the original:

* `mla_ragged_paged_attention`: head-major, as version 2 of tpu-inference's kernel.
* `mla_ragged_paged_attention_v1`: token-major, as version 1 and tokamax's.
* `mla_ragged_paged_attention_sglang`: token-major with packed page lists, as sglang-jax's.

The names of the arguments are theirs. docs/integrations.md says which engine calls what.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla._quantization import MAX_E4M3
from jax_mla.kv_cache import FP8_E4M3
from jax_mla.ops import _checks
from jax_mla.ops.decode import checks
from jax_mla.ops.decode.ragged import ragged_paged_attention

_MODULE = "jax_mla.integrations.tpu_interface"
LANES = 128  # a TPU's tiles are that wide: each part of a row begins at a multiple of it
# Softmax in float32 gives a key with this score no weight beside any score above -9,000.
NO_WEIGHT = -1e4


class TpuOptions(TypedDict, total=False):
    """The keyword arguments of the TPU kernels, besides sm_scale.

    Attributes:
      sliding_window: the most tokens that a query sees, as for `jax_mla.decode`.
      soft_cap: a limit of the scores, as for `jax_mla.decode`.
      mask_value: None or at most -1e4, for scores that do not count. Here they have no weight.
      q_scale: scale of queries in float8_e4m3fn; None or 1 for others. None means 1.
      k_scale: scale of a pool in float8_e4m3fn; None or 1 for others. None means 1.
      v_scale: the same number as k_scale.
      transpose_kv_cache: False.
      debug_mode: False.
      s_dtype: ignored, as the others below. Scores are float32.
      p_same_dtype_as_v: precision of the weights.
      chunk_prefill_size: tuning.
      num_kv_pages_per_block: tuning.
      num_queries_per_block: tuning.
      vmem_limit_bytes: tuning.
      decode_batch_size: tuning.
      mixed_q_split: tuning.
      two_step_flash_attention: tuning.
    """

    sliding_window: int | None
    soft_cap: float | None
    mask_value: float | None
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    transpose_kv_cache: bool
    debug_mode: bool
    s_dtype: Any
    p_same_dtype_as_v: bool
    chunk_prefill_size: int | None
    num_kv_pages_per_block: tuple[int, int, int] | int | None
    num_queries_per_block: tuple[int, int, int] | int | None
    vmem_limit_bytes: int | None
    decode_batch_size: int
    mixed_q_split: int
    two_step_flash_attention: bool


def mla_ragged_paged_attention(
    ql_nope: Annotated[Array, "[num_heads, tokens, d_ckv]"],
    q_pe: Annotated[Array, "[tokens, num_heads, d_kpe]"],
    new_kv_c: Annotated[Array, "[tokens, d_ckv]"],
    new_k_pe: Annotated[Array, "[tokens, d_kpe]"],
    cache_kv: Annotated[Array, "[num_pages, page_size / pack, pack, width]"],
    kv_lens: Annotated[Array, "[seqs] int32"],
    page_indices: Annotated[Array, "[seqs * pages_per_seq] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"],
    distribution: Annotated[Array, "[3] int32"],
    *,
    sm_scale: float = 1.0,
    **options: Unpack[TpuOptions],
) -> tuple[Array, Array]:
    """Write a step's new rows and attend, head-major, as version 2 of tpu-inference's kernel.

    `jax_mla.ragged_paged_attention` says what is computed, and what bad values on the device do.
    The call is local: an engine makes it inside `shard_map`, with page ids relative to the device's
    part of the pool.

    The pool is taken as it is and updated in place. Outside `jit` the call donates cache_kv, as the
    original does; under `jit` the caller donates it.

    Args:
      ql_nope: [num_heads, tokens, d_ckv], bfloat16, float16 or, on the CPU, float32; with a pool
        in float8_e4m3fn also that.
      q_pe: [tokens, num_heads, d_kpe], dtype of ql_nope.
      new_kv_c: [tokens, d_ckv], dtype of ql_nope, or bfloat16 if that is float8_e4m3fn; for a pool
        in float8_e4m3fn also that.
      new_k_pe: [tokens, d_kpe], dtype of new_kv_c.
      cache_kv: [num_pages, page_size / pack, pack, width], dtype of ql_nope or float8_e4m3fn. ckv
        begins at column 0 and kpe at column d_ckv, rounded up to a multiple of 128 with zeros
        between; the columns after them are neither read nor written.
      kv_lens: [seqs] int32. Tokens in the cache, including the new ones.
      page_indices: [seqs * pages_per_seq] int32. The page table, flat.
      cu_q_lens: [seqs + 1] int32. Where the tokens of each sequence begin.
      distribution: [3] int32. The last number is how many sequences the step has; what the arrays
        hold for the others does not matter. The first two are ignored.
      sm_scale: factor on the scores, a Python number.
      **options: see `TpuOptions`.

    Returns:
      out: [num_heads, tokens, d_ckv], dtype of ql_nope. 0 for tokens of no sequence.
      cache_kv: the pool with the new rows.

    Raises:
      TypeError: an operand is no array or its dtype does not fit, or an option is unknown.
      ValueError: shapes do not fit, or an option has a value that is not served.
    """
    operands = (
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens, distribution,
    )  # fmt: skip
    op = f"{_MODULE}.mla_ragged_paged_attention"
    return _call(op, operands, options, sm_scale, is_head_major=True)


def mla_ragged_paged_attention_v1(
    ql_nope: Annotated[Array, "[tokens, num_heads, d_ckv]"],
    q_pe: Annotated[Array, "[tokens, num_heads, d_kpe]"],
    new_kv_c: Annotated[Array, "[tokens, d_ckv]"],
    new_k_pe: Annotated[Array, "[tokens, d_kpe]"],
    cache_kv: Annotated[Array, "[num_pages, page_size / pack, pack, width]"],
    kv_lens: Annotated[Array, "[seqs] int32"],
    page_indices: Annotated[Array, "[seqs * pages_per_seq] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"],
    distribution: Annotated[Array, "[3] int32"],
    *,
    sm_scale: float = 1.0,
    **options: Unpack[TpuOptions],
) -> tuple[Array, Array]:
    """Write a step's new rows and attend, token-major, as version 1 of tpu-inference's kernel.

    Args:
      ql_nope: [tokens, num_heads, d_ckv].
      q_pe: the other arguments are those of `mla_ragged_paged_attention`.
      new_kv_c: see there.
      new_k_pe: see there.
      cache_kv: see there.
      kv_lens: see there.
      page_indices: see there.
      cu_q_lens: see there.
      distribution: see there.
      sm_scale: see there.
      **options: see `TpuOptions`.

    Returns:
      out: [tokens, num_heads, d_ckv], dtype of ql_nope. 0 for tokens of no sequence.
      cache_kv: the pool with the new rows.

    Raises:
      TypeError: as `mla_ragged_paged_attention`.
      ValueError: as `mla_ragged_paged_attention`.
    """
    operands = (
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens, distribution,
    )  # fmt: skip
    op = f"{_MODULE}.mla_ragged_paged_attention_v1"
    return _call(op, operands, options, sm_scale, is_head_major=False)


def mla_ragged_paged_attention_sglang(
    ql_nope: Annotated[Array, "[tokens, num_heads, d_ckv]"],
    q_pe: Annotated[Array, "[tokens, num_heads, d_kpe]"],
    new_kv_c: Annotated[Array, "[tokens, d_ckv]"],
    new_k_pe: Annotated[Array, "[tokens, d_kpe]"],
    cache_kv: Annotated[Array, "[num_pages, page_size / pack, pack, width]"],
    kv_lens: Annotated[Array, "[seqs] int32"],
    page_indices: Annotated[Array, "[num_page_indices] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"],
    cu_kv_lens: Annotated[Array, "[seqs + 1] int32"],
    distribution: Annotated[Array, "[3] int32"],
    *,
    sm_scale: float = 1.0,
    pages_per_seq: int | None = None,
    **options: Unpack[TpuOptions],
) -> tuple[Array, Array]:
    """Write a step's new rows and attend, token-major with packed page lists, as sglang-jax.

    A gather on the device makes a page table of [seqs, pages_per_seq] from the lists. A sequence
    never gets pages of another one's list, whatever kv_lens says.

    Args:
      ql_nope: [tokens, num_heads, d_ckv].
      q_pe: the other arguments are those of `mla_ragged_paged_attention`, except these two.
      new_kv_c: see there.
      new_k_pe: see there.
      cache_kv: see there.
      kv_lens: see there.
      page_indices: [num_page_indices] int32. The pages of all sequences, end to end.
      cu_q_lens: see there.
      cu_kv_lens: [seqs + 1] int32. Sums of the lengths, each rounded up to whole pages: the pages
        of sequence b are those from cu_kv_lens[b] / page_size to cu_kv_lens[b + 1] / page_size.
      distribution: see there.
      sm_scale: see there.
      pages_per_seq: an upper bound on the pages of a sequence, which the original does not have.
        None is num_page_indices, and then the table is large: an engine should pass the pages of
        its longest context. A sequence with more pages than that is cut off, and its new rows are
        not written.
      **options: see `TpuOptions`.

    Returns:
      out: [tokens, num_heads, d_ckv], dtype of ql_nope. 0 for tokens of no sequence.
      cache_kv: the pool with the new rows.

    Raises:
      TypeError: as `mla_ragged_paged_attention`.
      ValueError: as `mla_ragged_paged_attention`, or pages_per_seq is not positive.
    """
    op = f"{_MODULE}.mla_ragged_paged_attention_sglang"
    if pages_per_seq is not None:
        pages_per_seq = _checks.integer(
            op, "pages_per_seq", pages_per_seq, expected="None or an int"
        )
        if pages_per_seq < 1:
            raise ValueError(f"{op}: pages_per_seq: expected at least 1, got {pages_per_seq}")
    operands = (
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens, distribution,
        cu_kv_lens,
    )  # fmt: skip
    return _call(op, operands, options, sm_scale, is_head_major=False, pages_per_seq=pages_per_seq)


# ---- Options -----------------------------------------------------------------------------------


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | np.number) and not isinstance(x, bool)


# What an option has to be where it could change the result; the others are only about TPUs.
_SERVED: dict[str, tuple[str, Any]] = {
    "mask_value": (
        f"None or a number of at most {NO_WEIGHT:g}",
        lambda x: x is None or (_is_number(x) and x <= NO_WEIGHT),
    ),
    **dict.fromkeys(("transpose_kv_cache", "debug_mode"), ("False", lambda x: x is False)),
}


class Scales(NamedTuple):
    """The scales of an FP8 pool and of FP8 queries; None for what is not FP8."""

    cache: float | None
    query: float | None

    @property
    def kv_format(self) -> str | None:
        """The format of the pool; None if it holds numbers."""
        return None if self.cache is None else FP8_E4M3


def check_options(op: str, options: TpuOptions, ql_nope: Array, cache_kv: Array) -> Scales:
    """Return the scales; refuse what is unknown, or asks for something that is not served."""
    for name, value in options.items():
        if name not in TpuOptions.__annotations__:
            raise TypeError(f"{op}: {name}: expected an argument of the TPU kernels, got {name!r}")
        expected, is_served = _SERVED.get(name, ("anything", lambda _: True))
        if not is_served(value):
            raise ValueError(f"{op}: {name}: expected {expected}, got {value!r}")
    cache = _scale(op, "k_scale", options.get("k_scale"), cache_kv)
    v_scale, of_keys = options.get("v_scale"), 1 if cache is None else cache
    if v_scale is not None and not (_is_number(v_scale) and v_scale == of_keys):
        raise ValueError(
            f"{op}: v_scale: expected that of k_scale ({of_keys}), because keys and values are the "
            f"same rows, got {v_scale!r}"
        )
    return Scales(cache, _scale(op, "q_scale", options.get("q_scale"), ql_nope))


def _scale(op: str, name: str, value: Any, x: Array) -> float | None:
    """Return the scale of codes, 1 by default; None for an array of numbers."""
    dtype = _checks.dtype_name(x.dtype)
    value = 1.0 if value is None else value
    if dtype != _checks.E4M3:
        if not _is_number(value) or value != 1:
            raise ValueError(f"{op}: {name}: expected None or 1 for {dtype}, got {value!r}")
        return None
    if not _is_number(value):
        got = _checks.static_kind(value)
        raise TypeError(f"{op}: {name}: expected a Python number, got {got}")
    return float(_checks.scale(op, name, float(value)))


# ---- Calls -------------------------------------------------------------------------------------

_NUMBERS = ("ql_nope", "q_pe", "new_kv_c", "new_k_pe", "cache_kv")
_INTEGERS = ("kv_lens", "page_indices", "cu_q_lens", "distribution", "cu_kv_lens")


def _call(
    op: str,
    operands: tuple[Array, ...],
    options: TpuOptions,
    sm_scale: float,
    *,
    is_head_major: bool,
    pages_per_seq: int | None = None,
) -> tuple[Array, Array]:
    """Make the call; the form without page lists has no cu_kv_lens among its operands."""
    # Before jit, which takes None and lists for trees of arrays.
    arrays = {
        name: _checks.array(op, name, x, _checks.FLOATS if name in _NUMBERS else _checks.INDICES)
        for name, x in zip((*_NUMBERS, *_INTEGERS), operands, strict=False)
    }
    scales = check_options(op, options, arrays["ql_nope"], arrays["cache_kv"])
    window, cap = options.get("sliding_window"), options.get("soft_cap")
    checks.sliding_window(op, window, None)
    checks.soft_cap(op, cap)
    return _attend(
        **arrays, op=op, sm_scale=checks.scale(op, sm_scale), scales=scales,
        is_head_major=is_head_major, pages_per_seq=pages_per_seq,
        sliding_window=window, soft_cap=cap,
    )  # fmt: skip


# One program for eager calls, which can donate the pool. Under jit the body is inlined.
@functools.partial(
    jax.jit,
    static_argnames=(
        "op",
        "sm_scale",
        "scales",
        "is_head_major",
        "pages_per_seq",
        "sliding_window",
        "soft_cap",
    ),  # fmt: skip
    donate_argnames="cache_kv",
    inline=True,
)
def _attend(
    ql_nope: Array,
    q_pe: Array,
    new_kv_c: Array,
    new_k_pe: Array,
    cache_kv: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    distribution: Array,
    cu_kv_lens: Array | None = None,
    *,
    op: str,
    sm_scale: float,
    scales: Scales,
    is_head_major: bool,
    pages_per_seq: int | None,
    sliding_window: int | None,
    soft_cap: float | None,
) -> tuple[Array, Array]:
    """Attend; without cu_kv_lens the page lists all have the same size."""
    _checks.rank(op, "cache_kv", cache_kv, (4,), "[num_pages, page_size / pack, pack, width]")
    for name, x in (("kv_lens", kv_lens), ("page_indices", page_indices)):
        _checks.rank(op, name, x, (1,), "one dimension")
        _checks.dtype(op, name, x, _checks.INDICES)
        if x.shape[0] == 0:
            raise ValueError(f"{op}: {name}: expected at least one entry, got none")
    _checks.shape(op, "distribution", distribution, (3,))
    _checks.dtype(op, "distribution", distribution, _checks.INDICES)
    _checks.rank(op, "new_kv_c", new_kv_c, (2,), "[tokens, d_ckv]")
    d_ckv = new_kv_c.shape[-1]
    padding = -d_ckv % LANES
    if padding:
        # The rotary part begins at a multiple of LANES; zeros lie before it, as in the originals.
        _checks.rank(op, "ql_nope", ql_nope, (3,), "three dimensions")
        _checks.shape(op, "ql_nope", ql_nope, (None, None, d_ckv), ", the width of new_kv_c")
        ql_nope, new_kv_c = (
            lax.pad(x, jnp.zeros((), x.dtype), [*[(0, 0, 0)] * (x.ndim - 1), (0, padding, 0)])
            for x in (ql_nope, new_kv_c)
        )
    num_seqs = kv_lens.shape[0]
    if cu_kv_lens is None:
        page_table = _flat_table(op, page_indices, num_seqs)
    else:
        _checks.shape(op, "cu_kv_lens", cu_kv_lens, (num_seqs + 1,), " = sequences in kv_lens + 1")
        _checks.dtype(op, "cu_kv_lens", cu_kv_lens, _checks.INDICES)
        page_size = cache_kv.shape[1] * cache_kv.shape[2]
        page_table = packed_page_table(page_indices, cu_kv_lens // page_size, pages_per_seq)
    if is_head_major:
        # q_pe is token-major in both forms: it tells whether the caller has taken the wrong one.
        _checks.rank(op, "q_pe", q_pe, (3,), "[tokens, num_heads, d_kpe]")
        tokens, heads, _ = q_pe.shape
        _checks.shape(op, "ql_nope", ql_nope, (heads, tokens, None), " = heads, tokens of q_pe")
        ql_nope = lax.transpose(ql_nope, (1, 0, 2))
    live_seqs = lax.index_in_dim(distribution, 2, keepdims=False)
    out, cache_kv = ragged_paged_attention(
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, page_table, kv_lens, cu_q_lens, live_seqs,
        sm_scale=sm_scale, packs=True, kv_format=scales.kv_format,
        kv_scale=scales.cache, q_scale=scales.query, sliding_window=sliding_window,
        soft_cap=soft_cap,
    )  # fmt: skip
    out = lax.slice_in_dim(out, 0, d_ckv, axis=2) if padding else out
    if scales.query is not None:
        out = jnp.clip(out, -MAX_E4M3, MAX_E4M3).astype(ql_nope.dtype)
    return lax.transpose(out, (1, 0, 2)) if is_head_major else out, cache_kv


def _flat_table(op: str, page_indices: Array, num_seqs: int) -> Array:
    """Return the page table of lists that all have the same size."""
    pages_per_seq, rest = divmod(page_indices.shape[0], num_seqs)
    if rest or not pages_per_seq:
        raise ValueError(
            f"{op}: page_indices: expected a multiple of the {num_seqs} sequences in kv_lens as "
            f"its size, got {page_indices.shape[0]}"
        )
    return page_indices.reshape(num_seqs, pages_per_seq)


def packed_page_table(page_indices: Array, bounds: Array, pages_per_seq: int | None) -> Array:
    """Return the page table of lists that lie end to end; list b begins at bounds[b]."""
    num_pages = page_indices.shape[0]
    width = num_pages if pages_per_seq is None else min(pages_per_seq, num_pages)
    bounds = jnp.clip(bounds, 0, num_pages)  # wild ones would overflow in the sum below
    column = lax.broadcasted_iota(jnp.int32, (bounds.shape[0] - 1, width), 1)
    place = bounds[:-1, None] + column
    pages = page_indices.at[place].get(mode="clip")
    return jnp.where(place < bounds[1:, None], pages, -1)  # -1 is no page
