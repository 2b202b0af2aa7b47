"""The public function `check_values`: checks of what only the device knows."""

from __future__ import annotations

import warnings
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

from jax_mla.kv_cache import KvPages, PoolSizes, as_pools, bound_of_lengths, pool_sizes
from jax_mla.ops import _checks, _ragged
from jax_mla.ops.decode import checks

OP = "jax_mla.check_values"
SUMS = "pass np.concatenate([[0], np.cumsum(q_lens)])"


def check_values(
    kv_pages: KvPages,
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    *,
    seq_lens: Annotated[Array, "[batch] int32"] | None = None,
    positions: Annotated[Array, "[batch, q_len], [batch] or [tokens] int32"] | None = None,
    num_tokens: int | None = None,
    cu_q_lens: Annotated[Array, "[batch + 1] int32"] | None = None,
    num_seqs: Array | int | None = None,
    layer: Array | int | None = None,
    packs: bool = False,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
    q_nope: Annotated[Array, "[*tokens, num_heads, d_ckv]"] | None = None,
) -> None:
    """Check the values of the ops' arguments, for the debug mode of an engine.

    The ops read device values without checking them: they clamp a length, skip a token, and treat a
    page id outside the pool as absent. This function finds such values. Its arguments say which
    call it checks:

    * `seq_lens`: a call of `decode`,
    * `positions`, and `cu_q_lens` if the call has it: a call of `append`,
    * `seq_lens` and `num_tokens`, and `cu_q_lens` and `num_seqs` if the call has them: a call of
      `ragged_paged_attention`.

    It looks for

    * lengths outside [0, max_pages_per_seq * page_size], or above max_seq_len,
    * lengths that do not include the new tokens, if a step's tokens or `positions` are given too,
    * positions past the page table (a negative position is legal and skips the token),
    * cu_q_lens that decrease, lie outside [0, tokens], or do not start with 0, which often means
      that lengths were passed instead,
    * num_seqs outside [0, batch]; for sequences from num_seqs on, the arrays may hold anything,
    * page ids outside the pool, in the entries of the table that the call uses,
    * two tokens that would be written to the same row of the cache,
    * a layer outside [0, num_layers).

    It warns, and does not raise, if a legal call looks like a mistake:

    * q_nope with one head and several tokens per sequence, which is how [batch, num_heads, 1,
      d_ckv] is read,
    * outside `jit`, cu_q_lens that give some sequences no new token, and would give every token a
      sequence if they were lengths.

    Outside `jit` a bad value raises at once, and the host waits for the arrays. Under `jit` the
    check needs `jax.experimental.checkify`:

        def step(pool, ...):
            if debug:
                jax_mla.check_values(pool, page_table, positions=positions, layer=layer)
            pool = jax_mla.append(pool, ckv, kpe, page_table, positions, layer=layer)
            ...

        step = jax.jit(checkify.checkify(step) if debug else step)

    A checkified function returns (error, result), and `error.throw()` raises. Page ids are global:
    call the function with the whole pool, not with the parts inside a `shard_map`. With local pages
    (`MeshAxes`), call it for each group, with its part of the pool and its sequences.

    Args:
      kv_pages: the cache, as for `decode`; only its shape is used.
      page_table: [batch, max_pages_per_seq] int32.
      seq_lens: [batch] int32, as for `decode`.
      positions: [batch, q_len] int32 or [batch], with cu_q_lens [tokens], as for `append`.
      num_tokens: number of tokens in the step, q_nope.shape[0] of `ragged_paged_attention`.
      cu_q_lens: [batch + 1] int32, as for `append` and `ragged_paged_attention`.
      num_seqs: how many of the sequences the step has, as for `ragged_paged_attention`.
      layer: which layer of a stacked pool, as for all ops.
      packs: whether the pages of the pool are cut into packs, as for `decode`.
      max_seq_len: bound of the lengths, as for `decode` and `ragged_paged_attention`.
      sliding_window: as for `decode` and `ragged_paged_attention`. Pages of which no query sees a
        token may have any ids. For a call of `decode` with several query tokens give q_nope, too.
      q_nope: as for `decode`, or with num_tokens as for `ragged_paged_attention`; only its shape is
        used.

    Raises:
      ValueError: a value is bad, and the message says where; or the shapes do not fit; or the
        arguments do not form a call.
      TypeError: an argument has the wrong type or dtype.
    """
    pool = _checks.array(OP, "kv_pages", as_pools(OP, kv_pages)[0])
    _checks.rank_of_pool(OP, "kv_pages", pool, has_layer=layer is not None, packs=packs)
    sizes = pool_sizes(pool, layer is not None)
    if sizes.num_pages != 0:  # a pool may have no pages
        _refuse_empty("kv_pages", pool)
    page_table = _indices("page_table", page_table)
    _checks.shape(OP, "page_table", page_table, (None, None))
    _refuse_empty("page_table", page_table)
    if seq_lens is None and positions is None:
        raise ValueError(f"{OP}: seq_lens, positions: expected at least one of them, got None")
    if layer is not None:
        _check_index("layer", layer, sizes.num_layers)
    batch = page_table.shape[0]
    if seq_lens is not None:
        seq_lens = _indices("seq_lens", seq_lens)
        _checks.shape(OP, "seq_lens", seq_lens, (batch,), " with page_table's batch")
    if positions is not None:
        positions = _indices("positions", positions)
        _refuse_empty("positions", positions)
    _check_combination(seq_lens, positions, num_tokens, cu_q_lens, num_seqs)
    num_tokens = None if num_tokens is None else _static_size(num_tokens)
    if q_nope is not None:
        _check_query(_checks.array(OP, "q_nope", q_nope), batch, num_tokens)
    capacity = _checks.capacity(OP, "page_table", page_table, sizes.page_size)
    bound = checks.max_seq_len(OP, max_seq_len, capacity)
    window = checks.sliding_window(OP, sliding_window, bound_of_lengths(capacity, bound))
    if seq_lens is not None and num_tokens is not None:
        _check_step(seq_lens, num_tokens, cu_q_lens, num_seqs, page_table, sizes, bound, window)
    elif seq_lens is not None:
        q_len = 1 if q_nope is None or q_nope.ndim == 3 else q_nope.shape[1]
        first = _first_visible(seq_lens, q_len, window)
        _check_lengths(seq_lens, first, page_table, sizes, bound)
    if positions is not None and cu_q_lens is not None:
        _checks.rank(OP, "positions", positions, (1,), "[tokens] with cu_q_lens")
        bounds = _check_bounds(cu_q_lens, None, batch, positions.shape[0])
        sequence = _ragged.sequence_of_tokens(bounds, positions.shape[0])
        q_lens = bounds[1:] - bounds[:-1]
        _warn_of_lengths(bounds, q_lens, jnp.ones_like(q_lens), positions.shape[0], stacklevel=3)
        positions = jnp.where(sequence >= 0, positions, -1)
        _check_positions(positions, sequence, page_table, sizes, seq_lens)
    elif positions is not None:
        _checks.rank(OP, "positions", positions, (1, 2), "[batch, q_len] or [batch]")
        shape = (batch, *positions.shape[1:])
        _checks.shape(OP, "positions", positions, shape, " with page_table's batch")
        sequence = lax.broadcasted_iota(jnp.int32, positions.shape, 0)
        positions, sequence = positions.reshape(-1), sequence.reshape(-1)
        _check_positions(positions, sequence, page_table, sizes, seq_lens)


