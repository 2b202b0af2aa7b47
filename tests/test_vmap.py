"""vmap of the ops: one call of the handler, whatever is mapped."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_near, decode_fn, inputs

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.hlo import text

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

OPERANDS = ("q_nope", "q_pe", "kv_pages", "page_table", "seq_lens")


N = 3


def mapped(arrays, axes, seed=0):
    """N different versions of every mapped operand: permuted sequences, heads or pages."""
    rng = np.random.default_rng(seed)
    out = []
    for i, (x, axis) in enumerate(zip(arrays, axes, strict=True)):
        if axis is None:
            out.append(x)
        elif i == 2:  # other values, NaN where there was NaN
            versions = [jax.tree.map(lambda p, k=k: p * (1 + k), x) for k in range(N)]
            out.append(jax.tree.map(lambda *v, axis=axis: jnp.stack(v, axis), *versions))
        else:
            versions = [np.asarray(x)[rng.permutation(x.shape[0])] for _ in range(N)]
            out.append(jnp.stack(versions, axis))
    return out


SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]


@pytest.mark.quick(12)
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "+".join(OPERANDS[i] for i in s))
def test_vmap_of_decode(subset) -> None:
    """Every subset of operands, without a loop: one call of the handler."""
    axes = [(0 if i in (2, 4) else 1) if i in subset else None for i in range(5)]
    args = mapped(inputs().args(), axes)
    fun = jax.jit(jax.vmap(decode_fn(jax_mla.decode), in_axes=tuple(axes)))
    before = _ffi.extension().call_counts()["decode_cpu"]
    got = jax.block_until_ready(fun(*args))
    assert _ffi.extension().call_counts()["decode_cpu"] == before + 1
    assert "while(" not in text(fun.lower(*args).compile())
    want = jax.vmap(decode_fn(jax_mla.reference.decode), in_axes=tuple(axes))(*args)
    assert_near(got, want)


def test_vmap_does_not_reach_into_neighbouring_pools() -> None:
    """A wild id must not become a valid page of another mapped pool."""
    arrays = list(inputs().args())
    num_pages = arrays[2].shape[0]
    pools = jnp.where(jnp.isnan(jnp.stack([arrays[2]] * N)), 1.0, jnp.stack([arrays[2]] * N))
    for wild in (num_pages, num_pages + 3, -1, -num_pages, 2147480000, -2147483648):
        arrays[3] = arrays[3].at[1, 0].set(wild)
        args = (arrays[0], arrays[1], pools, arrays[3], arrays[4])
        in_axes = (None, None, 0, None, None)
        got = jax.vmap(decode_fn(jax_mla.decode), in_axes=in_axes)(*args)
        want = jax.vmap(decode_fn(jax_mla.reference.decode), in_axes=in_axes)(*args)
        assert_near(got, want)


FORMS = [{}, {"padding": 8}, {"padding": 8, "pack": 2}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("pools_mapped", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_vmap_over_layers(pools_mapped, split, form) -> None:
    data = inputs(num_layers=3, cache="split" if split else "packed", **form)
    args = list(data.args())
    args[2] = jax.tree.map(lambda p: jnp.where(jnp.isnan(p), 0.5, p), args[2])
    if pools_mapped:
        args[2] = jax.tree.map(lambda p: jnp.stack([p, p * 2, p * 3, p * 4]), args[2])
    layers = jnp.asarray([2, 0, 1, 7], jnp.int32)  # the last owns nothing

    def fn(fun):
        return lambda pool, layer: fun(
            args[0], args[1], pool, args[3], args[4],
            sm_scale=0.2, layer=layer, packs="pack" in form, return_lse=True,
        )  # fmt: skip

    in_axes = (0 if pools_mapped else None, 0)
    got = jax.jit(jax.vmap(fn(jax_mla.decode), in_axes=in_axes))(args[2], layers)
    want = jax.vmap(fn(jax_mla.reference.decode), in_axes=in_axes)(args[2], layers)
    assert_near(got, want)
    assert (got[0][3] == 0).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("subset", [(0,), (2,), (2, 3), (0, 1, 2, 3, 4)], ids=str)
def test_vmap_of_decode_with_other_forms_of_pools(subset, form) -> None:
    """Without layers, where a pool of packs has rank 4."""
    axes = [(0 if i in (2, 4) else 1) if i in subset else None for i in range(5)]
    args = mapped(inputs(**form).args(), axes)
    got, want = (
        jax.jit(jax.vmap(decode_fn(f, packs="pack" in form), in_axes=tuple(axes)))(*args)
        for f in (jax_mla.decode, jax_mla.reference.decode)
    )
    assert_near(got, want)


def test_vmap_of_one_part_of_a_split_cache() -> None:
    args = list(inputs(cache="split").args())
    ckv = jnp.stack([args[2][0], args[2][0] * 2])

    def fn(fun):
        return lambda c: fun(args[0], args[1], (c, args[2][1]), args[3], args[4], sm_scale=0.2)

    got, want = (jax.vmap(fn(f))(ckv) for f in (jax_mla.decode, jax_mla.reference.decode))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_vmap_over_page_begin() -> None:
    """Context parallelism under vmap: each shard owns its part of the ids."""
    args = list(inputs().args())
    num_pages = args[2].shape[0] // 2 * 2
    args[3] = jnp.where(args[3] < num_pages, args[3], -1)
    shards = args[2][:num_pages].reshape(2, num_pages // 2, *args[2].shape[1:])
    begins = jnp.asarray([0, num_pages // 2], jnp.int32)

    def fn(pool, begin):
        return jax_mla.decode(
            args[0], args[1], pool, *args[3:], sm_scale=0.2, return_lse=True, page_begin=begin
        )

    got = jax_mla.merge(*jax.vmap(fn)(shards, begins))
    want = decode_fn(jax_mla.reference.decode)(args[0], args[1], args[2][:num_pages], *args[3:])
    assert_near(got, want)


def test_nested_vmap() -> None:
    args = mapped(inputs().args(), [0, 0, 0, None, None])
    outer = [jnp.stack([x, x + 1]) for x in args[:2]]
    axes_in, axes_out = (0, 0, 0, None, None), (0, 0, None, None, None)

    def fn(fun):
        return jax.vmap(jax.vmap(decode_fn(fun), in_axes=axes_in), in_axes=axes_out)

    got, want = (
        jax.jit(fn(f))(*outer, *args[2:]) for f in (jax_mla.decode, jax_mla.reference.decode)
    )
    assert_near(got, want)


APPEND_SUBSETS = [s for n in (1, 2, 5) for s in itertools.combinations(range(5), n)]


@pytest.mark.quick(8)
@pytest.mark.parametrize("subset", APPEND_SUBSETS, ids=str)
@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("rows", [(4,), (2, 2)], ids=["plain", "packs"])
def test_vmap_of_append(subset, num_layers, rows) -> None:
    """Each mapped call returns a cache of its own."""
    rng = np.random.default_rng(0)
    layers = () if num_layers is None else (num_layers,)
    pool = rng.standard_normal((*layers, 8, *rows, 48)).astype(np.float32)
    ckv, kpe = (rng.standard_normal((2, 3, d)).astype(np.float32) for d in (32, 8))
    table = rng.permutation(8)[:6].reshape(2, 3).astype(np.int32)
    positions = np.array([[0, 1, 5], [-1, 3, 11]], np.int32)
    args, axes = [], []
    for i, x in enumerate((pool, ckv, kpe, table, positions)):
        if i in subset:
            versions = [np.roll(x, k, axis=0) for k in range(N)] if i else [x + k for k in range(N)]
            axis = 0 if i == 0 else 1
            x = np.stack(versions, axis)
        axes.append((0 if i == 0 else 1) if i in subset else None)
        args.append(jnp.asarray(x))
    layer = None if num_layers is None else jnp.int32(1)
    got, want = (
        jax.jit(
            jax.vmap(lambda *a, f=f: f(*a, layer=layer, packs=len(rows) == 2), in_axes=tuple(axes))
        )(*args)
        for f in (jax_mla.append, jax_mla.reference.append)
    )
    np.testing.assert_array_equal(got, want)
