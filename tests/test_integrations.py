"""The entry points of other engines against the reference: operands, padding, shardings."""

import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla.integrations import tpu_interface
from jax_mla.testing import fp8
from jax_mla.testing.hlo import collectives, memory, num_copies, pointers
from jax_mla.testing.ragged import RaggedInputs, ragged_inputs
from jax_mla.testing.run import cpu_mesh

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

# Without types, because a test gives whatever an engine could.
head_major: Any = tpu_interface.mla_ragged_paged_attention
token_major: Any = tpu_interface.mla_ragged_paged_attention_v1
sglang: Any = tpu_interface.mla_ragged_paged_attention_sglang
reference: Any = functools.partial(jax_mla.reference.ragged_paged_attention, packs=True)

CACHE = 4  # the place of cache_kv among the arguments
D_CKV, D_KPE, PAGE, PACK = 128, 16, 8, 2
WILD = 2147480000
# As the engines do, tokens and sequences are padded: all groups have 4 sequences and 24 tokens.
STEPS = (
    ((1, 40), (9, 9), (6, 31)),
    ((1, 8), (1, 3), (1, 33), (1, 40)),
    ((24, 29),),
    ((0, 12), (3, 3)),
)
SEQS, TOKENS, PAGES, MAX_PAGES = 4, 24, 20, 5
FORMS = {"head_major": head_major, "token_major": token_major, "sglang": sglang}
forms = pytest.mark.parametrize("form", FORMS)


@functools.cache
def step(group: int = 0) -> RaggedInputs:
    """The inputs of one data-parallel group; what the kernel must not read is NaN or wild."""
    seqs = STEPS[group]
    return ragged_inputs(
        seqs=seqs, num_padding=TOKENS - sum(n for n, _ in seqs), num_absent=SEQS - len(seqs),
        num_heads=4, d_ckv=D_CKV, d_kpe=D_KPE, page_size=PAGE, dtype="float32", pack=PACK,
        padding=128 - D_KPE, table_tokens=MAX_PAGES * PAGE, seed=group,
    )  # fmt: skip


