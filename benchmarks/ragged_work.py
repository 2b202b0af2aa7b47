"""The data of a timed step: a decode workload with the rows that the step writes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import roofline
import workload
from ragged_grid import RaggedCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedWorkload(workload.Workload):
    """Operands of one step. The pools hold other values where the new rows go.

    Attributes:
      pools: [num_caches, num_pages, page_size, d_ckv + d_kpe].
      ckv: [tokens, d_ckv], the same for all caches.
      kpe: [tokens, d_kpe].
    """

    case: RaggedCase
    pools: jax.Array
    ckv: jax.Array
    kpe: jax.Array

    @property
    def step_operands(self) -> tuple[object, ...]:
        """((q_nope, pools), q_pe, ckv, kpe, page_table, seq_lens, cu_q_lens)."""
        carry = self.q_nope, self.pools
        bounds = jnp.asarray(self.case.cu_q_lens)
        return carry, self.q_pe, self.ckv, self.kpe, self.page_table, self.seq_lens, bounds

    @property
    def new_rows(self) -> jax.Array:
        """[tokens, d_ckv + d_kpe]."""
        return jnp.concatenate([self.ckv, self.kpe], axis=-1)

    def written(self) -> workload.Workload:
        """The same workload after the step: XLA's own scatter has written the rows."""
        page, slot = np.divmod(self.case.places, self.case.page_size)
        page = np.asarray(self.page_table)[self.case.sequences, page]
        pools = self.pools.at[:, page, slot].set(self.new_rows)
        return dataclasses.replace(self, pools=pools)

    def host_cache(self, cache: int, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in a decode workload, with the new rows."""
        pool, table = super().host_cache(cache, sequences)
        new_rows = np.asarray(self.new_rows).astype(np.float32)
        for row, sequence in enumerate(sequences):
            is_its_own = self.case.sequences == sequence
            page, slot = np.divmod(self.case.places[is_its_own], self.case.page_size)
            pool[table[row, page], slot] = new_rows[is_its_own]
        return pool, table


def make(case: RaggedCase, cache_bytes: float) -> RaggedWorkload:
    """Make the data of a step.

    Args:
      case: The step.
      cache_bytes: What the rotating caches hold together, at least. A step with many tokens moves
        more for its queries than for its cache. Then fewer caches do: as many as it takes to move
        so many bytes before a cache is used again.
    """
    rounds = -(-cache_bytes // roofline.num_bytes(case))
    caches = workload.num_caches(case, cache_bytes, most=max(2, int(rounds)))
    base = workload.make_workload(case, *workload.make_pools(case, caches))
    keys = jax.random.split(jax.random.key(1))
    new = {
        name: workload.random_normal(key, (case.num_tokens, width), case.dtype)
        for name, key, width in (("ckv", keys[0], case.d_ckv), ("kpe", keys[1], case.d_kpe))
    }
    return RaggedWorkload(**{**vars(base), **new})
