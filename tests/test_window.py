"""Sliding windows and soft caps: meshes, vmap, exports, and what a call costs.

What each backend computes is in the cases (`jax_mla/testing/cases.py`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_mla
from jax_mla.ops.decode import primitive, window
from jax_mla.testing.cases import Case, RaggedCase
from jax_mla.testing.compare import assert_close, decode_exactly
from jax_mla.testing.hlo import num_copies
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.run import cpu_mesh

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

# Without types, because a test unpacks whatever its options give.
decode: Any = jax_mla.decode
attend: Any = jax_mla.ragged_paged_attention

CASE = Case(
    "case", (0, 5, 40, 300), d_ckv=256, d_kpe=32, page_size=16, dtype="float32", num_heads=4,
    sliding_window=50,
)  # fmt: skip
MASKS = [{"sliding_window": 50}, {"sliding_window": 50, "soft_cap": 0.7}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("axes", [{"cp": 4}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_meshes(axes, q_len, mask) -> None:
    """Also pages over devices: most of those in the window are absent on each."""
    inputs = decode_inputs(
        seq_lens=CASE.seq_lens, q_len=q_len, num_heads=4, d_ckv=256, d_kpe=32, page_size=16,
        dtype="float32", sliding_window=50, page_multiple=4,
    )  # fmt: skip
    mesh = cpu_mesh(tuple(axes.values()), tuple(axes))
    fun = functools.partial(decode, **inputs.kwargs(), **mask, return_lse=True, mesh=mesh)
    out, lse = jax.jit(fun)(*inputs.args())
    assert_close(out, lse, *decode_exactly(inputs, **mask), dtype="float32")


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_new_rows_on_a_mesh_with_pages_split(mask) -> None:
    case = RaggedCase("step", ((2, 9), (2, 200), (2, 70)), is_uniform=True, **mask)
    inputs = dataclasses.replace(case, dtype="float32").inputs()
    *rows, pool, table, lens, _, _ = inputs.args()
    pool = jnp.pad(pool, [(0, -len(pool) % 4), (0, 0), (0, 0)])
    fun = functools.partial(attend, **inputs.kwargs(), **mask, return_lse=True)
    want = jax.jit(fun)(*rows, pool, table, lens)
    got = jax.jit(functools.partial(fun, mesh=cpu_mesh((4,), ("cp",))))(*rows, pool, table, lens)
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(np.isnan(got[2]), np.isnan(want[2]))


@pytest.mark.parametrize("axes", [None, {"cp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_raw_rows_of_a_decode_step(axes) -> None:
    """One new row a sequence is written before, in place; the result is that of a ragged step."""
    case = RaggedCase(
        "step", ((1, 9), (1, 200), (1, 70), (1, 1)), dtype="float32", sliding_window=50, num_heads=4
    )
    inputs = case.inputs()
    *rows, pool, table, lens, bounds, _ = inputs.args()
    pool = jnp.pad(pool, [(0, -len(pool) % 4), (0, 0), (0, 0)])
    fun = functools.partial(
        attend, **inputs.kwargs(), sliding_window=50, norm_weight=jnp.linspace(0.5, 2, 256),
        rope_table=jax_mla.rope_table(256, 32), rope_interleaved=True,
    )  # fmt: skip
    want = jax.jit(fun)(*rows, pool, table, lens, bounds)
    mesh = {} if axes is None else {"mesh": cpu_mesh(tuple(axes.values()), tuple(axes))}
    jitted = jax.jit(functools.partial(fun, **mesh), donate_argnums=4)
    text_of = jitted.lower(*rows, pool, table, lens).compile()
    assert axes is not None or num_copies(text_of, pool.shape) == 0
    out, new = jitted(*rows, jnp.array(pool), table, lens)
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(new, want[1], atol=1e-5)


@pytest.mark.parametrize("mapped", ["queries", "lens", "pools"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_vmap(mask, mapped) -> None:
    inputs = CASE.inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    fun = functools.partial(decode, **inputs.kwargs(), **mask)
    args = {
        "queries": (jnp.stack([q_nope, -q_nope]), jnp.stack([q_pe, q_pe]), pool, table, lens),
        "lens": (q_nope, q_pe, pool, table, jnp.stack([lens, lens // 2])),
        "pools": (q_nope, q_pe, jnp.stack([pool, 2 * pool]), table, lens),
    }[mapped]
    if mapped == "lens":  # a shorter sequence has its window where the inputs are NaN
        args = (*args[:2], jnp.nan_to_num(pool), jnp.clip(table, 0, len(pool) - 1), args[4])
    axes = {"queries": (0, 0, None, None, None), "lens": (*[None] * 4, 0), "pools": (
        None, None, 0, None, None)}[mapped]  # fmt: skip
    got = jax.vmap(fun, axes)(*args)
    for i in range(2):
        one = [x if axis is None else x[i] for x, axis in zip(args, axes, strict=True)]
        np.testing.assert_allclose(got[i], fun(*one), atol=1e-5)


@pytest.mark.parametrize("q_len", [1, 2])
def test_bits_do_not_depend_on_the_table(q_len) -> None:
    """With batch_invariant, on the CPU always: neither on its width nor on max_seq_len."""
    inputs = dataclasses.replace(CASE, q_len=q_len, table_tokens=640).inputs()
    *args, table, lens = inputs.args()
    call = functools.partial(decode, **inputs.kwargs(), sliding_window=50, batch_invariant=True)
    want = call(*args, table, lens)
    for bound in (304, 320, 512, 631):
        np.testing.assert_array_equal(call(*args, table, lens, max_seq_len=bound), want)
        pages = -(-bound // 16)
        np.testing.assert_array_equal(call(*args, table[:, :pages], lens), want)


def test_a_window_that_hides_nothing_is_the_same_program() -> None:
    inputs = CASE.inputs()

    def program(window: int | None) -> str:
        fun = functools.partial(decode, **inputs.kwargs(), sliding_window=window)
        return jax.jit(fun).lower(*inputs.args()).as_text()

    plain = program(None)
    assert program(2**40) == program(304) == plain
    assert program(303) != plain


@pytest.mark.parametrize(("q_len", "width"), [(1, 512), (4, 9)])
def test_kernels_get_tables_of_the_window(q_len, width) -> None:
    """Slots of the tokens that one query sees, or pages that hold what several see."""
    i32 = np.dtype(np.int32)
    types = primitive.Operands(
        q_nope=jax.ShapeDtypeStruct((2, q_len, 16, 512), jnp.bfloat16),
        q_pe=jax.ShapeDtypeStruct((2, q_len, 16, 64), jnp.bfloat16),
        page_table=jax.ShapeDtypeStruct((2, 512), i32),
        seq_lens=jax.ShapeDtypeStruct((2,), i32),
        layer=jax.ShapeDtypeStruct((1,), i32),
        page_begin=jax.ShapeDtypeStruct((1,), i32),
        kv_pages=(jax.ShapeDtypeStruct((4096, 64, 576), jnp.bfloat16),),
    )
    params = primitive.Params(sm_scale=1.0, backend="", has_layer=False, sliding_window=512)
    found, _ = primitive.types_in_window(types, params)
    assert found.page_table.shape == (2, width + (q_len > 1))


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("bound", [100, 640, 1000])
def test_shortened_lengths_keep_what_they_mean(page_size, bound) -> None:
    short = window.width(50, 3, page_size, bound)
    if short is None:
        assert bound <= 52 + page_size - 1
        return
    lens = np.array([-7, 0, 3, 52, 99, bound, bound + 1, 2**31 - 1, -(2**31)], np.int32)
    table = np.arange(-(-bound // page_size), dtype=np.int32)[None].repeat(len(lens), 0)
    found, new = window.shorten(
        jnp.asarray(table), jnp.asarray(lens), window=50, q_len=3, page_size=page_size,
        bound=bound, short_bound=short,
    )  # fmt: skip
    assert found.shape[1] == -(-short // page_size)
    for old, length, pages in zip(lens.tolist(), np.asarray(new).tolist(), found, strict=True):
        assert (length > short) == (old > bound) and (length < 0) == (old < 0)
        old, length = min(max(old, 0), bound), min(max(length, 0), short)
        for back in range(1, min(old, 52) + 1):  # the tokens that some query sees, from the end
            t, column = length - back, (length - back) // page_size
            assert int(pages[column]) * page_size + t % page_size == old - back


def test_freed_pages_are_no_error_on_the_host() -> None:
    inputs = CASE.inputs()
    assert (inputs.page_table[3, :15] < 0).any() or (inputs.page_table[3, :15] > 1000).any()
    args = inputs.q_nope, inputs.q_pe, inputs.kv_pages, inputs.page_table, inputs.seq_lens
    out = decode(*args, **inputs.kwargs(), sliding_window=50)
    assert np.isfinite(np.asarray(out)).all()
    with pytest.raises(ValueError, match="page_table: expected ids of the pool's pages"):
        decode(*args, **inputs.kwargs(), sliding_window=90)


@pytest.mark.parametrize("q_len", [1, 2])
def test_export_with_symbolic_batch_and_table(q_len) -> None:
    inputs = dataclasses.replace(CASE, q_len=q_len).inputs()
    fun = jax.jit(functools.partial(decode, **inputs.kwargs(), sliding_window=50))
    shapes = export.symbolic_args_specs(
        inputs.args(), (f"b, {q_len}, 4, 256", f"b, {q_len}, 4, 32", "...", "b, n", "b")
    )
    targets = [export.DisabledSafetyCheck.custom_call(t) for t in ("jax_mla_decode",)]
    exported = export.export(fun, platforms=["cpu"], disabled_checks=targets)(*shapes)
    np.testing.assert_array_equal(exported.call(*inputs.args()), fun(*inputs.args()))
