"""The public function `index_topk`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla._runtime import _backends
from jax_mla.kv_cache import pool_sizes
from jax_mla.ops import _checks, _eager, _index, _ragged
from jax_mla.ops.decode import checks
from jax_mla.ops.index_topk import primitive

OP = primitive.NAME
MAX_K = 2**20


class IndexTopkOptions(TypedDict, total=False):
    """The optional arguments of `index_topk` that do not change the type of its result."""

    layer: Array | int | None
    return_positions: bool
    max_seq_len: int | None
    page_begin: Array | int | None
    axis_name: str | tuple[str, ...] | None
    mesh: Mesh | MeshAxes | None
    backend: str | None


@overload
def index_topk(
    q: Array, weights: Array, index_pages: Array, page_table: Array, seq_lens: Array,
    cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    k: int, return_scores: Literal[False] = ..., **options: Unpack[IndexTopkOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def index_topk(
    q: Array, weights: Array, index_pages: Array, page_table: Array, seq_lens: Array,
    cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    k: int, return_scores: Literal[True], **options: Unpack[IndexTopkOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
@overload
def index_topk(
    q: Array, weights: Array, index_pages: Array, page_table: Array, seq_lens: Array,
    cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    k: int, return_scores: bool, **options: Unpack[IndexTopkOptions],
) -> tuple[Array, Array] | tuple[Array, Array, Array]: ...  # fmt: skip
@_eager.lets_infs_pass
def index_topk(
    q: Annotated[Array, "[tokens, index_heads, d] or [batch, q_len, index_heads, d]"],
    weights: Annotated[Array, "[tokens, index_heads] or [batch, q_len, index_heads] float32"],
    index_pages: Annotated[Array, "[num_pages, page_size, d], or uint8 [.., 132]"],
    page_table: Annotated[Array, "[seqs, max_pages_per_seq] int32"],
    seq_lens: Annotated[Array, "[seqs] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"] | None = None,
    num_seqs: Array | int | None = None,
    *,
    k: int,
    layer: Array | int | None = None,
    return_positions: bool = False,
    return_scores: bool = False,
    max_seq_len: int | None = None,
    page_begin: Array | int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Choose for each query the k cached tokens with the largest index scores.

    This is the lightning indexer of DeepSeek V3.2 and GLM-5. It returns the `indices` and
    `topk_lens` of `sparse_attention`. A query at position p of its sequence sees the tokens t in
    [0, p], and

        score(t) = scale(t) * sum over heads h of weights[h] * relu(q[h] . key(t))

    in float32, where scale(t) is the scale of an FP8 key and otherwise 1. The choice is exact: the
    k largest scores, and among equal ones those with the lower t. Equal scores are common, because
    relu gives zeros. -0 equals 0, and NaN is below minus infinity. Each list has its tokens in
    ascending order, then -1. A query that sees at most k tokens gets all of them, and no score is
    computed. `jax_mla.reference.index_topk` defines this in jax.numpy.

    A step has the new tokens of all sequences, as for `ragged_paged_attention`: the tokens of
    sequence b, from cu_q_lens[b] to cu_q_lens[b + 1], are its newest ones. So one call serves
    sequences that decode and chunks of prompts. Their keys must already be in the cache: call
    `index_append` first.

    The op works eagerly and under jit, vmap, scan and shard_map. On a mesh, tokens are split over
    the axes of the batch. Index heads are not split, and the pool is replicated along the axes of
    the query heads. If axes split the pages, each device chooses k of its own tokens, and one
    all-gather gives the k best of all, still exactly. See docs/sharding.md. The op has no
    derivative.

    No value on the device makes the op read outside the pool, or pages that the row of page_table
    does not name, and no sequence disturbs another:

    * cu_q_lens, num_seqs and seq_lens are read as in `ragged_paged_attention`, for attention.
      Padding, and a token whose position is negative, get an empty list.
    * A token on a page that the pool does not hold is never chosen, even if there are at most k.

    Args:
      q: [tokens, index_heads, d], or [batch, q_len, index_heads, d] without cu_q_lens. The index
        queries, rotated like the keys: bfloat16, float16 or, on the CPU, float32; or codes in
        float8_e4m3fn, whose scales the caller has multiplied into weights.
      weights: [tokens, index_heads] float32, or [batch, q_len, index_heads]. The weights of the
        heads, multiplied by every constant factor of the model. Rounding them would change which
        tokens are chosen, so no other dtype is taken.
      index_pages: the index keys, as `index_append` writes them: [num_pages, page_size, d] in the
        dtype of q, or uint8 [num_pages, page_size, 132] in FP8, for d = 128; with a leading
        num_layers if layer is given. Fewer than 2^31 tokens in a layer. See docs/cache_layouts.md.
      page_table: [seqs, max_pages_per_seq] int32. The pages of each sequence in order. A wrong
        global id is an error in numpy arrays, as for `decode`.
      seq_lens: [seqs] int32. Tokens in the cache, including the new ones. A length outside
        [0, max_pages_per_seq * page_size], or above max_seq_len, is an error in a numpy array, and
        is clamped in a JAX array.
      cu_q_lens: [seqs + 1] int32, as for `ragged_paged_attention`. None: every sequence has
        tokens / seqs tokens.
      num_seqs: how many of the sequences the step has, as for `ragged_paged_attention`.
      k: how many tokens are chosen, a Python int.
      layer: which layer of a stacked pool, as for `decode`. A layer outside the pool has no tokens.
      return_positions: whether the lists hold positions in the sequence instead of slots.
      return_scores: whether to also return the scores of the chosen tokens. A query that sees at
        most k tokens gets 0 for each.
      max_seq_len: a static bound of the lengths, see `decode`. It bounds the memory for scores.
      page_begin: global id of the pool's first page, as for `decode`: the k best tokens of the
        pool's own pages are chosen.
      axis_name: manual mesh axes over which the pages are split (context parallelism written by
        hand in a `shard_map`), with page_begin. Each device chooses k of its own tokens, and one
        all-gather gives all of them the k best of all, exactly. Not with mesh.
      mesh: how to split the call if the argument types do not say, as for `decode`. With
        `MeshAxes(local_pages=)` slots are local, and cu_q_lens and num_seqs are as for
        `ragged_paged_attention`.
      backend: name of the backend, as for `decode`.

    Returns:
      slots: [tokens, k] int32, or [batch, q_len, k]: page id times page_size plus the row in the
        page; with return_positions, positions in the sequence. In ascending order of positions,
        then -1.
      lens: [tokens] int32, or [batch, q_len]. How many entries of each list count.
      scores: only with return_scores. The shape of slots, float32; minus infinity after the entries
        that count.

    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError, NotImplementedError: as for `decode`.

    Source: DeepSeek-V3.2 (lightning indexer).
    """
    table_as_given, lens_as_given, bounds_as_given = page_table, seq_lens, cu_q_lens
    q, weights = _checks.array(OP, "q", q), _checks.array(OP, "weights", weights)
    index_pages = _checks.array(OP, "index_pages", index_pages)
    page_table = _checks.array(OP, "page_table", page_table, _checks.INDICES)
    seq_lens = _checks.array(OP, "seq_lens", seq_lens, _checks.INDICES)
    is_ragged, has_layer = cu_q_lens is not None, layer is not None
    _check_arrays(q, weights, index_pages, page_table, seq_lens, is_ragged, has_layer)
    k = _checks.integer(OP, "k", k)
    if not 1 <= k <= MAX_K:
        raise ValueError(f"{OP}: k: expected an int in [1, {MAX_K}], got {k}")
    axes = () if axis_name is None else _check_axes(axis_name, page_begin, mesh)
    sizes = pool_sizes(index_pages, has_layer)
    _checks.slots(OP, "index_pages", sizes)
    capacity = _checks.capacity(OP, "page_table", page_table, sizes.page_size)
    bound = checks.max_seq_len(OP, max_seq_len, capacity)
    tokens, num_rows = q.shape[:-2], page_table.shape[0]
    num_groups = _ragged.num_groups(OP, mesh, tokens[0], num_rows)
    num_seqs = _ragged.check_num_seqs(OP, num_seqs, num_rows, num_groups)
    _ragged.check_lens(OP, lens_as_given, num_seqs, capacity, bound)
    if page_begin is None and not num_groups:
        _ragged.check_pages(OP, table_as_given, lens_as_given, num_seqs, sizes)
    if is_ragged:
        q_len = 0
        cu_q_lens = _checks.array(OP, "cu_q_lens", cu_q_lens, _checks.INDICES)
        _ragged.check(OP, bounds_as_given, num_seqs, num_rows, tokens[0], num_groups)
        _ragged.check_new_tokens(OP, lens_as_given, bounds_as_given, num_seqs, num_groups)
        num_seqs = _ragged.ALL_SEQS if num_seqs is None else num_seqs
    else:
        q_len = tokens[1] if q.ndim == 4 else _ragged.uniform_q_len(OP, "q", tokens[0], num_rows)
    with_scores = _checks.flag(OP, "return_scores", return_scores)
    params = primitive.Params(
        k=k,
        q_len=q_len,
        backend=_backends.check_name(OP, backend, has_variants=False),
        has_layer=has_layer,
        has_local_pages=num_groups > 0,
        return_positions=_checks.flag(OP, "return_positions", return_positions),
        return_scores=with_scores,
        max_seq_len=bound,
    )
    operands = primitive.Operands(
        q, weights, page_table, seq_lens, cu_q_lens, num_seqs,
        _checks.index(OP, "layer", layer, sizes.num_layers),
        _checks.index(OP, "page_begin", page_begin, 2**31), (index_pages,),
    )  # fmt: skip
    static: dict[str, Any] = {"axes": axes} if axes else {}
    if mesh is not None:
        static |= {"mesh": mesh, "num_groups": num_groups or 1}
    found = _choose(operands, params=params, **static)
    return (found[0], found[1], found[2]) if with_scores else (found[0], found[1])


