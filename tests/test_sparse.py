"""`sparse_attention` against its definition, on every backend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from quick import some
from sharded import check

import jax_mla
from jax_mla.testing.compare import assert_close, decode_exactly, decode_in_dtype
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.run import device_of, may_multiply_codes, why_not
from jax_mla.testing.sparse import SPARSE_CASES, SparseCase, SparseInputs

CASES = {case.name: case for case in SPARSE_CASES}
SMALL = SparseCase(
    "small", (0, 3, 7, 12, 12, 1), k=12, num_tokens=40, num_heads=4, d_ckv=32, d_kpe=8,
    page_size=4, dtype="float32", num_layers=2,
)  # fmt: skip


def run(inputs: SparseInputs, backend: str | None, **kwargs):
    with jax.default_device(device_of(backend or "cpu")):
        fun = functools.partial(
            jax_mla.sparse_attention, **inputs.kwargs(), return_lse=True, backend=backend, **kwargs
        )
        out, lse = jax.jit(fun)(*inputs.args())
        return np.asarray(out), np.asarray(lse)


def reference(inputs: SparseInputs):
    fun = functools.partial(jax_mla.reference.sparse_attention, **inputs.kwargs(), return_lse=True)
    out, lse = jax.jit(fun)(*inputs.args())
    return np.asarray(out), np.asarray(lse)


def left_by_sinks(inputs: SparseInputs, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Return `out` without the weight that the sinks take, in the form of the call."""
    if inputs.sink is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            left = np.where(np.isneginf(inputs.sink), 1, 1 / (1 + np.exp(inputs.sink - lse)))
        out = out * left[..., None]
    return np.asarray(inputs.shaped(out.astype(np.float32)))


