"""The FP8 formats of the cache in numpy, made from their documentation and not from the package.

Sources: FlashMLA's README (section "FP8 KV cache" of the sparse kernels) and vLLM's cache formats
"fp8_e4m3" and "fp8_ds_mla". `jax_mla.reference.encode_rows` must give the same bytes.
"""

from __future__ import annotations

from typing import TypeAlias

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
LARGEST = 448.0
TILE = 128  # values of a row of fp8_ds_mla that share a scale
POISON = 0xFF  # a byte of it is a NaN code, four are a NaN of float32, two one of bfloat16

Pools: TypeAlias = np.ndarray | tuple[np.ndarray, np.ndarray]


def is_mixed(pools: Pools) -> bool:
    """Return whether ckv and kpe are stored in different dtypes."""
    return isinstance(pools, tuple) and pools[0].dtype != pools[1].dtype


def dtype_of_call(q_nope: np.ndarray) -> np.dtype:
    """Return the dtype in which a call with these queries computes."""
    return BF16 if q_nope.dtype == E4M3 else q_nope.dtype


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Return the nearest codes of finite values; ties go to the even code, NaN stays NaN."""
    values = np.asarray(values, np.float32)
    with np.errstate(invalid="ignore"):
        return np.clip(values, -LARGEST, LARGEST).astype(E4M3)


def encode_ds_mla(ckv: np.ndarray, kpe: np.ndarray) -> np.ndarray:
    """Return rows of 656 bytes: 512 codes, 4 float32 scales, 64 bfloat16 values."""
    rows = np.empty((*ckv.shape[:-1], 656), np.uint8)
    for tile in range(4):
        values = ckv[..., tile * TILE : (tile + 1) * TILE].astype(np.float32)
        # The exponent of the power of two that is next to, and not below, largest / 448.
        fraction, exponent = np.frexp(np.abs(values).max(axis=-1, initial=0) / np.float64(LARGEST))
        exponent = np.clip(np.where(fraction == 0.5, exponent - 1, exponent), -100, 119)
        scale = np.ldexp(np.float32(1), np.where(fraction == 0, -100, exponent)).astype(np.float32)
        codes = round_to_e4m3(values / scale[..., None])
        rows[..., tile * TILE : (tile + 1) * TILE] = codes.view(np.uint8)
        rows[..., 512 + 4 * tile : 516 + 4 * tile] = scale[..., None].view(np.uint8)
    rows[..., 528:] = np.ascontiguousarray(kpe).astype(BF16).view(np.uint8)
    return rows


def decode_ds_mla(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ckv and kpe of rows of 656 bytes, or of wider ones, in float32."""
    codes = np.ascontiguousarray(rows[..., :512]).view(E4M3).astype(np.float32)
    scales = np.ascontiguousarray(rows[..., 512:528]).view(np.float32)
    kpe = np.ascontiguousarray(rows[..., 528:656]).view(BF16).astype(np.float32)
    return codes * np.repeat(scales, TILE, axis=-1), kpe


def quantized_pools(
    pools: Pools, kv_format: str, scales: tuple[float, float], d_ckv: int, *, keep_kpe: bool
) -> Pools:
    """Return a cache in a format. What is NaN in `pools`, padding for instance, is poison in it.

    Args:
      pools: the cache in a float dtype, in any layout.
      kv_format: "fp8_e4m3" or "fp8_ds_mla".
      scales: of ckv and kpe; unused by fp8_ds_mla.
      d_ckv: width of the latent.
      keep_kpe: whether the pool of kpe, of a split cache, becomes bfloat16.
    """
    if isinstance(pools, tuple):
        kpe = pools[1].astype(BF16) if keep_kpe else _codes(pools[1], scales[1])
        return _codes(pools[0], scales[0]), kpe
    if kv_format == "fp8_e4m3":
        parts = _codes(pools[..., :d_ckv], scales[0]), _codes(pools[..., d_ckv:], scales[1])
        return np.concatenate(parts, axis=-1)
    padding = pools.shape[-1] - 576
    rows = np.full((*pools.shape[:-1], 656 + padding), POISON, np.uint8)
    live = ~np.isnan(pools[..., :576].astype(np.float32)).any(axis=-1)
    values = pools[live]
    rows[live, :656] = encode_ds_mla(values[:, :512], values[:, 512:576])
    return rows


def plain_pools(pools: Pools, kv_format: str, scales: tuple[float, float], d_ckv: int) -> Pools:
    """Return a cache in float32: the values that its codes stand for."""
    if isinstance(pools, tuple):
        kpe_scale = scales[1] if pools[1].dtype == E4M3 else 1
        return _values(pools[0], scales[0]), _values(pools[1], kpe_scale)
    if kv_format == "fp8_e4m3":
        parts = _values(pools[..., :d_ckv], scales[0]), _values(pools[..., d_ckv:], scales[1])
        return np.concatenate(parts, axis=-1)
    return np.concatenate(decode_ds_mla(pools), axis=-1)


def _codes(values: np.ndarray, scale: float) -> np.ndarray:
    return round_to_e4m3(values.astype(np.float32) * (np.float32(1) / np.float32(scale)))


def _values(codes: np.ndarray, scale: float) -> np.ndarray:
    return codes.astype(np.float32) * np.float32(scale)
