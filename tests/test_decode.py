"""decode against the float32 reference, on every backend of this machine."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import some

import jax_mla
from jax_mla.testing.cases import CASES, Case
from jax_mla.testing.compare import assert_close, decode_exactly
from jax_mla.testing.run import check, expected, run, why_not

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

SMALL = Case("small", seq_lens=(0, 1, 40, 70), d_ckv=256, d_kpe=32, q_len=2, page_size=16)


def skip_if_declined(case: Case, backend: str) -> None:
    if reason := why_not(case, backend):
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.against_reference
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, backend: str) -> None:
    skip_if_declined(case, backend)
    check(case, backend)


QUICK_BY_HAND = (
    "deepseek_f16", "dims_64_8", "stacked_split", "packs_stacked", "packs_split", "all_empty",
    "bound_130", "bound_beyond_the_table", "page_48", "q_len_3", "q_len_4_not_causal",
    "window_130_q_len_3", "window_not_causal", "soft_cap",
    "values_huge", "mixed_codes_e4m3", "wide_odd_e4m3", "packs_e4m3", "packs_ds_mla",
)  # fmt: skip


# The definition has no splits, and treats all heads alike.
BY_HAND = [
    case
    for case in CASES
    if not (case.num_splits or case.batch_invariant or case.name.startswith("heads"))
]


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", some(BY_HAND, QUICK_BY_HAND))
def test_reference_by_hand(case: Case) -> None:
    """In numpy, which is what `test_matches_reference` compares with, without JAX."""
    inputs = case.inputs()
    fun = functools.partial(
        jax_mla.reference.decode, **inputs.kwargs(), **case.mask(), return_lse=True
    )
    out, lse = jax.jit(fun)(*inputs.args())
    want, want_lse = decode_exactly(inputs, **case.mask())
    assert_close(out, lse, want, want_lse, dtype="float32")


def test_inputs_are_poisoned() -> None:
    inputs = SMALL.inputs()
    pool = np.asarray(inputs.kv_pages, np.float32)
    assert np.isnan(pool).any(axis=-1).sum() >= 2 * 16  # two spare pages and the tails
    assert (inputs.page_table[0] > pool.shape[0]).any() or (inputs.page_table[0] < 0).any()


def test_rank_3_query_is_q_len_1(backend: str, on_device) -> None:
    case = dataclasses.replace(SMALL, q_len=1)
    inputs = case.inputs()
    q_nope, q_pe, *rest = inputs.args()
    options = {**inputs.kwargs(), "backend": backend, "return_lse": True}
    out, lse = jax_mla.decode(q_nope, q_pe, *rest, **options)
    out3, lse3 = jax_mla.decode(q_nope[:, 0], q_pe[:, 0], *rest, **options)
    assert out3.shape == (4, 16, 256) and lse3.shape == (4, 16)
    np.testing.assert_array_equal(out3, out[:, 0])
    np.testing.assert_array_equal(lse3, lse[:, 0])


def test_out_alone_is_the_same(backend: str, on_device) -> None:
    inputs = SMALL.inputs()
    out = jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend=backend)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(out, run(SMALL, backend)[0])


def test_repeats_bit_for_bit(backend: str) -> None:
    first, second = run(SMALL, backend), run(SMALL, backend)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_batch_invariant(backend: str, on_device) -> None:
    """A sequence gives the same bits alone and between others."""
    if backend == "reference":
        pytest.skip("reference: makes no promise, XLA's matrix products are not batch-invariant")
    case = dataclasses.replace(SMALL, seq_lens=(70, 3, 0, 200), batch_invariant=True, page_size=64)
    inputs = case.inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    options = {**inputs.kwargs(), "batch_invariant": True, "return_lse": True, "backend": backend}
    together = jax_mla.decode(q_nope, q_pe, pool, table, lens, **options)
    for b in range(4):
        own = slice(b, b + 1)
        alone = jax_mla.decode(q_nope[own], q_pe[own], pool, table[own], lens[own], **options)
        for whole, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(whole[own], one)


def test_nan_stays_in_its_sequence(backend: str, on_device) -> None:
    inputs = dataclasses.replace(SMALL, seq_lens=(40, 70, 5)).inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    clean = jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend=backend)
    page = int(table[1, 2])
    dirty_pool = pool.at[page, 3].set(jnp.nan)
    out = jax_mla.decode(q_nope, q_pe, dirty_pool, table, lens, **inputs.kwargs(), backend=backend)
    assert jnp.isnan(out[1]).all()
    np.testing.assert_array_equal(out[0], clean[0])
    np.testing.assert_array_equal(out[2], clean[2])
    dirty_q = q_nope.at[0, 0, 5].set(jnp.nan)
    out = jax_mla.decode(dirty_q, q_pe, pool, table, lens, **inputs.kwargs(), backend=backend)
    assert jnp.isnan(out[0, 0, 5]).all()
    np.testing.assert_array_equal(out[1:], clean[1:])


@pytest.mark.parametrize("num_heads", [16, 64])
def test_row_whose_scores_are_all_minus_infinity_is_neutral(num_heads, backend, on_device) -> None:
    """`merge` ignores it, as it ignores a row without keys."""
    query, pool = jnp.ones((2, num_heads, 288), "bfloat16"), jnp.ones((8, 16, 288), "bfloat16")
    query = query.at[1, 3].set(-jnp.inf)
    table, lens = jnp.arange(8, dtype="int32").reshape(2, 4), jnp.array([40, 64], "int32")
    args = query[..., :256], query[..., 256:], pool, table, lens
    out, lse = jax_mla.decode(*args, sm_scale=1.0, return_lse=True, backend=backend)
    assert (out[1, 3] == 0).all() and jnp.isneginf(lse[1, 3])
    assert jnp.isneginf(lse).sum() == 1 and (out == 1).sum() == out.size - 256


@pytest.mark.parametrize("num_heads", [16, 64])
def test_scores_far_below_zero(num_heads: int, backend: str, on_device) -> None:
    """A row with very small scores is not taken for a row without keys."""
    query, pool = jnp.ones((2, num_heads, 288), "bfloat16"), -jnp.ones((8, 16, 288), "bfloat16")
    table, lens = jnp.arange(8, dtype="int32").reshape(2, 4), jnp.array([40, 64], "int32")
    args = query[..., :256], query[..., 256:], pool, table, lens
    out, lse = jax_mla.decode(*args, sm_scale=1e30, return_lse=True, backend=backend)
    np.testing.assert_array_equal(out, -1)
    np.testing.assert_allclose(lse, -288e30, rtol=1e-5)


@pytest.mark.parametrize("num_heads", [8, 64])
def test_zeros_in_one_part_beside_huge_values_in_another(num_heads, backend, on_device) -> None:
    """Partial results are scaled to fit float16; zeros keep their weight."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((3, 64, 576)).astype(np.float32)
    pool[:2, :, :512] *= 2.0**60
    pool[2, :, :512] = 0  # the second of two parts
    q_pe = rng.standard_normal((1, num_heads, 64)).astype(np.float32)
    args = (
        jnp.zeros((1, num_heads, 512), jnp.bfloat16), jnp.asarray(q_pe, jnp.bfloat16),
        jnp.asarray(pool, jnp.bfloat16), jnp.arange(3)[None], jnp.array([192]),
    )  # fmt: skip
    options: dict[str, Any] = {"sm_scale": 0.1, "return_lse": True}
    out, lse = jax_mla.decode(*args, **options, num_splits=2, backend=backend)
    want, want_lse = jax_mla.reference.decode(*args, **options)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    error = np.float32(out) - np.float32(want)
    assert np.linalg.norm(error / 2.0**60) < 0.006 * np.linalg.norm(np.float32(want) / 2.0**60)


