# ruff: noqa: E501
"""Caches in FP8: the bytes, and what attention makes of them.

`cases.py` has the cases that run with those of other formats. Here is what only FP8 has: rounding,
scales, rows and queries that are codes already.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_mla
from jax_mla.testing import fp8
from jax_mla.testing.compare import assert_close, decode_in_dtype
from jax_mla.testing.hlo import num_copies, pointers
from jax_mla.testing.inputs import decode_inputs

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

E4M3, F32 = jnp.float8_e4m3fn, jnp.float32
D_CKV, D_KPE = 512, 64
# kv_format, kv_scale, whether the cache is split, whether kpe is bfloat16
FORMATS: dict[str, tuple[str, Any, bool, bool]] = {
    "e4m3": ("fp8_e4m3", (0.0125, 0.02), False, False),
    "split": ("fp8_e4m3", 0.02, True, False),
    "mixed": ("fp8_e4m3", 0.0125, True, True),
    "ds_mla": ("fp8_ds_mla", None, False, False),
}


def poisoned(form: str, *pages: int) -> Any:
    """A cache [*pages, width] of NaN codes."""
    _, _, is_split, is_mixed = FORMATS[form]
    if form == "ds_mla":
        return jnp.full((*pages, 656), fp8.POISON, jnp.uint8)
    if not is_split:
        return jnp.full((*pages, D_CKV + D_KPE), jnp.nan, E4M3)
    kpe = jnp.full((*pages, D_KPE), jnp.nan, jnp.bfloat16 if is_mixed else E4M3)
    return jnp.full((*pages, D_CKV), jnp.nan, E4M3), kpe


def options(form: str) -> dict[str, Any]:
    kv_format, kv_scale, *_ = FORMATS[form]
    return {"kv_format": kv_format, "kv_scale": kv_scale}


def same_bytes(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


# Backends that take float32 queries with an FP8 cache, in pages of any size.
ON_CPU = ("reference", "cpu")


def skip_if_declined(form: str, backend: str) -> None:
    pages = poisoned(form, 1, 64)
    q_nope, q_pe = jnp.zeros((1, 1, D_CKV), jnp.bfloat16), jnp.zeros((1, 1, D_KPE), jnp.bfloat16)
    statuses = jax_mla.backends(
        q_nope, q_pe, pages, jnp.zeros((1, 1), jnp.int32), kv_format=FORMATS[form][0],
        platform="cpu" if backend in ON_CPU else "cuda",
    )  # fmt: skip
    reason = next(s.reason for s in statuses if s.name == backend)
    if backend not in ON_CPU and reason:
        pytest.skip(f"{backend}: {reason}")


def write(form: str, ckv: Any, kpe: Any, backend: str | None) -> Any:
    """Append rows [tokens, ...] to one page for all of them."""
    tokens = ckv.shape[0]
    table = jnp.zeros((1, 1), jnp.int32)
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    return jax_mla.append(
        poisoned(form, 1, tokens), ckv[None], kpe[None], table, positions,
        **options(form), backend=backend,
    )  # fmt: skip


def difficult_values() -> np.ndarray:
    """[tokens, 576] float32: codes, the middles between them, their neighbours, and far beyond."""
    codes = np.arange(0x7F, dtype=np.uint8).view(fp8.E4M3).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, middles])
    values = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
    values = np.concatenate([values, -values, [449, 464, 465, 1e30, -1e30, 2**-20, -(2**-20)]])
    rng = np.random.default_rng(0)
    values = np.concatenate([values, np.exp(rng.uniform(-12, 12, 20000))]).astype(np.float32)
    rng.shuffle(values)
    return np.resize(values, (48, D_CKV + D_KPE))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMATS)
def test_append_writes_the_documented_bytes(form, dtype, backend, on_device) -> None:
    kv_format, kv_scale, is_split, is_mixed = FORMATS[form]
    scales = kv_scale if isinstance(kv_scale, tuple) else (kv_scale, kv_scale)
    with np.errstate(over="ignore"):
        values = (difficult_values() * 0.0125).astype(getattr(ml_dtypes, dtype, dtype))
    values = np.clip(values, -60000, 60000).astype(values.dtype)
    plain = (values[:, :D_CKV], values[:, D_CKV:]) if is_split else values
    want = fp8.quantized_pools(plain, kv_format, scales, D_CKV, keep_kpe=is_mixed)
    ckv, kpe = jnp.asarray(values[:, :D_CKV]), jnp.asarray(values[:, D_CKV:])
    got = write(form, ckv, kpe, backend)
    same_bytes(jax.tree.map(lambda x: x[0], got), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number_is_rounded_right(dtype, backend, on_device) -> None:
    """A scale of 1, so that codes can be compared with the rounding of ml_dtypes."""
    bits = np.arange(2**16, dtype=np.uint16).view(getattr(ml_dtypes, dtype, dtype))
    rows = np.concatenate([bits, np.zeros(114 * 576 - 2**16, bits.dtype)]).reshape(114, 576)
    got = jax_mla.append(
        jnp.zeros((1, 114, 576), E4M3), jnp.asarray(rows[None, :, :512]),
        jnp.asarray(rows[None, :, 512:]), jnp.zeros((1, 1), jnp.int32),
        jnp.arange(114, dtype=jnp.int32)[None], kv_format="fp8_e4m3", kv_scale=1, backend=backend,
    )  # fmt: skip
    want = np.nan_to_num(rows.astype(np.float32), nan=0, posinf=448, neginf=-448)
    same_bytes(got[0], fp8.round_to_e4m3(want))


@pytest.mark.parametrize("form", FORMATS)
def test_no_value_makes_a_nan_code(form, backend, on_device) -> None:
    """Nor does a scale that is 0, NaN or infinite, on the device."""
    rng = np.random.default_rng(1)
    signalling = np.array(0x7F800001, np.uint32).view(np.float32)
    kinds = np.array([np.nan, signalling, np.inf, -np.inf, 3, -0.0, 3.3e38], np.float32)
    bad = rng.choice(kinds, (16, 576))
    ckv, kpe = jnp.asarray(bad[:, :D_CKV]), jnp.asarray(bad[:, D_CKV:])
    one_scale = [0.5, *([] if form == "ds_mla" else [0.0, np.nan, np.inf, -np.inf])]
    for scale in one_scale:
        given: dict[str, Any] = options(form) | (
            {} if form == "ds_mla" else {"kv_scale": jnp.float32(scale)}
        )
        pages = jax_mla.append(
            poisoned(form, 1, 16), ckv[None], kpe[None], jnp.zeros((1, 1), jnp.int32),
            jnp.arange(16, dtype=jnp.int32)[None], **given, backend=backend,
        )  # fmt: skip
        codes = np.asarray(jax.tree.leaves(pages)[0])[0, :, :D_CKV].view(np.uint8)
        stored = [x for x in jax.tree.leaves(pages) if x.dtype == E4M3]
        for both in [np.asarray(x).view(np.uint8) for x in stored] or [codes]:
            assert not ((both & 0x7F) == 0x7F).any(), scale
        if backend != "reference":
            want = jax_mla.append(
                poisoned(form, 1, 16), ckv[None], jnp.zeros_like(kpe)[None],
                jnp.zeros((1, 1), jnp.int32), jnp.arange(16, dtype=jnp.int32)[None], **given,
                backend="reference",
            )  # fmt: skip
            width = 528 if form == "ds_mla" else D_CKV
            first = [np.asarray(jax.tree.leaves(x)[0])[0, :, :width] for x in (pages, want)]
            same_bytes(*first)
        if scale == 0.5:
            assert (codes[np.isnan(bad[:, :D_CKV])] == 0).all()
        if form == "ds_mla":
            scales = np.ascontiguousarray(np.asarray(pages)[0, :, 512:528]).view(np.float32)
            assert np.isfinite(scales).all() and (scales > 0).all()
            values = codes.view(fp8.E4M3).astype(np.float32) * np.repeat(scales, 128, axis=1)
            assert np.isfinite(values).all()


def test_rows_that_are_codes_are_written_as_they_are(backend, on_device) -> None:
    codes = np.arange(4 * 576, dtype=np.uint32).astype(np.uint8).reshape(4, 576)
    rows = jnp.asarray(codes.view(fp8.E4M3))
    got = np.asarray(write("e4m3", rows[:, :D_CKV], rows[:, D_CKV:], backend))[0]
    want = np.where((codes & 0x7F) == 0x7F, 0, codes)
    np.testing.assert_array_equal(got.view(np.uint8), want)


@pytest.mark.parametrize("form", FORMATS)
def test_every_code_is_read_exactly(form, backend, on_device) -> None:
    """A sequence of one token gives the token: one scale for all, then one for each tile."""
    skip_if_declined(form, backend)
    if backend not in ON_CPU:
        pytest.skip("the result is float32")
    codes = np.resize(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), (3, D_CKV))
    ckv_scale = 0.0125
    pages = poisoned(form, 3, 1)
    head = jax.tree.leaves(pages)[0]
    if form == "ds_mla":
        scales = np.array([2.0**-20, 0.3, 1, 2.0**10], np.float32)
        row = np.concatenate([codes, np.tile(scales.view(np.uint8), (3, 1))], axis=1)
        head = head.at[:, 0, :528].set(row).at[:, 0, 528:].set(0)
        factor = np.repeat(scales, 128)
    else:
        head = head.at[:, 0, :D_CKV].set(codes.view(fp8.E4M3))
        head = head.at[:, 0, D_CKV:].set(0)
        factor = np.float32(ckv_scale)
    pages = (head, jnp.zeros_like(pages[1])) if isinstance(pages, tuple) else head
    given: Any = options(form) | ({} if form == "ds_mla" else {"kv_scale": ckv_scale})
    out = jax_mla.decode(
        jnp.zeros((3, 1, D_CKV)), jnp.zeros((3, 1, D_KPE)), pages,
        jnp.arange(3, dtype=jnp.int32)[:, None], jnp.ones(3, jnp.int32), sm_scale=1.0, **given,
        backend=backend,
    )  # fmt: skip
    want = codes.view(fp8.E4M3).astype(np.float32) * factor
    np.testing.assert_array_equal(out[:, 0], want)


@pytest.mark.parametrize("form", FORMATS)
def test_reference_rows_round_trip(form) -> None:
    kv_format, kv_scale, is_split, is_mixed = FORMATS[form]
    rng = np.random.default_rng(2)
    ckv, kpe = (rng.standard_normal((7, d), np.float32) for d in (D_CKV, D_KPE))
    dtypes = [x.dtype for x in jax.tree.leaves(poisoned(form, 1, 1))]
    rows = jax_mla.reference.encode_rows(
        jnp.asarray(ckv), jnp.asarray(kpe), kv_format, kv_scale, dtypes
    )
    assert [x.shape[-1] for x in rows] == ([656] if form == "ds_mla" else
                                           [512, 64] if is_split else [576])  # fmt: skip
    scale = (kv_scale, 1.0) if is_mixed else kv_scale
    got = jax_mla.reference.decode_rows(rows, D_CKV, D_KPE, kv_format, scale)
    for values, back in zip((ckv, kpe), got, strict=True):
        np.testing.assert_allclose(back, values, rtol=1 / 16, atol=2e-5)


def small_inputs(form: str, **changes: Any) -> Any:
    kv_format, _, is_split, is_mixed = FORMATS[form]
    cache = "mixed" if is_mixed else "split" if is_split else "packed"
    given: dict[str, Any] = {
        "seq_lens": (0, 5, 70), "q_len": 2, "num_heads": 8, "page_size": 16, "dtype": "float32",
    }  # fmt: skip
    return decode_inputs(kv_format=kv_format, cache=cache, **(given | changes))


def inputs_for(backend: str) -> Any:
    """`small_inputs`, in bfloat16 where a backend takes no other queries."""
    changes = {} if backend in ON_CPU else {"dtype": "bfloat16", "page_size": 64}
    return small_inputs("e4m3", **changes)


def near(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        np.testing.assert_allclose(
            np.nan_to_num(a, neginf=0), np.nan_to_num(b, neginf=0), atol=1e-4
        )


@pytest.mark.parametrize("is_pool_mapped", [False, True], ids=["one_pool", "pools"])
def test_vmap_over_the_scale(is_pool_mapped, backend, on_device) -> None:
    """Each mapped call has a scale of its own; so has each pool."""
    skip_if_declined("e4m3", backend)
    inputs = inputs_for(backend)
    q_nope, q_pe, pool, *rest = inputs.args()
    scales = np.array([[0.0125, 0.02], [0.05, 0.001], [0.002, 0.1]], np.float32)
    pools = jnp.stack([pool, pool[::-1], pool]) if is_pool_mapped else pool

    def one(scale, pool):
        given = inputs.kwargs() | {"kv_scale": (scale[0], scale[1])}
        return jax_mla.decode(q_nope, q_pe, pool, *rest, **given, return_lse=True, backend=backend)

    axes = (0, 0 if is_pool_mapped else None)
    got = jax.jit(jax.vmap(one, axes))(jnp.asarray(scales), pools)
    assert (np.float32(got[0][:, 0]) == 0).all()  # no token
    # Codes of NaN may be read where pages are reversed.
    for i in (0, 2) if is_pool_mapped else (0, 1, 2):
        call = dataclasses.replace(inputs, kv_scale=tuple(scales[i]))
        plain = call.plain()
        want = jax_mla.reference.decode(*plain.args(), **plain.kwargs(), return_lse=True)
        if backend in ON_CPU:
            near([x[i] for x in got], want)
        else:
            assert_close(
                got[0][i], got[1][i], *want, dtype="bfloat16", yardstick=decode_in_dtype(call)[0]
            )


def test_vmap_of_append_over_the_scale(backend, on_device) -> None:
    rng = np.random.default_rng(3)
    ckv, kpe = (jnp.asarray(rng.standard_normal((1, 4, d), np.float32)) for d in (D_CKV, D_KPE))
    scales = jnp.array([0.0125, 0.5], F32)
    where = jnp.zeros((1, 1), jnp.int32), jnp.arange(4, dtype=jnp.int32)[None]

    def one(scale, backend=backend):
        return jax_mla.append(
            poisoned("e4m3", 1, 4), ckv, kpe, *where, kv_format="fp8_e4m3", kv_scale=scale,
            backend=backend,
        )  # fmt: skip

    got = jax.vmap(one)(scales)
    same_bytes(got, jnp.stack([one(s, "reference") for s in scales]))


@pytest.mark.parametrize("form", ["e4m3", "ds_mla"])
def test_queries_that_are_codes(form, backend, on_device) -> None:
    """Their scale may be on the device, and out is bfloat16."""
    skip_if_declined(form, backend)
    inputs = decode_inputs(
        seq_lens=(0, 5, 70), num_heads=8, kv_format=FORMATS[form][0], has_codes=True
    )
    given = inputs.kwargs() | {"q_scale": jnp.float32(inputs.q_scale), "return_lse": True}
    out, lse = jax.jit(functools.partial(jax_mla.decode, backend=backend, **given))(*inputs.args())
    assert out.dtype == jnp.bfloat16
    want = jax_mla.reference.decode(*inputs.plain().args(), **inputs.plain().kwargs(),
                                    return_lse=True)  # fmt: skip
    assert_close(out, lse, *want, dtype="bfloat16")


@pytest.mark.parametrize("scale", [0.0, np.nan, np.inf])
def test_a_bad_scale_stays_in_its_call(scale, backend, on_device) -> None:
    skip_if_declined("e4m3", backend)
    inputs = inputs_for(backend)
    args, given = inputs.args(), inputs.kwargs() | {"return_lse": True, "backend": backend}

    @jax.jit
    def both(bad):
        return (
            jax_mla.decode(*args, **given | {"kv_scale": bad}),
            jax_mla.decode(*args, **given),
        )

    (bad_out, bad_lse), good = both(jnp.float32(scale))
    alone = jax_mla.decode(*args, **given)
    if backend in ON_CPU:
        near(good, alone)
    else:
        assert_close(*good, *(np.float32(x) for x in alone), dtype="bfloat16")
    np.testing.assert_array_equal(np.float32(bad_out[0]), 0)  # no token
    np.testing.assert_array_equal(bad_lse[0], -np.inf)


def test_host_scales_are_no_implicit_transfers() -> None:
    inputs = small_inputs("e4m3")
    args = [jax.device_put(x) for x in inputs.args()]
    given = inputs.kwargs() | {"kv_scale": (0.0125, 0.02)}
    jax_mla.decode(*args, **given)
    given["kv_scale"] = (0.0126, 0.021)  # not made into arrays before
    with jax.transfer_guard("disallow"):
        jax_mla.decode(*args, **given)


@pytest.mark.parametrize("form", FORMATS)
def test_donated_pool_stays_in_place(form) -> None:
    cache = poisoned(form, 3, 6, 4)
    rng = np.random.default_rng(4)
    ckv, kpe = (jnp.asarray(rng.standard_normal((2, 1, d), np.float32)) for d in (D_CKV, D_KPE))
    where = jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 6, jnp.array([[3], [9]], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache):
        def layer(cache, index):
            return jax_mla.append(cache, ckv, kpe, *where, layer=index, **options(form)), None

        return jax.lax.scan(layer, cache, jnp.arange(3, dtype=jnp.int32))[0]

    pools = jax.tree.leaves(cache)
    compiled = step.lower(cache).compile()
    assert [num_copies(compiled, p.shape) for p in pools] == [0] * len(pools)
    before = [pointers(p) for p in pools]
    assert [pointers(p) for p in jax.tree.leaves(step(cache))] == before


@pytest.mark.parametrize("form", FORMATS)
def test_export(form) -> None:
    inputs = small_inputs(form)
    args, given = inputs.args(), inputs.kwargs() | {"return_lse": True}
    fun = jax.jit(functools.partial(jax_mla.decode, **given))
    disabled = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("jax_mla_decode",)]
    exported = jax.export.export(fun, platforms=["cpu"], disabled_checks=disabled)(*args)
    again = jax.export.deserialize(exported.serialize())
    near(again.call(*args), fun(*args))


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_prefill_reads_the_cached_part(form) -> None:
    """As with a cache of the values that the codes stand for."""
    inputs = small_inputs(form, seq_lens=(40, 70), q_len=1)
    rng = np.random.default_rng(5)
    tokens, heads, d_nope, d_v = 6, 8, 16, 24

    def make(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32)) / 4

    new = (make(tokens, heads, d_nope), make(tokens, heads, D_KPE), make(tokens, D_CKV),
           make(tokens, D_KPE), make(heads, d_nope, D_CKV), make(heads, D_CKV, d_v))  # fmt: skip

    def run(inputs):
        _, _, pages, table, lens = inputs.args()
        given = inputs.kwargs()
        del given["layer"]
        return jax_mla.prefill(*new, pages, table, lens, return_lse=True, **given)

    near(run(inputs), run(inputs.plain()))


DS_MLA = {"kv_format": "fp8_ds_mla"}
BAD = [
    ({"kv_pages": "split"}, ValueError, "kv_pages: expected one packed pool for format 'fp8_ds_mla', got two"),
    ({"kv_pages": (8, 16, 655)}, ValueError, "expected a last dimension that is a multiple of 16"),
    ({"kv_pages": (8, 16, 640)}, ValueError, "expected a last dimension of at least 656 = the bytes of a row"),
    ({"kv_scale": 1.0}, ValueError, "kv_scale: expected None for format 'fp8_ds_mla', got a scale"),
    ({"q_scale": 1.0}, ValueError, "q_scale: expected None for queries in bfloat16, got a scale"),
    ({"dtype": E4M3}, ValueError, "q_scale: expected a scale for queries in float8_e4m3fn, got None"),
    ({"dtype": E4M3, "q_scale": 0.0}, ValueError, "q_scale: expected a positive finite number"),
    ({"dtype": E4M3, "kv_format": None}, TypeError, "q_nope: expected bfloat16 or float16 or float32, got float8"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_of_ds_mla(changes, error, message) -> None:
    struct = jax.ShapeDtypeStruct
    given = {"dtype": jnp.bfloat16, "kv_pages": (8, 16, 656), **DS_MLA, **changes}
    dtype, shape = given.pop("dtype"), given.pop("kv_pages")
    pages = struct(shape, jnp.uint8) if shape != "split" else tuple(
        struct((8, 16, d), jnp.uint8) for d in (512, 64)
    )  # fmt: skip
    args = (struct((2, 4, 512), dtype), struct((2, 4, 64), dtype), pages,
            struct((2, 3), jnp.int32), struct((2,), jnp.int32))  # fmt: skip
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(jax_mla.decode, sm_scale=1.0, **given), *args)


@pytest.mark.parametrize("form", ["mixed", "ds_mla"])
def test_rows_that_are_codes_need_a_cache_of_codes(form) -> None:
    rows = jnp.zeros((2, 576), E4M3)
    with pytest.raises(TypeError, match="ckv: expected bfloat16 or float16 or float32, got float8"):
        write(form, rows[:, :D_CKV], rows[:, D_CKV:], None)


def test_reference_rows_need_a_format_and_its_scale() -> None:
    rows = [jnp.zeros((2, 576), E4M3)]
    with pytest.raises(ValueError, match="decode_rows: kv_scale: expected a scale for format"):
        jax_mla.reference.decode_rows(rows, D_CKV, D_KPE, "fp8_e4m3", None)
    with pytest.raises(ValueError, match="encode_rows: kv_format: expected one of bf16, .*'fp8'"):
        jax_mla.reference.encode_rows(rows[0], rows[0], "fp8", 1.0, [E4M3])


@pytest.mark.cuda_build
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("form", FORMATS)
def test_cuda_serves_bfloat16_queries(form, page_size) -> None:
    """Both kinds of kernels take pages of any size."""
    inputs = small_inputs(form, dtype="bfloat16", page_size=page_size)
    fun = jax.jit(functools.partial(jax_mla.decode, **inputs.kwargs()))
    lowered = fun.trace(*inputs.args()).lower(lowering_platforms=("cuda",))
    assert "@jax_mla_decode" in lowered.as_text()
    said = {s.name: s.reason for s in cuda_backends(inputs)}
    assert not said["sm80"]
    hopper = said.get("sm90")  # None: not in this build
    if hopper is not None and "compute capability" not in hopper:
        assert not hopper


@pytest.mark.cuda_build
@pytest.mark.parametrize("form", FORMATS)
def test_cuda_declines_other_queries_and_says_why(form) -> None:
    """Nothing falls back without a word."""
    inputs = small_inputs(form, dtype="float16", page_size=64)
    fun = jax.jit(functools.partial(jax_mla.decode, **inputs.kwargs()))
    why = "needs queries in bfloat16 or float8_e4m3fn with an FP8 cache, got float16"
    with pytest.raises(ValueError, match=f"sm80: {why}"):
        fun.trace(*inputs.args()).lower(lowering_platforms=("cuda",))
    said = [s.reason for s in cuda_backends(inputs)]
    assert all(why in reason or "compute capability" in reason for reason in said)


def cuda_backends(inputs: Any) -> list[Any]:
    statuses = jax_mla.backends(
        *inputs.args()[:4], layer=inputs.layer, kv_format=inputs.kv_format, platform="cuda"
    )
    return [s for s in statuses if s.platform == "cuda" and not s.by_name_only]


@pytest.mark.cuda_build
@pytest.mark.parametrize("form", FORMATS)
def test_append_lowers_for_cuda(form) -> None:
    rows = jnp.zeros((2, 576))
    append = jax.jit(functools.partial(write, form, backend=None))
    lowered = append.trace(rows[:, :D_CKV], rows[:, D_CKV:]).lower(lowering_platforms=("cuda",))
    assert "@jax_mla_append" in lowered.as_text()
