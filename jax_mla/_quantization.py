"""The formats of the cache in jax.numpy, which specify what every backend writes and reads.

`encode_rows` makes the rows that `append` writes, and `decode_rows` gives the values that attention
sees. Both work in float32. docs/cache_layouts.md has the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array, lax

from jax_mla.kv_cache import (
    DS_MLA_D_CKV,
    DS_MLA_D_KPE,
    DS_MLA_ROW_BYTES,
    DS_MLA_TILE,
    FP8_DS_MLA,
    KvScale,
    find_format,
)

MAX_E4M3 = 448.0


def to_e4m3(x: Array) -> Array:
    """Round float32 values to e4m3: to nearest even, clamped to +-448; a NaN becomes 0.

    So the two NaN codes never occur.
    """
    finite = jnp.where(jnp.isnan(x), 0, jnp.clip(x, -MAX_E4M3, MAX_E4M3))
    return finite.astype(jnp.float8_e4m3fn)


def as_bytes(pool: Array) -> Array:
    """Return a pool of codes as uint8, any other as it is.

    On a CPU, XLA converts a whole pool of codes before it gathers from it or scatters into it.
    """
    return lax.bitcast_convert_type(pool, jnp.uint8) if pool.dtype == jnp.float8_e4m3fn else pool


def from_bytes(rows: Array, pool_dtype: Any) -> Array:
    """Undo `as_bytes`: return its bytes as codes, anything else as it is."""
    # A bitcast only where there are bytes, because JAX takes its derivative for zero.
    return rows if rows.dtype == pool_dtype else lax.bitcast_convert_type(rows, pool_dtype)


def ds_mla_scale(max_magnitude: Array) -> Array:
    """Return the scale of a tile of fp8_ds_mla by its largest magnitude.

    It is the smallest power of two for which no code exceeds 448. It is at least 2^-100, so that
    its reciprocal is finite, and at most 2^119, so that no value is infinite.
    """
    # 448 = 1.75 * 2^8. A significand of more than 1.75 carries into the exponent.
    bits = lax.bitcast_convert_type(max_magnitude.astype(jnp.float32), jnp.int32)
    exponent = jnp.clip(((bits + 0x1FFFFF) >> 23) - 8, 127 - 100, 127 + 119)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def scale_pair(kv_scale: KvScale) -> tuple[Any, Any]:
    """Return the scales of ckv and kpe; one scale is that of both."""
    if isinstance(kv_scale, tuple):
        return kv_scale
    return kv_scale, kv_scale


def encode_rows(
    ckv: Annotated[Array, "[..., d_ckv]"],
    kpe: Annotated[Array | None, "[..., d_kpe]"],
    kv_format: str | None,
    kv_scale: KvScale | None,
    pool_dtypes: Sequence[Any],
) -> list[Array]:
    """Return the rows of each pool of a cache.

    Args:
      ckv: [..., d_ckv], any float dtype. With fp8_e4m3 it may already be codes (float8_e4m3fn).
      kpe: [..., d_kpe], dtype of ckv; None for rows without rotary part.
      kv_format: a key of `KV_FORMATS`, or None for the dtype of the pools.
      kv_scale: the scale of ckv and kpe, or a tuple of both, each one number; None if the format
        has none.
      pool_dtypes: the dtype of the packed pool, or of the pools of ckv and kpe.

    Returns:
      One array [..., width] per pool, where width is that of a row without padding.

    Raises:
      ValueError: the format is unknown, its scale is missing, or it has a rotary part that the rows
        lack.
    """
    op = "jax_mla.reference.encode_rows"
    if kpe is None and (len(pool_dtypes) > 1 or kv_format == FP8_DS_MLA):
        raise ValueError(f"{op}: kpe: expected an array for this cache, got None")
    if kpe is not None and kv_format == FP8_DS_MLA:
        return [_encode_ds_mla(ckv, kpe)]
    parts = [ckv] if kpe is None else [ckv, kpe]
    dtypes = (list(pool_dtypes) * 2)[: len(parts)]
    scales = _scales("encode_rows", kv_format, kv_scale)
    if scales is not None:
        parts = [
            _quantize(x, scale, dtype)
            for x, scale, dtype in zip(parts, scales, dtypes, strict=False)
        ]
    parts = [x.astype(dtype) for x, dtype in zip(parts, dtypes, strict=True)]
    return [jnp.concatenate(parts, axis=-1)] if len(pool_dtypes) == 1 else parts


def decode_rows(
    rows: Sequence[Array], d_ckv: int, d_kpe: int, kv_format: str | None, kv_scale: KvScale | None
) -> tuple[Array, Array]:
    """Return ckv and kpe as float32, of the rows of each pool of a cache; see `encode_rows`.

    Here a scale may also be an array that broadcasts to the rows. NaN codes, which `encode_rows`
    never makes, may give any value. With a d_kpe of 0, kpe is [..., 0].
    """
    f32 = jnp.float32
    if kv_format == FP8_DS_MLA:
        return _decode_ds_mla(rows[0])
    ckv, kpe = split_rows(rows, d_ckv, d_kpe)
    scales = _scales("decode_rows", kv_format, kv_scale)
    if scales is None:
        return ckv.astype(f32), kpe.astype(f32)
    ckv_scale, kpe_scale = (jnp.asarray(scale, f32) for scale in scales)
    kpe_scale = kpe_scale if kpe.dtype == jnp.float8_e4m3fn else 1
    return ckv.astype(f32) * ckv_scale, kpe.astype(f32) * kpe_scale


def split_rows(rows: Sequence[Array], d_ckv: int, d_kpe: int) -> tuple[Array, Array]:
    """Return ckv and kpe as they are stored, of the rows of each pool, which may be wider."""
    begin = d_ckv if len(rows) == 1 else 0
    return rows[0][..., :d_ckv], rows[-1][..., begin : begin + d_kpe]


def _scales(fun: str, kv_format: str | None, kv_scale: KvScale | None) -> tuple[Any, Any] | None:
    """Return the scales of ckv and kpe; None if the format has none."""
    op = f"jax_mla.reference.{fun}"
    fmt = find_format(op, kv_format)
    if fmt is None or not fmt.has_scale:
        return None
    if kv_scale is None:
        raise ValueError(f"{op}: kv_scale: expected a scale for format {fmt.name!r}, got None")
    return scale_pair(kv_scale)


def _quantize(x: Array, scale: Any, dtype: Any) -> Array:
    """Return codes if `dtype` is e4m3, otherwise `x`."""
    if jnp.dtype(dtype) != jnp.float8_e4m3fn:
        return x
    if x.dtype == jnp.float8_e4m3fn:
        return to_e4m3(x.astype(jnp.float32))
    return to_e4m3(x.astype(jnp.float32) * (1 / jnp.asarray(scale, jnp.float32).reshape(())))


def _encode_ds_mla(ckv: Array, kpe: Array) -> Array:
    tiles = ckv.astype(jnp.float32).reshape(*ckv.shape[:-1], -1, DS_MLA_TILE)
    magnitude = jnp.max(jnp.where(jnp.isnan(tiles), 0, jnp.abs(tiles)), axis=-1)
    scale = ds_mla_scale(magnitude)
    codes = to_e4m3(tiles * (1 / scale)[..., None]).reshape(ckv.shape)
    parts = (codes, scale, kpe.astype(jnp.bfloat16))
    return jnp.concatenate([_as_bytes(x) for x in parts], axis=-1)


def _decode_ds_mla(rows: Array) -> tuple[Array, Array]:
    scales = slice(DS_MLA_D_CKV, DS_MLA_ROW_BYTES - 2 * DS_MLA_D_KPE)
    scale = _from_bytes(rows[..., scales], jnp.float32)
    codes = _from_bytes(rows[..., :DS_MLA_D_CKV], jnp.float8_e4m3fn).astype(jnp.float32)
    tiles = codes.reshape(*codes.shape[:-1], -1, DS_MLA_TILE)
    kpe = _from_bytes(rows[..., scales.stop : DS_MLA_ROW_BYTES], jnp.bfloat16)
    return (tiles * scale[..., None]).reshape(codes.shape), kpe.astype(jnp.float32)


def _as_bytes(x: Array) -> Array:
    """Return the bytes of [..., n] as [..., n * itemsize] uint8."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(x: Array, dtype: Any) -> Array:
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize > 1:
        x = x.reshape(*x.shape[:-1], -1, itemsize)
    return lax.bitcast_convert_type(x, dtype)