def test_wild_id_inside_a_length_is_an_absent_page(backend: str, on_device) -> None:
    inputs = dataclasses.replace(SMALL, seq_lens=(40, 70)).inputs()
    args = list(inputs.args())
    for wild in (2147480000, -1, -2147483648, 10_000):
        args[3] = jnp.asarray(inputs.page_table).at[1, 1].set(wild)
        options: dict[str, Any] = {**inputs.kwargs(), "return_lse": True}
        out, lse = jax_mla.decode(*args, **options, backend=backend)
        want_out, want_lse = jax_mla.reference.decode(*args, **options)
        assert jnp.isfinite(out).all()
        assert_close(out, lse, want_out, want_lse, dtype="bfloat16", yardstick=want_out * 1.004)


def test_page_begin_selects_owned_pages(backend: str, on_device) -> None:
    """The merged results of two halves of the pool are the result of the whole."""
    inputs = dataclasses.replace(SMALL, num_layers=2).inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    half = pool.shape[1] // 2
    options = {**inputs.kwargs(), "return_lse": True, "backend": backend}
    parts = [
        jax_mla.decode(q_nope, q_pe, part, table, lens, page_begin=begin, **options)
        for begin, part in ((0, pool[:, :half]), (half, pool[:, half:]))
    ]
    out, lse = jax_mla.merge(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    want, yardstick = expected(dataclasses.replace(SMALL, num_layers=2))
    assert_close(out, lse, *want, dtype="bfloat16", yardstick=yardstick[0])


def test_no_page_id_wraps_around_a_negative_page_begin(backend: str, on_device) -> None:
    inputs = SMALL.inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    wild = jnp.full_like(table, 2**31 - 1)
    options = {"page_begin": jnp.int32(-5), "backend": backend, "return_lse": True, "sm_scale": 1.0}
    out, lse = jax_mla.decode(q_nope, q_pe, pool, wild, lens, **options)
    assert (out == 0).all() and jnp.isneginf(lse).all()


def test_layer_outside_the_pool_owns_nothing(backend: str, on_device) -> None:
    inputs = dataclasses.replace(SMALL, num_layers=2).inputs()
    args, options = inputs.args(), {"sm_scale": 1.0, "return_lse": True, "backend": backend}
    with jax.enable_x64(True):
        wide = [jnp.int64(2**32), jnp.int64(-(2**32) + 1)]
        for layer in (*map(jnp.int32, (2, -1, 2**31 - 1)), *wide):
            out, lse = jax_mla.decode(*args, layer=layer, **options)
            assert (out == 0).all() and jnp.isneginf(lse).all()


def test_lengths_are_clamped_on_the_device(backend: str, on_device) -> None:
    inputs = dataclasses.replace(SMALL, seq_lens=(64, 64), page_size=16).inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    options = {**inputs.kwargs(), "return_lse": True, "backend": backend}
    want = jax_mla.decode(q_nope, q_pe, pool, table, lens, **options)
    too_long = jnp.asarray([2**31 - 1, 65], jnp.int32)
    got = jax_mla.decode(q_nope, q_pe, pool, table, too_long, **options)
    # The mask is aligned to the clamped end, so nothing differs.
    np.testing.assert_array_equal(got[0], want[0])
    negative = jax_mla.decode(q_nope, q_pe, pool, table, -lens, **options)
    assert (negative[0] == 0).all() and jnp.isneginf(negative[1]).all()
