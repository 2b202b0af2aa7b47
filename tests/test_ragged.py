"""ragged_paged_attention against its reference, and what it promises about append and decode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import some

import jax_mla
from jax_mla.testing.cases import RAGGED_CASES, RaggedCase
from jax_mla.testing.compare import decode_exactly
from jax_mla.testing.run import check_ragged, defined_ragged, why_not

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

# Without types, because a test unpacks whatever its options give.
attend: Any = jax_mla.ragged_paged_attention
reference: Any = jax_mla.reference.ragged_paged_attention
STEP = RaggedCase("step", ((1, 40), (1, 1), (1, 70), (1, 600)), d_ckv=64, d_kpe=16)
MIXED = RaggedCase(
    "mixed", ((1, 40), (9, 9), (0, 5), (20, 70)), num_padding=3, num_heads=3, d_ckv=64, d_kpe=16
)


ON_CPU = ("reference", "cpu")  # backends that take any dims, and float32


def for_backend(case: RaggedCase, backend: str) -> RaggedCase:
    """The case with dims that the backend takes."""
    return case if backend in ON_CPU else dataclasses.replace(case, d_ckv=256, d_kpe=32)


def needs_float32(backend: str) -> None:
    if backend not in ON_CPU:
        pytest.skip("a test in float32")


def bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick(14)
@pytest.mark.against_reference
@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda case: case.name)
def test_matches_reference(case: RaggedCase, backend: str) -> None:
    if reason := why_not(case, backend):
        pytest.skip(f"{backend}: {reason}")
    check_ragged(case, backend)


def in_float32(case: RaggedCase) -> RaggedCase:
    return dataclasses.replace(case, dtype="float32", has_codes=False)


BY_HAND = [in_float32(case) for case in RAGGED_CASES if not case.page_ids]
QUICK_BY_HAND = (
    "mixed_f32", "stacked_split", "packs_stacked", "decode_step", "prompts", "empty_chunks",
    "more_tokens_than_the_length", "shared_prefix", "bound_33", "window_20",
    "soft_cap_window", "uniform_3", "uniform_absent",
    "bounds_fall", "bounds_all_past_the_tokens", "lengths", "mixed_e4m3", "wide_odd_e4m3",
    "mixed_step_ds_mla",
)  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", some(BY_HAND, QUICK_BY_HAND))
def test_reference_by_hand(case: RaggedCase) -> None:
    """Tokens, places and rows by loops over the definition, without JAX."""
    inputs = case.inputs()
    out, lse, *pools = defined_ragged(inputs, **case.mask())
    new = inputs.new_pools()
    assert_same(pools, new)
    if not case.is_wild or case.cu_q_lens:
        want_out, want_lse = decode_exactly(inputs.token_by_token(new), **case.mask())
        np.testing.assert_allclose(out, want_out[:, 0], atol=1e-5)
        np.testing.assert_allclose(lse, want_lse[:, 0], atol=1e-5)


def test_inputs_are_poisoned() -> None:
    inputs = RAGGED_CASES[0].inputs()
    pool: Any = inputs.kv_pages
    without_place = [t for t, (_, place) in enumerate(inputs.places()) if place < 0]
    assert len(without_place) == 6 and inputs.num_seqs == len(inputs.seq_lens) - 2
    assert np.isnan(np.float32(inputs.ckv[without_place])).all()
    written = [(b, p) for b, p in inputs.places() if p >= 0]
    for b, place in written:
        page, slot = divmod(place, inputs.page_size)
        assert np.isnan(np.float32(pool[inputs.page_table[b, page], slot])).all()


def append_then_decode(case: RaggedCase, **options: Any) -> tuple[Any, Any, Any]:
    """The two calls, for a case whose sequences have one token each."""
    q_nope, q_pe, ckv, kpe, pool, table, lens, *_ = case.inputs().args()
    kwargs = case.inputs().kwargs()
    backend = options.get("backend")
    new = jax_mla.append(pool, ckv, kpe, table, lens - 1, layer=kwargs["layer"], backend=backend)
    out, lse = jax_mla.decode(q_nope, q_pe, new, table, lens, return_lse=True, **kwargs, **options)
    return out, lse, new


@pytest.mark.parametrize("is_uniform", [False, True])
def test_one_token_a_sequence_is_append_then_decode(is_uniform, backend, on_device) -> None:
    """Bit for bit; on the reference the products of another shape may round otherwise."""
    step = for_backend(STEP, backend)
    case = dataclasses.replace(step, is_uniform=is_uniform, batch_invariant=True)
    inputs, options = case.inputs(), {"batch_invariant": True, "backend": backend}
    got = attend(*inputs.args(), **inputs.kwargs(), **options, return_lse=True)
    want = append_then_decode(case, **options)
    assert_same(got[2], want[2])
    if backend == "reference":
        np.testing.assert_allclose(np.float32(got[0]), np.float32(want[0]), rtol=2e-2, atol=1e-3)
    else:
        assert_same(got[:2], want[:2])


THREE = RaggedCase("three", ((1, 700), (20, 90), (3, 3)), num_heads=5)


def test_batch_invariant(backend, on_device) -> None:
    """A sequence gives the same bits alone and between others, in a step of the same size."""
    if backend == "reference":
        pytest.skip("reference: makes no promise, XLA's matrix products are not batch-invariant")
    inputs = THREE.inputs()
    options = {**inputs.kwargs(), "batch_invariant": True, "return_lse": True, "backend": backend}
    together = attend(*inputs.args(), **options)
    *rows, pool, table, lens, bounds, _ = inputs.args()
    for b in range(3):
        begin, q_len = int(bounds[b]), int(bounds[b + 1] - bounds[b])
        rotated = [jnp.roll(x, -begin, axis=0) for x in rows]  # its tokens come first
        order = jnp.asarray([b, 0, 0])
        own_bounds = jnp.full(4, q_len, jnp.int32).at[0].set(0)  # the others have no tokens
        alone = attend(*rotated, pool, table[order], lens[order], own_bounds, **options)
        own = slice(begin, begin + q_len)
        assert_same([x[own] for x in together[:2]], [x[:q_len] for x in alone[:2]])


@pytest.mark.parametrize("kv_format", [None, "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [8, 12, 24])
@pytest.mark.parametrize("num_others", [1, 3], ids=["one_token_each", "chunk"])
def test_batch_invariant_beside_other_queries(
    num_others, num_heads, kv_format, backend, on_device
) -> None:
    """Another sequence's queries change no bit, also where a kernel has both in one tile."""
    if backend == "reference":
        pytest.skip("reference: makes no promise, XLA's matrix products are not batch-invariant")
    case = RaggedCase(
        "beside", ((1, 6000), (num_others, 70)), num_heads=num_heads, d_ckv=512, d_kpe=64,
        page_size=64, kv_format=kv_format, batch_invariant=True,
    )  # fmt: skip
    if reason := why_not(case, backend):
        pytest.skip(f"{backend}: {reason}")
    inputs = case.inputs()
    options = {**inputs.kwargs(), "batch_invariant": True, "return_lse": True, "backend": backend}
    q_nope, *others = inputs.args()
    for num_splits in (1, None):
        want = attend(q_nope, *others, **options, num_splits=num_splits)
        for factor in (50.0, np.nan):
            changed = jnp.asarray(q_nope).at[1:].multiply(factor)
            got = attend(changed, *others, **options, num_splits=num_splits)
            assert_same([x[:1] for x in got[:2]], [x[:1] for x in want[:2]])


