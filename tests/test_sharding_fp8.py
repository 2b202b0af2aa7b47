# ruff: noqa: E501
"""Sharded calls on FP8 caches: scales go to all devices, and codes move as bytes."""

import functools
from typing import Any

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
    SIZE,
    B,
    H,
    L,
    Q,
    append_args,
    check,
    compile_and_check,
    context,
    gather,
    make_mesh,
    merge_of,
    mesh_argument,
    put,
    specs,
)

import jax_mla
from jax_mla.testing import fp8
from jax_mla.testing.hlo import collectives, num_copies, pointers
from jax_mla.testing.inputs import DecodeInputs, decode_inputs

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

kinds = pytest.mark.parametrize("kind", KINDS)
forms = pytest.mark.parametrize("form", ["e4m3", "codes", "mixed", "ds_mla"])
SCALE = 0.0125


@functools.cache
def inputs(form: str) -> DecodeInputs:
    is_ds_mla = form == "ds_mla"
    d_ckv, d_kpe = (512, 64) if is_ds_mla else (D_CKV, D_KPE)
    return decode_inputs(
        seq_lens=(0, 5, 16, 11), q_len=Q, num_heads=H, d_ckv=d_ckv, d_kpe=d_kpe, page_size=SIZE,
        dtype="bfloat16" if form == "codes" else "float32", num_layers=L, page_multiple=8,
        cache="mixed" if form == "mixed" else "packed", has_codes=form == "codes",
        kv_format="fp8_ds_mla" if is_ds_mla else "fp8_e4m3",
    )  # fmt: skip


def options(form: str) -> dict[str, Any]:
    return {**inputs(form).kwargs(), "return_lse": True}


@functools.cache
def reference(form: str) -> list[np.ndarray]:
    out, lse = jax_mla.reference.decode(*inputs(form).args(), **options(form))
    return [np.asarray(out), np.asarray(lse)]


def put_decode(form: str, mesh, *roles) -> list[Any]:
    """Place the arguments; both pools of a mixed cache are split alike."""
    q_nope, q_pe, pages, *rest = inputs(form).args()
    query, _, pool, *others = specs(*roles)
    placed = put([q_nope, q_pe, *jax.tree.leaves(pages), *rest], mesh,
                 [query, query, *[pool] * len(jax.tree.leaves(pages)), *others])  # fmt: skip
    return [*placed[:2], tuple(placed[2:4]), *placed[4:]] if form == "mixed" else placed


def near(got: Any, form: str) -> None:
    """Codes as queries give bfloat16, in which parts of a sequence are merged."""
    if form != "codes":
        return check(got, reference(form))
    for a, b in zip(got, reference(form), strict=True):
        a = np.asarray(a, np.float32)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        np.testing.assert_allclose(
            np.nan_to_num(a, neginf=0), np.nan_to_num(b, neginf=0), atol=0.03
        )


@pytest.mark.quick(1)
@forms
@pytest.mark.parametrize(
    ("kind", "batch", "heads", "pages"),
    [
        *((kind, "dp", "tp", "cp") for kind in KINDS),
        ("auto", "dp", "tp", None),
        ("explicit", None, None, "cp"),
    ],
)
def test_decode(kind, form, batch, heads, pages) -> None:
    """The same communication as with other formats: none, or a max and a sum for split pages."""
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put_decode(form, mesh, batch, heads, pages)
        fun = jax.jit(functools.partial(jax_mla.decode, **options(form)))
        compiled = fun.lower(*args).compile()
        near(compiled(*args), form)
    b, h = B // (2 if batch else 1), H // (2 if heads else 1)
    found = collectives(compiled)
    if form in ("e4m3", "mixed"):
        assert found == (merge_of(b, h) if pages else [])
    else:
        assert {c.kind for c in found} == ({"all-reduce"} if pages else set())


@pytest.mark.quick(1)
@forms
def test_decode_with_a_mesh_argument(form) -> None:
    mesh = make_mesh()
    axes = mesh_argument(mesh, batch="dp", heads="tp", pages="cp")
    fun = functools.partial(jax_mla.decode, mesh=axes, **options(form))
    args = put_decode(form, mesh, "dp", "tp", "cp")
    near(jax.jit(fun)(*args), form)
    near(fun(*args), form)  # eager