def exactly(inputs: SparseInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse by definition, in numpy."""
    out, lse = (x[:, 0] for x in decode_exactly(inputs.by_token(), causal=False))
    return left_by_sinks(inputs, out, lse), np.asarray(inputs.shaped(lse))


@pytest.mark.quick(7)
@pytest.mark.against_reference
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, backend) -> None:
    case = CASES[name]
    if reason := why_not(case, backend):
        pytest.skip(f"{backend}: {reason}")
    inputs = case.inputs()
    want, want_lse = exactly(inputs)
    yardstick, lse_yardstick = (x[:, 0] for x in decode_in_dtype(inputs.by_token(), causal=False))
    dtype = inputs.cache.dtype
    yardstick = left_by_sinks(inputs, yardstick, lse_yardstick).astype(dtype).astype(np.float32)
    got, lse = run(inputs, backend, batch_invariant=case.batch_invariant)
    assert got.dtype == dtype and got.shape == want.shape
    assert_close(
        got,
        lse,
        want,
        want_lse,
        dtype=case.dtype,
        yardstick=yardstick,
        lse_yardstick=lse_yardstick.reshape(want_lse.shape)
        if may_multiply_codes(case, backend)
        else None,
    )


QUICK_DEFINITION = (
    "f16", "by_sequence", "nothing_but_wild", "no_keys", "sinks_by_sequence", "packs_stacked",
    "split_stacked", "page_48", "codes_e4m3", "mixed_e4m3", "packs_stacked_ds_mla",
)  # fmt: skip


@pytest.mark.quick(5)
@pytest.mark.parametrize("case", some(SPARSE_CASES, QUICK_DEFINITION))
def test_the_definition_of_every_case(case: SparseCase) -> None:
    inputs = case.inputs()
    assert_close(*reference(inputs), *exactly(inputs), dtype="float32")


def test_the_definition_by_hand() -> None:
    """In numpy, entry by entry: duplicates, wild slots, lengths, sinks."""
    inputs = dataclasses.replace(SMALL, num_wild=2, has_sink=True).inputs()
    layer = np.asarray(inputs.cache.kv_pages)[inputs.cache.layer].reshape(-1, 40)
    sink = np.asarray(inputs.sink)
    q = np.concatenate([inputs.cache.q_nope, inputs.cache.q_pe], axis=-1)[0]
    out, lse = reference(inputs)
    for i, (slots, count) in enumerate(zip(inputs.indices, inputs.topk_lens, strict=True)):
        rows = layer[[s for s in slots[:count] if 0 <= s < len(layer)]]
        scores = inputs.cache.sm_scale * q[i] @ rows.T  # [heads, keys]
        with np.errstate(divide="ignore", over="ignore"):
            total = np.exp(scores).sum(-1)
            np.testing.assert_allclose(lse[i], np.log(total), rtol=1e-5)
            weights = np.exp(scores) / (total + np.exp(sink))[:, None]
        np.testing.assert_allclose(out[i], weights @ rows[:, :32], atol=1e-5)


def test_a_list_of_the_whole_sequence_is_decode(backend) -> None:
    inputs = decode_inputs(seq_lens=(300,) * 3)
    q_nope, q_pe, pages, table, lens = inputs.args()
    place = jnp.arange(300)
    slots = table[:, place // 64] * 64 + place % 64
    kwargs = {"sm_scale": inputs.sm_scale, "return_lse": True, "backend": backend}
    with jax.default_device(device_of(backend)):
        q_nope, q_pe = q_nope[:, 0], q_pe[:, 0]
        got = jax_mla.sparse_attention(q_nope, q_pe, pages, slots, **kwargs)
        want = jax_mla.decode(q_nope, q_pe, pages, table, lens, **kwargs)
    out, want_out = (np.asarray(x[0], np.float32) for x in (got, want))
    np.testing.assert_allclose(out, want_out, atol=2e-2 * np.abs(want_out).max())
    np.testing.assert_allclose(got[1], want[1], atol=1e-3)


@pytest.mark.against_reference
def test_batch_invariant(backend) -> None:
    """A query's bits are the same alone and among others."""
    inputs = SparseCase("one", (130, 1, 100, 64) * 10, batch_invariant=True).inputs()
    out, lse = run(inputs, backend, batch_invariant=True)
    for i in (0, 2):
        alone = dataclasses.replace(
            inputs,
            cache=dataclasses.replace(
                inputs.cache,
                q_nope=inputs.cache.q_nope[:, i : i + 1],
                q_pe=inputs.cache.q_pe[:, i : i + 1],
            ),
            indices=inputs.indices[i : i + 1],
            topk_lens=inputs.topk_lens[i : i + 1],
        )
        got, got_lse = run(alone, backend, batch_invariant=True)
        np.testing.assert_array_equal(got[0].view(np.uint8), out[i].view(np.uint8))
        np.testing.assert_array_equal(got_lse[0], lse[i])


def test_lengths_on_the_device_are_clamped(backend) -> None:
    inputs = SparseCase("lens", (130, 0, 130, 0), num_heads=8).inputs()
    wild = dataclasses.replace(inputs, topk_lens=np.array([2**31 - 1, -1, 131, -(2**31)], np.int32))
    for a, b in zip(run(wild, backend), run(inputs, backend), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_lengths_all_entries_count(backend) -> None:
    inputs = SparseCase("all", (9, 9), k=9, num_heads=8).inputs()
    kwargs = {**inputs.kwargs(), "return_lse": True, "backend": backend}
    del kwargs["topk_lens"]
    with jax.default_device(device_of(backend)):
        got = jax_mla.sparse_attention(*inputs.args(), **kwargs)
    for a, b in zip(got, run(inputs, backend), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", [None, 2], ids=["tokens", "by_sequence"])
def test_eager(form) -> None:
    inputs = dataclasses.replace(SMALL, q_len=form, has_sink=True, num_wild=1).inputs()
    got = jax_mla.sparse_attention(*inputs.args(), **inputs.kwargs(), return_lse=True)
    check(got, reference(inputs))
    out = jax_mla.sparse_attention(*inputs.args(), **inputs.kwargs())
    np.testing.assert_array_equal(out, got[0])


@pytest.mark.quick(2)
@pytest.mark.parametrize("begin", [0, 3, 2**30, 2**31 - 1, -1, -(2**31)])
def test_a_part_of_the_pool(begin) -> None:
    """Slots on pages before and behind the pool are no keys, whatever page_begin is."""
    inputs = dataclasses.replace(SMALL, topk_lens=(12,) * 4, num_wild=2).inputs()
    q_nope, q_pe, pool, indices = inputs.args()
    pool = jnp.nan_to_num(pool, nan=0.5)
    fun = functools.partial(jax_mla.sparse_attention, **inputs.kwargs(), return_lse=True)
    got = jax.jit(fun)(q_nope, q_pe, pool, indices, page_begin=jnp.int32(begin))
    local = np.asarray(indices, np.int64) - begin * 4
    is_key = (np.asarray(indices) >= 0) & (0 <= local) & (local < pool.shape[1] * 4) & (begin >= 0)
    np.testing.assert_array_equal(np.isneginf(got[1]).all(axis=1), ~is_key.any(axis=1))
    want = jax_mla.reference.sparse_attention(
        q_nope, q_pe, pool, jnp.asarray(np.where(is_key, local, -1), jnp.int32),
        **inputs.kwargs(), return_lse=True,
    )  # fmt: skip
    check(got, want)


@pytest.mark.quick(2)
@pytest.mark.parametrize("mapped", ["query", "lists", "layer", "pools"])
@pytest.mark.parametrize("form", [None, 2], ids=["tokens", "by_sequence"])
def test_vmap(mapped, form) -> None:
    inputs = dataclasses.replace(SMALL, q_len=form, has_sink=True, num_wild=1).inputs()
    q_nope, q_pe, pool, indices = inputs.args()
    kwargs = inputs.kwargs()
    lens, layer = kwargs.pop("topk_lens"), kwargs.pop("layer")
    args = [q_nope, q_pe, pool, indices, lens, layer]
    clean = jnp.nan_to_num(pool, nan=0.5)
    axes: list[int | None] = [None] * 6
    if mapped == "query":
        args[0], args[1], axes[:2] = jnp.stack([q_nope, -q_nope]), jnp.stack([q_pe, q_pe]), [0, 0]
    elif mapped == "lists":
        args[3], args[4] = jnp.stack([indices, indices[::-1]]), jnp.stack([lens, lens[::-1]])
        axes[3:5] = [0, 0]
    elif mapped == "layer":
        args[2], args[5], axes[5] = clean, jnp.array([1, 0], jnp.int32), 0
    else:
        args[2], axes[2] = jnp.stack([clean, clean * 2]), 0

    def call(fun, q_nope, q_pe, pool, indices, lens, layer):
        return fun(
            q_nope, q_pe, pool, indices, topk_lens=lens, layer=layer, return_lse=True, **kwargs
        )

    op = functools.partial(call, jax_mla.sparse_attention)
    got = jax.jit(jax.vmap(op, in_axes=axes))(*args)
    for i in range(2):
        one = [x if axis is None else x[i] for x, axis in zip(args, axes, strict=True)]
        want = call(jax_mla.reference.sparse_attention, *one)
        check([x[i] for x in got], want)


def test_scan_over_layers() -> None:
    inputs = SMALL.inputs()
    q_nope, q_pe, pool, indices = inputs.args()
    pool, kwargs = jnp.nan_to_num(pool, nan=0.5), inputs.kwargs()
    del kwargs["layer"]

    def step(fun, carry, layer):
        return carry + fun(carry, q_pe, pool, indices, layer=layer, **kwargs), None

    layers = jnp.arange(2, dtype=jnp.int32)
    got, _ = jax.lax.scan(functools.partial(step, jax_mla.sparse_attention), q_nope, layers)
    want = q_nope
    for layer in range(2):
        want, _ = step(jax_mla.reference.sparse_attention, want, layer)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_export() -> None:
    inputs = SMALL.inputs()
    fun = jax.jit(functools.partial(jax_mla.sparse_attention, **inputs.kwargs(), return_lse=True))
    checks = [export.DisabledSafetyCheck.custom_call("jax_mla_decode")]
    exported = export.export(fun, platforms=("cpu",), disabled_checks=checks)(*inputs.args())
    restored = export.deserialize(exported.serialize())
    check(restored.call(*inputs.args()), reference(inputs))


def test_the_pool_is_not_copied() -> None:
    """Seen as pages of one token, a pool is the same bytes."""
    inputs = dataclasses.replace(SMALL, num_tokens=4000).inputs()
    fun = functools.partial(jax_mla.sparse_attention, **inputs.kwargs())
    compiled = jax.jit(fun).lower(*inputs.args()).compile()
    stats = compiled.memory_analysis()
    assert stats is not None and stats.temp_size_in_bytes < inputs.args()[2].nbytes


def test_no_derivative() -> None:
    inputs = SMALL.inputs()
    q_nope, *rest = inputs.args()
    with pytest.raises(NotImplementedError, match="sparse_attention is for inference"):
        jax.grad(lambda q: jax_mla.sparse_attention(q, *rest, **inputs.kwargs()).sum())(q_nope)