def _check_axes(
    axis_name: Any, page_begin: Array | int | None, mesh: Mesh | MeshAxes | None
) -> tuple[str, ...]:
    """Return the axes over which the caller has split the pages."""
    if page_begin is None:
        raise ValueError(f"{OP}: page_begin: expected an index with axis_name, got None")
    if mesh is not None:
        raise ValueError(f"{OP}: axis_name: expected None with mesh, got {axis_name!r}")
    return _checks.axis_names(OP, axis_name)


def _check_arrays(
    q: Array,
    weights: Array,
    index_pages: Array,
    page_table: Array,
    seq_lens: Array,
    is_ragged: bool,
    has_layer: bool,
) -> None:
    if is_ragged:
        _checks.rank(OP, "q", q, (3,), "[tokens, index_heads, d] with cu_q_lens")
    else:
        dims = "[tokens, index_heads, d] or [batch, q_len, index_heads, d]"
        _checks.rank(OP, "q", q, (3, 4), dims)
    _checks.numbers(OP, "q", q, takes_codes=True)
    _checks.shape(OP, "weights", weights, q.shape[:-1], ", the tokens and heads of q")
    advice = ": rounded weights choose other tokens"
    _checks.dtype(OP, "weights", weights, ("float32",), advice=advice)
    _index.check_pool(OP, index_pages, q.shape[-1], q.dtype, "q", has_layer=has_layer)
    _checks.rank(OP, "page_table", page_table, (2,), "[seqs, max_pages_per_seq]")
    _checks.dtype(OP, "page_table", page_table, _checks.INDICES)
    if q.ndim == 4:
        _checks.shape(OP, "page_table", page_table, (q.shape[0], None), ", the batch of q")
    _checks.shape(OP, "seq_lens", seq_lens, page_table.shape[:1], " with page_table's sequences")
    _checks.dtype(OP, "seq_lens", seq_lens, _checks.INDICES)
    if 0 in (*q.shape, *page_table.shape):
        raise ValueError(
            f"{OP}: q, page_table: expected no dimension of size 0, got {q.shape}, "
            f"{page_table.shape}"
        )