def test_batch_invariant_in_steps_of_any_size() -> None:
    """On the CPU the size of the step does not matter either."""
    inputs = THREE.inputs()
    options = {**inputs.kwargs(), "batch_invariant": True, "return_lse": True, "backend": "cpu"}
    together = attend(*inputs.args(), **options)
    *rows, pool, table, lens, bounds, _ = inputs.args()
    for b in range(3):
        own = slice(int(bounds[b]), int(bounds[b + 1]))
        seq = slice(b, b + 1)
        alone = attend(*(x[own] for x in rows), pool, table[seq], lens[seq], **options)
        assert_same([x[own] for x in together[:2]], alone[:2])


def test_repeats_bit_for_bit(backend, on_device) -> None:
    inputs = for_backend(MIXED, backend).inputs()
    fun = jax.jit(lambda *args: attend(*args, **inputs.kwargs(), return_lse=True, backend=backend))
    assert_same(fun(*inputs.args()), fun(*inputs.args()))


def test_out_alone_is_the_same(backend, on_device) -> None:
    inputs = for_backend(MIXED, backend).inputs()
    options = {**inputs.kwargs(), "backend": backend}
    out, _, pool = attend(*inputs.args(), **options, return_lse=True)
    assert_same(attend(*inputs.args(), **options), (out, pool))


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("num_seqs", [-(2**31), -1, 0, 1, 3, 4, 2**31 - 1])
def test_num_seqs_is_clamped_on_the_device(num_seqs, is_ragged, backend, on_device) -> None:
    step = dataclasses.replace(for_backend(STEP, backend), seqs=((1, 40), (1, 1), (1, 70)))
    *args, bounds, _ = step.inputs().args()
    args.append(bounds if is_ragged else None)
    options: dict[str, Any] = {"sm_scale": 0.1, "return_lse": True, "backend": backend}
    number = jnp.int32(num_seqs)
    out, lse, pool = attend(*args, number, **options)
    want = attend(*args, **options)
    n = min(max(num_seqs, 0), 3)
    assert (out[n:] == 0).all() and jnp.isneginf(lse[n:]).all()
    assert_same((out[:n], lse[:n]), (want[0][:n], want[1][:n]))
    assert jnp.isnan(args[4]).all(-1).sum() - jnp.isnan(pool).all(-1).sum() == n


