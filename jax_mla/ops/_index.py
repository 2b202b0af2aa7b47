"""The indexer's keys: their pools, how a page is laid out, and the FP8 codes.

A pool of plain keys is [(num_layers,) num_pages, page_size, d]. A pool in FP8 is uint8
[(num_layers,) num_pages, page_size, 132]. Its page is not an array of rows: it holds first the
page_size x 128 codes in e4m3, and then page_size float32 scales. DeepGEMM, vLLM and SGLang use the
same bytes. docs/cache_layouts.md shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla import _quantization
from jax_mla.kv_cache import local_pages, pool_sizes
from jax_mla.ops import _checks, _eager

FP8_DIM = 128  # width of a key in FP8
SCALE_BYTES = 4
FP8_WIDTH = FP8_DIM + SCALE_BYTES
MIN_MAGNITUDE = 1e-4  # the largest magnitude of a key, from below, as the scales take it
POOL_DIMS = "[num_pages, page_size, d], with num_layers in front if layer is given"


def is_fp8(pages: Any) -> bool:
    """Return whether a pool holds codes and scales."""
    return _checks.dtype_name(pages.dtype) == "uint8"


def check_pool(op: str, pages: Any, d: Any, dtype: Any, like: str, *, has_layer: bool) -> None:
    """Check a pool of index keys.

    Args:
      op: name of the calling op.
      pages: the pool.
      d: width of a key.
      dtype: dtype of the keys or queries of the call.
      like: name of the argument that has this width and dtype.
      has_layer: whether the call selects a layer.

    Raises:
      TypeError: wrong dtype.
      ValueError: wrong rank or size.
    """
    ndim = len(pages.shape)
    if ndim == 4 and not has_layer:
        raise ValueError(
            f"{op}: index_pages: expected layer= for a stacked pool of rank 4, got shape "
            f"{tuple(pages.shape)}"
        )
    _checks.rank(op, "index_pages", pages, (3 + has_layer,), POOL_DIMS)
    name, known = _checks.dtype_name(pages.dtype), (*_checks.FLOATS, "uint8")
    _checks.dtype(op, "index_pages", pages, known)
    if name == "uint8":
        if d != FP8_DIM:
            raise ValueError(
                f"{op}: {like}: expected {FP8_DIM} values a key for index_pages of uint8, got {d}"
            )
        _checks.shape(
            op, "index_pages", pages, (*pages.shape[:-1], FP8_WIDTH), ", 128 codes and a scale"
        )
    else:
        is_code = _checks.dtype_name(dtype) == _checks.E4M3
        if not is_code and pages.dtype != dtype:
            raise TypeError(
                f"{op}: index_pages: expected {_checks.dtype_name(dtype)} as in {like}, or uint8, "
                f"got {pages.dtype}"
            )
        _checks.shape(op, "index_pages", pages, (*pages.shape[:-1], d), f", the width of {like}")
    if 0 in pages.shape:
        layers = "num_layers, " if has_layer else ""
        raise ValueError(
            f"{op}: index_pages: expected {layers}num_pages and page_size of at least 1, got shape "
            f"{tuple(pages.shape)}"
        )


@_eager.definition
def encode_index_keys(
    x: Annotated[Array, "[..., 128]"], *, power_of_two_scales: bool = True
) -> tuple[Array, Array]:
    """Return the codes and the scales of rows in FP8, as `index_append` stores keys.

    The scale of a row is its largest magnitude, at least 1e-4, divided by 448. With
    power_of_two_scales it is rounded up to a power of two (ue8m0). A code is the value times the
    reciprocal of the scale, rounded to e4m3: to nearest even, clamped to +-448. NaN becomes 0 and
    does not affect the scale.

    Queries can be encoded like that too: `weights` of `index_topk` are then multiplied by their
    scales.

    Args:
      x: [..., 128], any float dtype.
      power_of_two_scales: whether scales are powers of two.

    Returns:
      codes: float8_e4m3fn, shape of x.
      scales: [...] float32.

    Source: DeepSeek-V3.2's inference code, and DeepGEMM's cast of the key cache.
    """
    x32 = x.astype(jnp.float32)
    magnitude = jnp.max(jnp.where(jnp.isnan(x32), 0, jnp.abs(x32)), axis=-1)
    largest = jnp.clip(magnitude, MIN_MAGNITUDE, float(np.finfo(np.float32).max))
    # XLA would turn a division by a constant into a product, which is rounded differently.
    not_constant = jnp.where(largest > 0, jnp.float32(_quantization.MAX_E4M3), jnp.float32(1))
    scale = largest / not_constant
    if power_of_two_scales:
        bits = lax.bitcast_convert_type(scale, jnp.int32)
        scale = lax.bitcast_convert_type(((bits + 0x7FFFFF) >> 23) << 23, jnp.float32)
    return _quantization.to_e4m3(x32 * (1 / scale)[..., None]), scale


class Keys(NamedTuple):
    """Keys of sequences, in token order.

    Attributes:
      values: [seqs, tokens, d] float32; of a pool in FP8 the codes.
      scales: [seqs, tokens] float32; None for plain keys.
      owned: [seqs, tokens] bool, whether the pool holds the key's page. Elsewhere the others are
        arbitrary.
    """

    values: Array
    scales: Array | None
    owned: Array


def gather_keys(
    pages: Array, page_table: Array, layer: Array | int | None, page_begin: Array | int
) -> Keys:
    """Read the keys of each sequence from its pages.

    Args:
      pages: the pool.
      page_table: [seqs, max_pages_per_seq] int32, global page ids.
      layer: which layer of a stacked pool; a layer outside the pool has no pages.
      page_begin: global id of the pool's first page.
    """
    num_layers, num_pages, page_size = pool_sizes(pages, layer is not None)
    if layer is None:
        layer, pages = 0, pages[None]
    local, owned = local_pages(page_table, page_begin, num_pages)
    owned &= (layer >= 0) & (layer < num_layers)
    found = pages[jnp.clip(layer, 0, num_layers - 1), jnp.where(owned, local, 0)]
    seqs, max_pages = page_table.shape
    owned = jnp.repeat(owned, page_size, axis=1)
    if not is_fp8(pages):
        values = found.reshape(seqs, max_pages * page_size, -1).astype(jnp.float32)
        return Keys(values, None, owned)
    found = found.reshape(seqs, max_pages, page_size * FP8_WIDTH)
    codes, scales = jnp.split(found, [page_size * FP8_DIM], axis=2)
    codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    scales = lax.bitcast_convert_type(scales.reshape(seqs, -1, SCALE_BYTES), jnp.float32)
    return Keys(codes.reshape(seqs, max_pages * page_size, FP8_DIM), scales, owned)


def slots_at(page_table: Array, sequence: Array, positions: Array, page_size: int) -> Array:
    """Return the slots of positions.

    Args:
      page_table: [seqs, max_pages_per_seq] int32.
      sequence: [tokens] int32, that of each token; any in [0, seqs) for a token without one.
      positions: [tokens, k] int32; a negative one gives -1.
      page_size: rows of a page.
    """
    page = page_table[sequence[:, None], jnp.maximum(positions, 0) // page_size]
    return slots_of(page, positions, page_size)


def slots_of(page: Array, positions: Array, page_size: int) -> Array:
    """Return the slots of positions whose pages are known; -1 for a negative position."""
    return jnp.where(positions >= 0, page * page_size + positions % page_size, -1)
