"""A device of a context-parallel call walks only over the pages it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla.kv_cache import local_pages
from jax_mla.ops.decode.primitive import Operands, Params, keep_owned_pages

NUM_DEVICES, PAGES_EACH, PAGE_SIZE, MAX_PAGES = 4, 24, 4, 16
D_CKV, D_KPE, HEADS = 16, 8, 3
PARAMS = Params(sm_scale=1.0, backend="", has_layer=False)


def call(q_len: int, seed: int) -> tuple[Operands, np.ndarray]:
    """Return operands with the pages of all devices, and the page_begin of each device."""
    rng = np.random.default_rng(seed)
    lens = np.array([0, 1, q_len, 4, 5, 37, 61, 64, 1000, -3], np.int32)
    batch = len(lens)
    table = rng.permutation(batch * MAX_PAGES).astype(np.int32) % (NUM_DEVICES * PAGES_EACH)
    table = table.reshape(batch, MAX_PAGES)
    table[:, -1] = 2147480000  # a wild id inside a length of two sequences
    pool = rng.standard_normal((NUM_DEVICES * PAGES_EACH, PAGE_SIZE, D_CKV + D_KPE), np.float32)
    q_nope = rng.standard_normal((batch, q_len, HEADS, D_CKV), np.float32)
    q_pe = rng.standard_normal((batch, q_len, HEADS, D_KPE), np.float32)
    zero = np.zeros(1, np.int32)
    begins = np.arange(NUM_DEVICES, dtype=np.int32) * PAGES_EACH
    return Operands(q_nope, q_pe, table, lens, zero, zero, kv_pages=(pool,)), begins


def on_device(operands: Operands, begin: int) -> Operands:
    pool = operands.kv_pages[0][begin : begin + PAGES_EACH]
    local = operands._replace(page_begin=np.full(1, begin, np.int32), kv_pages=(pool,))
    return jax.tree.map(jnp.asarray, local)


def reference(x: Operands, causal: bool) -> tuple[jax.Array, jax.Array]:
    out, lse = jax_mla.reference.decode(
        x.q_nope, x.q_pe, x.kv_pages[0], x.page_table, x.seq_lens,
        sm_scale=0.3, causal=causal, return_lse=True, page_begin=x.page_begin[0],
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 3, 6])
def test_same_result(q_len: int, causal: bool) -> None:
    operands, begins = call(q_len, seed=q_len)
    for begin in begins:
        whole = on_device(operands, begin)
        want = reference(whole, causal)
        got = reference(keep_owned_pages(whole, PARAMS), causal)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("q_len", [1, 6])
def test_walks_over_owned_pages_only(q_len: int) -> None:
    operands, begins = call(q_len, seed=7)
    table, lens = operands.page_table, np.clip(operands.seq_lens, 0, MAX_PAGES * PAGE_SIZE)
    tail_pages = 1 + -(-(q_len - 1) // PAGE_SIZE)
    for begin in begins:
        kept = keep_owned_pages(on_device(operands, begin), PARAMS)
        used = np.arange(MAX_PAGES) * PAGE_SIZE < lens[:, None]
        owned = (used & (table >= begin) & (table < begin + PAGES_EACH)).sum(axis=1)
        pages = -(-np.asarray(kept.seq_lens) // PAGE_SIZE)
        assert (pages <= owned + tail_pages).all()
        assert (pages >= owned).all()
        for b, n in enumerate(pages):
            assert (np.asarray(kept.page_table)[b, n:] == -1).all()


def test_no_page_id_wraps_around_into_a_pool() -> None:
    """The difference of an id and the first page may leave 32 bits on either side."""
    edges = np.array([-(2**31), -(2**31) + 3, -5, -1, 0, 1, 6, 2**31 - 8, 2**31 - 1])
    ids, begins = np.meshgrid(edges, edges)
    local, owned = local_pages(jnp.asarray(ids, jnp.int32), jnp.asarray(begins, jnp.int32), 8)
    is_in_pool = (ids >= begins) & (ids - begins < 8)  # in 64 bits
    np.testing.assert_array_equal(owned, is_in_pool)
    np.testing.assert_array_equal(local[is_in_pool], (ids - begins)[is_in_pool])