@kinds
def test_scale_on_the_device(kind) -> None:
    """It is an operand like others, replicated."""
    mesh = make_mesh(kind)
    given = options("e4m3")
    del given["kv_scale"]

    def fun(scale, *args):
        return jax_mla.decode(*args, kv_scale=(scale[0], scale[1]), **given)

    with context(mesh, kind):
        scales = put([np.array(inputs("e4m3").kv_scale, np.float32)], mesh, [P()])
        args = [*scales, *put_decode("e4m3", mesh, "dp", "tp", "cp")]
        _, found = compile_and_check(fun, args, reference("e4m3"))
    assert found == merge_of(B // 2, H // 2)


def rows(is_codes: bool) -> list[Any]:
    """Return ckv, kpe, page_table and positions, and a pool of NaN codes."""
    pool, ckv, kpe, table, positions = append_args()
    pool = np.full(pool.shape, np.nan, fp8.E4M3)
    if is_codes:
        ckv, kpe = (fp8.round_to_e4m3(x / np.float32(SCALE)) for x in (ckv, kpe))
    return [pool, ckv, kpe, table, positions]


@kinds
@pytest.mark.parametrize("is_codes", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize(("batch", "pages"), [(None, "cp"), ("dp", None), ("dp", "cp")])
def test_append(kind, is_codes, batch, pages) -> None:
    """A sharded batch costs one all-gather, of the rows as they come and of their slots."""
    mesh = make_mesh(kind)
    given = {"layer": jnp.int32(1), "kv_format": "fp8_e4m3", "kv_scale": SCALE}
    fun = jax.jit(functools.partial(jax_mla.append, **given), donate_argnums=0)
    want = jax_mla.reference.append(*rows(is_codes), **given)
    with context(mesh, kind):
        pool, *others = put(rows(is_codes), mesh, (P(None, pages), *(P(batch),) * 4))
        pool = jnp.copy(pool)  # device_put lets CPU devices share memory, which cannot be donated
        compiled = fun.lower(pool, *others).compile()
        before, shard = pointers(pool), pool.addressable_shards[0].data.shape
        got = fun(pool, *others)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    assert pointers(got) == before and num_copies(compiled, shard) == 0
    width = D_CKV + D_KPE + (8 if is_codes else 2)
    moved = gather(B, Q, width, itemsize=1 if is_codes else 4)
    assert collectives(compiled) == ([moved] if batch else [])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(None, pages)), 4)


