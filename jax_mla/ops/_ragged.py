"""Which token of a step belongs to which sequence; `csrc/core/ragged.h` says it for the kernels.

The tokens of all sequences lie end to end. Sequence b has the tokens from the largest of
cu_q_lens[0..b] to the largest of cu_q_lens[0..b + 1], clipped to [0, num_tokens]. So no values make
two sequences share a token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla._mesh import _dispatch, _sharding
from jax_mla.kv_cache import PoolSizes
from jax_mla.ops import _checks

ALL_SEQS = 2**31 - 1  # as a number of sequences: all that there are


def bounds(cu_q_lens: Array, num_seqs: Array | int | None, num_tokens: Any) -> Array:
    """Return where the tokens of each sequence begin, and where the last ones end.

    Args:
      cu_q_lens: [*groups, seqs + 1] int32, any values.
      num_seqs: sequences from this one on have no tokens, an int, a scalar or [*groups, 1]; None
        for all.
      num_tokens: number of tokens in the step, or in each group.

    Returns:
      [*groups, seqs + 1] int32. Sequence b has the tokens from entry b to entry b + 1.
    """
    axis = cu_q_lens.ndim - 1
    if num_seqs is not None:
        place = lax.broadcasted_iota(jnp.int32, cu_q_lens.shape, axis)
        is_used = place <= jnp.maximum(num_seqs, 0)
        cu_q_lens = jnp.where(is_used, cu_q_lens, np.iinfo(np.int32).min)
    return jnp.clip(lax.cummax(cu_q_lens, axis), 0, num_tokens).astype(jnp.int32)


def sequence_of_tokens(bounds_: Array, num_tokens: Any) -> Array:
    """Return the sequence of each token, [num_tokens] int32; -1 for padding."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    first_after = jnp.sum(bounds_[None, :] <= token[:, None], axis=1, dtype=jnp.int32)
    return jnp.where(first_after < bounds_.shape[0], first_after - 1, -1)


