"""append against its reference, on the platform of every backend."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

BATCH, Q_LEN, NUM_PAGES, PAGE_SIZE, MAX_PAGES = 4, 3, 24, 8, 5
# Rows of whole 16-byte vectors, rows of odd lengths, and rows wider than a warp holds.
WIDTHS = [(64, 16), (33, 7), (600, 72)]


def make(
    dtype: str = "bfloat16",
    num_layers: int | None = None,
    split: bool = False,
    widths: tuple[int, int] = WIDTHS[0],
    seed: int = 0,
    padding: int = 0,
    pack: int | None = None,
) -> tuple[Any, ...]:
    """Return a pool, new rows, a page table and positions that exercise every rule.

    The padding of the pool is NaN.
    """
    rng = np.random.default_rng(seed)
    d_ckv, d_kpe = widths

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)

    layers = () if num_layers is None else (num_layers,)
    pool = normal(*layers, NUM_PAGES, PAGE_SIZE, d_ckv + d_kpe)
    table = rng.permutation(NUM_PAGES)[: BATCH * MAX_PAGES].reshape(BATCH, MAX_PAGES)
    table = table.astype(np.int32)
    table[3, 2:] = (2147480000, -5, NUM_PAGES)  # wild ids: those tokens are dropped
    positions = np.array(
        [
            [0, 1, 2],  # a first page
            [7, 8, -1],  # across a border, one skipped
            [MAX_PAGES * PAGE_SIZE - 1, MAX_PAGES * PAGE_SIZE, 2147483000],  # past the table
            [15, 16, 39],  # into wild pages
        ],
        np.int32,
    )

    def laid_out(x: jax.Array) -> jax.Array:
        nan = jnp.full((*x.shape[:-1], padding), jnp.nan, x.dtype)
        rows = (PAGE_SIZE,) if pack is None else (PAGE_SIZE // pack, pack)
        x = jnp.concatenate([x, nan], axis=-1)
        return x.reshape(*layers, NUM_PAGES, *rows, x.shape[-1])

    parts = laid_out(pool[..., :d_ckv]), laid_out(pool[..., d_ckv:])
    kv_pages = parts if split else laid_out(pool)
    rows = (normal(BATCH, Q_LEN, d_ckv), normal(BATCH, Q_LEN, d_kpe))
    return kv_pages, *rows, jnp.asarray(table), jnp.asarray(positions)


def assert_same(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.against_reference
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("split", [False, True], ids=["packed", "split"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_matches_reference(backend, on_device, dtype, num_layers, split, widths) -> None:
    args = make(dtype, num_layers, split, widths)
    layer = None if num_layers is None else jnp.int32(1)
    want = jax_mla.reference.append(*args, layer=layer)
    got = jax.jit(lambda *a: jax_mla.append(*a, layer=layer, backend=backend))(*args)
    assert_same(got, want)


# The padding is or is not a multiple of 16 bytes.
@pytest.mark.against_reference
@pytest.mark.parametrize("padding", [0, 16, 3])
@pytest.mark.parametrize("pack", [None, 2])
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("split", [False, True], ids=["packed", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wide_rows_and_packs(backend, on_device, padding, pack, num_layers, split, dtype) -> None:
    """The same bytes as in a pool without them; the padding stays what it was, bit for bit."""
    layer = None if num_layers is None else jnp.int32(1)
    args = make(dtype, num_layers, split)
    want = jax.tree.leaves(jax_mla.reference.append(*args, layer=layer))
    pools, *rest = make(dtype, num_layers, split, padding=padding, pack=pack)
    options = {"layer": layer, "packs": pack is not None}
    reference = jax_mla.reference.append(pools, *rest, **options)
    op = jax.jit(lambda *a: jax_mla.append(*a, **options, backend=backend))(pools, *rest)
    for got in (reference, op):
        for new, old, plain in zip(*map(jax.tree.leaves, (got, pools)), want, strict=True):
            assert new.shape == old.shape
            width = plain.shape[-1]
            rows = new.reshape(*plain.shape[:-1], width + padding)
            assert_same(rows[..., :width], plain)
            assert_same(new[..., width:], old[..., width:])


def test_reference_by_hand() -> None:
    pool, ckv, kpe, table, positions = make("float32")
    want = np.array(pool)
    for b in range(BATCH):
        for i in range(Q_LEN):
            page, slot = divmod(int(positions[b, i]), PAGE_SIZE)
            if 0 <= page < MAX_PAGES and 0 <= table[b, page] < NUM_PAGES:
                want[table[b, page], slot] = np.concatenate([ckv[b, i], kpe[b, i]])
    np.testing.assert_array_equal(jax_mla.reference.append(*make("float32")), want)
    assert (want != np.asarray(pool)).any(axis=-1).sum() == 7


def test_page_begin_drops_other_pages(backend, on_device) -> None:
    pool, *rest = make()
    half = NUM_PAGES // 2
    parts = [
        jax_mla.append(part, *rest, page_begin=begin, backend=backend)
        for begin, part in ((0, pool[:half]), (half, pool[half:]))
    ]
    assert_same(jnp.concatenate(parts), jax_mla.reference.append(pool, *rest))


def test_layer_outside_the_pool_writes_nothing(backend, on_device) -> None:
    pool, *rest = make(num_layers=2)
    with jax.enable_x64(True):
        for layer in (jnp.int32(2), jnp.int32(-1), jnp.int64(2**32), jnp.int64(-(2**32) + 1)):
            got = jax_mla.append(pool, *rest, layer=layer, backend=backend)
            assert_same(got, pool)
            assert_same(jax_mla.reference.append(pool, *rest, layer=layer), pool)


class Cache(NamedTuple):
    ckv: jax.Array
    kpe: jax.Array


@pytest.mark.parametrize("kind", [tuple, Cache._make])
def test_pair_comes_back_as_what_it_was(kind, backend, on_device) -> None:
    """The result can then be the carry of a scan."""
    pool, *rest = make()
    d_ckv = rest[0].shape[-1]
    pair = kind((pool[..., :d_ckv], pool[..., d_ckv:]))
    got = jax_mla.append(pair, *rest, backend=backend)
    assert jax.tree.structure(got) == jax.tree.structure(pair)
    want = jax_mla.reference.append(pair, *rest)
    assert jax.tree.structure(want) == jax.tree.structure(pair)
    assert_same(jnp.concatenate(got, axis=-1), jax_mla.reference.append(pool, *rest))


def test_input_stays_valid_without_donation(backend, on_device) -> None:
    pool, *rest = make()
    before = np.array(pool)
    jax_mla.append(pool, *rest, backend=backend)
    np.testing.assert_array_equal(pool, before)


def test_append_then_decode(backend, on_device) -> None:
    """A cache written token by token gives the same result as plain attention."""
    rng = np.random.default_rng(1)
    num_tokens, dtype = 20, jnp.float16
    rows = jnp.asarray(rng.standard_normal((2, num_tokens, 288), dtype=np.float32), dtype)
    table = jnp.asarray([[3, 0, 4], [5, 1, 2]], jnp.int32)
    pool = jnp.full((6, 8, 288), jnp.nan, dtype)

    @jax.jit
    def step(pool, row, t):
        at = jnp.full((2, 1), t, jnp.int32)
        ckv, kpe = row[:, None, :256], row[:, None, 256:]
        return jax_mla.append(pool, ckv, kpe, table, at, backend=backend)

    for t in range(num_tokens):
        pool = step(pool, rows[:, t], t)
    q = jnp.asarray(rng.standard_normal((2, 1, 4, 288), dtype=np.float32), dtype)
    lens = jnp.full((2,), num_tokens, jnp.int32)
    args = (q[..., :256], q[..., 256:], pool, table, lens)
    out = jax_mla.decode(*args, sm_scale=0.06, backend=backend)
    scores = 0.06 * np.einsum("bqhd,btd->bqht", np.float32(q), np.float32(rows))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bqht,btd->bqhd", p / p.sum(-1, keepdims=True), np.float32(rows[..., :256]))
    np.testing.assert_allclose(np.float32(out), want, atol=3e-3)
