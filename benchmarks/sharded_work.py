"""Operands of sharded decode: how each way of splitting places them on the devices."""

import dataclasses
import functools
from typing import Any

import contenders
import jax
import jax.numpy as jnp
import numpy as np
import workload
from grid import SM_SCALE, Case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "x"


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How one way of splitting places the operands over the mesh axis."""

    name: str
    heads: str | None
    pages: str | None
    compiler_options: dict[str, Any] | None = None

    @property
    def q(self) -> P:
        """[batch, q_len, num_heads, d]."""
        return P(None, None, self.heads)

    @property
    def pool(self) -> P:
        """[num_caches, num_pages, page_size, d]."""
        return P(None, self.pages)


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of one case on a mesh."""

    q_nope: jax.Array
    q_pe: jax.Array
    pool: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    num_caches: int

    def with_queries_as(self, sharding: NamedSharding) -> tuple[jax.Array, ...]:
        """The arguments of a decode call before its layer, with the queries placed as given."""
        queries = jax.device_put((self.q_nope, self.q_pe), sharding)
        return (*queries, self.pool, self.page_table, self.seq_lens)


def place(case: Case, sharding: Sharding, mesh: jax.sharding.Mesh, caches: int) -> Operands:
    """Make the operands directly on their devices; the values do not depend on the mesh."""
    table = workload.page_table(case)
    num_pages = int(case.pages_per_seq.sum())

    def on(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    dtype = jnp.dtype(case.dtype)
    tile = jax.device_put(workload.host_tile(case, caches).astype(dtype), on(P()))
    share = num_pages // (mesh.size if sharding.pages else 1)

    def fill(tile):
        first = jax.lax.axis_index(AXIS) * share if sharding.pages else 0
        pages = first + jnp.arange(share)
        return tile[(jnp.arange(caches)[:, None] * num_pages + pages) % tile.shape[0]]

    # Each device fills its own share, so nothing is moved.
    fill = jax.shard_map(fill, mesh=mesh, in_specs=P(), out_specs=sharding.pool, check_vma=False)
    rng = np.random.default_rng(0)
    rows = (case.batch, case.q_len, case.num_heads)
    q_nope = rng.standard_normal((*rows, case.d_ckv), np.float32).astype(dtype)
    q_pe = (3 * rng.standard_normal((*rows, case.d_kpe), np.float32)).astype(dtype)
    return Operands(
        q_nope=jax.device_put(q_nope, on(sharding.q)),
        q_pe=jax.device_put(q_pe, on(sharding.q)),
        pool=jax.jit(fill)(tile),
        page_table=jax.device_put(table, on(P())),
        seq_lens=jax.device_put(case.seq_lens, on(P())),
        num_caches=caches,
    )


def local_part(sharding: Sharding, mesh: jax.sharding.Mesh) -> contenders.DecodeFn:
    """The same call without communication: each device attends to its own pages only.

    The results are partial. Only the time is of use.
    """
    import jax_mla

    # Where heads and pages share the axis, the communication that is left out includes gathering
    # q.
    q_spec = P() if sharding.pages else sharding.q

    def part(q_nope, q_pe, pool, page_table, seq_lens, *, layer):
        # Pages outside the local pool are absent keys, as in the sharded op.
        begin = jax.lax.axis_index(AXIS) * pool.shape[1] if sharding.pages else None
        return jax_mla.decode(
            q_nope, q_pe, pool, page_table, seq_lens,
            sm_scale=SM_SCALE, layer=layer, page_begin=begin,
        )  # fmt: skip

    def call(q_nope, q_pe, pool, page_table, seq_lens, layer):
        return jax.shard_map(
            functools.partial(part, layer=layer),
            mesh=mesh,
            in_specs=(q_spec, q_spec, sharding.pool, P(), P()),
            out_specs=q_spec,
            check_vma=False,
        )(q_nope, q_pe, pool, page_table, seq_lens)

    return call