def test_layer_outside_the_pool_writes_nothing_and_sees_nothing(backend, on_device) -> None:
    inputs = dataclasses.replace(for_backend(MIXED, backend), num_layers=2).inputs()
    args = inputs.args()
    for layer in (2, -1, 2**31 - 1):
        out, lse, pool = attend(
            *args, sm_scale=0.1, layer=jnp.int32(layer), return_lse=True, backend=backend
        )
        assert_same(pool, args[4])
        assert (out == 0).all() and jnp.isneginf(lse).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("is_uniform", [False, True])
def test_page_begin_writes_and_reads_owned_pages(is_uniform, backend, on_device) -> None:
    """The merged results of two halves of the pool are the result of the whole."""
    seqs = ((3, 100), (3, 3), (3, 70)) if is_uniform else ((1, 100), (0, 9), (30, 70), (5, 5))
    case = dataclasses.replace(for_backend(MIXED, backend), seqs=seqs, is_uniform=is_uniform)
    case = dataclasses.replace(case, dtype="float32" if backend in ON_CPU else "float16")
    atol = 1e-5 if backend in ON_CPU else 5e-3
    inputs = dataclasses.replace(case, num_padding=0).inputs()
    *rows, pool, table, lens, bounds, _ = inputs.args()
    half = pool.shape[0] // 2
    options: dict[str, Any] = {**inputs.kwargs(), "return_lse": True}
    parts = [
        attend(*rows, part, table, lens, bounds, page_begin=begin, backend=backend, **options)
        for begin, part in ((0, pool[:half]), (half, pool[half:]))
    ]
    outs, lses, pools = zip(*parts, strict=True)
    out, lse = jax_mla.merge(jnp.stack(outs), jnp.stack(lses))
    want = reference(*inputs.args(), **options)
    assert_same(jnp.concatenate(pools), want[2])
    np.testing.assert_allclose(np.float32(out), want[0], atol=atol)
    np.testing.assert_allclose(lse, want[1], atol=atol)


@pytest.mark.quick(1)
def test_a_wild_length_writes_nothing_with_page_begin_either(backend, on_device) -> None:
    """Pages that a device does not own are dropped first, and that must not make the length fit."""
    needs_float32(backend)
    inputs = dataclasses.replace(MIXED, dtype="float32").inputs()
    *rows, pool, table, lens, bounds, _ = inputs.args()
    pool = jnp.nan_to_num(pool)
    for length in (2**31 - 1, table.shape[1] * 16 + 1, -1):
        args = (*rows, pool, table, lens.at[3].set(length), bounds)
        options = {"sm_scale": 0.1, "page_begin": 0}
        got = attend(*args, **options, backend=backend)
        want = reference(*args, sm_scale=0.1)
        assert_same(got[1], want[1])


