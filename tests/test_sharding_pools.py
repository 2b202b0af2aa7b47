"""Sharded calls on pools with padding and with packs: the plans and the results of other pools."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    ARGS,
    D_CKV,
    D_KPE,
    KINDS,
    NUM_PAGES,
    OPTIONS,
    SIZE,
    B,
    H,
    L,
    Q,
    append_args,
    check,
    compile_and_check,
    context,
    decode,
    gather,
    laid_out,
    make_mesh,
    merge_of,
    mesh_argument,
    put,
    specs,
)

import jax_mla
from jax_mla.testing.hlo import collectives, num_copies, pointers

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

LAYER = OPTIONS["layer"]
forms = pytest.mark.parametrize("form", ["wide", "packs"])
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@forms
@pytest.mark.parametrize(
    ("batch", "heads", "pages"),
    [("dp", "tp", None), ("dp", "tp", "cp"), (None, None, ("dp", "cp"))],
)
def test_decode(kind, form, batch, heads, pages) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = [ARGS[0], ARGS[1], laid_out(ARGS[2], form), *ARGS[3:]]
        fun = functools.partial(decode, packs=form == "packs")
        _, found = compile_and_check(fun, put(args, mesh, specs(batch, heads, pages)))
    b, h = B // (2 if batch else 1), H // (2 if heads else 1)
    assert found == (merge_of(b, h, 4 if pages == ("dp", "cp") else 2) if pages else [])


@kinds
@forms
def test_decode_without_layers(kind, form) -> None:
    """A pool of packs then has rank 4, and its first dimension is its pages."""
    mesh = make_mesh(kind)
    options = {name: value for name, value in OPTIONS.items() if name != "layer"}
    fun = functools.partial(jax_mla.decode, packs=form == "packs", **options)
    with context(mesh, kind):
        args = [ARGS[0], ARGS[1], laid_out(ARGS[2][LAYER], form), *ARGS[3:]]
        query, _, _, table, lens = specs("dp", "tp", "cp")
        _, found = compile_and_check(fun, put(args, mesh, (query, query, P("cp"), table, lens)))
    assert found == merge_of(B // 2, H // 2)


@forms
def test_decode_with_a_mesh_argument(form) -> None:
    mesh = make_mesh()
    roles = {"batch": "dp", "heads": "tp", "pages": "cp"}
    fun = functools.partial(decode, mesh=mesh_argument(mesh, **roles), packs=form == "packs")
    args = [ARGS[0], ARGS[1], laid_out(ARGS[2], form), *ARGS[3:]]
    _, found = compile_and_check(fun, put(args, mesh, specs("dp", "tp", "cp")))
    assert found == merge_of(B // 2, H // 2)


@kinds
@forms
@pytest.mark.parametrize("batch", [None, "dp"])
@pytest.mark.parametrize("layers", [True, False], ids=["stacked", "plain"])
def test_append(kind, form, batch, layers) -> None:
    """In place on every device, and the padding stays."""
    mesh = make_mesh(kind)
    pool, *rows = append_args()
    old = laid_out(pool if layers else pool[LAYER], form)
    layer = LAYER if layers else None
    options = {"layer": layer, "packs": form == "packs"}
    fun = jax.jit(functools.partial(jax_mla.append, **options), donate_argnums=0)
    plain = jax_mla.reference.append(pool, *rows, layer=LAYER)
    want = np.asarray(laid_out(plain if layers else plain[LAYER], form))
    pool_spec = P(None, "cp") if layers else P("cp")
    with context(mesh, kind):
        pool, *rows = put([old, *rows], mesh, (pool_spec, *(P(batch),) * 4))
        pool = jnp.copy(pool)  # device_put lets CPU devices share memory, which cannot be donated
        compiled = fun.lower(pool, *rows).compile()
        before = pointers(pool)
        shard = pool.addressable_shards[0].data.shape
        got = fun(pool, *rows)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))
    assert pointers(got) == before and num_copies(compiled, shard) == 0
    assert collectives(compiled) == ([gather(B, Q, D_CKV + D_KPE + 2)] if batch else [])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, pool_spec), got.ndim)


def test_decode_in_a_manual_region() -> None:
    mesh = make_mesh()
    in_specs = specs("dp", "tp", "cp")
    args = put([ARGS[0], ARGS[1], laid_out(ARGS[2], "packs"), *ARGS[3:]], mesh, in_specs)

    def local(q_nope, q_pe, pool, table, lens):
        begin = jax.lax.axis_index("cp") * pool.shape[1]
        out, lse = decode(q_nope, q_pe, pool, table, lens, page_begin=begin, packs=True)
        return jax_mla.merge(out, lse, axis_name="cp")

    query = in_specs[0]
    fun = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(query, query))
    check(jax.jit(fun)(*args))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("spec", "dimension"), [(P(None, None, "cp"), "page_size"), (P(None, None, None, "cp"), "pack")]
)
def test_a_page_cannot_be_split(kind, spec, dimension) -> None:
    mesh = make_mesh(kind)
    pool = jnp.zeros((L, NUM_PAGES, SIZE // 2, 2, D_CKV + D_KPE))
    with context(mesh, kind):
        args = put([ARGS[0], ARGS[1], pool, *ARGS[3:]], mesh, (P(), P(), spec, P(), P()))
        with pytest.raises(ValueError, match=f"kv_pages: expected only .* got its {dimension} dim"):
            decode(*args, packs=True)
