"""Sharded append: in place on every device, with one all-gather of the new rows at most."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    D_CKV,
    D_KPE,
    KINDS,
    B,
    Q,
    append_args,
    context,
    gather,
    make_mesh,
    put,
)

import jax_mla
from jax_mla.testing.hlo import collectives, num_copies, pointers

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "pages"),
    [
        (None, None), (None, "cp"), (None, ("tp", "cp")), ("dp", None), ("dp", "cp"),
        ("dp", "dp"), (("tp", "dp"), "cp"), (("dp", "tp"), ("dp", "cp")),
    ],
)  # fmt: skip
def test_append(kind, batch, pages) -> None:
    """In place on every device; a sharded batch costs one all-gather of the new rows and slots."""
    mesh = make_mesh(kind)
    spec = (P(None, pages), P(batch), P(batch), P(batch), P(batch))
    fun = jax.jit(functools.partial(jax_mla.append, layer=jnp.int32(1)), donate_argnums=0)
    want = jax_mla.reference.append(*append_args(), layer=1)
    with context(mesh, kind):
        pool, *rows = put(append_args(), mesh, spec)
        compiled = fun.lower(pool, *rows).compile()
        before = pointers(pool)
        shard = pool.addressable_shards[0].data.shape
        got = fun(pool, *rows)
    np.testing.assert_array_equal(got, want)
    assert pointers(got) == before and num_copies(compiled, shard) == 0
    words = D_CKV + D_KPE + 2  # float32: 4 bytes a value and a slot is two int32
    assert collectives(compiled) == ([gather(B, Q, words)] if batch else [])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec[0]), 4)


def test_append_rows_in_bfloat16_move_as_such() -> None:
    mesh = make_mesh()
    pool, ckv, kpe, table, positions = append_args()
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (pool, ckv, kpe)] + [table, positions]
    args = put(arrays, mesh, (P(None, "cp"), *(P("dp"),) * 4))
    compiled = jax.jit(functools.partial(jax_mla.append, layer=1)).lower(*args).compile()
    want = jax_mla.reference.append(*map(jnp.asarray, arrays), layer=1)
    np.testing.assert_array_equal(compiled(*args), want)
    assert collectives(compiled) == [gather(B, Q, D_CKV + D_KPE + 4, itemsize=2)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_append_in_a_manual_region(check_vma) -> None:
    mesh = make_mesh()
    spec = (P(None, "cp"), P(), P(), P(), P())

    def local(pool, *rows):
        begin = jax.lax.axis_index("cp") * pool.shape[1]
        return jax_mla.append(pool, *rows, layer=1, page_begin=begin)

    fun = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec[0], check_vma=check_vma)
    compiled = jax.jit(fun, donate_argnums=0).lower(*put(append_args(), mesh, spec)).compile()
    args = put(append_args(), mesh, spec)
    before = pointers(args[0])
    got = compiled(*args)
    np.testing.assert_array_equal(got, jax_mla.reference.append(*append_args(), layer=1))
    assert pointers(got) == before and collectives(compiled) == []