def test_engine_steps_give_plain_attention(backend, on_device) -> None:
    """Prompts in chunks of unequal sizes, then tokens, all by one compiled program."""
    needs_float32(backend)
    rng = np.random.default_rng(2)
    lens, num_tokens, d_ckv, d = [37, 12, 50], 24, 64, 80
    keys = [rng.standard_normal((n, d), dtype=np.float32) for n in lens]
    queries = [rng.standard_normal((n, 2, d), dtype=np.float32) for n in lens]
    table = jnp.asarray(rng.permutation(24).reshape(3, 8), jnp.int32)
    step: Any = jax.jit(
        lambda *args: attend(*args, sm_scale=0.1, backend=backend),
        donate_argnums=4,
    )
    pool, done, outs = jnp.full((24, 8, d), jnp.nan, jnp.float32), [0, 0, 0], [[], [], []]
    while done != lens:
        sizes = [min(int(rng.integers(0, 9)), n - k) for n, k in zip(lens, done, strict=True)]
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        row, query = np.full((num_tokens, d), np.nan), np.full((num_tokens, 2, d), np.nan)
        for b, n in enumerate(sizes):
            row[bounds[b] : bounds[b + 1]] = keys[b][done[b] : done[b] + n]
            query[bounds[b] : bounds[b + 1]] = queries[b][done[b] : done[b] + n]
            done[b] += n
        row, query = jnp.float32(row), jnp.float32(query)
        out, pool = step(
            query[..., :d_ckv], query[..., d_ckv:], row[:, :d_ckv], row[:, d_ckv:], pool, table,
            jnp.asarray(done, jnp.int32), jnp.asarray(bounds),
        )  # fmt: skip
        for b in range(3):
            outs[b] += list(np.asarray(out[bounds[b] : bounds[b + 1]]))
    assert step._cache_size() == 1
    for key, query, out in zip(keys, queries, outs, strict=True):
        scores = 0.1 * np.einsum("qhd,td->qht", query, key)
        scores = np.where(np.tri(len(key), dtype=bool)[:, None], scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("qht,td->qhd", p / p.sum(-1, keepdims=True), key[:, :d_ckv])
        np.testing.assert_allclose(np.stack(out), want, atol=1e-4)


# ---- append with cu_q_lens ---------------------------------------------------------------------

BOUNDS = {
    "some": (0, 1, 1, 8, 12),
    "padding_first": (3, 4, 9, 9, 9),
    "fall": (0, 9, 4, 20, 2),
    "wild": (-5, 2**31 - 1, -(2**31), 3, 40),
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("split", [False, True], ids=["packed", "split"])
def test_append_of_ragged_tokens(bounds, num_layers, split, backend, on_device) -> None:
    """Against uniform append of one token a sequence, which finds no sequence by itself."""
    rng = np.random.default_rng(0)
    layers = () if num_layers is None else (num_layers,)
    num_tokens, ends = 14, np.maximum.accumulate(bounds)
    rows = jnp.asarray(rng.standard_normal((num_tokens, 40)), jnp.float16)
    pool = jnp.asarray(rng.standard_normal((*layers, 12, 8, 40)), jnp.float16)
    cache = (pool[..., :32], pool[..., 32:]) if split else pool
    table = rng.permutation(12).astype(np.int32).reshape(4, 3)
    table[2, 1] = 2147480000
    positions = rng.permutation(30)[:num_tokens].astype(np.int32) - 3  # some negative, some too far
    sequence = np.searchsorted(ends, np.arange(num_tokens), side="right") - 1
    own = (sequence >= 0) & (sequence < 4)
    layer = None if num_layers is None else jnp.int32(1)
    want = jax_mla.reference.append(
        cache, rows[:, :32], rows[:, 32:], jnp.asarray(table[np.clip(sequence, 0, 3)]),
        jnp.asarray(np.where(own, positions, -1)), layer=layer,
    )  # fmt: skip
    args = (cache, rows[:, :32], rows[:, 32:], jnp.asarray(table), jnp.asarray(positions))
    options: dict[str, Any] = {"cu_q_lens": jnp.asarray(bounds, jnp.int32), "layer": layer}
    assert_same(jax_mla.append(*args, **options, backend=backend), want)
    assert_same(jax_mla.reference.append(*args, **options), want)