def _indices(name: str, x: object) -> Array:
    """Return int32 values as a JAX array, replicated over the Explicit axes of its mesh.

    Over those axes, operands sharded in different ways are an error, and so are most gathers.
    """
    array = _checks.array(OP, name, x, _checks.INDICES)
    _checks.dtype(OP, name, array, _checks.INDICES)
    sharding = jax.typeof(array).sharding
    if any(sharding.spec):  # names Explicit axes only
        return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
    return array


def _refuse_empty(name: str, x: Array) -> None:
    if 0 in x.shape:
        raise ValueError(f"{OP}: {name}: expected no dimension of size 0, got {tuple(x.shape)}")


def _check_combination(
    seq_lens: object, positions: object, num_tokens: object, cu_q_lens: object, num_seqs: object
) -> None:
    """Refuse arguments that are not those of a call."""
    if num_tokens is not None:
        if seq_lens is None or positions is not None:
            raise ValueError(
                f"{OP}: num_tokens: expected seq_lens beside it, and no positions, as in a call of "
                "ragged_paged_attention"
            )
    elif num_seqs is not None and positions is not None:
        raise ValueError(f"{OP}: num_seqs: expected None with positions, as in a call of append")
    elif num_seqs is not None or (cu_q_lens is not None and positions is None):
        name = "cu_q_lens" if num_seqs is None else "num_seqs"
        raise ValueError(f"{OP}: {name}: expected num_tokens beside it, got None")


