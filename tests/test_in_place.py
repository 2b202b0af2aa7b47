"""append writes in place: same buffers, no copy of the pool, bounded temporary memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.hlo import memory, num_copies, pointers

L, PAGES, SIZE, D_CKV, D_KPE, B, MAX, H = 3, 64, 8, 64, 16, 2, 4, 4
D = D_CKV + D_KPE


def rows(seed: int = 0):
    rng = np.random.default_rng(seed)
    ckv, kpe = (
        jnp.asarray(rng.standard_normal((B, 1, d), dtype=np.float32)) for d in (D_CKV, D_KPE)
    )
    table = jnp.asarray(rng.permutation(PAGES)[: B * MAX].reshape(B, MAX), jnp.int32)
    positions = jnp.asarray([[5], [17]], jnp.int32)
    return ckv, kpe, table, positions


# The dimensions of a page's rows, and the columns of padding.
FORMS = {"plain": ((SIZE,), 0), "wide": ((SIZE,), 16), "packs": ((SIZE // 2, 2), 16)}
forms = pytest.mark.parametrize("form", FORMS)


def pool(*layers: int, d: int = D, form: str = "plain") -> jax.Array:
    page, padding = FORMS[form]
    return jnp.zeros((*layers, PAGES, *page, d + padding))


def num_pool_copies(compiled: jax.stages.Compiled, cache: jax.Array) -> int:
    """Count the copies of a pool, or of one layer or mapped pool, in its own shape or flattened."""
    page = 2 if cache.ndim > 3 and cache.shape[-2] == 2 else 1
    front, width = cache.shape[: -page - 1], cache.shape[-1]
    shapes = {
        (*front[i:], *rows, width)
        for i in range(len(front))
        for rows in (cache.shape[-page - 1 : -1], (SIZE,))
    }
    return sum(num_copies(compiled, shape) for shape in shapes)


def step(q, cache, ckv, kpe, table, positions, *, append, decode, packs=False):
    """One decode step of a toy model: append and decode in every layer of a stacked pool."""

    def layer(carry, index):
        q, cache = carry
        new = ckv * (index + 1), kpe
        cache = append(cache, *new, table, positions, layer=index, packs=packs)
        out = decode(
            q[..., :D_CKV],
            q[..., D_CKV:],
            cache,
            table,
            positions[:, 0] + 1,
            sm_scale=0.1,
            layer=index,
            packs=packs,
        )
        return (q.at[..., :D_CKV].add(out), cache), None

    return jax.lax.scan(layer, (q, cache), jnp.arange(L, dtype=jnp.int32))[0]


OPS = functools.partial(step, append=jax_mla.append, decode=jax_mla.decode)
REFERENCE = functools.partial(
    step, append=jax_mla.reference.append, decode=jax_mla.reference.decode
)


@forms
@pytest.mark.parametrize("layers", [(), (L,)], ids=["plain", "stacked"])
@pytest.mark.parametrize("split", [False, True], ids=["packed", "split"])
def test_donated_pool_keeps_its_buffer(layers, split, form) -> None:
    make = functools.partial(pool, *layers, form=form)
    cache = (make(d=D_CKV), make(d=D_KPE)) if split else make()
    layer = jnp.int32(1) if layers else None
    options = {"layer": layer, "packs": form == "packs"}
    fun = jax.jit(functools.partial(jax_mla.append, **options), donate_argnums=0)
    compiled = fun.lower(cache, *rows()).compile()
    before = [pointers(p) for p in jax.tree.leaves(cache)]
    sizes = [p.nbytes for p in jax.tree.leaves(cache)]
    new = fun(cache, *rows())
    assert [pointers(p) for p in jax.tree.leaves(new)] == before
    assert all(p.is_deleted() for p in jax.tree.leaves(cache))
    assert [num_pool_copies(compiled, p) for p in jax.tree.leaves(cache)] == [0] * len(sizes)
    stats = memory(compiled)
    assert stats.alias_size_in_bytes == sum(sizes)
    assert stats.temp_size_in_bytes < 4096


PACKED = (PAGES, SIZE // 2, 2, D)


def append_twice(cache, *args):
    return jax_mla.append(jax_mla.append(cache, *args), *args)


def append_then_reshape(cache, *args):
    return jax_mla.append(cache, *args).reshape(PACKED)


def reshape_around_the_scan(cache, *args):
    def layer(cache, index):
        return jax_mla.append(cache, *args, layer=index), None

    layers = jnp.arange(L, dtype=jnp.int32)
    return jax.lax.scan(layer, cache.reshape(L, PAGES, SIZE, D), layers)[0].reshape(cache.shape)


@pytest.mark.parametrize(
    ("fun", "shape"),
    [
        (jax_mla.append, (PAGES, SIZE, D)),
        (append_twice, (PAGES, SIZE, D)),
        (append_then_reshape, (PAGES, SIZE, D)),
        (reshape_around_the_scan, (L, *PACKED)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_donated_pool_is_not_copied(fun, shape) -> None:
    """The program has no second array as large as a layer of the pool."""
    cache = jnp.zeros(shape)
    compiled = jax.jit(fun, donate_argnums=0).lower(cache, *rows()).compile()
    stats = memory(compiled)
    assert stats.alias_size_in_bytes == cache.nbytes
    assert stats.temp_size_in_bytes < 4096
    assert num_copies(compiled, (PAGES, SIZE, D)) == num_copies(compiled, shape) == 0
    before = pointers(cache)
    assert pointers(jax.jit(fun, donate_argnums=0)(cache, *rows())) == before


@forms
def test_one_copy_without_donation(form) -> None:
    cache = pool(form=form)
    fun = jax.jit(functools.partial(jax_mla.append, packs=form == "packs"))
    compiled = fun.lower(cache, *rows()).compile()
    new = fun(cache, *rows())
    assert num_pool_copies(compiled, cache) == 1
    assert pointers(new) != pointers(cache) and not cache.is_deleted()
    assert (cache == 0).all() and (new != 0).any()


@pytest.mark.quick(1)
@forms
def test_scan_over_layers_copies_nothing(form) -> None:
    q, packs = jnp.ones((B, 1, H, D)), form == "packs"
    fun = jax.jit(functools.partial(OPS, packs=packs), donate_argnums=1)
    cache = pool(L, form=form)
    compiled = fun.lower(q, cache, *rows()).compile()
    assert num_pool_copies(compiled, cache) == 0
    stats = memory(compiled)
    assert stats.alias_size_in_bytes == cache.nbytes
    assert stats.temp_size_in_bytes < 32 << 10 < cache.nbytes // L
    before = pointers(cache)
    counts = _ffi.extension().call_counts()
    got_q, got = jax.block_until_ready(fun(q, cache, *rows()))
    after = _ffi.extension().call_counts()
    assert pointers(got) == before
    assert after["append_cpu"] - counts["append_cpu"] == L
    assert after["decode_cpu"] - counts["decode_cpu"] == L
    want_q, want = jax.jit(functools.partial(REFERENCE, packs=packs))(
        q, pool(L, form=form), *rows()
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(got_q, want_q, rtol=1e-5, atol=1e-5)


@forms
def test_append_and_decode_of_one_pool_copy_nothing(form) -> None:
    """Without layers, where a pool of packs has rank 4."""
    q, cache = jnp.ones((B, 1, H, D)), pool(form=form)

    def fun(cache, ckv, kpe, table, positions):
        packs = form == "packs"
        cache = jax_mla.append(cache, ckv, kpe, table, positions, packs=packs)
        lens = positions[:, 0] + 1
        q_nope, q_pe = q[..., :D_CKV], q[..., D_CKV:]
        out = jax_mla.decode(
            q_nope, q_pe, cache, table, lens, sm_scale=0.1, packs=packs, backend="cpu"
        )
        return out, cache

    step = jax.jit(fun, donate_argnums=0)
    compiled = step.lower(cache, *rows()).compile()
    assert num_pool_copies(compiled, cache) == 0
    assert memory(compiled).alias_size_in_bytes == cache.nbytes
    assert memory(compiled).temp_size_in_bytes < 4096
    before = pointers(cache)
    assert pointers(step(cache, *rows())[1]) == before


@forms
@pytest.mark.parametrize("layers", [(), (L,)], ids=["plain", "stacked"])
def test_vmapped_append_is_in_place(layers, form) -> None:
    """Pools mapped along a leading axis."""
    cache = pool(3, *layers, form=form)
    layer = 1 if layers else None
    args = [jnp.stack([x] * 3) for x in rows()]
    append = jax.vmap(functools.partial(jax_mla.append, layer=layer, packs=form == "packs"))
    fun = jax.jit(append, donate_argnums=0)
    compiled = fun.lower(cache, *args).compile()
    assert num_pool_copies(compiled, cache) == 0
    before = pointers(cache)
    assert pointers(fun(cache, *args)) == before
    assert memory(compiled).temp_size_in_bytes < 8192


def test_repeated_steps_do_not_move_the_cache() -> None:
    """A decoding loop on the host: the same buffer from the first token to the last."""
    fun = jax.jit(OPS, donate_argnums=1)
    q, cache = jnp.ones((B, 1, H, D)), pool(L)
    ckv, kpe, table, _ = rows()
    before = pointers(cache)
    for t in range(12):
        positions = jnp.full((B, 1), t, jnp.int32)
        q, cache = fun(q, cache, ckv, kpe, table, positions)
        assert pointers(cache) == before
    assert (cache != 0).any(axis=-1).sum() == L * B * 12


@forms
def test_vmapped_decode_does_not_copy_pools(form) -> None:
    cache = pool(3, L, form=form)
    _, _, table, _ = rows()
    q, lens = jnp.ones((B, 1, H, D)), jnp.asarray([7, 30], jnp.int32)

    def fun(cache, layer):
        return jax_mla.decode(
            q[..., :D_CKV], q[..., D_CKV:], cache, table, lens,
            sm_scale=0.1, layer=layer, packs=form == "packs",
        )  # fmt: skip

    layers = jnp.asarray([0, 2, 1], jnp.int32)
    compiled = jax.jit(jax.vmap(fun)).lower(cache, layers).compile()
    assert num_pool_copies(compiled, cache) == 0
    assert num_copies(compiled, (3 * L * PAGES, *cache.shape[3:])) == 0
    assert memory(compiled).temp_size_in_bytes < cache.nbytes // 4
