"""Attention of a padded batch on keys and values of every head, by cuDNN or by XLA."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla import _compat
from jax_mla.ops.prefill.operands import CUDNN, OP, XLA

# (q, k, v, q_lens, kv_lens) -> (out, lse), both float32
_Attention = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]


def attend(
    q: Array,
    k: Array,
    v: Array,
    q_lens: Array,
    kv_lens: Array,
    *,
    sm_scale: float,
    causal: bool,
    implementation: str | None,
) -> tuple[Array, Array]:
    """Attend from each sequence's queries to its own keys.

    Args:
      q: [seqs, q_len, heads, d_qk].
      k: [seqs, kv_len, heads, d_qk]; finite also beyond kv_lens.
      v: [seqs, kv_len, heads, d_v]; finite also beyond kv_lens.
      q_lens: [seqs] int32, queries of each sequence.
      kv_lens: [seqs] int32, keys of each sequence.
      sm_scale: factor on the scores.
      causal: whether query i sees only the keys up to i.
      implementation: "cudnn", "xla", or None for cuDNN on CUDA and XLA elsewhere.

    Returns:
      out: [seqs, q_len, heads, d_v] float32.
      lse: [seqs, q_len, heads] float32, natural logarithm.
      For a query that is beyond q_lens or has no key, out is 0 and lse is -inf.
    """
    # cuDNN has had bugs with empty sequences. It sees none: an empty sequence gets one key, and its
    # result is replaced below.
    operands = q, k, v, jnp.maximum(q_lens, 1), jnp.maximum(kv_lens, 1)
    out, lse = _chosen(sm_scale, causal, implementation)(*operands)
    place = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    has_key = (place < q_lens[:, None]) & (kv_lens > 0)[:, None]
    out = jnp.where(has_key[..., None, None], out, 0)
    return out, jnp.where(has_key[..., None], lse, -jnp.inf)


def attend_masked(
    q: Array, k: Array, v: Array, mask: Array, *, sm_scale: float, soft_cap: float
) -> tuple[Array, Array]:
    """Attend where a mask says which keys a query sees, in float32.

    Args:
      q: [seqs, q_len, heads, d_qk].
      k: [seqs, kv_len, heads, d_qk].
      v: [seqs, kv_len, heads, d_v]. A row that is not finite makes NaN of the queries that see it.
      mask: [seqs, q_len, kv_len] bool, whether a query sees a key.
      sm_scale: factor on the scores.
      soft_cap: limit of the scores; 0 for none.

    Returns:
      out: [seqs, q_len, heads, d_v] float32.
      lse: [seqs, q_len, heads] float32, natural logarithm.
      For a query that sees no key, out is 0 and lse is -inf.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    highest = lax.Precision.HIGHEST
    # Not the scores times sm_scale: XLA would fuse that product with the difference below, whose
    # terms are then rounded differently. Where scores are large, exp would overflow.
    scores = jnp.einsum("sqhd,skhd->shqk", sm_scale * q, k, precision=highest)
    if soft_cap:
        scores = lax.optimization_barrier(soft_cap * jnp.tanh(scores / soft_cap))
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1)
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(scores - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    is_bad = ~jnp.isfinite(v).all(-1)  # 0 times NaN is NaN
    v = jnp.where(is_bad[..., None], 0, v)
    num_bad = jnp.einsum("sqk,skh->shq", mask.astype(v.dtype), is_bad.astype(v.dtype))
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    divisor = jnp.where(num_bad > 0, jnp.nan, total)
    out = jnp.einsum("shqk,skhv->sqhv", weights, v, precision=highest)
    return out / divisor.swapaxes(1, 2)[..., None], lse.swapaxes(1, 2)


def _chosen(sm_scale: float, causal: bool, implementation: str | None) -> _Attention:
    cudnn, xla = _cudnn(sm_scale, causal), _xla(sm_scale, causal)

    @jax.custom_batching.custom_vmap
    def attention(*operands: Array) -> tuple[Array, Array]:
        if implementation == CUDNN:
            return cudnn(*operands)
        # JAX traces the code of every platform, and asks for a GPU when it traces cuDNN's.
        may_be_cudnn = operands[0].dtype != jnp.float32 and jax.default_backend() == "gpu"
        if implementation == XLA or not may_be_cudnn:
            return xla(*operands)
        return lax.platform_dependent(*operands, cuda=cudnn, default=xla)

    @attention.def_vmap
    def _more_sequences(
        size: int, is_mapped: list[bool], *operands: Array
    ) -> tuple[tuple[Array, Array], tuple[bool, ...]]:
        # JAX's own rule for cuDNN assumes that values are as wide as keys.
        mapped = [
            x if has_dim else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, has_dim in zip(operands, is_mapped, strict=True)
        ]
        out, lse = attention(*(x.reshape(-1, *x.shape[2:]) for x in mapped))
        seqs = mapped[0].shape[:2]
        return (out.reshape(*seqs, *out.shape[1:]), lse.reshape(*seqs, *lse.shape[1:])), (True,) * 2

    return attention


def _cudnn(sm_scale: float, causal: bool) -> _Attention:
    def attention(
        q: Array, k: Array, v: Array, q_lens: Array, kv_lens: Array
    ) -> tuple[Array, Array]:
        try:
            # Its code mixes dtypes, which "strict" refuses.
            with jax.numpy_dtype_promotion("standard"):
                out, lse = _compat.cudnn_attention(
                    q, k, v, q_lens, kv_lens, scale=sm_scale, causal=causal
                )
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{OP}: implementation: expected a call that cuDNN takes, got from JAX: {error} "
                'Pass implementation="xla", or absorb the weights and call jax_mla.decode'
            ) from error
        return out.astype(jnp.float32), lse

    return attention


def _xla(sm_scale: float, causal: bool) -> _Attention:
    def attention(
        q: Array, k: Array, v: Array, q_lens: Array, kv_lens: Array
    ) -> tuple[Array, Array]:
        # Not JAX's own attention: it overflows where scores are large (see attend_masked), and it
        # hides keys by a finite number.
        del q_lens
        query, key = (jnp.arange(x.shape[1], dtype=jnp.int32)[None] for x in (q, k))
        mask = (key < kv_lens[:, None])[:, None]
        if causal:
            mask = mask & (key[:, None] <= query[..., None])
        mask = jnp.broadcast_to(mask, (q.shape[0], q.shape[1], k.shape[1]))
        return attend_masked(q, k, v, mask, sm_scale=sm_scale, soft_cap=0.0)

    return attention
