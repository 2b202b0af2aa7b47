"""The public function `ragged_paged_attention`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla.kv_cache import Cache, KvScale, Scale, like, pool_sizes
from jax_mla.ops import _checks, _eager, _ragged, _sink
from jax_mla.ops.append import checks as append_checks
from jax_mla.ops.decode import checks, parse, primitive

OP = primitive.RAGGED_NAME


def _check_table(op: str, q_nope: Array, page_table: Array) -> None:
    del q_nope
    _checks.rank(op, "page_table", page_table, (2,), "[seqs, max_pages_per_seq]")


FORM = parse.Form(
    op=OP,
    query_ranks=(3,),
    query_dims="[tokens, num_heads, d_ckv]",
    table="page_table",
    check_table=_check_table,
)


class RaggedOptions(TypedDict, total=False):
    """The optional arguments that do not change the type of the result."""

    sink: Array | None
    layer: Array | int | None
    packs: bool
    sliding_window: int | None
    soft_cap: float | None
    kv_format: str | None
    kv_scale: KvScale | None
    q_scale: Scale | None
    norm_weight: Array | None
    norm_eps: float
    rope_table: Array | None
    rope_interleaved: bool | None
    num_splits: int | None
    batch_invariant: bool
    max_seq_len: int | None
    page_begin: Array | int | None
    mesh: Mesh | MeshAxes | None
    backend: str | None


@overload
def ragged_paged_attention(
    q_nope: Array, q_pe: Array | None, ckv: Array, kpe: Array | None, kv_pages: Cache,
    page_table: Array,
    seq_lens: Array, cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    sm_scale: float, return_lse: Literal[False] = ..., **options: Unpack[RaggedOptions],
) -> tuple[Array, Cache]: ...  # fmt: skip
@overload
def ragged_paged_attention(
    q_nope: Array, q_pe: Array | None, ckv: Array, kpe: Array | None, kv_pages: Cache,
    page_table: Array,
    seq_lens: Array, cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    sm_scale: float, return_lse: Literal[True], **options: Unpack[RaggedOptions],
) -> tuple[Array, Array, Cache]: ...  # fmt: skip
@overload
def ragged_paged_attention(
    q_nope: Array, q_pe: Array | None, ckv: Array, kpe: Array | None, kv_pages: Cache,
    page_table: Array,
    seq_lens: Array, cu_q_lens: Array | None = ..., num_seqs: Array | int | None = ..., *,
    sm_scale: float, return_lse: bool, **options: Unpack[RaggedOptions],
) -> tuple[Array, Cache] | tuple[Array, Array, Cache]: ...  # fmt: skip
@_eager.lets_infs_pass
def ragged_paged_attention(
    q_nope: Annotated[Array, "[tokens, num_heads, d_ckv]"],
    q_pe: Annotated[Array | None, "[tokens, num_heads, d_kpe]"],
    ckv: Annotated[Array, "[tokens, d_ckv]"],
    kpe: Annotated[Array | None, "[tokens, d_kpe]"],
    kv_pages: Cache,
    page_table: Annotated[Array, "[seqs, max_pages_per_seq] int32"],
    seq_lens: Annotated[Array, "[seqs] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"] | None = None,
    num_seqs: Array | int | None = None,
    *,
    sm_scale: float,
    sink: Annotated[Array | None, "[num_heads] float32"] = None,
    layer: Array | int | None = None,
    packs: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    q_scale: Scale | None = None,
    norm_weight: Annotated[Array, "[d_ckv]"] | None = None,
    norm_eps: float = 1e-6,
    rope_table: Annotated[Array, "[num_positions, d_kpe] float32"] | None = None,
    rope_interleaved: bool | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_seq_len: int | None = None,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> tuple[Array, Cache] | tuple[Array, Array, Cache]:
    """Write the new rows of a whole engine step into the cache, and attend to it.

    A step has the new tokens of all sequences, end to end: one token of a sequence that decodes, a
    chunk of another's prompt. Sequence b has the tokens from cu_q_lens[b] to cu_q_lens[b + 1]. They
    are its newest tokens: token t has the position

        p(t) = seq_lens[b] - (cu_q_lens[b + 1] - t)

    Its row (ckv[t], kpe[t]) is written there, as `append` does. Then it attends to the tokens 0 to
    p(t) of its sequence, as `decode` does. All rows are written before any is read. The other
    tokens, from cu_q_lens[num_seqs] on, are padding. `jax_mla.reference.ragged_paged_attention`
    defines this in jax.numpy.

    On the way into the cache, rows may be normalised (`norm_weight`) and rotated (`rope_table`), as
    in `append`. With `rope_table` the queries are rotated as well. So ckv, kpe and q_pe can be the
    raw projections.

    `tokens` and `seqs` are the static sizes of a step, and everything else is on the device: the
    same compiled program serves every mix of sequences. A sequence without tokens writes nothing
    and costs almost nothing. Sequences may share pages, except those that are written.

    To update the cache in place, donate it, as for `append`. The op works eagerly and under jit,
    scan and shard_map; under vmap only the query may be mapped. It has no derivative. Heads and the
    pages of the cache may be sharded over a mesh, without cu_q_lens sequences as well; see
    docs/sharding.md.

    No value on the device makes the op read or write outside the pool, or pages that the row of
    page_table does not name:

    * The tokens of sequence b end at the largest of cu_q_lens[0] to cu_q_lens[b + 1], clipped to
      [0, tokens], and the next sequence's begin there. So no two sequences share a token, whatever
      the array holds.
    * A length outside [0, max_pages_per_seq * page_size], or above max_seq_len, is clamped for
      attention, and the new rows of that sequence are not written.
    * A token whose position is negative, because the sequence has more tokens than its length, is
      not written. Its out is 0 and its lse is -inf, as for padding. If seq_lens and cu_q_lens are
      both numpy arrays, it is an error.
    * A row whose page the pool does not hold is not written, and a page that the pool does not hold
      has no keys.

    Args:
      q_nope: [tokens, num_heads, d_ckv]; bfloat16, float16 or, on the CPU, float32; with an FP8
        cache also float8_e4m3fn, and float16 only on the CPU. The query without rotary part,
        multiplied by W_UK.
      q_pe: [tokens, num_heads, d_kpe], dtype of q_nope. The rotary part of the query; None, like
        kpe, if the rows have none.
      ckv: [tokens, d_ckv], dtype of q_nope, or bfloat16 if that is float8_e4m3fn. The new latents.
        If the cache stores both parts in float8_e4m3fn, also codes in float8_e4m3fn, which cannot
        be normalised or rotated.
      kpe: [tokens, d_kpe], dtype of ckv. The new rotary keys.
      kv_pages: the cache, as for `decode`.
      page_table: [seqs, max_pages_per_seq] int32. The pages of each sequence in order, as global
        page ids, or as ids local to each group with MeshAxes(local_pages=). A wrong global id is an
        error in numpy arrays, as for `decode`.
      seq_lens: [seqs] int32. Tokens in the cache, including the new ones of this step. A length
        outside [0, max_pages_per_seq * page_size], or above max_seq_len, is an error in a numpy
        array. In a JAX array, such as any argument of a jitted function, it is treated as described
        above.
      cu_q_lens: [seqs + 1] int32. None: every sequence has tokens / seqs tokens. In a numpy array,
        values that decrease or lie outside [0, tokens] are an error.
      num_seqs: how many of the sequences the step has, an int or an int32 scalar; None for all. The
        sequences from it on are absent, whatever the arrays hold there. An int outside [0, seqs]
        is an error; a JAX scalar is clamped.
      sm_scale: factor on the scores, see `decode`.
      sink: [num_heads] float32. One more score per head, without a value: out is multiplied by
        exp(lse) / (exp(lse) + exp(sink)). Minus infinity means no sink.
      layer: which layer of a stacked pool, see `decode`. Outside the pool nothing is written.
      packs: whether the pages of the pool are cut into packs, as for `decode`.
      sliding_window: the most tokens that a query sees, its own and those before it, see `decode`:
        token t sees the tokens from p(t) - sliding_window + 1 on.
      soft_cap: a limit of the scores, see `decode`.
      return_lse: whether to also return the log-sum-exp of the scores.
      kv_format: name of the format in which the cache is stored, see `decode` and `append`; None
        for the dtype of q_nope.
      kv_scale: scale of a cache in "fp8_e4m3", see `decode` and `append`.
      q_scale: scale of queries in float8_e4m3fn, see `decode`.
      norm_weight: [d_ckv], the weight of the norm of ckv, see `append`.
      norm_eps: added to the mean square by the norm, see `append`.
      rope_table: [num_positions, d_kpe] float32, see `append`. The new rows of kpe and q_pe are
        rotated by the angles of p(t). Then the queries cannot be float8_e4m3fn. A length beyond
        the table is an error in a numpy array; in a JAX array its tokens take the last row.
      rope_interleaved: whether the two values of a pair are adjacent, see `append`; required with
        rope_table.
      num_splits: largest number of parts into which the tokens of a sequence are split, see
        `decode`.
      batch_invariant: whether the result of a sequence must not depend, bit for bit, on the other
        sequences in the step. On CUDA the sizes `tokens` and `seqs` may still matter. With one
        token a sequence (tokens = seqs) it is then the result of `decode`. max_seq_len and the
        width of page_table never matter.
      max_seq_len: a static bound of the lengths that is smaller than the width of page_table, see
        `decode`.
      page_begin: global id of the pool's first page, see `decode`. Rows for pages outside the pool
        are not written.
      mesh: how to split the call if the argument types do not say, see `decode`. With cu_q_lens and
        global page ids, the axes of `batch` split nothing: all devices along them do the same work.
        With `MeshAxes(local_pages=)` each group has its part of the tokens and of the sequences.
        Then cu_q_lens has the arrays of the groups end to end, [seqs / groups + 1] each, which
        count from 0 in the group's tokens, and num_seqs is [groups] int32, or None.
      backend: name of the backend, see `decode`.

    Returns:
      out: shape and dtype of q_nope; bfloat16 for queries in float8_e4m3fn. The result in the
        latent space, before W_UV.
      lse: only with return_lse. [tokens, num_heads] float32, natural logarithm, without the sink.
      kv_pages: the cache with the new rows, in the form of kv_pages.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes, values or shardings do not fit, without cu_q_lens the sequences do not
        divide the tokens, or no backend takes the call. Raised while tracing or lowering.
      jax.errors.JaxRuntimeError: as for `decode`. On CUDA the units into which tokens are cut (see
        docs/kernels/ragged.md) count as sequences there.
      NotImplementedError: the call is differentiated.
    """
    operands, params, sink = parse.attention(
        FORM, q_nope, q_pe, kv_pages, page_table, rows=(ckv, kpe),
        sm_scale=sm_scale, sink=sink, layer=layer, packs=packs,
        sliding_window=sliding_window, soft_cap=soft_cap, kv_format=kv_format,
        kv_scale=kv_scale, q_scale=q_scale, num_splits=num_splits, batch_invariant=batch_invariant,
        max_seq_len=max_seq_len, page_begin=page_begin, backend=backend,
    )  # fmt: skip
    num_tokens, num_rows = operands.q_nope.shape[0], operands.page_table.shape[0]
    lens = _checks.indices(OP, "seq_lens", seq_lens, (num_rows,), " with page_table's sequences")
    sizes = pool_sizes(operands.kv_pages[0], params.has_layer)
    num_groups = _ragged.num_groups(OP, mesh, num_tokens, num_rows)
    num_seqs = _ragged.check_num_seqs(OP, num_seqs, num_rows, num_groups)
    capacity = operands.page_table.shape[1] * sizes.page_size
    _ragged.check_lens(OP, seq_lens, num_seqs, capacity, params.max_seq_len)
    bounds = None
    if cu_q_lens is None:
        _ragged.uniform_q_len(OP, "q_nope", num_tokens, num_rows)
    else:
        bounds = _checks.array(OP, "cu_q_lens", cu_q_lens, _checks.INDICES)
        _ragged.check(OP, cu_q_lens, num_seqs, num_rows, num_tokens, num_groups)
        _ragged.check_new_tokens(OP, seq_lens, cu_q_lens, num_seqs, num_groups)
        num_seqs = _ragged.ALL_SEQS if num_seqs is None else num_seqs
    if page_begin is None and not num_groups:
        seen = _num_seen(params.sliding_window, cu_q_lens, num_seqs, num_tokens, num_rows)
        _ragged.check_pages(OP, page_table, seq_lens, num_seqs, sizes, seen=seen)
    with_lse = _checks.flag(OP, "return_lse", return_lse)
    interleaved = append_checks.interleaved(OP, rope_interleaved, rope_table)
    norm_weight, rope_table = append_checks.transforms(
        OP, operands.ckv, operands.kpe, norm_weight, rope_table
    )
    norm_eps = append_checks.eps(OP, norm_eps)
    if rope_table is not None:
        _checks.dtype(OP, "q_nope, q_pe", operands.q_pe, _checks.FLOATS, " with rope_table")
        _check_rotated_lens(seq_lens, num_seqs, rope_table)
    params = dataclasses.replace(
        params,
        has_local_pages=num_groups > 0,
        norm_eps=0.0 if norm_weight is None else norm_eps,
        rope_interleaved=interleaved,
    )
    operands = operands._replace(
        seq_lens=lens,
        cu_q_lens=bounds,
        num_seqs=num_seqs,
        norm_weight=norm_weight,
        rope_table=rope_table,
    )
    mesh_arguments = {"mesh": mesh, "num_groups": num_groups or 1} if mesh is not None else {}
    out, lse, *pools = _attend(operands, sink, params=params, **mesh_arguments)
    new = like(kv_pages, pools)
    return (out, lse, new) if with_lse else (out, new)


def _num_seen(window: int, cu_q_lens: Any, num_seqs: Any, num_tokens: Any, num_rows: Any) -> Any:
    """Return how many tokens at the end of each sequence its queries see at most; None for all."""
    if not window:
        return None
    if cu_q_lens is None:
        return num_tokens // num_rows + window - 1
    new = _ragged.new_tokens(cu_q_lens, num_seqs)
    return (num_tokens if new is None else new) + window - 1


def _check_rotated_lens(seq_lens: Any, num_seqs: Any, rope_table: Array) -> None:
    """Refuse lengths for which the table has no angles, if they are known on the host."""
    if isinstance(seq_lens, np.ndarray) and isinstance(num_seqs, int | None):
        high, what = rope_table.shape[0], "lengths for which rope_table has positions"
        _checks.values(OP, "seq_lens", seq_lens[:num_seqs], 0, high + 1, what)


@_eager.compiled(OP)
def _attend(
    operands: primitive.Operands,
    sink: Array | None,
    *,
    params: primitive.Params,
    mesh: Mesh | MeshAxes | None = None,
    num_groups: int = 1,
) -> list[Array]:
    """Run the op on arguments that have been checked."""
    is_part_of_cache = operands.page_begin is not None
    operands = checks.as_arrays(operands, num_groups)
    if operands.norm_weight is not None:  # exact: float32 holds all values of other dtypes
        operands = operands._replace(norm_weight=operands.norm_weight.astype(jnp.float32))
    num_tokens, q_len = operands.q_nope.shape[0], 0
    if operands.cu_q_lens is None:
        q_len = num_tokens // operands.page_table.shape[0]
        operands = _by_sequence(operands, q_len)
    if operands.rope_table is not None:
        operands = operands._replace(rope_lens=operands.seq_lens)
    if is_part_of_cache:
        operands = primitive.keep_owned_pages(operands, params)
    out, lse, *pools = primitive.bind_ragged(operands, params, mesh=mesh)
    if q_len == 1:
        out, lse = lax.squeeze(out, (1,)), lax.squeeze(lse, (1,))
    elif q_len:
        out, lse = (x.reshape(num_tokens, *x.shape[2:]) for x in (out, lse))
    return [_sink.apply(out, lse, sink), lse, *pools]


def _by_sequence(operands: primitive.Operands, q_len: int) -> primitive.Operands:
    """Turn the operands of a uniform call into what its outer primitive takes.

    A sequence that is absent gets the length -1: it then writes nothing and sees nothing. So no
    device has to know which of the sequences are its own.
    """
    seq_lens = _ragged.lens_of_present(operands.seq_lens, operands.num_seqs)

    def split(name: str) -> Array | None:
        x = getattr(operands, name)
        return x if x is None else _ragged.by_sequence(OP, name, x, seq_lens.shape[0], q_len)

    return operands._replace(
        q_nope=split("q_nope"),
        q_pe=split("q_pe"),
        ckv=split("ckv"),
        kpe=split("kpe"),
        seq_lens=seq_lens,
        num_seqs=None,
    )