def places(bounds_: Array, seq_lens: Array, num_tokens: Any) -> tuple[Array, Array]:
    """Return each token's sequence, and its place there.

    Args:
      bounds_: [seqs + 1] int32, from `bounds`.
      seq_lens: [seqs] int32, the lengths with the new tokens.
      num_tokens: number of tokens in the step.

    Returns:
      sequence: [num_tokens] int32, -1 for padding.
      place: [num_tokens] int32, -1 for padding and for a token without a place.
    """
    sequence = sequence_of_tokens(bounds_, num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    place = seq_lens[sequence] - (bounds_[sequence + 1] - token)
    return sequence, jnp.where(sequence >= 0, jnp.maximum(place, -1), -1)


def num_groups(op: str, mesh: Any, num_tokens: Any, num_rows: Any) -> int:
    """Return how many groups with local pages a call has; 0 if page ids are global.

    Args:
      op: name of the calling op, for messages.
      mesh: the argument `mesh=`.
      num_tokens: number of tokens in the step.
      num_rows: sequences for which the page table has a row.

    Raises:
      ValueError: the groups do not have as many tokens and sequences each.
    """
    groups = _dispatch.num_local_groups(op, mesh)
    for what, size in (("tokens", num_tokens), ("sequences", num_rows)):
        if groups and size % groups != 0:
            raise ValueError(
                f"{op}: mesh: expected a multiple of {groups}, the number of groups with local "
                f"pages, as the number of {what}, got {size}"
            )
    return groups


def check_num_seqs(op: str, x: Any, num_rows: Any, num_groups: int) -> int | Array | None:
    """Check num_seqs; with local pages every group has a number of its own."""
    if x is None or num_groups <= 1:
        return _checks.index(op, "num_seqs", x, num_rows + 1, "a number of sequences")
    if isinstance(x, int):
        raise TypeError(
            f"{op}: num_seqs: expected an int32 array of shape ({num_groups},), one number for "
            f"each group with local pages, got {type(x).__name__}"
        )
    x = _checks.array(op, "num_seqs", x, _checks.INDICES)
    _checks.shape(op, "num_seqs", x, (num_groups,), ", one number for each group with local pages")
    _checks.dtype(op, "num_seqs", x, _checks.INDICES)
    return x


def uniform_q_len(op: str, name: str, num_tokens: Any, num_rows: Any) -> int:
    """Return the number of tokens of each sequence where cu_q_lens does not say it.

    Args:
      op: name of the calling op, for messages.
      name: name of the argument that has the tokens.
      num_tokens: number of tokens in the step.
      num_rows: sequences for which the page table has a row.

    Raises:
      ValueError: the sequences do not divide the tokens.
    """
    q_len, rest = divmod(num_tokens, num_rows)
    if not isinstance(q_len, int) or rest != 0:
        raise ValueError(
            f"{op}: {name}: expected a multiple of the {num_rows} sequences in page_table as the "
            f"number of tokens, or cu_q_lens, got {num_tokens} tokens"
        )
    return q_len


def by_sequence(op: str, name: str, x: Array, num_seqs: int, q_len: int) -> Array:
    """Return [seqs, q_len, ...] of the tokens [seqs * q_len, ...] of a uniform call.

    Raises:
      ValueError: Explicit axes split the tokens over devices that do not divide the sequences.
    """
    if q_len == 1:
        return lax.expand_dims(x, (1,))
    sharding = jax.typeof(x).sharding
    axes = _sharding.axes_of(_dispatch.specs_of([jax.typeof(x)])[0][0])
    if not _sharding.divides(num_seqs, axes, sharding.mesh.shape):
        raise ValueError(
            f"{op}: {name}: expected a number of devices along {list(axes)} that divides the "
            f"{num_seqs} sequences, of {q_len} tokens each, since no sequence is cut; got "
            f"{sharding.spec} on {dict(sharding.mesh.shape)}"
        )
    return x.reshape(num_seqs, q_len, *x.shape[1:])


def lens_of_present(seq_lens: Array, num_seqs: Array | None) -> Array:
    """Return the lengths, with -1 for sequences that are absent.

    Args:
      seq_lens: [seqs] int32.
      num_seqs: [groups] int32, how many of the sequences of each group a step has; None for all.
    """
    if num_seqs is None:
        return seq_lens
    groups = num_seqs.shape[0]
    in_group = lax.broadcasted_iota(jnp.int32, (groups, seq_lens.shape[0] // groups), 1)
    return jnp.where((in_group < num_seqs[:, None]).reshape(seq_lens.shape), seq_lens, -1)


def of_sequences(x: Any, cu_q_lens: Any, num_groups: int = 0) -> Any:
    """Return the values of the tokens that sequences have, if they are known on the host.

    Args:
      x: [tokens], as the caller gave it.
      cu_q_lens: as for `check`.
      num_groups: as for `check`.

    Returns:
      A numpy array, or None.
    """
    if not isinstance(x, np.ndarray) or not isinstance(cu_q_lens, np.ndarray):
        return None
    groups = max(num_groups, 1)
    spans = cu_q_lens.reshape(groups, -1)[:, [0, -1]]
    own = [g[begin:end] for g, (begin, end) in zip(x.reshape(groups, -1), spans, strict=True)]
    return np.concatenate(own)


def check_lens(op: str, seq_lens: Any, num_seqs: Any, capacity: Any, max_seq_len: int = 0) -> None:
    """Check the lengths of the sequences that are present, if both are known on the host.

    Args:
      op: name of the calling op, for messages.
      seq_lens: [seqs] int32, as the caller gave it.
      num_seqs: how many of the sequences count: None for all, or an int; anything else is not known
        on the host.
      capacity: tokens of a sequence that the page table has places for.
      max_seq_len: the caller's bound, below the capacity; 0 if there is none.

    Raises:
      ValueError: a length outside [0, capacity], or above the bound.
    """
    if isinstance(seq_lens, np.ndarray) and isinstance(num_seqs, int | None):
        _checks.lengths(op, seq_lens[:num_seqs], capacity, max_seq_len)


def check_pages(
    op: str,
    page_table: Any,
    seq_lens: Any,
    num_seqs: Any,
    sizes: PoolSizes,
    new: Any = 0,
    seen: Any = None,
) -> None:
    """Check the global page ids of the sequences that are present, if the host knows their lengths.

    Args:
      op: name of the calling op, for messages.
      page_table: [seqs, max_pages_per_seq] int32, as the caller gave it.
      seq_lens: as for `check_lens`, which has passed.
      num_seqs: as for `check_lens`.
      sizes: sizes of the pool.
      new: tokens of each of those sequences that the call does not look for in the cache.
      seen: how many of the tokens before those the call looks for; None for all.

    Raises:
      ValueError: an id outside the pool, where a sequence has tokens.
    """
    if isinstance(seq_lens, np.ndarray) and isinstance(num_seqs, int | None):
        _checks.page_ids(op, page_table, seq_lens[:num_seqs] - new, sizes, seen)


def check_written_pages(
    op: str, page_table: Any, positions: Any, cu_q_lens: Any, sizes: PoolSizes
) -> None:
    """Refuse ids of pages that the pool does not have, if the host knows which are written.

    Args:
      op: name of the calling op, for messages.
      page_table: as the caller gave it.
      positions: those of all tokens that sequences have; not a numpy array if unknown.
      cu_q_lens: as the caller gave it, or None.
      sizes: sizes of the pool.
    """
    known = isinstance(page_table, np.ndarray) and isinstance(positions, np.ndarray)
    if not known or not isinstance(sizes.page_size, int):
        return
    if cu_q_lens is None:
        sequence = np.indices(positions.shape)[0]
    else:
        sequence = np.repeat(np.arange(len(page_table)), np.diff(cu_q_lens))
    is_written, is_used = positions >= 0, np.zeros(page_table.shape, bool)
    is_used[sequence[is_written], positions[is_written] // sizes.page_size] = True
    _checks.used_ids(op, page_table, is_used, sizes.num_pages)


def new_tokens(cu_q_lens: Any, num_seqs: Any, num_groups: int = 0) -> np.ndarray | None:
    """Return how many new tokens each sequence that is present has; None if only the device knows.

    Args:
      cu_q_lens: as for `check`, which has passed.
      num_seqs: as for `check`.
      num_groups: as for `check`.
    """
    if not isinstance(cu_q_lens, np.ndarray) or not isinstance(num_seqs, int | None):
        return None
    return np.diff(cu_q_lens.reshape(num_groups or 1, -1)).reshape(-1)[:num_seqs]


def check_new_tokens(
    op: str, seq_lens: Any, cu_q_lens: Any, num_seqs: Any, num_groups: int = 0
) -> None:
    """Check that lengths include the new tokens, if all values are known on the host.

    Args:
      op: name of the calling op, for messages.
      seq_lens: [seqs] int32, as the caller gave it.
      cu_q_lens: as for `new_tokens`.
      num_seqs: as for `new_tokens`.
      num_groups: as for `new_tokens`.

    Raises:
      ValueError: a sequence has more new tokens than its length.
    """
    new = new_tokens(cu_q_lens, num_seqs, num_groups)
    if new is None or not isinstance(seq_lens, np.ndarray):
        return
    short = np.flatnonzero(new > seq_lens[:num_seqs])
    if short.size:
        at = int(short[0])
        raise ValueError(
            f"{op}: seq_lens: expected lengths that include the new tokens, got {seq_lens[at]} for "
            f"sequence {at} with {new[at]} new ones"
        )


def check(
    op: str, cu_q_lens: Any, num_seqs: Any, num_rows: Any, num_tokens: Any, num_groups: int = 0
) -> None:
    """Check cu_q_lens, and its values if they are known on the host.

    Args:
      op: name of the calling op, for messages.
      cu_q_lens: [num_rows + 1] int32, as the caller gave it; with groups the arrays of the groups,
        end to end.
      num_seqs: how many of its sequences count: None for all, or an int; anything else is not known
        on the host.
      num_rows: sequences for which the page table has a row.
      num_tokens: number of tokens in the step.
      num_groups: groups with local pages, which have as many tokens and sequences each; 0 if page
        ids are global.

    Raises:
      TypeError: wrong dtype.
      ValueError: wrong shape, or values that decrease or lie outside the tokens.
    """
    each = f", in each of {num_groups} groups with local pages" if num_groups else ""
    num_groups = num_groups or 1
    why = f" = sequences in page_table + 1{each}"
    _checks.shape(op, "cu_q_lens", cu_q_lens, (num_rows + num_groups,), why)
    _checks.dtype(op, "cu_q_lens", cu_q_lens, _checks.INDICES)
    if not isinstance(cu_q_lens, np.ndarray) or not isinstance(num_seqs, int | None):
        return
    for group, bounds_ in enumerate(cu_q_lens.reshape(num_groups, -1)):
        used = bounds_ if num_seqs is None else bounds_[: num_seqs + 1]
        high = num_tokens // num_groups + 1
        _checks.values(op, "cu_q_lens", used, 0, high, "places among the tokens")
        falls = np.flatnonzero(np.diff(used) < 0)
        if falls.size:
            at = int(falls[0])
            raise ValueError(
                f"{op}: cu_q_lens: expected values that never fall, got {used[at]} followed by "
                f"{used[at + 1]} at index {group * len(bounds_) + at + 1}"
            )
