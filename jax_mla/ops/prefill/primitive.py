"""The primitive behind `prefill`: attention on keys and values of every head, end to end.

It takes the prompts without padding: each sequence has a range of queries and a range of keys. The
ranges of queries must not overlap: results of rows in two of them are undefined.

A plain call has no groups. Every `vmap` adds one group in front of all operands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mla import _primitive
from jax_mla._op import Factors, FfiCall, Op
from jax_mla.ops.prefill.operands import OP, REFERENCE, SM90


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    Attributes:
      q_nope: [*groups, queries, heads, d_nope].
      q_pe: [*groups, queries, heads, d_kpe]; None, like kpe, without rotary part.
      k_nope: [*groups, keys, heads, d_nope].
      kpe: [*groups, keys, d_kpe].
      v: [*groups, keys, heads, d_v].
      bounds: [*groups, 4, seqs] int32: the first query of each sequence, one past its last one, and
        the same of its keys. Any value; what lies outside is clamped.
      prior_out: [*groups, queries, heads, d_v] float32, the result for other keys; None for none.
      prior_lse: [*groups, queries, heads] float32. Where it is -inf, prior_out may hold anything.
    """

    q_nope: Any
    q_pe: Any
    k_nope: Any
    kpe: Any
    v: Any
    bounds: Any
    prior_out: Any
    prior_lse: Any


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      sm_scale: factor on the scores, positive.
      causal: whether query i of a sequence sees only its keys up to i.
      out_dtype: dtype of out: that of q_nope, or float32.
      implementation: SM90, REFERENCE, or SM90_OR_XLA.
    """

    sm_scale: float
    causal: bool
    out_dtype: str
    implementation: str


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of out and lse.

    A query without keys gets 0 and -inf. Where out is in the memory of prior_out (`ffi`), it may
    keep what it held there.
    """
    rows = types.q_nope.shape[:-1]
    return [
        jax.ShapeDtypeStruct((*rows, types.v.shape[-1]), np.dtype(params.out_dtype)),
        jax.ShapeDtypeStruct(rows, np.dtype(np.float32)),
    ]


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`. Only heads can be split."""
    del params
    groups = [f"groups{i}" for i in range(types.q_nope.ndim - 3)]
    rows = [*groups, "whole_queries", "heads0"]
    keys = [*groups, "whole_keys"]
    out = [*rows, "whole_dv"]
    has_prior = types.prior_out is not None
    operands = Operands(
        q_nope=[*rows, "whole_dnope"],
        q_pe=None if types.q_pe is None else [*rows, "whole_dkpe"],
        k_nope=[*keys, "heads0", "whole_dnope"],
        kpe=None if types.kpe is None else [*keys, "whole_dkpe"],
        v=[*keys, "heads0", "whole_dv"],
        bounds=[*groups, "whole_bounds", "whole_seqs"],
        prior_out=out if has_prior else None,
        prior_lse=rows if has_prior else None,
    )
    return operands, [out, rows]


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Call the inner primitive on one device's blocks: groups become more sequences."""
    groups = operands.bounds.shape[:-2]
    if not groups:
        return bind(operands, params)
    size = math.prod(groups)
    num_queries, num_keys = (x.shape[len(groups)] for x in (operands.q_nope, operands.k_nope))
    group = lax.broadcasted_iota(jnp.int32, (size, 1, 1), 0)
    bounds = operands.bounds.reshape(size, *operands.bounds.shape[-2:])
    queries, keys = (
        jnp.clip(x, 0, rows) + group * rows
        for x, rows in ((bounds[:, :2], num_queries), (bounds[:, 2:], num_keys))
    )
    bounds = jnp.concatenate([queries, keys], axis=1)

    def fold(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[len(groups) + 1 :])

    folded = jax.tree.map(fold, operands._replace(bounds=None))
    folded = folded._replace(bounds=jnp.moveaxis(bounds, 0, 1).reshape(4, -1))
    found = bind(folded, params)
    return [x.reshape(*groups, num_queries, *x.shape[1:]) for x in found]


def reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the definition on the operands of the inner primitive, in float32.

    It holds the scores of all queries and all keys of a sequence at a time.
    """
    f32, exact = jnp.float32, lax.Precision.HIGHEST
    q_nope, q_pe, k_nope, kpe, v = jax.tree.map(lambda x: x.astype(f32), operands[:5])
    query = jnp.arange(q_nope.shape[0], dtype=jnp.int32)
    key = jnp.arange(k_nope.shape[0], dtype=jnp.int32)
    out = jnp.zeros((*q_nope.shape[:2], v.shape[-1]), f32)
    lse = jnp.full(q_nope.shape[:2], -jnp.inf, f32)

    def add_sequence(state: tuple[jax.Array, jax.Array], bounds: jax.Array) -> Any:
        # The kernel's clamping, so that queries and keys count from the same places.
        q_begin, k_begin = (jnp.clip(bounds[i], 0, n.size) for i, n in ((0, query), (2, key)))
        own_query = (query >= q_begin) & (query < bounds[1])
        own_key = (key >= k_begin) & (key < bounds[3])
        sees = own_query[:, None] & own_key[None]
        if params.causal:
            sees &= (key - k_begin)[None] <= (query - q_begin)[:, None]
        scores = jnp.einsum("qhn,khn->qhk", q_nope, k_nope, precision=exact)
        if q_pe is not None:
            scores += jnp.einsum("qhr,kr->qhk", q_pe, kpe, precision=exact)
        scores = lax.optimization_barrier(params.sm_scale * scores)  # see attend_masked
        scores = jnp.where(sees[:, None], scores, -jnp.inf)
        peak = jnp.max(scores, axis=-1)
        if operands.prior_lse is not None:
            peak = jnp.maximum(peak, operands.prior_lse)
        peak = jnp.where(peak == -jnp.inf, 0, peak)
        weights = jnp.exp(scores - peak[..., None])
        total = jnp.sum(weights, axis=-1)
        is_bad = ~jnp.isfinite(v).all(-1)
        values = jnp.where(is_bad[..., None], 0, v)  # 0 times NaN is NaN
        num_bad = jnp.einsum("qk,kh->qh", sees.astype(f32), is_bad.astype(f32))
        new = jnp.einsum("qhk,khv->qhv", weights, values, precision=exact)
        if operands.prior_lse is not None:
            weight = jnp.exp(operands.prior_lse - peak)
            total += weight
            new += jnp.where(weight[..., None] > 0, weight[..., None] * operands.prior_out, 0)
        new = jnp.where(num_bad[..., None] > 0, jnp.nan, new)
        safe_total = jnp.where(total == 0, 1, total)
        new_lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe_total))
        out, lse = state
        out = jnp.where(own_query[:, None, None], new / safe_total[..., None], out)
        return (out, jnp.where(own_query[:, None], new_lse, lse)), None

    (out, lse), _ = lax.scan(add_sequence, (out, lse), operands.bounds.T)
    return [out.astype(params.out_dtype), lse]


def ffi(platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference.

    Raises:
      ValueError: the caller has named the kernel, and it does not run on this platform.
    """
    if params.implementation == SM90 and platform != "cuda":
        raise ValueError(
            f"{OP}: implementation: expected one that runs on {platform}, got {SM90!r}, which runs "
            "on cuda"
        )
    # Under SM90_OR_XLA a program for several platforms has this code for each of them, but runs it
    # on cuda alone.
    if params.implementation == REFERENCE or platform != "cuda":
        return None
    is_in_place = types.prior_out is not None and params.out_dtype == "float32"
    return FfiCall(
        target="jax_mla_prefill",
        attrs={"sm_scale": np.float32(params.sm_scale), "causal": np.bool_(params.causal)},
        aliases={"prior_out": 0, "prior_lse": 1} if is_in_place else {},
        scratch_shape=(4,),
    )


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int], Params]:
    """Add one mapped axis, in front of all operands."""
    return _primitive.insert_axes(operands, dims, size), [0, 0], params


bind, _ = _primitive.define(
    Op(
        name=OP,
        results=results,
        local=local,
        reference=reference,
        ffi=ffi,
        batch=batch,
        factors=factors,
        merges=False,
    )
)