def packed_pages(inputs: RaggedInputs, num_seqs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return page_indices and cu_kv_lens as sglang-jax makes them, with wild values behind."""
    counts = [-(-int(n) // PAGE) for n in inputs.seq_lens[:num_seqs]]
    lists = [inputs.page_table[b, :n] for b, n in enumerate(counts)]
    pages = np.full(SEQS * MAX_PAGES, WILD, np.int32)
    pages[: sum(counts)] = np.concatenate(lists)
    sums = np.full(SEQS + 1, -WILD, np.int32)
    sums[: num_seqs + 1] = np.cumsum([0, *counts]) * PAGE
    return pages, sums


def engine_args(form: str, group: int = 0) -> list[Any]:
    """The operands as the engine has them, as numpy arrays."""
    inputs, num_seqs = step(group), len(STEPS[group])
    given: Any = inputs.kv_pages
    pool = np.full((PAGES, *given.shape[1:]), np.nan, given.dtype)
    pool[: len(given)] = given
    bounds: Any = inputs.cu_q_lens
    rows = [inputs.q_nope, inputs.q_pe, inputs.ckv, inputs.kpe, pool, inputs.seq_lens]
    distribution = np.array([0, 0, num_seqs], np.int32)
    if form == "head_major":
        rows[0] = rows[0].transpose(1, 0, 2)
    if form == "sglang":
        pages, sums = packed_pages(inputs, num_seqs)
        return [*rows, pages, bounds, sums, distribution]
    return [*rows, inputs.page_table.reshape(-1), bounds, distribution]


@functools.cache
def want(group: int = 0) -> list[np.ndarray]:
    """Return out, token-major, and the pool, by definition."""
    *rows, _, table, lens, bounds, _ = step(group).args()
    pool = jnp.asarray(engine_args("token_major", group)[CACHE])
    num_seqs = len(STEPS[group])
    return [
        np.asarray(x) for x in reference(*rows, pool, table, lens, bounds, num_seqs, sm_scale=0.2)
    ]


def assert_same_pool(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8)
    )


def check(form: str, got: Any, group: int = 0) -> None:
    out, pool = got
    expected, expected_pool = want(group)
    out = np.swapaxes(out, 0, 1) if form == "head_major" else out
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert_same_pool(pool, expected_pool)


def as_arrays(args: list[Any]) -> list[Any]:
    return [jnp.array(x) for x in args]


# ---- Values ------------------------------------------------------------------------------------


@forms
def test_a_latent_is_padded_to_a_tile_as_in_the_originals(form) -> None:
    """tokamax's tests have a d_ckv of 500, in 512 columns."""
    args = as_arrays(engine_args(form))
    ckv_places, width = {"ql_nope": 0, "new_kv_c": 2}, 100
    whole = [
        x.at[..., width:].set(0) if i in ckv_places.values() else x for i, x in enumerate(args)
    ]
    # What lies in the pool between ckv and kpe is zero, as the originals write it.
    whole[CACHE] = whole[CACHE].at[..., width:D_CKV].set(0)
    narrow = [x[..., :width] if i in ckv_places.values() else x for i, x in enumerate(whole)]
    want_out, want_pool = FORMS[form](*map(jnp.copy, whole), sm_scale=0.2)
    out, pool = FORMS[form](*narrow, sm_scale=0.2)
    np.testing.assert_array_equal(out, want_out[..., :width])
    assert_same_pool(pool, want_pool)


@pytest.mark.parametrize("group", range(len(STEPS)))
@forms
def test_matches_reference(form, group) -> None:
    assert np.abs(want(group)[0]).max() > 0.1
    check(
        form,
        jax.jit(functools.partial(FORMS[form], sm_scale=0.2))(*engine_args(form, group)),
        group,
    )


@pytest.mark.parametrize("mask", [{"sliding_window": 5}, {"soft_cap": 0.3}], ids=str)
@forms
def test_masks_are_handed_over(form, mask) -> None:
    *rows, _, table, lens, bounds, _ = step().args()
    pool = jnp.asarray(engine_args("token_major")[CACHE])
    place = table, lens, bounds, len(STEPS[0])
    expected, _ = reference(*rows, pool, *place, sm_scale=0.2, **mask)
    assert np.abs(np.asarray(expected) - want()[0]).max() > 1e-2
    fun = jax.jit(functools.partial(FORMS[form], sm_scale=0.2, **mask))
    out, _ = fun(*engine_args(form))
    out = np.swapaxes(out, 0, 1) if form == "head_major" else out
    np.testing.assert_allclose(out, expected, atol=1e-5)


def fp8_args(form: str, *, has_codes: bool) -> tuple[list[Any], list[np.ndarray]]:
    """The operands of an engine with an FP8 pool, and out and the pool by definition."""
    args = engine_args(form)
    codes = [0, 1, 2, 3, CACHE] if has_codes else [CACHE]
    scale = {0: 0.02, 1: 0.02, 2: 0.0125, 3: 0.0125, CACHE: 0.0125}
    for i in codes:
        args[i] = fp8.round_to_e4m3(args[i] / np.float32(scale[i]))
    tokens = [np.asarray(x) for x in (args[0].swapaxes(0, 1) if form == "head_major" else args[0],
                                      *args[1:CACHE])]  # fmt: skip
    _, _, _, _, _, table, lens, bounds, _ = step().args()
    expected = reference(
        *(jnp.asarray(x) for x in tokens), jnp.asarray(args[CACHE]), table, lens, bounds,
        len(STEPS[0]), sm_scale=0.2, kv_format="fp8_e4m3", kv_scale=0.0125,
        q_scale=0.02 if has_codes else None,
    )  # fmt: skip
    return args, [np.asarray(x) for x in expected]


@pytest.mark.quick(1)
@pytest.mark.parametrize("has_codes", [False, True], ids=["numbers", "codes"])
@forms
def test_fp8_pools(form, has_codes) -> None:
    """Codes as queries give codes as out, as the originals do."""
    args, (expected, expected_pool) = fp8_args(form, has_codes=has_codes)
    scales = {"k_scale": 0.0125, "v_scale": 0.0125} | ({"q_scale": 0.02} if has_codes else {})
    out, pool = FORMS[form](*as_arrays(args), sm_scale=0.2, **scales)
    assert out.dtype == args[0].dtype
    out = np.asarray(out, np.float32)
    out = np.swapaxes(out, 0, 1) if form == "head_major" else out
    rtol, atol = (0.07, 2e-3) if has_codes else (0, 1e-5)
    np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)
    assert_same_pool(pool, expected_pool)


