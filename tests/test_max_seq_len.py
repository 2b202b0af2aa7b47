"""The bound of the lengths, max_seq_len: it is the width of a narrower page table, for all ops.

What each backend does with lengths beyond it is in the cases (`jax_mla/testing/cases.py`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from sharded import KINDS, context, make_mesh, mesh_argument, put

import jax_mla
from jax_mla._runtime import _backends, _ffi
from jax_mla.testing.cases import Case, RaggedCase
from jax_mla.testing.hlo import collectives
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.ragged import ragged_inputs

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

# Without types, because a test unpacks whatever its options give.
decode: Any = jax_mla.decode
attend: Any = jax_mla.ragged_paged_attention
reference: Any = jax_mla.reference.decode
ragged_reference: Any = jax_mla.reference.ragged_paged_attention

CASE = Case("case", (0, 5, 128, 300, 1000), d_ckv=256, d_kpe=32, q_len=2, table_tokens=4096)
STEP = RaggedCase(
    "step", ((1, 40), (9, 64), (0, 5), (20, 300)), num_padding=3, page_size=16, table_tokens=4096
)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def skip_reference(backend: str) -> None:
    if backend == "reference":
        pytest.skip("reference: products of another shape may round otherwise")


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_decode_is_that_of_a_narrower_table(num_heads, backend, on_device) -> None:
    """Bit for bit, so whatever a backend chooses goes by the bound and not by the table."""
    skip_reference(backend)
    inputs = dataclasses.replace(CASE, num_heads=num_heads).inputs()
    *args, table, lens = inputs.args()
    options = {**inputs.kwargs(), "return_lse": True, "backend": backend}
    for bound in (64, 256, 1024):
        got = decode(*args, table, lens, **options, max_seq_len=bound)
        assert_same(got, decode(*args, table[:, : bound // 64], lens, **options))


@pytest.mark.parametrize("is_uniform", [False, True])
def test_ragged_is_that_of_a_narrower_table(is_uniform, backend, on_device) -> None:
    skip_reference(backend)
    case = dataclasses.replace(STEP, seqs=((2, 40), (2, 64), (2, 65), (2, 300)), num_padding=0)
    inputs = (dataclasses.replace(case, is_uniform=True) if is_uniform else STEP).inputs()
    *args, table, lens, bounds, _ = inputs.args()
    args[4] = jnp.nan_to_num(args[4])  # rows that are not written would be NaN among the keys
    options = {**inputs.kwargs(), "return_lse": True, "backend": backend}
    for bound in (16, 64, 304):
        got = attend(*args, table, lens, bounds, **options, max_seq_len=bound)
        assert_same(got, attend(*args, table[:, : bound // 16], lens, bounds, **options))


@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_batch_invariant_decode_does_not_depend_on_it(
    num_splits, num_heads, backend, on_device
) -> None:
    """Nor on the width of the table: splits follow a sequence's own length."""
    skip_reference(backend)
    for longest in (1, 64, 65, 128, 130, 500):
        lens = (longest, longest // 2, 0, 1)
        inputs = dataclasses.replace(CASE, seq_lens=lens, num_heads=num_heads).inputs()
        *args, table, lens = inputs.args()
        options = {**inputs.kwargs(), "return_lse": True, "backend": backend}
        options |= {"batch_invariant": True, "num_splits": num_splits}
        want = decode(*args, table, lens, **options)
        for bound in (longest, longest + 1, 2 * longest, 700):
            assert_same(decode(*args, table, lens, **options, max_seq_len=bound), want)
        assert_same(decode(*args, table[:, : -(-longest // 64)], lens, **options), want)


def test_batch_invariant_ragged_does_not_depend_on_it(backend, on_device) -> None:
    skip_reference(backend)
    inputs = STEP.inputs()
    options = {**inputs.kwargs(), "batch_invariant": True, "return_lse": True, "backend": backend}
    want = attend(*inputs.args(), **options)
    for bound in (300, 301, 512, 4000):
        assert_same(attend(*inputs.args(), **options, max_seq_len=bound), want)


def test_pages_behind_it_are_not_read_and_ids_there_may_be_wild(backend, on_device) -> None:
    """The cases have pages of NaN behind the bound; here they do not exist."""
    inputs = dataclasses.replace(CASE, max_seq_len=128).inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    options = {**inputs.kwargs(), "return_lse": True, "backend": backend}
    want = decode(q_nope, q_pe, pool, table, lens, **options)
    for wild in (2147480000, -1, pool.shape[0]):
        got = decode(q_nope, q_pe, pool, table.at[:, 2:].set(wild), lens, **options)
        assert_same(got, want)


def test_a_bound_that_the_table_has_no_place_for_changes_nothing() -> None:
    """It does not even make another program."""
    inputs, step = CASE.inputs(), STEP.inputs()
    capacity = inputs.page_table.shape[1] * 64
    for (
        op,
        given,
    ) in ((decode, inputs), (attend, step)):
        programs = {
            jax.jit(functools.partial(op, **given.kwargs(), max_seq_len=bound))
            .lower(*given.args()).as_text()
            for bound in (None, capacity, capacity + 1, np.int64(2**40))
        }  # fmt: skip
        assert len(programs) == 1


def test_scratch_is_sized_for_it() -> None:
    """Python and the handler ask the same function, with the bound among the facts of the call."""
    call = functools.partial(
        _backends.DecodeCall, "bfloat16", 4, 1, 128, 512, 64, 64, num_splits=64
    )
    narrow, wide = call(16), call(2560)
    bounded = call(2560, max_seq_len=1024)
    scratch = functools.partial(_backends.scratch_shape, "jax_mla.decode")
    for num_bytes in (lambda c: scratch(c)[0], lambda c: _backends.ragged_bytes(c, 64)[0]):
        assert num_bytes(bounded) == num_bytes(narrow) < num_bytes(wide)
        assert num_bytes(call(2560, max_seq_len=2**30)) == num_bytes(wide)
    # As lowered for any width: enough for every table, and no more than the bound needs.
    symbolic = export.symbolic_shape("pages")[0]
    assert scratch(call(symbolic, max_seq_len=1024)) == scratch(narrow)


def test_the_schedule_goes_by_it() -> None:
    extension = _ffi.extension()

    def items(lens: list[int], **widths: int) -> list[tuple[int, ...]]:
        shape = extension.DecodeShape(
            dtype="bfloat16", batch=len(lens), q_len=1, num_heads=16, d_ckv=512, d_kpe=64,
            page_size=64, **widths,
        )  # fmt: skip
        found = extension.schedule(
            shape, lens, block_m=16, num_ctas=132, seq_cost=1, max_single_blocks=66,
            scratch_bytes=extension.decode_scratch_bytes(shape),
        )  # fmt: skip
        return [(i.worker, i.seq_idx, i.block_begin, i.block_end, i.slot) for i in found]

    lens = [1024, 900, 5000, 0]
    wide = items(lens, max_pages_per_seq=2560, max_seq_len=1024)
    assert wide == items(lens, max_pages_per_seq=16)
    assert max(end for _, _, _, end, _ in wide) == 16
    assert items(lens, max_pages_per_seq=2560) != wide


# ---- In JAX: the bound travels with the op -----------------------------------------------------

H, D_CKV, D_KPE, SIZE, BOUND = 8, 32, 8, 4, 9
INPUTS = decode_inputs(
    seq_lens=(0, 5, 16, 11), q_len=2, num_heads=H, d_ckv=D_CKV, d_kpe=D_KPE, page_size=SIZE,
    dtype="float32", num_layers=2, page_multiple=8, table_tokens=100, max_seq_len=BOUND,
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "num_heads": H, "d_ckv": D_CKV, "d_kpe": D_KPE, "page_size": SIZE, "dtype": "float32",
    "num_layers": 2, "page_multiple": 8, "table_tokens": 100, "max_seq_len": BOUND,
}  # fmt: skip
STEPS = {
    "uniform": ragged_inputs(seqs=((2, 5), (2, 16), (2, 2), (2, 9)), is_uniform=True, **SHAPE),
    "ragged": ragged_inputs(seqs=((1, 5), (4, 16), (0, 7), (2, 9)), num_padding=1, **SHAPE),
}
OPTIONS = {**INPUTS.kwargs(), "return_lse": True}


def check(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


@functools.cache
def by_definition() -> Any:
    """By lengths that are within the bound already."""
    *args, lens = INPUTS.args()
    options = {k: v for k, v in OPTIONS.items() if k != "max_seq_len"}
    return reference(*args, jnp.clip(lens, 0, BOUND), **options)


def test_reference() -> None:
    check(reference(*INPUTS.args(), **OPTIONS), by_definition())


def test_eager_and_jit() -> None:
    check(decode(*INPUTS.args(), **OPTIONS), by_definition())
    check(jax.jit(functools.partial(decode, **OPTIONS))(*INPUTS.args()), by_definition())
    fun = jax.jit(decode, static_argnames=("sm_scale", "return_lse", "max_seq_len"))
    check(fun(*INPUTS.args(), **OPTIONS), by_definition())


def test_vmap() -> None:
    q_nope, q_pe, pool, table, lens = INPUTS.args()
    fun = jax.vmap(functools.partial(decode, **OPTIONS), in_axes=(0, 0, None, 0, 0))
    two = [jnp.stack([x, x[::-1]]) for x in (q_nope, q_pe, table, lens)]
    got = fun(two[0], two[1], pool, *two[2:])
    check([x[0] for x in got], by_definition())
    check([x[1][::-1] for x in got], by_definition())


SPLITS = [("dp", None), (None, "cp"), ("dp", "cp"), (None, ("dp", "cp"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "pages"), SPLITS)
@pytest.mark.parametrize("has_mesh_argument", [False, True])
def test_sharded_decode(has_mesh_argument, batch, pages, kind) -> None:
    """It bounds the length of the whole sequence, wherever its pages are."""
    mesh = make_mesh(kind)
    query = P(batch, None, "tp")
    axes = mesh_argument(mesh, batch=batch, heads="tp", pages=pages) if has_mesh_argument else None
    with context(mesh, kind):
        args = put(INPUTS.args(), mesh, (query, query, P(None, pages), P(batch), P(batch)))
        check(jax.jit(functools.partial(decode, **OPTIONS, mesh=axes))(*args), by_definition())


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("batch", "pages"), SPLITS)
def test_sharded_step(batch, pages, name, kind) -> None:
    if batch is not None and name == "ragged":
        pytest.skip("sequences are split without cu_q_lens only")
    inputs = STEPS[name]
    args = [x if x is None else jnp.nan_to_num(x) for x in inputs.args()[:8]]
    args = args if name == "ragged" else args[:7]
    options: dict[str, Any] = {**inputs.kwargs(), "return_lse": True}
    want = ragged_reference(*args, **options)
    rows, query, mesh = P(batch), P(batch, "tp"), make_mesh(kind)
    specs = (query, query, rows, rows, P(None, pages), rows, rows, P())[: len(args)]
    with context(mesh, kind):
        got = jax.jit(functools.partial(attend, **options))(*put(args, mesh, specs))
    check(got[:2], want[:2])
    assert_same(got[2], want[2])


@pytest.mark.parametrize("is_pages_first", [True, False])
def test_parts_of_the_pool_by_hand(is_pages_first) -> None:
    """With page_begin, in a manual region or not, it is a bound of global lengths too."""
    q_nope, q_pe, pool, table, lens = INPUTS.args()
    half = pool.shape[1] // 2
    parts = [
        decode(q_nope, q_pe, part, table, lens, page_begin=begin, **OPTIONS)
        for begin, part in ((0, pool[:, :half]), (half, pool[:, half:]))
    ]
    parts = parts if is_pages_first else parts[::-1]
    check(jax_mla.merge(*(jnp.stack(x) for x in zip(*parts, strict=True))), by_definition())


def test_manual_region() -> None:
    mesh = make_mesh()

    def local(q_nope, q_pe, pool, table, lens):
        begin = jax.lax.axis_index("cp") * pool.shape[1]
        out, lse = decode(q_nope, q_pe, pool, table, lens, page_begin=begin, **OPTIONS)
        return jax_mla.merge(out, lse, axis_name="cp")

    query = P("dp", None, "tp")
    fun = jax.shard_map(
        local, mesh=mesh, in_specs=(query, query, P(None, "cp"), P("dp"), P("dp")),
        out_specs=(query, query),
    )  # fmt: skip
    check(jax.jit(fun)(*INPUTS.args()), by_definition())


def test_local_pages() -> None:
    """Both groups have the same part of the pool, under the same ids."""
    mesh = make_mesh()
    q_nope, q_pe, pool, table, lens = INPUTS.args()
    twice = [jnp.concatenate([x, x]) for x in (q_nope, q_pe, table, lens)]
    args = twice[0], twice[1], jnp.concatenate([pool, pool], axis=1), *twice[2:]
    axes = mesh_argument(mesh, batch="dp", local_pages="dp")
    query = P("dp")
    placed = put(args, mesh, (query, query, P(None, "dp"), P("dp"), P("dp")))
    compiled = jax.jit(functools.partial(decode, **OPTIONS, mesh=axes)).lower(*placed).compile()
    assert collectives(compiled) == []
    got = compiled(*placed)
    check([x[:4] for x in got], by_definition())
    check([x[4:] for x in got], by_definition())


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_export_with_a_table_of_any_width(name) -> None:
    """The bound is a number of the program; a narrower table bounds the lengths as well."""
    args = INPUTS.args()
    pages = export.symbolic_shape("pages")[0]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    shapes[3] = jax.ShapeDtypeStruct((4, pages), jnp.int32)
    target = export.DisabledSafetyCheck.custom_call("jax_mla_decode")
    fun = jax.jit(functools.partial(decode, **OPTIONS, backend=name))
    exported = export.export(fun, platforms=("cpu",), disabled_checks=[target])(*shapes)
    options = {k: v for k, v in OPTIONS.items() if k != "max_seq_len"}
    for width in (1, 2, 3, 25):
        *front, table, lens = args
        got = exported.call(*front, table[:, :width], lens)
        lens = jnp.clip(lens, 0, min(BOUND, width * SIZE))
        check(got, reference(*front, table, lens, **options))


def test_check_values_knows_it() -> None:
    pool, table = jnp.zeros((8, SIZE, 40)), jnp.zeros((2, 4), jnp.int32)
    lens = jnp.array([5, 10], jnp.int32)
    jax_mla.check_values(pool, table, seq_lens=lens, max_seq_len=10)
    message = r"expected lengths that fit max_seq_len in \[0, 9\], got 10 for sequence 1"
    with pytest.raises(ValueError, match=message):
        jax_mla.check_values(pool, table, seq_lens=lens, max_seq_len=9)
