"""Tests that need a GPU: command buffers, in-place chains, layouts, big pools, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_params import gpu_params

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing import fp8
from jax_mla.testing.cases import BIG_CASES, CASES, Case
from jax_mla.testing.run import check, device_of, gpu_backends, num_gpus, why_not

pytestmark = pytest.mark.gpu

D_CKV, D_KPE, HEADS = 512, 64, 16
PAGE_SIZES = {"sm100": 128}  # of a backend that does not take pages of 64
SM_SCALE = 192**-0.5
NUM_LAYERS = 61
VARIANTS = ("227kb", "163kb", "99kb")

cuda_backends = pytest.mark.parametrize("gpu_backend", gpu_params() or ["none"])


@pytest.fixture(autouse=True)
def default_to_gpu():
    """Put plain arrays on the first GPU."""
    with jax.default_device(device_of("sm80")):
        yield


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "case", [c for c in CASES + BIG_CASES if max(c.seq_lens) < 2000], ids=lambda case: case.name
)
def test_shared_memory_layouts_of_other_gpus(case: Case, variant: str) -> None:
    """The shared memory layouts for smaller GPUs run on this one as well."""
    if reason := why_not(case, "sm80"):
        pytest.skip(f"sm80: {reason}")
    try:
        check(case, f"sm80:{variant}")
    except jax.errors.JaxRuntimeError as error:
        if "needs a variant" not in str(error):
            raise
        pytest.skip(f"sm80: {error}")


@cuda_backends
@pytest.mark.parametrize("case", BIG_CASES, ids=lambda case: case.name)
def test_big_cases(case: Case, gpu_backend: str) -> None:
    if reason := why_not(case, gpu_backend):
        pytest.skip(f"{gpu_backend}: {reason}")
    check(case, gpu_backend)


def make_step(page_size: int = 64, batch: int = 3, max_pages: int = 6, seed: int = 0):
    """Return a stacked pool with `batch` sequences, and queries and new rows for each layer."""
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 5)
    dtype = jnp.bfloat16
    num_pages = batch * max_pages + 1
    pool = jax.random.normal(keys[0], (NUM_LAYERS, num_pages, page_size, D_CKV + D_KPE), dtype)
    q_nope = jax.random.normal(keys[1], (NUM_LAYERS, batch, 1, HEADS, D_CKV), dtype)
    q_pe = jax.random.normal(keys[2], (NUM_LAYERS, batch, 1, HEADS, D_KPE), dtype)
    ckv = jax.random.normal(keys[3], (NUM_LAYERS, batch, 1, D_CKV), dtype)
    kpe = jax.random.normal(keys[4], (NUM_LAYERS, batch, 1, D_KPE), dtype)
    table = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages)
    return pool, (q_nope, q_pe, ckv, kpe, jnp.asarray(table, jnp.int32))


def layer_call(pool, layer, rows, table, lens, backend):
    """Append one token a sequence, then attend."""
    q_nope, q_pe, ckv, kpe = rows
    pool = jax_mla.append(pool, ckv, kpe, table, lens[:, None] - 1, layer=layer)
    out = jax_mla.decode(
        q_nope, q_pe, pool, table, lens, sm_scale=SM_SCALE, layer=layer, backend=backend
    )
    return pool, out


def chain(backend, pool, q_nope, q_pe, ckv, kpe, table, lens):
    """Run all layers, unrolled."""
    outs = []
    for layer in range(NUM_LAYERS):
        rows = (q_nope[layer], q_pe[layer], ckv[layer], kpe[layer])
        pool, out = layer_call(pool, layer, rows, table, lens, backend)
        outs.append(out)
    return pool, jnp.stack(outs)


def scan(backend, pool, q_nope, q_pe, ckv, kpe, table, lens):
    """Run all layers in a loop that carries the pool."""

    def body(pool, xs):
        layer, rows = xs
        return layer_call(pool, layer, rows, table, lens, backend)

    layers = jnp.arange(NUM_LAYERS, dtype=jnp.int32)
    return jax.lax.scan(body, pool, (layers, (q_nope, q_pe, ckv, kpe)))


def assert_step_right(pool, outs, q_nope, q_pe, ckv, kpe, table, lens) -> None:
    """Compare a step with the reference on the returned pool."""
    last, page_size = lens - 1, pool.shape[2]
    for layer in (0, 1, NUM_LAYERS - 1):
        page = jnp.take_along_axis(table, (last // page_size)[:, None], axis=1)[:, 0]
        stored = pool[layer, page, last % page_size]
        np.testing.assert_array_equal(stored[:, :D_CKV], ckv[layer, :, 0])
        np.testing.assert_array_equal(stored[:, D_CKV:], kpe[layer, :, 0])
        want, _ = jax_mla.reference.decode(
            q_nope[layer],
            q_pe[layer],
            pool,
            table,
            lens,
            sm_scale=SM_SCALE,
            layer=layer,
            return_lse=True,
        )
        error = jnp.linalg.norm(outs[layer].astype(jnp.float32) - want.astype(jnp.float32))
        assert error < 8e-3 * jnp.linalg.norm(want.astype(jnp.float32))


@cuda_backends
@pytest.mark.parametrize("loop", [chain, scan])
def test_61_layers_in_place_with_growing_lengths(gpu_backend: str, loop) -> None:
    """One executable takes new lengths at each call, and the donated pool never moves."""
    pool, operands = make_step(PAGE_SIZES.get(gpu_backend, 64))
    step = jax.jit(functools.partial(loop, gpu_backend), donate_argnums=0)
    lens = jnp.asarray([63, 200, 1], jnp.int32)
    address = pool.unsafe_buffer_pointer()
    for _ in range(4):
        pool, outs = step(pool, *operands, lens)
        assert pool.unsafe_buffer_pointer() == address
        assert_step_right(pool, outs, *operands, lens)
        lens = lens + 1
    assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


@cuda_backends
def test_host_handlers_are_not_called_in_steady_state(gpu_backend: str) -> None:
    """XLA replays its command buffer, so 61 appends and decodes cost the host one launch.

    A command buffer is recorded for fixed addresses, so a serving loop donates its state, lengths
    and outputs included; XLA keeps one recording for each set of addresses that it met.
    """
    pool, operands = make_step(PAGE_SIZES.get(gpu_backend, 64))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), keep_unused=True)
    def step(pool, lens, last_outs, *operands):
        q_nope, q_pe, ckv, kpe, table = operands
        pool, outs = chain(gpu_backend, pool, q_nope, q_pe, ckv, kpe, table, lens)
        return pool, lens + 1, outs

    state = (pool, jnp.asarray([63, 200, 1], jnp.int32), jnp.zeros_like(operands[0]))
    for _ in range(6):
        state = jax.block_until_ready(step(*state, *operands))
    before = _ffi.extension().call_counts()
    for _ in range(10):
        state = jax.block_until_ready(step(*state, *operands))
    assert min(before["decode_cuda"], before["append_cuda"]) > 0
    assert _ffi.extension().call_counts() == before
    pool, lens, outs = state
    assert_step_right(pool, outs, *operands, lens - 1)


@cuda_backends
def test_pool_over_4_gib_and_page_ids_over_2_to_the_20(gpu_backend: str) -> None:
    """The same tokens at the far end of a big pool, past 32-bit offsets, give the same bits."""
    page_size, lens = PAGE_SIZES.get(gpu_backend, 4), jnp.asarray([240, 17, 0], jnp.int32)
    max_pages, num_pages = -(-240 // page_size), (1 << 22) // page_size + 200
    keys = jax.random.split(jax.random.key(1), 3)
    small = jax.random.normal(keys[0], (3 * max_pages, page_size, D_CKV + D_KPE), jnp.bfloat16)
    q_nope = jax.random.normal(keys[1], (3, HEADS, D_CKV), jnp.bfloat16)
    q_pe = jax.random.normal(keys[2], (3, HEADS, D_KPE), jnp.bfloat16)
    local = jnp.arange(3 * max_pages, dtype=jnp.int32).reshape(3, max_pages)
    far = num_pages - 3 * max_pages
    place = jax.jit(
        lambda: (
            jnp.full((num_pages, page_size, D_CKV + D_KPE), jnp.nan, jnp.bfloat16)
            .at[far:]
            .set(small)
        )
    )
    big = place()
    assert big.nbytes > 1 << 32
    options = {"sm_scale": SM_SCALE, "return_lse": True, "backend": gpu_backend}
    got = jax_mla.decode(q_nope, q_pe, big, local + far, lens, **options)
    want = jax_mla.decode(q_nope, q_pe, small, local, lens, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)

    append = jax.jit(jax_mla.append, donate_argnums=0)
    row = jnp.ones((3, 1, D_CKV), jnp.bfloat16), jnp.ones((3, 1, D_KPE), jnp.bfloat16)
    positions = jnp.asarray([[239], [-1], [3]], jnp.int32)
    big = append(big, *row, local + far, positions)
    assert (big[far + 239 // page_size, 239 % page_size] == 1).all()
    assert (big[far + 2 * max_pages, 3] == 1).all()
    np.testing.assert_array_equal(big[far + max_pages], small[max_pages])


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@pytest.mark.parametrize("variant", ["", ":narrow", ":narrow8", ":narrow16", ":wide"])
@pytest.mark.parametrize("table_tokens", [1024, 1 << 17])
@pytest.mark.parametrize(("q_len", "num_heads"), [(1, 24), (1, 64), (1, 100), (2, 128)])
def test_hopper_tilings(q_len: int, num_heads: int, table_tokens: int, variant: str) -> None:
    """Every kernel and tile, and the ones that the backend chooses for little and for much work."""
    seq_lens = (1000, 65, 0, 1, 700)
    case = Case("tilings", seq_lens, q_len, num_heads, table_tokens=table_tokens)
    if reason := why_not(case, "sm90"):
        pytest.skip(f"sm90: {reason}")
    check(case, f"sm90{variant}")


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@pytest.mark.parametrize("variant", ["narrow", "wide"])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24, 64])
def test_hopper_page_sizes(page_size: int, variant: str) -> None:
    """Pages are loaded by a tensor map or gathered."""
    case = Case("pages", (1000, 65, 0, 1, 700), num_heads=80, page_size=page_size)
    if reason := why_not(case, "sm90"):
        pytest.skip(f"sm90: {reason}")
    check(case, f"sm90:{variant}")


# Blocks that make up pairs and those that are left over; so many sequences that a CTA has several.
CODE_LENGTHS = {"few": (1000, 65, 0, 1, 700, 64, 128, 129, 4000), "many": (*range(0, 600, 2),)}


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@pytest.mark.parametrize("variant", ["", ":narrow", ":narrow16", ":narrow16x2", ":scores"])
@pytest.mark.parametrize("lengths", CODE_LENGTHS)
@pytest.mark.parametrize(
    ("q_len", "num_heads", "d_ckv", "cache", "kv_format", "queries"),
    [
        (1, 24, 512, "packed", "fp8_e4m3", "numbers"),
        (1, 64, 512, "mixed", "fp8_e4m3", "numbers"),
        (3, 50, 512, "packed", "fp8_e4m3", "numbers"),
        (1, 128, 256, "mixed", "fp8_e4m3", "numbers"),
        (1, 24, 512, "packed", "fp8_e4m3", "codes"),
        (1, 64, 512, "mixed", "fp8_e4m3", "codes"),
        (3, 50, 512, "packed", "fp8_e4m3", "codes"),
        (1, 128, 256, "packed", "fp8_e4m3", "codes"),
        (1, 16, 512, "packed", "fp8_ds_mla", "numbers"),
        (2, 4, 512, "packed", "fp8_ds_mla", "numbers"),
        (1, 40, 512, "packed", "fp8_ds_mla", "codes"),
    ],
)
def test_hopper_codes(
    q_len: int, num_heads: int, d_ckv: int, cache: str, kv_format: str, queries: str, lengths: str,
    variant: str,
) -> None:  # fmt: skip
    """FP8 on every kernel and on the one that the backend chooses."""
    case = Case(
        "codes",
        CODE_LENGTHS[lengths],
        q_len,
        num_heads,
        d_ckv,
        d_kpe=d_ckv // 8,
        cache=cache,
        kv_format=kv_format,
        has_codes=queries == "codes",
    )
    if reason := why_not(case, "sm90"):
        pytest.skip(f"sm90: {reason}")
    if variant == ":narrow16x2" and d_ckv == 256:
        message = f'FP8 .* = 512 for "narrow16x2", got {kv_format}.* with {d_ckv}'
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            check(case, f"sm90{variant}")
        return
    if variant == ":scores" and d_ckv != 512:
        with pytest.raises(jax.errors.JaxRuntimeError, match='d_ckv = 512 for "scores"'):
            check(case, f"sm90{variant}")
        return
    check(case, f"sm90{variant}")


def codes_call(
    lens: np.ndarray,
    heads: int,
    kv_format: str,
    is_absent: np.ndarray,
    *,
    has_codes: bool,
    kpe_scale: float | None = 0.5,
):
    """Return a decode with an FP8 cache, as a function of the backend.

    `is_absent` [batch, max_pages]: pages that the pool does not have, whose ids are wild.
    `has_codes`: the queries are codes, too. `kpe_scale`: the scale of kpe in "fp8_e4m3", where that
    of ckv is 0.5; None: kpe is bf16, in a pool of its own.
    """
    rng = np.random.default_rng(5)
    table = rng.permutation(is_absent.size).reshape(is_absent.shape).astype(np.int32)
    values = rng.standard_normal((table.size, 64, D_CKV + D_KPE), np.float32)
    if kv_format == "fp8_ds_mla":
        scale, dtypes = None, [jnp.uint8]
    elif kpe_scale is None:
        scale, dtypes = 0.5, [jnp.float8_e4m3fn, jnp.bfloat16]
    else:
        scale, dtypes = (0.5, kpe_scale), [jnp.float8_e4m3fn]
    ckv, kpe = jnp.asarray(values[..., :D_CKV]), jnp.asarray(values[..., D_CKV:])
    rows = jax_mla.reference.encode_rows(ckv, kpe, kv_format, scale, dtypes)
    pools = [np.array(pool) for pool in rows]
    for pool in pools:
        pool.view(np.uint8)[table[is_absent]] = fp8.POISON
    pool = tuple(map(jnp.asarray, pools)) if len(pools) == 2 else jnp.asarray(pools[0])
    table[is_absent] = 2_147_480_000
    q_nope, q_pe = (
        jnp.asarray(
            rng.standard_normal((len(lens), 1, heads, width)),
            jnp.float8_e4m3fn if has_codes else jnp.bfloat16,
        )
        for width in (D_CKV, D_KPE)
    )
    return functools.partial(
        jax_mla.decode,
        *(q_nope, q_pe, pool, jnp.asarray(table), jnp.asarray(lens)),
        sm_scale=SM_SCALE,
        kv_format=kv_format,
        kv_scale=scale,
        q_scale=1.25 if has_codes else None,
        return_lse=True,
    )


codes_kernels = pytest.mark.parametrize(
    ("heads", "kv_format", "queries", "kernel"),
    [
        (64, "fp8_e4m3", "numbers", "narrow"),
        (64, "fp8_e4m3", "codes", "scores"),
        (100, "fp8_e4m3", "codes", "scores"),
        (64, "fp8_e4m3", "numbers", "scores"),
        (64, "fp8_ds_mla", "numbers", "scores"),
        (100, "fp8_ds_mla", "codes", "scores"),
        (16, "fp8_e4m3", "numbers", "narrow"),
        (16, "fp8_e4m3", "numbers", "narrow16x2"),
        (16, "fp8_ds_mla", "numbers", "narrow"),
        (16, "fp8_ds_mla", "numbers", "narrow16x2"),
    ],
)


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@codes_kernels
def test_hopper_codes_on_absent_pages(
    heads: int, kv_format: str, queries: str, kernel: str
) -> None:
    """Pages that the pool does not have: alone, in turn, in runs longer than the ring of stages."""
    lens = np.array([10_000, 9_999, 64, 6_400, 640, 10_000, 10_000, 10_000], np.int32)
    is_absent = np.random.default_rng(6).random((len(lens), 160)) < 0.4
    is_absent[1, 3:150] = True
    is_absent[2:4] = True
    is_absent[3, 60] = False
    is_absent[5:] = False
    is_absent[5, ::2] = is_absent[6, 1::2] = True
    call = codes_call(lens, heads, kv_format, is_absent, has_codes=queries == "codes")
    want = call(backend="sm80")
    for num_splits in (None, 1):  # uncut, a sequence has its whole run in one item
        got = call(backend=f"sm90:{kernel}", num_splits=num_splits)
        assert np.isneginf(got[1][2]).all() and (got[0][2] == 0).all()
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=0.02)


# Lengths of runs of empty blocks, which take a stage each. The ring has 16 stages, of which a block
# with keys leaves 11; with fp8_ds_mla one fewer.
EMPTY_BLOCKS = (0, 1, 9, 10, 11, 15, 16, 17)
scores_formats = pytest.mark.parametrize(
    ("kv_format", "kpe_scale"),
    [("fp8_e4m3", 0.5), ("fp8_e4m3", 2.0), ("fp8_e4m3", None), ("fp8_ds_mla", None)],
)


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@scores_formats
@pytest.mark.parametrize("queries", ["numbers", "codes"])
def test_hopper_scores_behind_empty_blocks(
    queries: str, kv_format: str, kpe_scale: float | None
) -> None:
    """Runs of empty blocks in front of, between and behind others, several sequences a CTA."""
    rng = np.random.default_rng(11)
    lens, is_absent = [], []
    for seq in range(320):  # more than two for each SM
        present: list[bool] = []
        while len(present) < 24:
            present += [False] * int(rng.choice(EMPTY_BLOCKS)) + [True] * int(rng.integers(4))
        num_blocks = 0 if seq % 13 == 5 else int(rng.integers(1, len(present)))
        if seq % 13 == 7:
            present = [False] * len(present)
        lens.append(max(64 * num_blocks - int(rng.integers(64)), 0))
        is_absent.append([not x for x in present[:24]])
    lengths = np.minimum(np.array(lens, np.int32), 64 * 24)
    options = {"has_codes": queries == "codes", "kpe_scale": kpe_scale}
    call = codes_call(lengths, 40, kv_format, np.array(is_absent), **options)
    want = call(backend="sm80")
    for num_splits in (None, 1):
        got = call(backend="sm90:scores", num_splits=num_splits)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=0.02)


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@scores_formats
def test_hopper_scores_of_special_queries(kv_format: str, kpe_scale: float | None) -> None:
    """Rows of queries that two codes hold badly, or not at all, change no other row."""
    lens = np.full(4, 200, np.int32)
    is_absent = np.zeros((4, 4), bool)
    call = codes_call(lens, 40, kv_format, is_absent, has_codes=False, kpe_scale=kpe_scale)
    q_nope, q_pe, *rest = call.args
    factors = {0: 0.0, 1: 1e-40, 2: 2.0**100, 3: 2.0**-100}
    for row, factor in factors.items():
        q_nope, q_pe = (q.at[:, 0, row].multiply(factor) for q in (q_nope, q_pe))
    q_nope = q_nope.at[:, 0, 4, 7].set(jnp.inf).at[:, 0, 5, 9].set(jnp.nan)
    q_pe = q_pe.at[:, 0, 6, 3].set(-jnp.inf)
    q_nope = q_nope.at[:, 0, 7, 5].multiply(2.0**10)  # an outlier
    call = functools.partial(call.func, q_nope, q_pe, *rest, **call.keywords)
    got, want = call(backend="sm90:scores"), call(backend="sm80")
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(a.astype(jnp.float32)) for a in (x, y))
        assert np.isnan(x[:, 0, 4:7]).all()
        keep = [0, 1, 3, *range(7, 40)]  # 2: one key has all the weight, or two nearly the same
        np.testing.assert_allclose(x[:, 0, keep], y[:, 0, keep], atol=0.02, rtol=0.01)
        assert np.isfinite(x[:, 0, 2]).all()


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@pytest.mark.parametrize("heads", [16, 64])
def test_hopper_tile_scales_of_any_size(heads: int) -> None:
    """Tiles whose scales are far smaller than others of their token, or 0, in either order."""
    lens = np.full(16, 200, np.int32)
    is_absent = np.zeros((16, 4), bool)
    call = codes_call(lens, heads, "fp8_ds_mla", is_absent, has_codes=False)
    q_nope, q_pe, pool, table, *rest = call.args
    rows, factors = np.array(pool), np.array([0.0, 2.0**-20, 2.0**-70, 2.0**-110], np.float32)
    scales = rows[..., 512:528].view(np.float32)
    for seq, pages in enumerate(np.asarray(table)):
        is_small = [bool(seq >> tile & 1) for tile in range(4)]
        scales[pages] *= np.where(is_small, np.tile(factors, 16)[:, None], np.float32(1.0))
    call = functools.partial(
        call.func, q_nope, q_pe, jnp.asarray(rows), table, *rest, **call.keywords
    )
    want = call(backend="sm80")
    for kernel in ("narrow", "scores"):
        for x, y in zip(call(backend=f"sm90:{kernel}"), want, strict=True):
            np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=0.02)


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@codes_kernels
def test_hopper_codes_in_long_items(heads: int, kv_format: str, queries: str, kernel: str) -> None:
    """Every CTA goes round its ring of stages many times, and repeats bit for bit."""
    lens = np.random.default_rng(7).integers(1, 2400, 150).astype(np.int32)
    lens[0] = 2400
    is_absent = np.random.default_rng(8).random((len(lens), 38)) < 0.05
    call = codes_call(lens, heads, kv_format, is_absent, has_codes=queries == "codes")
    got, want = call(backend=f"sm90:{kernel}"), call(backend="sm80")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=0.02)
    for _ in range(3):
        for x, y in zip(call(backend=f"sm90:{kernel}"), got, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.skipif("sm90" not in gpu_backends(), reason="needs the sm90 backend")
@pytest.mark.parametrize(
    ("heads", "kv_format", "queries", "kernel"),
    [
        (16, "fp8_e4m3", "numbers", "narrow16x2"),
        (9, "fp8_e4m3", "numbers", "narrow16x2"),
        (16, "fp8_ds_mla", "numbers", "narrow16x2"),
        (9, "fp8_ds_mla", "numbers", "narrow16x2"),
        (64, "fp8_e4m3", "codes", "scores"),
        (40, "fp8_e4m3", "numbers", "scores"),
    ],
)
def test_hopper_codes_of_a_step(heads: int, kv_format: str, queries: str, kernel: str) -> None:
    """One new token a sequence with cu_q_lens: two teams take units, if the cache has one scale."""
    rng = np.random.default_rng(9)
    lens = rng.integers(0, 2400, 150).astype(np.int32)
    lens[:2] = 2400, 0
    is_absent = rng.random((len(lens), 38)) < 0.05
    decode = codes_call(lens, heads, kv_format, is_absent, has_codes=queries == "codes")
    q_nope, q_pe, pool, table, seq_lens = decode.args
    ckv, kpe = (
        jnp.asarray(rng.standard_normal((len(lens), width)), jnp.bfloat16)
        for width in (D_CKV, D_KPE)
    )
    step = functools.partial(
        jax_mla.ragged_paged_attention,
        *(q_nope[:, 0], q_pe[:, 0], ckv, kpe, pool, table, seq_lens),
        cu_q_lens=jnp.arange(len(lens) + 1, dtype=jnp.int32),
        **decode.keywords,
    )
    *want, want_pool = step(backend="sm80")
    *first, first_pool = step(backend=f"sm90:{kernel}")
    for x, y in zip(first, want, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=0.02)
    np.testing.assert_array_equal(first_pool.view(jnp.uint8), want_pool.view(jnp.uint8))
    for _ in range(3):
        for x, y in zip(step(backend=f"sm90:{kernel}")[:2], first, strict=True):
            np.testing.assert_array_equal(x, y)


@cuda_backends
@pytest.mark.parametrize("num_heads", [16, 64])
def test_batch_invariant_with_long_mates(gpu_backend: str, num_heads: int) -> None:
    page_size = PAGE_SIZES.get(gpu_backend, 64)
    lens = (5000, 3, 0, 700, 64, 9000)
    case = Case("mates", seq_lens=lens, num_heads=num_heads, page_size=page_size)
    inputs = case.inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    options = {
        **inputs.kwargs(),
        "batch_invariant": True,
        "return_lse": True,
        "backend": gpu_backend,
    }
    together = jax_mla.decode(q_nope, q_pe, pool, table, lens, **options)
    for own in (slice(0, 1), slice(3, 4), slice(3, 6), slice(5, 6)):
        alone = jax_mla.decode(q_nope[own], q_pe[own], pool, table[own], lens[own], **options)
        for whole, part in zip(together, alone, strict=True):
            np.testing.assert_array_equal(whole[own], part)


def test_error_lists_every_backend() -> None:
    inputs = CASES[0].inputs()
    with pytest.raises(jax.errors.JaxRuntimeError, match="sm80: needs a variant") as error:
        jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend="sm80:1kb").block_until_ready()
    for name in gpu_backends():
        assert f"{name}: " in str(error.value)


@cuda_backends
@pytest.mark.skipif(num_gpus() < 2, reason="needs two GPUs")
def test_two_devices_at_once(gpu_backend: str) -> None:
    """The backend keeps the facts of each device, and both devices give the same bits."""
    case = Case("two", seq_lens=(0, 700, 65, 3000), page_size=PAGE_SIZES.get(gpu_backend, 64))
    outs = []
    for device in jax.devices("cuda")[:2]:
        with jax.default_device(device):
            inputs = case.inputs()
            outs.append(jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend=gpu_backend))
    np.testing.assert_array_equal(np.asarray(outs[0]), np.asarray(outs[1]))


@cuda_backends
def test_calls_from_two_streams_do_not_share_scratch(gpu_backend: str) -> None:
    """Independent calls of one program, which XLA may overlap, give the same bits as each alone."""
    page_size = PAGE_SIZES.get(gpu_backend, 64)
    cases = [
        Case(f"stream_{i}", seq_lens=(3000 + 64 * i, 5), page_size=page_size) for i in range(4)
    ]
    args = [case.inputs(i).args() for i, case in enumerate(cases)]
    one = functools.partial(jax_mla.decode, sm_scale=SM_SCALE, return_lse=True, backend=gpu_backend)
    together = jax.jit(lambda xs: [one(*x) for x in xs])(args)
    for got, x in zip(together, args, strict=True):
        want = jax.jit(one)(*x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