@forms
def test_fp8_out_is_clamped(form) -> None:
    """Beyond 448 there is no code but that of NaN."""
    args, _ = fp8_args(form, has_codes=True)
    scales = {"q_scale": 0.02, "k_scale": 8.0, "v_scale": 8.0}
    out, _ = FORMS[form](*as_arrays(args), sm_scale=0.2, **scales)
    assert np.abs(np.asarray(out, np.float32)).max() == 448


@forms
def test_one_program_for_every_mix(form) -> None:
    fun: Any = jax.jit(functools.partial(FORMS[form], sm_scale=0.2))
    for group in range(len(STEPS)):
        check(form, fun(*as_arrays(engine_args(form, group))), group)
    assert fun._cache_size() == 1


@pytest.mark.parametrize("num_seqs", [-(2**31), 0, 2, 3, 2**31 - 1])
@forms
def test_distribution_is_clamped_on_the_device(form, num_seqs) -> None:
    """Only the last number counts."""
    args = engine_args(form)
    args[-1] = np.array([WILD, -WILD, num_seqs], np.int32)
    if num_seqs > SEQS:  # then the absent sequence's garbage counts, and must do no harm
        got, _ = FORMS[form](*as_arrays(args), sm_scale=0.2)
        assert got.shape == args[0].shape
        return
    out, _ = FORMS[form](*as_arrays(args), sm_scale=0.2)
    out = np.swapaxes(out, 0, 1) if form == "head_major" else out
    n = int(step().cu_q_lens[max(num_seqs, 0)])  # type: ignore[index]
    np.testing.assert_allclose(out[:n], want()[0][:n], atol=1e-5)
    assert not np.any(out[n:])


@pytest.mark.parametrize("pages_per_seq", [None, MAX_PAGES, 10_000])
def test_sglang_bound_on_pages(pages_per_seq) -> None:
    """Any bound that is large enough gives the same."""
    got = sglang(*as_arrays(engine_args("sglang")), sm_scale=0.2, pages_per_seq=pages_per_seq)
    check("sglang", got)


def test_sglang_cuts_off_sequences_with_more_pages() -> None:
    """The sequence of 9 tokens has 2 pages and is served, the others are not written."""
    args = as_arrays(engine_args("sglang"))
    before = np.asarray(args[CACHE])
    out, pool = sglang(*args, sm_scale=0.2, pages_per_seq=2)
    np.testing.assert_allclose(out[1:10], want()[0][1:10], atol=1e-5)
    own = step().page_table[1, :2]
    expected = before.copy()
    expected[own] = want()[1][own]
    assert_same_pool(pool, expected)


def test_sglang_length_beyond_the_list_stays_in_the_list() -> None:
    """A length that is too long would otherwise reach the next sequence's first page."""
    args, table = engine_args("sglang", 1), step(1).page_table
    assert STEPS[1][:2] == ((1, 8), (1, 3))  # so place 15 of the first is free in that page
    args[5] = args[5].copy()
    args[5][0] = 16
    before = args[CACHE].copy()
    _, pool = sglang(*as_arrays(args), sm_scale=0.2)
    expected = want(1)[1].copy()
    expected[table[0, 0]] = before[table[0, 0]]
    assert_same_pool(pool, expected)


@pytest.mark.parametrize("first", [-800, SEQS * MAX_PAGES * PAGE, 2**31 - 201])
def test_sglang_lists_outside_the_array_have_no_pages(first) -> None:
    args = as_arrays(engine_args("sglang"))
    args[8] = jnp.arange(SEQS + 1, dtype=jnp.int32) * 40 + first
    before = np.asarray(args[CACHE])
    out, pool = sglang(*args, sm_scale=0.2)
    assert not np.any(out)
    assert_same_pool(pool, before)


def test_sglang_wild_sums_do_no_harm() -> None:
    args = as_arrays(engine_args("sglang"))
    args[8] = jnp.array([WILD, -WILD, 7, 3, 2**31 - 1], jnp.int32)
    out, pool = sglang(*args, sm_scale=0.2)
    assert out.shape == args[0].shape and pool.shape == args[CACHE].shape