def _check_query(q_nope: Array, batch: int, num_tokens: object) -> None:
    """Check the shape of the queries, and warn of a dimension of heads that may be another one."""
    if num_tokens is not None:
        _checks.shape(OP, "q_nope", q_nope, (num_tokens, None, None), " with num_tokens")
        return
    dims = "[batch, q_len, num_heads, d_ckv] or [batch, num_heads, d_ckv]"
    _checks.rank(OP, "q_nope", q_nope, (3, 4), dims)
    _checks.shape(
        OP, "q_nope", q_nope, (batch, *[None] * (q_nope.ndim - 1)), " with page_table's batch"
    )
    if q_nope.ndim == 4 and q_nope.shape[1] > 1 and q_nope.shape[2] == 1:
        warnings.warn(
            f"{OP}: q_nope: got shape {tuple(q_nope.shape)}, which is [batch, q_len, num_heads, "
            f"d_ckv]: {q_nope.shape[1]} tokens of one head. If those are heads of one token, swap "
            "the two dimensions",
            stacklevel=3,
        )


def _static_size(num_tokens: object) -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer):
        kind = _checks.static_kind(num_tokens)
        raise TypeError(f"{OP}: num_tokens: expected an int, got {kind}")
    if num_tokens < 1:
        raise ValueError(f"{OP}: num_tokens: expected at least 1, got {num_tokens}")
    if num_tokens > np.iinfo(np.int32).max:
        raise ValueError(f"{OP}: num_tokens: expected less than 2^31, got {num_tokens}")
    return int(num_tokens)


def _refuse(bad: Array, message: str, **values: Array) -> None:
    """Raise if any item of `bad` is true.

    Args:
      bad: any shape.
      message: format string over `values`.
      **values: arrays of the shape of `bad`; the message shows each at the first bad item.
    """
    first = jnp.argmax(bad.reshape(-1))
    shown = {name: x.reshape(-1)[first] for name, x in values.items()}
    checkify.check(~jnp.any(bad), f"{OP}: {message}", **shown)  # type: ignore[arg-type]


def _check_index(
    name: str, x: Array | int, high: int, what: str = "an index"
) -> Array | int | None:
    index = _checks.index(OP, name, x, high, what)
    if isinstance(index, Array):
        bad = (index < 0) | (index >= high)
        _refuse(bad, f"{name}: expected {what} in [0, {high}), got {{got}}", got=index)
    return index


def _first_visible(seq_lens: Array, q_lens: Array | int, window: int) -> Array:
    """Return, for each sequence, the first token that one of its queries sees."""
    first = seq_lens - q_lens - window + 1 if window else jnp.zeros_like(seq_lens)
    return jnp.maximum(first, 0)


