"""Sharded decode: right answers with exactly the communication that docs/sharding.md promises."""

import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    ARGS,
    CASES,
    D_CKV,
    D_KPE,
    KINDS,
    MAX,
    NUM_PAGES,
    OPTIONS,
    B,
    H,
    L,
    Q,
    case_id,
    check,
    compile_and_check,
    context,
    decode,
    gather,
    make_mesh,
    merge_of,
    put,
    size_of,
    specs,
)

import jax_mla
from jax_mla.testing.hlo import Collective, collectives

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


@pytest.mark.quick(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_combination(kind, case) -> None:
    """Sequences and heads need no communication, pages need one max and one sum."""
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs(**case))
        (out, lse), found = compile_and_check(decode, args)
        b, h = B // size_of(case.get("batch")), H // size_of(case.get("heads"))
        assert found == (merge_of(b, h, size_of(case["pages"])) if case.get("pages") else [])
        want = NamedSharding(mesh, specs(**case)[0])
        assert out.sharding.is_equivalent_to(want, 4) and lse.sharding.is_equivalent_to(want, 3)
        if kind == "explicit":
            spec = jax.typeof(out).sharding.spec
            assert (spec[0], spec[2]) == (case.get("batch"), case.get("heads"))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_pages_on_one_axis(kind) -> None:
    """The cache stays; the query is gathered over tp, and its sum comes back scattered."""
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", "tp"))
        (out, _), found = compile_and_check(decode, args)
    b = B // 2
    scattered = (b, Q, H // 2, D_CKV)
    assert found == sorted(
        [
            gather(b, Q, H, D_CKV),
            gather(b, Q, H, D_KPE),
            merge_of(b, H)[0],
            Collective("reduce-scatter", 4 * math.prod(scattered), (scattered,)),
        ]
    )
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_on_one_of_two_axes_of_the_pages(kind) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", ("cp", "tp")))
        (out, _), found = compile_and_check(decode, args)
    b = B // 2
    gathers = [gather(b, Q, H, D_CKV), gather(b, Q, H, D_KPE)]
    assert found == sorted([*gathers, *merge_of(b, H, 4)])
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_and_pages_on_one_axis(kind) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", "dp"))
        (out, _), found = compile_and_check(decode, args)
    h = H // 2
    scattered = (B // 2, Q, h, D_CKV)
    gathers = [gather(B, Q, h, D_CKV), gather(B, Q, h, D_KPE), gather(B, MAX), gather(B)]
    total = Collective("reduce-scatter", 4 * math.prod(scattered), (scattered,))
    assert found == sorted([*gathers, merge_of(B, h)[0], total])
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_sequences_and_pages_on_one_axis(kind) -> None:
    """Two dimensions lose the axis to the pages; the first operand's gets it back."""
    mesh = make_mesh(kind)
    spec = [P(None, None, "tp"), P(None, None, "tp"), P(None, "tp"), P("tp"), P("tp")]
    with context(mesh, kind):
        args = put(ARGS, mesh, spec)
        (out, _), found = compile_and_check(decode, args)
    scattered = (B, Q, H // 2, D_CKV)
    query = [gather(B, Q, H, D_CKV), gather(B, Q, H, D_KPE)]
    total = Collective("reduce-scatter", 4 * math.prod(scattered), (scattered,))
    assert found == sorted([*query, gather(B, MAX), gather(B), merge_of(B, H)[0], total])
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [(3, 4), (0,), (0, 1)], ids=str)
def test_replicated_operands_are_sliced_not_communicated(kind, whole) -> None:
    mesh = make_mesh(kind)
    spec = [P() if i in whole else s for i, s in enumerate(specs("dp", "tp", None))]
    with context(mesh, kind):
        _, found = compile_and_check(decode, put(ARGS, mesh, spec))
    assert found == []


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_other_names_and_split_cache(kind) -> None:
    mesh = make_mesh(kind, names=("rows", "x"), sizes=(2, 4))
    q_nope, q_pe, pool, table, lens = ARGS
    cache = (pool[..., :D_CKV], pool[..., D_CKV:])
    q_spec, _, pool_spec, table_spec, lens_spec = specs("rows", None, "x")
    with context(mesh, kind):
        query = put((q_nope, q_pe, table, lens), mesh, (q_spec, q_spec, table_spec, lens_spec))
        args = (*query[:2], tuple(put(cache, mesh, (pool_spec,) * 2)), *query[2:])
        _, found = compile_and_check(decode, args)
    assert found == merge_of(B // 2, H, 4)


def test_auto_mesh_as_the_current_one() -> None:
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        _, found = compile_and_check(decode, put(ARGS, mesh, specs("dp", "tp", "cp")))
    assert found == merge_of(B // 2, H // 2)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("pages", ["cp", "tp"])
def test_axes_of_size_1_stay_in_the_types(sizes, kind, pages) -> None:
    mesh = make_mesh(kind, sizes=sizes)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", pages))
        (out, _), found = compile_and_check(decode, args)
        if kind == "explicit":
            assert jax.typeof(out).sharding == jax.typeof(args[0]).sharding
            jax.jit(lambda a, b: a + b)(out, args[0])
    if dict(mesh.shape)[pages] == 1:
        assert found == []


def test_out_shardings_alone_do_not_gather() -> None:
    mesh = make_mesh()
    fun = jax.jit(decode, out_shardings=NamedSharding(mesh, P("dp", None, "tp")))
    args = put(ARGS, mesh, specs("dp", "tp", "cp"))
    compiled = fun.lower(*args).compile()
    check(compiled(*args))
    assert collectives(compiled) == merge_of(B // 2, H // 2)


@pytest.mark.parametrize("kind", KINDS)
def test_in_64_bit_mode(kind) -> None:
    """Counts of devices and tokens stay int32."""
    mesh = make_mesh(kind)
    with jax.enable_x64(True), context(mesh, kind):
        check(jax.jit(decode)(*put(ARGS, mesh, specs("dp", "tp", "cp"))))
        check(jax_mla.reference.decode(*ARGS, **OPTIONS))


def test_lowered_program_keeps_what_it_needs_to_compile() -> None:
    mesh = make_mesh()
    args = put(ARGS, mesh, specs("dp", "tp", "cp"))
    lowered = jax.jit(lambda *args: decode(*args)).lower(*args)
    jax.clear_caches()
    gc.collect()
    check(lowered.compile()(*args))


def test_empty_shards_are_neutral() -> None:
    """All pages of all sequences are on one device, and the other devices own none."""
    q_nope, q_pe, pool, table, lens = ARGS
    front = jnp.concatenate([pool, jnp.full((L, 3 * NUM_PAGES, *pool.shape[2:]), jnp.nan)], axis=1)
    mesh = make_mesh(names=("cp",), sizes=(4,))
    args = put((q_nope, q_pe, front, table, lens), mesh, specs(pages="cp"))
    (out, lse), found = compile_and_check(decode, args)
    assert found == merge_of(B, H, 4)
    assert (np.asarray(out[0]) == 0).all() and np.isneginf(np.asarray(lse[0])).all()