# ---- In place ----------------------------------------------------------------------------------


@forms
def test_donated_pool_is_updated_in_place(form) -> None:
    fun = jax.jit(functools.partial(FORMS[form], sm_scale=0.2), donate_argnums=CACHE)
    args = as_arrays(engine_args(form))
    compiled = fun.lower(*args).compile()
    before, nbytes = pointers(args[CACHE]), args[CACHE].nbytes
    _, pool = fun(*args)
    assert pointers(pool) == before
    for shape in ((PAGES, PAGE // PACK, PACK, 256), (PAGES, PAGE, 256), (PAGES * PAGE, 256)):
        assert num_copies(compiled, shape) == 0
    assert memory(compiled).alias_size_in_bytes == nbytes


@forms
def test_eager_call_donates_the_pool(form) -> None:
    """As the original does, which is compiled with donation."""
    args = as_arrays(engine_args(form))
    before = pointers(args[CACHE])
    got = FORMS[form](*args, sm_scale=0.2)
    assert args[CACHE].is_deleted() and pointers(got[1]) == before
    check(form, got)


# ---- Shardings of the engines ------------------------------------------------------------------


def shard_map_args(form: str, groups: int, specs: list[P], mesh) -> list[Any]:
    """Operands of all groups: those that every group has its own of end to end, placed."""
    parts = list(zip(*(engine_args(form, g) for g in range(groups)), strict=True))
    whole = [
        np.concatenate(x, axis=1 if i == 0 and form == "head_major" else 0)
        for i, x in enumerate(parts)
    ]
    return [
        jax.device_put(jnp.array(x), NamedSharding(mesh, s))
        for x, s in zip(whole, specs, strict=True)
    ]


def check_sharded(form: str, groups: int, mesh, specs: list[P], **options: Any) -> None:
    fun = jax.jit(
        jax.shard_map(
            lambda *args: FORMS[form](*args, sm_scale=0.2, **options), mesh=mesh,
            in_specs=tuple(specs), out_specs=(specs[0], specs[CACHE]), check_vma=False,
        ),
        donate_argnums=CACHE,
    )  # fmt: skip
    args = shard_map_args(form, groups, specs, mesh)
    compiled = fun.lower(*args).compile()
    before = pointers(args[CACHE])
    out, pool = fun(*args)
    token_axis = 1 if form == "head_major" else 0
    outs, pools = np.split(np.asarray(out), groups, token_axis), np.split(np.asarray(pool), groups)
    for group in range(groups):
        check(form, (outs[group], pools[group]), group)
    for shard in pool.addressable_shards:  # replicas must not differ either
        assert_same_pool(shard.data, np.asarray(pool)[shard.index])
    assert collectives(compiled) == []
    assert pointers(pool) == before
    assert num_copies(compiled, (PAGES, PAGE // PACK, PACK, 256)) == 0


def test_token_parallel_as_tpu_inference() -> None:
    """Every device has all heads, and its own part of all else."""
    mesh = cpu_mesh((4, 1), ("data", "model"))
    rows = P("data", None)
    specs = [P(None, "data", None), P("data", None, None), rows, rows, *[P("data")] * 5]
    check_sharded("head_major", 4, mesh, specs)


@pytest.mark.parametrize("pages_per_seq", [None, MAX_PAGES])
def test_heads_over_tensor_as_sglang_jax(pages_per_seq) -> None:
    """Heads are split over an axis along which the pool is replicated."""
    mesh = cpu_mesh((2, 4), ("data", "tensor"), (jax.sharding.AxisType.Explicit,) * 2)
    query, rows = P("data", "tensor", None), P("data", None)
    specs = [query, query, rows, rows, P("data", None, None, None), *[P("data")] * 5]
    check_sharded("sglang", 2, mesh, specs, pages_per_seq=pages_per_seq)


def test_heads_over_tensor_head_major() -> None:
    mesh = cpu_mesh((2, 2), ("data", "tensor"))
    rows = P("data", None)
    specs = [P("tensor", "data"), P("data", "tensor"), rows, rows, *[P("data")] * 5]
    check_sharded("head_major", 2, mesh, specs)


# ---- Signatures --------------------------------------------------------------------------------

POSITIONAL = [
    "ql_nope", "q_pe", "new_kv_c", "new_k_pe", "cache_kv", "kv_lens", "page_indices", "cu_q_lens",
    "distribution",
]  # fmt: skip
COMMON: dict[str, Any] = {
    "sliding_window": None, "soft_cap": None, "q_scale": None, "k_scale": None, "v_scale": None,
    "chunk_prefill_size": 256, "num_kv_pages_per_block": (4, 4, 4), "num_queries_per_block": 8,
    "vmem_limit_bytes": 2**24, "debug_mode": False,
}  # fmt: skip
V1 = COMMON | {"mask_value": -0.7 * float(np.finfo(np.float32).max)}
V2 = COMMON | {
    "mask_value": None, "decode_batch_size": 4, "mixed_q_split": 2, "s_dtype": jnp.bfloat16,
    "transpose_kv_cache": False, "two_step_flash_attention": True, "p_same_dtype_as_v": True,
}  # fmt: skip
# Positional names and keyword arguments of tpu-inference b8692ff01 and sglang-jax cddbf6f1.
KERNELS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "head_major": (POSITIONAL, V2),
    "token_major": (POSITIONAL, V1),
    "sglang": (
        [*POSITIONAL[:-1], "cu_kv_lens", "distribution"],
        V1 | {"decode_batch_size": 4},
    ),
}


@forms
def test_signature_is_that_of_the_kernel(form) -> None:
    positional, keywords = KERNELS[form]
    parameters = inspect.signature(FORMS[form]).parameters.values()
    assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == positional
    (sm_scale,) = (p for p in parameters if p.name == "sm_scale")
    assert sm_scale.kind == sm_scale.KEYWORD_ONLY and sm_scale.default == 1.0
    extra = [p for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
    assert not extra
    assert set(keywords) <= set(typing.get_type_hints(tpu_interface.TpuOptions))


@forms
def test_takes_all_arguments_of_the_kernel(form) -> None:
    """By name too, as the originals allow."""
    positional, keywords = KERNELS[form]
    args = dict(zip(positional, as_arrays(engine_args(form)), strict=True))
    check(form, FORMS[form](**args, sm_scale=0.2, **keywords))
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), 1.0)
    check(form, FORMS[form](*as_arrays(engine_args(form)), sm_scale=0.2, **keywords | scales))


@pytest.mark.parametrize("fun", FORMS.values(), ids=FORMS)
def test_type_hints_can_be_read(fun) -> None:
    assert set(typing.get_type_hints(fun)) == {*inspect.signature(fun).parameters, "return"}


def test_the_package_does_not_import_them() -> None:
    program = "import jax_mla, sys; sys.exit('jax_mla.integrations' in sys.modules)"
    path = os.pathsep.join(entry for entry in sys.path if entry)  # of the package that is tested
    command = [sys.executable, "-P", "-c", program]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})


