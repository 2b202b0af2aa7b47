"""The public function `index_append`."""

from __future__ import annotations

from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jax_mla._mesh import _dispatch
from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla._runtime import _backends
from jax_mla.kv_cache import pool_sizes
from jax_mla.ops import _checks, _eager, _index, _ragged
from jax_mla.ops.append import checks
from jax_mla.ops.index_append import primitive

OP = primitive.NAME


def index_append(
    index_pages: Annotated[Array, "[num_pages, page_size, d], or uint8 [.., 132]"],
    k: Annotated[Array, "[batch, q_len, d], [batch, d] or [tokens, d]"],
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    positions: Annotated[Array, "[batch, q_len], [batch] or [tokens] int32"],
    *,
    cu_q_lens: Annotated[Array, "[batch + 1] int32"] | None = None,
    layer: Array | int | None = None,
    power_of_two_scales: bool = True,
    norm_weight: Annotated[Array, "[d]"] | None = None,
    norm_bias: Annotated[Array, "[d]"] | None = None,
    norm_eps: float = 1e-6,
    rope_table: Annotated[Array, "[num_positions, d_rope] float32"] | None = None,
    rope_interleaved: bool | None = None,
    rope_last: bool = False,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> Array:
    """Write the index keys of new tokens into their pool, for `index_topk`.

    Token i of sequence b, at position p = positions[b, i], goes to row p % page_size of page
    page_table[b, p // page_size]. This is `append` for the one vector that the indexer of DeepSeek
    V3.2 and GLM-5 keeps for each token. The page table is that of the latent cache.
    `jax_mla.reference.index_append` defines this in jax.numpy.

    On its way into the pool a key may be normalised (`norm_weight`; LayerNorm, with a mean) and
    partly rotated (`rope_table`), so that k can be the raw projection. The steps are
    `jax_mla.reference.layer_norm` and `rotate`; `encode_index_keys` makes the codes of an FP8 pool.
    XLA adds in another order, so a value sometimes differs from the definition by one unit in its
    last place, and a code by one. A Hadamard rotation belongs to the model and comes after RoPE, so
    such a model passes keys after all three steps.

    To update the pool in place, donate it, as for `append`. The op works eagerly and under jit,
    vmap, scan and shard_map, and is sharded like `append`. It has no derivative.

    Args:
      index_pages: the index keys. [num_pages, page_size, d], bfloat16, float16 or float32, or in
        FP8 uint8 [num_pages, page_size, 132] for d = 128: a page holds first its page_size x 128
        e4m3 codes, then its page_size float32 scales, as in DeepGEMM, vLLM and SGLang. With `layer`
        it has a leading dimension num_layers. See docs/cache_layouts.md.
      k: [batch, q_len, d], or [batch, d] for q_len 1; with cu_q_lens [tokens, d]. Dtype of
        index_pages; for FP8 bfloat16, float16 or float32. The new keys.
      page_table: [batch, max_pages_per_seq] int32, as for `append`.
      positions: [batch, q_len] int32, or [batch]; with cu_q_lens [tokens], as for `append`.
      cu_q_lens: [batch + 1] int32, or None, as for `append`.
      layer: which layer of a stacked pool, as for `append`.
      power_of_two_scales: in FP8, whether the scale of a key is rounded up to a power of two
        (ue8m0, as in the published weights of DeepSeek V3.2). Otherwise it is exactly its largest
        magnitude / 448. Without FP8 this has no effect.
      norm_weight: [d], bfloat16, float16 or float32. Weight of the LayerNorm; None for no norm.
      norm_bias: [d]. Its bias; None for none.
      norm_eps: added to the variance by the norm, a Python number.
      rope_table: [num_positions, d_rope] float32, see `jax_mla.rope_table`. d_rope values of a key
        are rotated by the angles of its position, see `jax_mla.reference.rotate`. None: no
        rotation. A position past the table is an error in a numpy array, and takes the last row in
        a JAX array.
      rope_interleaved: whether the two values of a pair are adjacent. Required with rope_table:
        False for DeepSeek V3.2's indexer (unlike its latent cache), True for GLM-5's.
      rope_last: whether the last d_rope values are rotated, instead of the first.
      page_begin: global id of the pool's first page, as for `append`.
      mesh: how to split the call if the argument types do not say, see `decode`.
      backend: name of the backend, as for `append`.

    Returns:
      The pool with the new keys.

    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError, NotImplementedError: as for `append`.

    Source: DeepSeek-V3.2 (lightning indexer).
    """
    table_as_given, positions_as_given, bounds_as_given = page_table, positions, cu_q_lens
    k, index_pages = _checks.array(OP, "k", k), _checks.array(OP, "index_pages", index_pages)
    page_table = _checks.array(OP, "page_table", page_table, _checks.INDICES)
    positions = _checks.array(OP, "positions", positions, _checks.INDICES)
    is_ragged, has_layer = cu_q_lens is not None, layer is not None
    _check_arrays(index_pages, k, page_table, positions, is_ragged, has_layer)
    num_groups = 0
    if is_ragged:
        num_tokens, num_rows = k.shape[0], page_table.shape[0]
        num_groups = _ragged.num_groups(OP, mesh, num_tokens, num_rows)
        cu_q_lens = _checks.array(OP, "cu_q_lens", cu_q_lens, _checks.INDICES)
        _ragged.check(OP, bounds_as_given, None, num_rows, num_tokens, num_groups)
        positions_as_given = _ragged.of_sequences(positions_as_given, bounds_as_given, num_groups)
    sizes = pool_sizes(index_pages, has_layer)
    capacity = _checks.capacity(OP, "page_table", page_table, sizes.page_size)
    what = "places that page_table has"
    _checks.values(OP, "positions", positions_as_given, -(2**31), capacity, what)
    if page_begin is None and not _dispatch.num_local_groups(OP, mesh):
        _ragged.check_written_pages(OP, table_as_given, positions_as_given, bounds_as_given, sizes)
    norm_weight, norm_bias = _check_norm(k, norm_weight, norm_bias)
    rope_table = _check_rope(k, rope_table)
    if rope_table is not None:
        what = "positions that rope_table (jax_mla.rope_table) has"
        _checks.values(OP, "positions", positions_as_given, -(2**31), rope_table.shape[0], what)
    last = _checks.flag(OP, "rope_last", rope_last)
    if last and rope_table is None:
        raise ValueError(f"{OP}: rope_last: expected False without rope_table, got True")
    eps = checks.eps(OP, norm_eps)
    params = primitive.Params(
        backend=_backends.check_name(OP, backend, has_variants=False),
        has_layer=has_layer,
        has_local_pages=num_groups > 0,
        power_of_two_scales=_checks.flag(OP, "power_of_two_scales", power_of_two_scales),
        norm_eps=0.0 if norm_weight is None else eps,
        rope_interleaved=_interleaved(rope_interleaved, rope_table),
        rope_last=last,
    )
    operands = primitive.Operands(
        k, page_table, positions, cu_q_lens, _checks.index(OP, "layer", layer, sizes.num_layers),
        _checks.index(OP, "page_begin", page_begin, 2**31), norm_weight, norm_bias, rope_table,
        (index_pages,),
    )  # fmt: skip
    return _append(operands, params=params, mesh=mesh)


def _check_arrays(
    index_pages: Array,
    k: Array,
    page_table: Array,
    positions: Array,
    is_ragged: bool,
    has_layer: bool,
) -> None:
    if is_ragged:
        _checks.rank(OP, "k", k, (2,), "[tokens, d] with cu_q_lens")
    else:
        _checks.rank(OP, "k", k, (2, 3), "[batch, q_len, d] or [batch, d]")
    _checks.dtype(OP, "k", k, _checks.FLOATS)
    _index.check_pool(OP, index_pages, k.shape[-1], k.dtype, "k", has_layer=has_layer)
    _checks.rank(OP, "page_table", page_table, (2,), "[batch, max_pages_per_seq]")
    if not is_ragged:
        _checks.shape(OP, "page_table", page_table, (k.shape[0], None), ", the batch of k")
    _checks.dtype(OP, "page_table", page_table, _checks.INDICES)
    _checks.shape(OP, "positions", positions, k.shape[:-1], " as in k")
    _checks.dtype(OP, "positions", positions, _checks.INDICES)
    if 0 in (*k.shape, *page_table.shape):
        raise ValueError(
            f"{OP}: k, page_table: expected no dimension of size 0, got {k.shape}, "
            f"{page_table.shape}"
        )


def _check_norm(k: Array, weight: Any, bias: Any) -> tuple[Array | None, Array | None]:
    if weight is None and bias is not None:
        raise ValueError(f"{OP}: norm_bias: expected None without norm_weight, got an array")

    def check(name: str, x: Any) -> Array | None:
        if x is None:
            return None
        x = _checks.array(OP, name, x)
        _checks.shape(OP, name, x, (k.shape[-1],), ", the width of k")
        _checks.dtype(OP, name, x, _checks.FLOATS)
        return x

    return check("norm_weight", weight), check("norm_bias", bias)


def _check_rope(k: Array, rope_table: Any) -> Array | None:
    if rope_table is None:
        return None
    rope_table = _checks.array(OP, "rope_table", rope_table, ("float32",))
    _checks.rank(OP, "rope_table", rope_table, (2,), "[num_positions, d_rope]")
    _checks.dtype(OP, "rope_table", rope_table, ("float32",))
    num_positions, width = rope_table.shape
    if num_positions == 0 or width == 0 or width % 2 or width > k.shape[-1]:
        raise ValueError(
            f"{OP}: rope_table: expected at least one position and an even width of at most "
            f"{k.shape[-1]}, that of k, got shape {tuple(rope_table.shape)}"
        )
    return rope_table


def _interleaved(value: bool | None, rope_table: Any) -> bool:
    """Return the argument `rope_interleaved`, of which no model's value is the default."""
    if value is None and rope_table is not None:
        raise ValueError(
            f"{OP}: rope_interleaved: expected True or False with rope_table, got None; False for "
            "the indexer of DeepSeek V3.2, True for that of GLM-5"
        )
    return checks.interleaved(OP, value, rope_table)


@_eager.compiled(OP)
def _append(
    operands: primitive.Operands, *, params: primitive.Params, mesh: Mesh | MeshAxes | None = None
) -> Array:
    """Run the op on arguments that have been checked."""
    operands = _eager.with_scalar_arrays(operands)
    for name in ("norm_weight", "norm_bias"):
        x = getattr(operands, name)
        if x is not None:  # exact: float32 holds all values of other dtypes
            operands = operands._replace(**{name: x.astype(jnp.float32)})
    if operands.k.ndim == 2 and operands.cu_q_lens is None:
        expanded = {n: lax.expand_dims(getattr(operands, n), (1,)) for n in ("k", "positions")}
        operands = operands._replace(**expanded)
    return primitive.bind(operands, params, mesh=mesh)[0]