@pytest.mark.quick(1)
@kinds
@pytest.mark.parametrize("form", ["e4m3", "codes", "mixed", "ds_mla"])
def test_rows_of_a_uniform_call_reach_all_devices(kind, form) -> None:
    """Sequences are split, and so are the pages, whose ids are global: the rows are exchanged."""
    mesh = make_mesh(kind)
    case, given = inputs(form), options(form)
    rng = np.random.default_rng(1)
    q_nope, q_pe = (x[:, 0] for x in (case.q_nope, case.q_pe))
    d_ckv, d_kpe = q_nope.shape[-1], q_pe.shape[-1]
    new = [rng.standard_normal((B, d), np.float32) for d in (d_ckv, d_kpe)]
    if form == "codes":
        new = [fp8.round_to_e4m3(x / np.float32(SCALE)) for x in new]
    old = jax.tree.map(np.zeros_like, case.kv_pages)
    table, lens = case.page_table.copy(), np.array([4, 5, 16, 11], np.int32)
    table[0, 0] = np.setdiff1d(np.arange(8), table)[0]  # the first sequence had no page
    args = [q_nope, q_pe, *new, old, table, lens]
    want = step(*(jax.tree.map(jnp.asarray, x) for x in args), **given)
    pools = jax.tree.leaves(old)
    query, rows_, pool_spec = P("dp", "tp"), P("dp"), P(None, "cp")
    flat = put([q_nope, q_pe, *new, *pools, table, lens], mesh,
               [query, query, rows_, rows_, *[pool_spec] * len(pools), rows_, rows_])  # fmt: skip
    with context(mesh, kind):
        pages = tuple(flat[4:-2]) if len(pools) == 2 else flat[4]
        fun = functools.partial(jax_mla.ragged_paged_attention, **given)
        out, lse, got = jax.jit(fun)(*flat[:4], pages, *flat[-2:])
    atol = 0.03 if form == "codes" else 1e-4
    np.testing.assert_allclose(np.float32(out), want[0], atol=atol)
    np.testing.assert_allclose(lse, want[1], atol=1e-3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want[2]), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_a_query_scale_for_each_device() -> None:
    """The pool does not depend on it, so it stays the same on all of them."""
    mesh = make_mesh()
    case, given = inputs("codes"), options("codes")
    del given["q_scale"]
    q_nope, q_pe = (jnp.asarray(x[:, 0]) for x in (case.q_nope, case.q_pe))
    new = [jnp.zeros((B, x.shape[-1]), jnp.bfloat16) for x in (q_nope, q_pe)]
    pool = jnp.zeros(np.shape(case.kv_pages), fp8.E4M3)
    table, lens = jnp.asarray(case.page_table), jnp.asarray(case.seq_lens)
    scales = jnp.array([0.01, 0.03], jnp.float32)

    def local(q_nope, q_pe, scale, pool):
        fun: Any = jax_mla.ragged_paged_attention
        return fun(q_nope, q_pe, *new, pool, table, lens, q_scale=scale, **given)

    heads = P(None, "tp")
    fun = jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, P("tp"), P()), out_specs=(heads, heads, P())
    )
    _, _, got = jax.jit(fun)(q_nope, q_pe, scales, pool)
    want = step(q_nope, q_pe, *new, pool, table, lens, q_scale=0.01, **given)[2]
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


# Without types, because it takes numpy arrays.
step: Any = jax_mla.reference.ragged_paged_attention


@pytest.mark.parametrize("form", ["e4m3", "ds_mla"])
def test_ragged_with_local_pages(form) -> None:
    """Each group has its own pages, and nothing communicates."""
    mesh = make_mesh()
    case = inputs(form)
    rng = np.random.default_rng(0)
    d_ckv, d_kpe = case.q_nope.shape[-1], case.q_pe.shape[-1]
    tokens = B * 1
    q_nope, q_pe = (x[:, 0] for x in (case.q_nope, case.q_pe))
    new = [rng.standard_normal((tokens, d), np.float32) for d in (d_ckv, d_kpe)]
    num_pages = case.kv_pages.shape[1] // 2  # type: ignore[union-attr]
    table = np.arange(B, dtype=np.int32)[:, None] % 2 * 4 + np.arange(4, dtype=np.int32)[None]
    lens = np.array([1, 5, 16, 11], np.int32)
    given = options(form)
    axes = mesh_argument(mesh, batch="dp", heads="tp", local_pages="dp")
    pool = np.zeros_like(case.kv_pages)
    pool_spec, query = P(None, "dp"), P("dp", "tp")
    args = put([q_nope, q_pe, *new, pool, table, lens], mesh,
               (query, query, P("dp"), P("dp"), pool_spec, P("dp"), P("dp")))  # fmt: skip
    fun = jax.jit(functools.partial(jax_mla.ragged_paged_attention, mesh=axes, **given))
    out, lse, got = fun(*args)
    assert collectives(fun.lower(*args).compile()) == []
    for group in range(2):
        own = slice(2 * group, 2 * group + 2)
        part = pool[:, group * num_pages : (group + 1) * num_pages]
        want = step(
            q_nope[own], q_pe[own], new[0][own], new[1][own], jnp.asarray(part), table[own],
            lens[own], **given,
        )  # fmt: skip
        np.testing.assert_allclose(out[own], want[0], atol=1e-4)
        np.testing.assert_allclose(lse[own], want[1], atol=1e-4)
        mine = np.asarray(got)[:, group * num_pages : (group + 1) * num_pages]
        np.testing.assert_array_equal(mine.view(np.uint8), np.asarray(want[2]).view(np.uint8))