# ---- Bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sliding_window", 0, "expected None or an int of at least 1, got 0"),
        ("soft_cap", 0.0, "expected None or a number from 2^-60 to 2^60, got 0.0"),
        ("q_scale", 0.5, "expected None or 1 for float32, got 0.5"),
        ("k_scale", 2, "expected None or 1 for float32, got 2"),
        ("v_scale", jnp.ones(2), "expected that of k_scale (1), because"),
        (
            "v_scale",
            2,
            "expected that of k_scale (1), because keys and values are the same rows, got 2",
        ),
        ("q_scale", jnp.float32(1), "expected None or 1 for float32, got "),
        ("mask_value", 0.0, "expected None or a number of at most -10000, got 0.0"),
        ("mask_value", float("nan"), "expected None or a number of at most -10000, got nan"),
        ("transpose_kv_cache", True, "expected False, got True"),
        ("debug_mode", True, "expected False, got True"),
    ],
)
@forms
def test_refuses_options_by_name(form, option, value, message) -> None:
    op = f"jax_mla.integrations.tpu_interface.{FORMS[form].__name__}: {option}: {message}"
    with pytest.raises(ValueError, match="^" + re.escape(op)):
        FORMS[form](*as_arrays(engine_args(form)), sm_scale=0.2, **{option: value})