@_eager.compiled(OP)
def _choose(
    operands: primitive.Operands,
    *,
    params: primitive.Params,
    axes: tuple[str, ...] = (),
    mesh: Mesh | MeshAxes | None = None,
    num_groups: int = 1,
) -> list[Array]:
    """Run the op on arguments that have been checked."""
    is_part_of_cache = operands.page_begin is not None
    operands = _eager.with_scalar_arrays(operands, num_groups)
    tokens, q_len, page_table = operands.weights.shape[:-1], params.q_len, operands.page_table
    if not _index.is_fp8(operands.index_pages[0]):  # codes for plain keys: exact
        operands = operands._replace(q=operands.q.astype(operands.index_pages[0].dtype))
    if is_part_of_cache:
        operands = _without_wild_begin(operands, params)
    if q_len:
        operands = _by_sequence(operands, q_len)
    if axes:
        chosen, lens, *scores = primitive.bind_part(operands, params, axes, page_table)
    else:
        chosen, lens, *scores = primitive.bind(operands, params, mesh=mesh)
    found = [chosen.reshape(*tokens, params.k), lens.reshape(tokens)]
    if not scores:
        return found
    counts = lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1) < lens[..., None]
    return [*found, jnp.where(counts, scores[0], -jnp.inf).reshape(*tokens, params.k)]


def _by_sequence(operands: primitive.Operands, q_len: int) -> primitive.Operands:
    """Turn the operands of a uniform call into what its outer primitive takes.

    A sequence that is absent gets the length -1, with which its tokens see nothing. So no device
    has to know which of the sequences are its own.
    """
    seq_lens = _ragged.lens_of_present(operands.seq_lens, operands.num_seqs)
    q, weights = operands.q, operands.weights
    if weights.ndim == 2:
        q, weights = (
            _ragged.by_sequence(OP, name, x, seq_lens.shape[0], q_len)
            for name, x in (("q", q), ("weights", weights))
        )
    return operands._replace(q=q, weights=weights, seq_lens=seq_lens, num_seqs=None)


def _without_wild_begin(
    operands: primitive.Operands, params: primitive.Params
) -> primitive.Operands:
    """Let the pool hold no page if page_begin is no page whose slots are int32."""
    sizes = pool_sizes(operands.index_pages[0], params.has_layer)
    last = _checks.MAX_SLOTS // sizes.page_size - sizes.num_pages
    begin: Any = operands.page_begin
    is_page = (begin >= 0) & (begin <= last)  # one number
    return operands._replace(
        page_begin=jnp.where(is_page, begin, 0),
        page_table=jnp.where(is_page.reshape(()), operands.page_table, -1),
    )
