"""`index_topk` against its definition and an oracle in numpy, on every backend."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.index import (
    INDEX_CASES,
    IndexCase,
    IndexInputs,
    as_dtype,
    check_lists,
    check_scores,
    fp8_pages,
    oracle,
)
from jax_mla.testing.inputs import WILD_IDS
from jax_mla.testing.run import device_of

pytestmark = pytest.mark.usefixtures("no_rank_promotion")
index_topk: Any = jax_mla.index_topk  # without types, because options are made from dictionaries
CASES = {case.name: case for case in INDEX_CASES}
SMALL = IndexCase(
    "small", (20, 3, 0, 9), q_lens=2, k=5, d=16, dtype="float32", num_layers=2, num_wild=1
)
MIXED = dataclasses.replace(
    SMALL, seq_lens=(20, 3, 0, 9), q_lens=(1, 3, 0, 3), num_padding=1, name="small_mixed"
)


def refused(case: IndexCase, backend: str) -> str:
    """Return why a CUDA backend does not take a case; empty elsewhere."""
    if backend in ("cpu", "reference"):
        return ""
    if case.dtype in ("float16", "float32"):
        return "keys in float16 and float32 are for the CPU"
    return ""


def run(inputs: IndexInputs, backend: str | None = None, **kwargs):
    with jax.default_device(device_of(backend or "cpu")):
        fun = functools.partial(index_topk, **inputs.kwargs(), backend=backend, **kwargs)
        return [np.asarray(x) for x in jax.jit(fun)(*inputs.args())]


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, backend) -> None:
    """Slot by slot: values are integers, so ties and scores are exact."""
    case = CASES[name]
    if reason := refused(case, backend):
        pytest.skip(f"{backend}: {reason}")
    if backend == "reference" and max(case.seq_lens) > 2500:
        pytest.skip("the definition sorts whole sequences, which takes long on a CPU")
    inputs = case.inputs()
    want = oracle(inputs)
    if case.name in ("zeros", "equal"):
        assert len(want[0].scores) == case.k and len(set(want[0].scores)) == 1
    slots, lens, scores = run(inputs, backend, return_scores=True)
    assert slots.dtype == lens.dtype == np.int32 and scores.dtype == np.float32
    check_lists((slots, lens), want, case.k)
    check_scores(scores, want, case.k)


@pytest.mark.parametrize("case", [SMALL, MIXED], ids=["uniform", "ragged"])
def test_positions(case, backend) -> None:
    if reason := refused(case, backend):
        pytest.skip(f"{backend}: {reason}")
    got = run(case.inputs(), backend, return_positions=True)
    check_lists(got, oracle(case.inputs()), case.k, positions=True)


def test_random_scores(backend) -> None:
    """With rounding: nothing that was left out is better than what was chosen, but for rounding."""
    case = IndexCase("random", (700, 20, 333), q_lens=2, k=64, num_heads=32, page_size=16)
    inputs, rng = case.inputs(), np.random.default_rng(5)
    keys = as_dtype(rng.standard_normal(inputs.keys.shape), "bfloat16")
    inputs = dataclasses.replace(
        inputs,
        q=as_dtype(rng.standard_normal(inputs.q.shape), "bfloat16"),
        weights=rng.standard_normal(inputs.weights.shape).astype(np.float32),
        index_pages=keys,
        keys=keys.astype(np.float64),
    )
    lists, lens, scores = run(inputs, backend, return_positions=True, return_scores=True)
    for t, (row, count, got) in enumerate(zip(lists, lens, scores, strict=True)):
        b, place = t // 2, int(inputs.seq_lens[t // 2]) - 2 + t % 2
        position = np.arange(place + 1)
        rows = inputs.keys[inputs.page_table[b, position // 16], position % 16]
        terms = inputs.weights[t] * np.maximum(rows @ inputs.q[t].astype(np.float64).T, 0)
        want = terms.sum(-1)
        rounding = np.abs(terms).sum(-1).max() * 2**-20
        assert count == min(len(position), 64)
        chosen = row[:count]
        assert (np.diff(chosen) > 0).all() and (row[count:] == -1).all()
        if len(position) <= 64:
            continue
        np.testing.assert_allclose(got, want[chosen], atol=rounding)
        assert want[chosen].min() >= np.delete(want, chosen).max() - rounding


@pytest.mark.quick(1)
def test_special_scores(backend) -> None:
    """-0 is 0, and a NaN is below every number: it is chosen only if nothing else is left."""
    keys = np.zeros((1, 8, 128), np.float32)
    keys[0, :, 0] = [np.nan, 1, 3e38, -1, 3e38, 0, 2, 1]
    heads = np.zeros((1, 2, 128), np.float32)
    heads[0, :, 0] = [1, -1]
    weights = np.array([[-1, -0.0]], np.float32)
    base = IndexCase("special", (8,), num_heads=2).inputs()

    def choose(keys, weights, k):
        inputs = dataclasses.replace(
            base, q=as_dtype(heads, "bfloat16"), weights=weights, k=k,
            index_pages=as_dtype(keys, "bfloat16"),
            page_table=np.zeros((1, 1), np.int32),
        )  # fmt: skip
        slots, lens = run(inputs, backend)
        return slots[0, : lens[0]].tolist()

    assert choose(keys, weights, 1) == [3]  # -0 and 0 are equal: the lower position
    assert choose(keys, weights, 2) == [3, 5]
    assert choose(keys, weights, 5) == [1, 3, 5, 6, 7]
    assert choose(keys, weights, 6) == [1, 2, 3, 5, 6, 7]  # of two that are lowest
    assert choose(keys, weights, 7) == [1, 2, 3, 4, 5, 6, 7]  # and no NaN


def test_a_score_is_never_minus_zero(backend) -> None:
    """That of a key in FP8 whose scale is 0, with a negative weight."""
    codes = np.full((1, 8 * 128), 0x38, np.uint8)  # ones
    pool = np.concatenate([codes, np.zeros((1, 8 * 4), np.uint8)], axis=1).reshape(1, 8, 132)
    inputs = dataclasses.replace(
        IndexCase("minus_zero", (8,), num_heads=1).inputs(), k=2, index_pages=pool,
        q=as_dtype(np.ones((1, 1, 128)), "bfloat16"), weights=np.full((1, 1), -1, np.float32),
        page_table=np.zeros((1, 1), np.int32),
    )  # fmt: skip
    slots, _, scores = run(inputs, backend, return_scores=True)
    assert slots.tolist() == [[0, 1]]
    np.testing.assert_array_equal(scores, 0)
    assert not np.signbit(scores).any()


def test_bits_do_not_depend_on_neighbours(backend) -> None:
    case = IndexCase("neighbours", (300, 40, 0, 90), k=16, page_size=16, num_heads=8)
    inputs, rng = case.inputs(), np.random.default_rng(1)
    inputs = dataclasses.replace(
        inputs, weights=rng.standard_normal(inputs.weights.shape).astype(np.float32)
    )
    together = run(inputs, backend, return_scores=True)
    for b in (0, 3):
        alone = dataclasses.replace(
            inputs, q=inputs.q[b : b + 1], weights=inputs.weights[b : b + 1],
            page_table=inputs.page_table[b : b + 1], seq_lens=inputs.seq_lens[b : b + 1],
        )  # fmt: skip
        for x, y in zip(run(alone, backend, return_scores=True), together, strict=True):
            np.testing.assert_array_equal(x[0], y[b])


# What may stand in cu_q_lens, seq_lens and num_seqs of a device. Sequence 2 is the one that is
# checked: nothing that the others hold disturbs it.
WILD_STEPS = {
    "lens": ([0, 2, 4, 7], [2**31 - 1, -5, 20], 3),
    "falling": ([5, -7, 4, 7], [9, 9, 20], 2**31 - 1),
    "past_the_end": ([0, 2, 4, 2**31 - 1], [-(2**31), 9, 20], 3),
}


@pytest.mark.parametrize("name", WILD_STEPS)
def test_wild_values_harm_no_other_sequence(name, backend) -> None:
    case = dataclasses.replace(
        SMALL, seq_lens=(20, 9, 20), q_lens=(2, 2, 3), dtype="bfloat16", d=128, num_layers=None
    )
    inputs = case.inputs()
    want = oracle(inputs)
    bounds, lens, num_seqs = WILD_STEPS[name]
    table = inputs.page_table.copy()
    table[:2] = np.resize(WILD_IDS, table[:2].shape)
    wild = dataclasses.replace(
        inputs, page_table=table, seq_lens=np.array(lens, np.int32),
        cu_q_lens=np.array(bounds, np.int32),
    )  # fmt: skip
    with jax.default_device(device_of(backend)):
        fun = functools.partial(index_topk, **wild.kwargs(), backend=backend)
        slots, found = jax.jit(fun)(*wild.args(), jnp.int32(num_seqs))
    first = {"falling": 5}.get(name, 4)
    check_lists((slots[first:], found[first:]), want[first:], case.k)
    assert (np.asarray(slots)[:first] == -1).all() and not np.asarray(found)[:first].any()


@pytest.mark.parametrize("num_seqs", [0, 2, -3, 2**31 - 1])
@pytest.mark.parametrize("case", [SMALL, MIXED], ids=["uniform", "ragged"])
def test_num_seqs(case, num_seqs) -> None:
    inputs = case.inputs()
    args = inputs.args() if case is MIXED else [*inputs.args(), None]
    fun = functools.partial(index_topk, **inputs.kwargs())
    got = jax.jit(lambda n: fun(*args, n))(jnp.int32(num_seqs))
    check_lists(got, oracle(inputs, min(max(num_seqs, 0), 4)), case.k)


@pytest.mark.parametrize("bound", [7, 20, 1000])
def test_max_seq_len(bound, backend) -> None:
    """A longer length is clamped to the bound, wherever it stands."""
    case = dataclasses.replace(SMALL, dtype="bfloat16", d=128)
    inputs = case.inputs()
    got = run(inputs, backend, max_seq_len=bound)
    lens = np.minimum(inputs.seq_lens, bound)
    check_lists(got, oracle(dataclasses.replace(inputs, seq_lens=lens)), case.k)


@pytest.mark.quick(3)
@pytest.mark.parametrize("begin", [0, 3, 2**29, 2**31 - 1, -1, -(2**31)])
def test_a_part_of_the_pool(begin, backend) -> None:
    """Only tokens on the pages at hand are chosen; their slots are global."""
    case = dataclasses.replace(SMALL, dtype="bfloat16", d=128)
    inputs = case.inputs()
    num_pages = len(inputs.scales)
    part = inputs.index_pages[:, 3 : num_pages - 2]
    here = dataclasses.replace(inputs, index_pages=part)
    slots, lens = run(here, backend, page_begin=jnp.int32(begin))
    local = inputs.page_table.astype(np.int64) - begin
    table = np.where((local >= 0) & (local < part.shape[1]) & (begin >= 0), local + 3, -1)
    seen = dataclasses.replace(inputs, page_table=table)
    want = oracle(seen)
    page = case.page_size * (begin - 3)  # the oracle has the pages of the part from 3 on
    want = [dataclasses.replace(x, slots=[s + page for s in x.slots]) for x in want]
    check_lists((slots, lens), want, case.k)


@pytest.mark.parametrize("layer", [-1, 2, 2**31 - 1])
def test_a_layer_outside_the_pool_has_no_tokens(layer, backend) -> None:
    case = dataclasses.replace(SMALL, dtype="bfloat16", d=128)
    inputs = case.inputs()
    with jax.default_device(device_of(backend)):
        fun = functools.partial(index_topk, k=5, backend=backend)
        slots, lens = jax.jit(lambda i: fun(*inputs.args(), layer=i))(jnp.int32(layer))
    assert (np.asarray(slots) == -1).all() and not np.asarray(lens).any()


def test_the_forms_agree() -> None:
    """[batch, q_len], tokens end to end, and the same with cu_q_lens."""
    inputs = SMALL.inputs()
    args, want = inputs.args(), oracle(inputs)
    by_sequence = [x.reshape(4, 2, *x.shape[1:]) for x in args[:2]]
    fun = functools.partial(index_topk, **inputs.kwargs())
    slots, lens, scores = fun(*by_sequence, *args[2:], return_scores=True)
    assert slots.shape == scores.shape == (4, 2, 5) and lens.shape == (4, 2)
    check_lists((slots, lens), want, 5)
    check_lists(fun(*args), want, 5)
    check_lists(fun(*args, jnp.array([0, 2, 4, 6, 8], jnp.int32)), want, 5)


def test_codes_for_plain_keys_are_numbers() -> None:
    """A query in e4m3 is taken as it is, exactly."""
    inputs = IndexCase("codes").inputs()
    codes = dataclasses.replace(inputs, q=as_dtype(inputs.q, "float8_e4m3fn"))
    check_lists(run(codes), oracle(inputs), inputs.k)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mapped", ["query", "sequences", "layer", "pool"])
@pytest.mark.parametrize("case", [SMALL, MIXED], ids=["uniform", "ragged"])
def test_vmap(mapped, case) -> None:
    inputs = case.inputs()
    args, pool = inputs.args(), jnp.nan_to_num(jnp.asarray(inputs.index_pages), nan=1.0)
    layer = jnp.int32(1)
    args[2] = pool
    axes: list[int | None] = [None] * len(args)
    layers_axis = None
    if mapped == "query":
        args[0], args[1], axes[0], axes[1] = jnp.stack([args[0], -args[0]]), args[1], 0, None
    elif mapped == "sequences":
        args[3] = jnp.stack([args[3], args[3][:, ::-1]], axis=1)
        args[4] = jnp.stack([args[4], args[4] // 2])
        axes[3], axes[4] = 1, 0
    elif mapped == "layer":
        layer, layers_axis = jnp.array([1, 0], jnp.int32), 0
    else:
        args[2], axes[2] = jnp.stack([pool, pool[:, ::-1]]), 0

    def call(fun, layer, *args):
        return fun(*args, k=5, layer=layer, return_scores=True)

    op = functools.partial(call, jax_mla.index_topk)
    got = jax.jit(jax.vmap(op, in_axes=(layers_axis, *axes)))(layer, *args)
    for i in range(2):
        one = [
            x if axis is None else jnp.take(x, i, axis=axis)
            for x, axis in zip(args, axes, strict=True)
        ]
        want = call(jax_mla.reference.index_topk, layer if layers_axis is None else layer[i], *one)
        for x, y in zip(got[:2], want[:2], strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_scan_over_layers() -> None:
    inputs = SMALL.inputs()
    args = inputs.args()
    args[2] = jnp.nan_to_num(args[2], nan=1.0)
    fun = functools.partial(index_topk, k=5)
    layers = jnp.arange(2, dtype=jnp.int32)
    _, got = jax.lax.scan(lambda _, i: (None, fun(*args, layer=i)), None, layers)
    for i in range(2):
        want = jax_mla.reference.index_topk(*args, k=5, layer=i)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x[i], y)


@pytest.mark.parametrize("case", [SMALL, MIXED], ids=["uniform", "ragged"])
def test_export_with_symbolic_sizes(case) -> None:
    inputs = case.inputs()
    fun = jax.jit(functools.partial(index_topk, **inputs.kwargs()))
    checks = [export.DisabledSafetyCheck.custom_call("jax_mla_index_topk")]
    args = inputs.args()
    if case is SMALL:
        args[:2] = [x.reshape(4, 2, *x.shape[1:]) for x in args[:2]]
        shapes = "b, 2, ...", "b, 2, ...", "...", "b, m", "b"
    else:
        shapes = "t, ...", "t, ...", "...", "b, m", "b", "b + 1"
    symbolic = export.symbolic_args_specs(tuple(args), shapes)
    exported = export.export(fun, platforms=("cpu",), disabled_checks=checks)(*symbolic)
    restored = export.deserialize(exported.serialize())
    check_lists([*restored.call(*args)], oracle(inputs), case.k)


def test_runs_the_kernel_and_names_the_backend() -> None:
    inputs = SMALL.inputs()
    before = _ffi.extension().call_counts()["index_topk_cpu"]
    index_topk(*inputs.args(), **inputs.kwargs())
    assert _ffi.extension().call_counts()["index_topk_cpu"] == before + 1


def test_x64() -> None:
    inputs = MIXED.inputs()
    with jax.enable_x64(True):
        got = run(inputs, "reference", return_scores=True)
        assert [x.dtype for x in got] == [np.int32, np.int32, np.float32]
        check_lists(got[:2], oracle(inputs), MIXED.k)
        check_lists(run(inputs, "cpu"), oracle(inputs), MIXED.k)


def test_no_derivative() -> None:
    inputs = SMALL.inputs()
    q, *rest = inputs.args()

    def total(q):
        return index_topk(q, *rest, **inputs.kwargs(), return_scores=True)[2].sum()

    with pytest.raises(NotImplementedError, match="index_topk is for inference"):
        jax.grad(total)(q)


def test_the_codes_of_the_definition_are_those_of_the_description() -> None:
    """A page in FP8, made from DeepGEMM's description, scores as the values that it stands for."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 4, 128)).astype(np.float32)
    largest = np.maximum(np.abs(keys).max(-1), 1e-4)
    scales = (largest / 448).astype(np.float32)
    codes = as_dtype(keys * (1 / scales)[..., None], "float8_e4m3fn")
    got = jax_mla.reference.encode_index_keys(jnp.asarray(keys), power_of_two_scales=False)
    np.testing.assert_array_equal(np.asarray(got[0]).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(got[1], scales)
    inputs = IndexInputs(
        q=as_dtype(rng.integers(-2, 3, (1, 4, 128)), "float8_e4m3fn"),
        weights=np.ones((1, 4), np.float32),
        index_pages=fp8_pages(codes, scales),
        page_table=np.array([[2, 0, 1]], np.int32),
        seq_lens=np.array([12], np.int32),
        cu_q_lens=None,
        k=5,
        layer=None,
        keys=codes.astype(np.float32),
        scales=scales,
    )
    check_lists(run(inputs, "cpu"), oracle(inputs), 5)


def test_scales_that_are_powers_of_two() -> None:
    x = np.zeros((4, 128), np.float32)
    x[:, 3] = [448, 449, 0, -1e-3]
    codes, scales = jax_mla.reference.encode_index_keys(jnp.asarray(x))
    assert scales.tolist() == [1, 2, 2.0**-22, 2.0**-18]
    x[0, 5], x[1, 3] = np.nan, np.inf
    codes, scales = jax_mla.reference.encode_index_keys(jnp.asarray(x))
    assert float(scales[0]) == 1 and float(codes[0, 5]) == 0 and np.isfinite(scales).all()
    assert float(codes[1, 3]) == 448


@pytest.mark.parametrize("k", [1, 8, 40])
def test_random_steps(k, backend) -> None:
    """Hundreds of queries in random mixes of lengths, chunks, padding and wild ids."""
    num_tokens, seqs, pages, size = 48, 12, 24, 8
    rng = np.random.default_rng(k)
    fun = jax.jit(functools.partial(index_topk, k=k, backend=backend, return_scores=True))
    with jax.default_device(device_of(backend)):
        for _ in range(3 if backend == "reference" else 12):
            keys = rng.integers(-1, 2, (pages, size, 128)).astype(np.float32)
            table = rng.integers(0, pages, (seqs, 4)).astype(np.int32)
            table[rng.random(table.shape) < 0.1] = rng.choice(WILD_IDS)
            q_lens = rng.multinomial(rng.integers(0, num_tokens + 1), np.full(seqs, 1 / seqs))
            q_lens = np.where(rng.random(seqs) < 0.3, 0, q_lens)
            inputs = IndexInputs(
                q=as_dtype(rng.integers(-1, 2, (num_tokens, 3, 128)), "bfloat16"),
                weights=rng.integers(-1, 2, (num_tokens, 3)).astype(np.float32),
                index_pages=as_dtype(keys, "bfloat16"),
                page_table=table,
                seq_lens=np.minimum(q_lens + rng.integers(0, 33, seqs), 32).astype(np.int32),
                cu_q_lens=np.cumsum([0, *q_lens]).astype(np.int32),
                k=k,
                layer=None,
                keys=keys,
                scales=np.ones((pages, size), np.float32),
            )
            num_seqs = int(rng.integers(0, seqs + 1))
            got = fun(*inputs.args(), jnp.int32(num_seqs))
            want = oracle(inputs, num_seqs)
            check_lists(got, want, k)
            check_scores(got[2], want, k)