@forms
def test_refuses_unknown_options(form) -> None:
    with pytest.raises(TypeError, match="sliding_windows: expected an argument of the TPU kernels"):
        FORMS[form](*as_arrays(engine_args(form)), sliding_windows=None)


def with_arg(name: str, change: Any) -> Any:
    def changed(form: str, args: list[Any]) -> list[Any]:
        at = KERNELS[form][0].index(name)
        return [change(x) if i == at else x for i, x in enumerate(args)]

    return changed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (with_arg("distribution", lambda x: x[:2]), ValueError, "distribution: expected shape (3)"),
        (with_arg("distribution", np.float32), TypeError, "distribution: expected int32, got"),
        (with_arg("kv_lens", np.float32), TypeError, "kv_lens: expected int32, got float32"),
        (with_arg("kv_lens", lambda x: x[:0]), ValueError, "kv_lens: expected at least one entry"),
        (with_arg("page_indices", lambda x: x[None]), ValueError, "page_indices: expected one dim"),
        (
            with_arg("cache_kv", lambda x: x.reshape(PAGES, PAGE, -1)), ValueError,
            "cache_kv: expected [num_pages, page_size / pack, pack, width], got shape (20, 8, 256)",
        ),
        (
            with_arg("cache_kv", lambda x: x.astype(jnp.float8_e5m2)), TypeError,
            "kv_pages: expected float32 as in q_nope, got float8_e5m2",
        ),
        (
            with_arg("new_kv_c", lambda x: x[:, :96]), ValueError,
            "96), the width of new_kv_c, got (",
        ),
        (with_arg("cu_q_lens", lambda x: x[:-1]), ValueError, "cu_q_lens: expected shape (5)"),
        (
            with_arg("new_kv_c", lambda x: x[0, 0]), ValueError,
            "new_kv_c: expected [tokens, d_ckv], got shape ()",
        ),
        (with_arg("page_indices", np.int64), TypeError, "page_indices: expected int32, got int64"),
    ],
    ids=range(11),
)  # fmt: skip
@forms
def test_refuses_arrays(form, change, error, message) -> None:
    args = change(form, engine_args(form))
    with pytest.raises(error, match=re.escape(message)):
        FORMS[form](*args, sm_scale=0.2)


@pytest.mark.parametrize("value", [None, [1], 1.0], ids=str)
@forms
def test_refuses_what_is_no_array(form, value) -> None:
    """None and lists are trees to jit, and None has a meaning inside."""
    for name in KERNELS[form][0]:
        args = with_arg(name, lambda _: value)(form, engine_args(form))
        message = f"{FORMS[form].__name__}: {name}: expected an array, got {type(value).__name__}"
        with pytest.raises(TypeError, match=f"{message}$"):
            FORMS[form](*args, sm_scale=0.2)


@pytest.mark.parametrize("form", ["head_major", "token_major"])
def test_refuses_a_table_that_is_not_rectangular(form) -> None:
    args = with_arg("page_indices", lambda x: x[:-1])(form, engine_args(form))
    with pytest.raises(ValueError, match="expected a multiple of the 4 sequences in kv_lens"):
        FORMS[form](*args)


def test_refuses_sums_of_another_size() -> None:
    args = with_arg("cu_kv_lens", lambda x: x[1:])("sglang", engine_args("sglang"))
    with pytest.raises(ValueError, match=re.escape("cu_kv_lens: expected shape (5) = sequences")):
        sglang(*args)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_refuses_a_wrong_bound_on_pages(value, error) -> None:
    with pytest.raises(error, match="sglang: pages_per_seq: expected "):
        sglang(*engine_args("sglang"), pages_per_seq=value)


def test_the_two_orders_are_not_confused() -> None:
    """As long as there are not as many heads as tokens."""
    with pytest.raises(
        ValueError, match=re.escape("ql_nope: expected shape (4, 24, *) = heads, t")
    ):
        head_major(*engine_args("token_major"))
    with pytest.raises(ValueError, match="q_pe: expected shape"):
        token_major(*engine_args("head_major"))


def test_refuses_a_traced_scale() -> None:
    with pytest.raises(TypeError, match="sm_scale: expected a Python number, got a traced value"):
        jax.jit(lambda scale: head_major(*engine_args("head_major"), sm_scale=scale))(0.2)


# ---- tokamax -----------------------------------------------------------------------------------


