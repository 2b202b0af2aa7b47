"""Which token of a step belongs to which sequence; `csrc/core/ragged.h` says it for the kernels.

The tokens of all sequences lie end to end. Sequence b has the tokens from the largest of
cu_q_lens[0..b] to the largest of cu_q_lens[0..b + 1], clipped to [0, num_tokens]. So no array,
however wild, makes two sequences share a token.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla.ops import _checks


def bounds(cu_q_lens: Array, num_seqs: Array | int | None, num_tokens: Any) -> Array:
    """Return where the tokens of each sequence begin, and where the last ones end.

    Args:
      cu_q_lens: [seqs + 1] int32, any values.
      num_seqs: sequences from this one on have no tokens, an int or a scalar; None for all.
      num_tokens: number of tokens in the step.

    Returns:
      [seqs + 1] int32. Sequence b has the tokens from entry b to entry b + 1.
    """
    if num_seqs is not None:
        place = lax.iota(jnp.int32, cu_q_lens.shape[0])
        is_used = place <= jnp.maximum(num_seqs, 0)
        cu_q_lens = jnp.where(is_used, cu_q_lens, np.iinfo(np.int32).min)
    return jnp.clip(lax.cummax(cu_q_lens), 0, num_tokens).astype(jnp.int32)


def sequence_of_tokens(bounds_: Array, num_tokens: Any) -> Array:
    """Return the sequence of each token, [num_tokens] int32; -1 for padding."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    first_after = jnp.sum(bounds_[None, :] <= token[:, None], axis=1, dtype=jnp.int32)
    return jnp.where(first_after < bounds_.shape[0], first_after - 1, -1)


def check(op: str, cu_q_lens: Any, num_seqs: Any, num_rows: Any, num_tokens: Any) -> None:
    """Check cu_q_lens, and its values if they are known on the host.

    Args:
      op: name of the calling op, for messages.
      cu_q_lens: [num_rows + 1] int32, as the caller gave it.
      num_seqs: how many of its sequences count: None for all, or an int; anything else is not known
        on the host.
      num_rows: sequences for which the page table has a row.
      num_tokens: number of tokens in the step.

    Raises:
      TypeError: wrong dtype.
      ValueError: wrong shape, or values that fall or are no places among the tokens.
    """
    _checks.shape(op, "cu_q_lens", cu_q_lens, (num_rows + 1,), " = sequences in page_table + 1")
    _checks.dtype(op, "cu_q_lens", cu_q_lens, _checks.INDICES)
    if not isinstance(cu_q_lens, np.ndarray) or not isinstance(num_seqs, int | None):
        return
    used = cu_q_lens if num_seqs is None else cu_q_lens[: num_seqs + 1]
    _checks.values(op, "cu_q_lens", used, 0, num_tokens + 1, "places among the tokens")
    falls = np.flatnonzero(np.diff(used) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"{op}: cu_q_lens: expected values that never fall, got {used[at]} followed by "
            f"{used[at + 1]} at index {at + 1}"
        )