def _check_lengths(
    seq_lens: Array, first: Array, page_table: Array, sizes: PoolSizes, max_seq_len: int
) -> None:
    """Check lengths, and the ids of the pages that hold the tokens from `first` on."""
    _, num_pages, page_size = sizes
    batch, max_pages = page_table.shape
    sequence = jnp.arange(batch, dtype=jnp.int32)
    bound = bound_of_lengths(max_pages * page_size, max_seq_len)
    what = "max_seq_len" if max_seq_len else "page_table"
    _refuse(
        (seq_lens < 0) | (seq_lens > bound),
        f"seq_lens: expected lengths that fit {what} in [0, {bound}], got "
        "{got} for sequence {sequence}",
        got=seq_lens,
        sequence=sequence,
    )
    place = lax.broadcasted_iota(jnp.int32, page_table.shape, 1)
    used = (place >= first[:, None] // page_size) & (place * page_size < seq_lens[:, None])
    _refuse(
        used & ((page_table < 0) | (page_table >= num_pages)),
        f"page_table: expected page ids in [0, {num_pages}) within the lengths, got {{got}} at "
        "place {place} of sequence {sequence}",
        got=page_table,
        place=place,
        sequence=jnp.broadcast_to(sequence[:, None], page_table.shape),
    )


def _check_bounds(
    cu_q_lens: Array, num_seqs: Array | int | None, batch: int, num_tokens: int
) -> Array:
    """Check cu_q_lens as far as num_seqs says; return where the tokens of each sequence begin."""
    cu_q_lens = _indices("cu_q_lens", cu_q_lens)
    _checks.shape(OP, "cu_q_lens", cu_q_lens, (batch + 1,), " = sequences in page_table + 1")
    index = jnp.arange(batch + 1, dtype=jnp.int32)
    used = index <= (batch if num_seqs is None else num_seqs)
    _refuse(
        used & ((cu_q_lens < 0) | (cu_q_lens > num_tokens)),
        f"cu_q_lens: expected places among the tokens in [0, {num_tokens}], got {{got}} at index "
        "{index}",
        got=cu_q_lens,
        index=index,
    )
    _refuse(
        used[1:2] & (cu_q_lens[:1] != 0),
        f"cu_q_lens: expected sums of lengths, of which the first is 0, got {{got}}; {SUMS}",
        got=cu_q_lens[:1],
    )
    _refuse(
        used[1:] & (cu_q_lens[1:] < cu_q_lens[:-1]),
        "cu_q_lens: expected values that never fall, got {first} followed by {second} at index "
        "{index}",
        first=cu_q_lens[:-1],
        second=cu_q_lens[1:],
        index=index[1:],
    )
    return _ragged.bounds(cu_q_lens, num_seqs, num_tokens)


def _check_step(
    seq_lens: Array,
    num_tokens: int,
    cu_q_lens: Array | None,
    num_seqs: Array | int | None,
    page_table: Array,
    sizes: PoolSizes,
    max_seq_len: int,
    window: int,
) -> None:
    """Check a call of `ragged_paged_attention`."""
    batch, max_pages = page_table.shape
    if num_seqs is not None:
        num_seqs = _check_index("num_seqs", num_seqs, batch + 1, "a number of sequences")
        num_seqs = jnp.asarray(num_seqs, jnp.int32).reshape(())
    if cu_q_lens is not None:
        bounds = _check_bounds(cu_q_lens, num_seqs, batch, num_tokens)
    elif num_tokens % batch == 0:
        uniform = jnp.arange(batch + 1, dtype=jnp.int32) * (num_tokens // batch)
        bounds = _ragged.bounds(uniform, num_seqs, num_tokens)
    else:
        raise ValueError(
            f"{OP}: num_tokens: expected a multiple of the {batch} sequences in page_table, or "
            f"cu_q_lens, got {num_tokens}"
        )
    sequence = jnp.arange(batch, dtype=jnp.int32)
    if num_seqs is not None:  # an absent sequence may have any length
        seq_lens = jnp.where(sequence < num_seqs, seq_lens, 0)
    q_lens = bounds[1:] - bounds[:-1]
    first = _first_visible(seq_lens, q_lens, window)
    _check_lengths(seq_lens, first, page_table, sizes, max_seq_len)
    _refuse(
        q_lens > seq_lens,
        "seq_lens: expected lengths that include the new tokens, got {got} for sequence {sequence} "
        "with {q_len} new ones",
        got=seq_lens,
        sequence=sequence,
        q_len=q_lens,
    )
    if cu_q_lens is not None:
        _warn_of_lengths(bounds, q_lens, seq_lens, num_tokens, stacklevel=4)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = _ragged.sequence_of_tokens(bounds, num_tokens)
    capacity = bound_of_lengths(max_pages * sizes.page_size, max_seq_len)
    fits = (seq_lens >= 0) & (seq_lens <= capacity)
    is_written = (owner >= 0) & fits[owner]
    positions = jnp.where(is_written, seq_lens[owner] - (bounds[owner + 1] - token), -1)
    _check_rows("page_table", positions, owner, page_table, sizes)


def _warn_of_lengths(
    bounds: Array, q_lens: Array, seq_lens: Array, num_tokens: int, *, stacklevel: int
) -> None:
    """Warn of cu_q_lens that would account for all tokens if they were lengths after a 0.

    As sums they leave tokens over, while sequences that have a length get none. `stacklevel` is
    that of whoever called `check_values`, as `warnings.warn` counts.
    """
    has_tokens = seq_lens > 0
    as_lengths = jnp.sum(jnp.where(has_tokens, bounds[1:], 0), dtype=jnp.int32)
    are_idle = jnp.any(has_tokens & (q_lens == 0)) & (bounds[-1] < num_tokens)
    looks_wrong = are_idle & (as_lengths == num_tokens)
    if not isinstance(looks_wrong, Tracer) and looks_wrong:
        warnings.warn(
            f"{OP}: cu_q_lens: got sequences without a new token, and tokens of no sequence; as "
            f"lengths the values would fit the {num_tokens} tokens. If they are lengths, {SUMS}",
            stacklevel=stacklevel,
        )


def _check_positions(
    positions: Array,
    sequence: Array,
    page_table: Array,
    sizes: PoolSizes,
    seq_lens: Array | None,
) -> None:
    """Check a call of `append`, and whether lengths beside it include its tokens.

    Args:
      positions: [num_tokens] int32; a negative one is skipped.
      sequence: [num_tokens] int32, any value for a token that is skipped.
      page_table: page table of the sequences.
      sizes: sizes of the pool.
      seq_lens: [batch] int32, or None.
    """
    capacity = page_table.shape[1] * sizes.page_size
    _refuse(
        positions >= capacity,
        f"positions: expected places that page_table has, below {capacity}, got {{got}} for "
        "sequence {sequence}",
        got=positions,
        sequence=sequence,
    )
    _check_rows("positions", positions, sequence, page_table, sizes)
    if seq_lens is None:
        return
    length = seq_lens[sequence]
    _refuse(
        positions >= length,
        "seq_lens: expected lengths that include the new tokens, got {got} for sequence {sequence} "
        "with a token at position {position}",
        got=length,
        sequence=sequence,
        position=positions,
    )


def _check_rows(
    name: str, positions: Array, sequence: Array, page_table: Array, sizes: PoolSizes
) -> None:
    """Check where tokens are written.

    Args:
      name: argument that a message about two tokens for one row names.
      positions: [num_tokens] int32; a negative one is not written.
      sequence: [num_tokens] int32, any value for a token that is not written.
      page_table: page table of the sequences.
      sizes: sizes of the pool.
    """
    _, num_pages, page_size = sizes
    max_pages = page_table.shape[1]
    place = positions // page_size
    is_written = (positions >= 0) & (place < max_pages)
    page = page_table[sequence, jnp.clip(place, 0, max_pages - 1)]
    _refuse(
        is_written & ((page < 0) | (page >= num_pages)),
        f"page_table: expected page ids in [0, {num_pages}) where tokens are written, got {{got}} "
        "at place {place} of sequence {sequence}",
        got=page,
        place=place,
        sequence=sequence,
    )
    # Tokens for the same row become neighbours; skipped tokens get rows of their own.
    num_tokens = positions.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    page = jnp.where(is_written, page, num_pages)
    row = jnp.where(is_written, positions % page_size, token)
    page, row, sequence = lax.sort((page, row, sequence), num_keys=2)
    if num_tokens > 1:
        _refuse(
            (page[1:] == page[:-1]) & (row[1:] == row[:-1]),
            f"{name}: expected every token at a row of its own, got row {{row}} of page {{page}} "
            "for two tokens, of sequences {first} and {second}",
            row=row[1:],
            page=page[1:],
            first=sequence[:-1],
            second=sequence[1:],
        )