@pytest.fixture
def tokamax_mla():
    """tokamax's package of the op, and ours registered there."""
    pytest.importorskip("tokamax", reason="needs tokamax (Python 3.12)")
    name = "tokamax._src.ops.experimental.mla"
    api, utils = (importlib.import_module(f"{name}.{module}") for module in ("api", "utils"))
    importlib.import_module("jax_mla.integrations.tokamax").register()
    yield api.IMPLEMENTATIONS, utils
    del api.IMPLEMENTATIONS["jax_mla"]


STEPS_OF_TOKAMAX = {"decode": ((1, 300), (1, 17), (1, 1)), "prefill": ((40, 40), (40, 90))}


@pytest.mark.filterwarnings("ignore")  # tokamax's own
@pytest.mark.parametrize("seqs", STEPS_OF_TOKAMAX.values(), ids=STEPS_OF_TOKAMAX)
def test_tokamax_op_gives_what_its_reference_gives(tokamax_mla, seqs) -> None:
    implementations, utils = tokamax_mla
    args = utils.generate_mla_inputs(
        seqs, 16, 512, 64, 32, jnp.float32, jnp.float32, 40, rng=np.random.default_rng(0)
    )
    # The reference writes zeros to the columns of padding; jax_mla writes no padding.
    args = [x.at[..., 576:].set(0) if i == CACHE else x for i, x in enumerate(args)]
    options = {"sm_scale": 0.05, "s_dtype": jnp.float32}
    with jax.numpy_rank_promotion("allow"):
        want_out, want_pool = implementations["xla"](*map(jnp.copy, args), **options)
    fun = jax.jit(functools.partial(implementations["jax_mla"], **options))
    out, pool = fun(*args)
    assert_same_pool(pool, want_pool)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    (eager, _), residuals = implementations["jax_mla"](*args, **options, return_residuals=True)
    np.testing.assert_array_equal(eager, out)
    assert residuals is None


@pytest.mark.filterwarnings("ignore")
def test_tokamax_op_updates_a_donated_pool_in_place(tokamax_mla) -> None:
    fun = jax.jit(tokamax_mla[0]["jax_mla"], donate_argnums=CACHE)
    args = as_arrays(engine_args("token_major"))
    compiled = fun.lower(*args).compile()
    before = pointers(args[CACHE])
    _, pool = fun(*args)
    assert pointers(pool) == before
    assert num_copies(compiled, (PAGES, PAGE // PACK, PACK, 256)) == 0
    _, pool = tokamax_mla[0]["jax_mla"](*args[:CACHE], pool, *args[CACHE + 1 :])  # eagerly
    assert pointers(pool) == before


@pytest.mark.filterwarnings("ignore")
def test_tokamax_op_has_the_signature_of_its_base(tokamax_mla) -> None:
    implementations, _ = tokamax_mla
    ours, base = (
        list(inspect.signature(implementations[name]._fwd).parameters.values())
        for name in ("jax_mla", "xla")
    )
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in base]


@pytest.mark.filterwarnings("ignore")
def test_tokamax_op_knows_its_devices(tokamax_mla) -> None:
    op = tokamax_mla[0]["jax_mla"]
    assert op.supported_on(jax.devices("cpu")[0])

    class Tpu:
        platform = "tpu"

    assert not op.supported_on(Tpu())


def test_without_tokamax_the_error_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokamax", None)
    for name in [name for name in sys.modules if name.startswith("tokamax.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "jax_mla.integrations.tokamax", raising=False)
    with pytest.raises(ImportError, match="^jax_mla.integrations.tokamax: expected tokamax with"):
        importlib.import_module("jax_mla.integrations.tokamax")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, r"expected sglang-jax \(Python 3.12 or 3.13\): pip install "),
        ("0.2.0", r"expected sglang-jax 0.1.0rc0, got 0.2.0: pip install "),
    ],
)
def test_without_a_known_sglang_jax_the_error_says_so(monkeypatch, version, words) -> None:
    def installed(name: str) -> str:
        assert name == "sglang-jax"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    for name in [name for name in sys.modules if name.startswith("jax_mla.integrations.sglang")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=f"^jax_mla.integrations.sglang: {words}"):
        importlib.import_module("jax_mla.integrations.sglang")
