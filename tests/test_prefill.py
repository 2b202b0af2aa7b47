"""prefill: unabsorbed attention of long prompts, against the absorbed reference."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick import seeds

import jax_mla
from jax_mla._runtime import _backends
from jax_mla.ops.prefill import primitive
from jax_mla.testing.compare import ATOL_LSE, assert_close, decode_exactly, decode_in_dtype
from jax_mla.testing.hlo import collectives, num_copies, text
from jax_mla.testing.inputs import DecodeInputs, decode_inputs
from jax_mla.testing.run import GPU_PLATFORM, cpu_mesh

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens of several sequences, and what the definition gives for them.

    Tokens of no sequence are NaN. So are the pool's rows of the new tokens, and all that
    `decode_inputs` poisons.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]
    out: np.ndarray
    lse: np.ndarray
    yardstick: tuple[np.ndarray, np.ndarray]

    def args(self, **changes) -> list[Any]:
        """Return the positional arguments of `prefill`."""
        return jax.tree.map(jnp.asarray, list({**self.arrays, **changes}.values()))

    def run(self, options=None, **changes):
        options = {**self.options, **(options or {}), "return_lse": True}
        return jax_mla.prefill(*self.args(**changes), **options)

    def check(self, got) -> None:
        dtype = str(self.arrays["q_nope"].dtype)
        assert got[0].dtype == dtype and got[1].dtype == np.float32
        out, lse = map(np.asarray, got)
        in_dtype, lse_in_dtype = self.yardstick
        assert_close(out, None, self.out, self.lse, dtype=dtype, yardstick=in_dtype)
        # The keys are rounded to the dtype, so lse is not as exact as that of decode.
        seen = np.isfinite(self.lse)
        np.testing.assert_array_equal(np.isneginf(lse), ~seen)
        allowed = 2 * np.abs(lse_in_dtype[seen] - self.lse[seen]).max(initial=0) + ATOL_LSE[dtype]
        np.testing.assert_allclose(lse[seen], self.lse[seen], atol=allowed, rtol=0)


@functools.cache
def step(
    q_lens=(7, 0, 1, 5),
    prefix_lens=(9, 6, 0, 22),
    num_padding=3,
    heads=4,
    d_nope=16,
    d_v=12,
    d_ckv=32,
    d_kpe=8,
    page_size=4,
    dtype="float32",
    device=None,
    implementation=None,
    sliding_window=None,
    soft_cap=None,
    **options,
) -> Step:
    rng = np.random.default_rng(1)
    num_tokens = sum(q_lens) + num_padding
    totals = tuple(map(sum, zip(q_lens, prefix_lens, strict=True)))
    inputs = decode_inputs(
        seq_lens=totals, num_heads=heads, d_ckv=d_ckv, d_kpe=d_kpe, page_size=page_size,
        dtype=dtype, sliding_window=sliding_window, num_new=q_lens, **options,
    )  # fmt: skip
    mask = {"sliding_window": sliding_window, "soft_cap": soft_cap}
    as_dtype = inputs.q_nope.dtype

    def normal(*shape: int, scale=1.0):
        return (rng.standard_normal(shape, dtype=np.float32) * scale).astype(as_dtype)

    q_nope, q_pe = normal(num_tokens, heads, d_nope), normal(num_tokens, heads, d_kpe)
    rows = np.full((num_tokens, d_ckv + d_kpe), np.nan, as_dtype)
    w_uk = normal(heads, d_nope, d_ckv, scale=d_ckv**-0.5)
    w_uv = normal(heads, d_ckv, d_v, scale=d_ckv**-0.5)
    sm_scale = 2 * (d_nope + d_kpe) ** -0.5
    out = np.zeros((num_tokens, heads, d_v), np.float32)
    lse = np.full((num_tokens, heads), -np.inf, np.float32)
    yardstick = out.copy(), lse.copy()
    cu = np.cumsum((0, *q_lens)).astype(np.int32)
    given = inputs.kv_pages if isinstance(inputs.kv_pages, tuple) else (inputs.kv_pages,)
    pools = [pool.copy() for pool in given]
    f32 = np.float32
    for b, (q_len, prefix) in enumerate(zip(q_lens, prefix_lens, strict=True)):
        new = slice(cu[b], cu[b + 1])
        place = np.arange(prefix, prefix + q_len)
        index = inputs.page_table[b][place // page_size], place % page_size
        if inputs.layer is not None:
            index = (inputs.layer, *index)
        rows[new] = np.concatenate([pool[index] for pool in pools], -1)
        if not q_len:
            continue
        absorbed = np.einsum("qhn,hnc->qhc", q_nope[new].astype(f32), w_uk.astype(f32))[None]
        one: dict[str, Any] = {
            "q_pe": q_pe[new][None], "page_table": inputs.page_table[b : b + 1],
            "seq_lens": inputs.seq_lens[b : b + 1], "sm_scale": sm_scale,
        }  # fmt: skip
        whole = DecodeInputs(q_nope=absorbed, kv_pages=inputs.kv_pages, layer=inputs.layer, **one)
        if device is None:
            latents, lses = decode_exactly(whole, **mask)
        else:  # large
            with jax.default_device(device):
                got = jax_mla.reference.decode(*whole.args(), **whole.kwargs(), return_lse=True)
            latents, lses = map(np.asarray, got)
        rounded = dataclasses.replace(whole, q_nope=absorbed.astype(as_dtype))
        to_values = functools.partial(np.einsum, "qhc,hcv->qhv")
        out[new] = to_values(latents[0], w_uv.astype(f32))
        lse[new] = lses[0]
        in_dtype, lse_in_dtype = decode_in_dtype(rounded, **mask)
        yardstick[0][new] = to_values(in_dtype[0], w_uv.astype(f32)).astype(as_dtype).astype(f32)
        yardstick[1][new] = lse_in_dtype[0]
    for b, (q_len, prefix) in enumerate(zip(q_lens, prefix_lens, strict=True)):
        place = np.arange(prefix, prefix + q_len)
        index = inputs.page_table[b][place // page_size], place % page_size
        for pool in pools:
            pool[(..., *index, slice(None))] = np.nan
    q_nope[cu[-1] :] = q_pe[cu[-1] :] = np.nan
    arrays = {
        "q_nope": q_nope, "q_pe": q_pe, "ckv": rows[:, :d_ckv], "kpe": rows[:, d_ckv:],
        "w_uk": w_uk, "w_uv": w_uv,
        "kv_pages": tuple(pools) if len(pools) == 2 else pools[0],
        "page_table": inputs.page_table, "seq_lens": inputs.seq_lens, "cu_q_lens": cu,
        "num_seqs": None,
    }  # fmt: skip
    options = {
        "sm_scale": sm_scale, "layer": inputs.layer, "max_q_len": max(q_lens),
        "implementation": implementation,
    }  # fmt: skip
    options |= {name: value for name, value in mask.items() if value is not None}
    return Step(arrays, options, out, lse, yardstick)


@pytest.fixture
def make_step(implementation: str):
    """Return `step` for the padded and for the packed prompts; the kernel takes the latter."""
    return functools.partial(step, implementation=implementation)


@pytest.fixture(params=["xla", "reference"])
def implementation(request) -> str:
    return request.param


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("dtype", "prefix_chunk"),
    [("float32", 1), ("float32", 40), ("float32", 8192), ("bfloat16", 1), ("float16", 40)],
)
def test_equals_absorbed_attention(dtype, prefix_chunk, make_step) -> None:
    case = make_step(dtype=dtype)
    out, lse = case.run({"prefix_chunk": prefix_chunk})
    case.check((out, lse))
    if dtype == "float32":
        seen = np.isfinite(case.lse)
        np.testing.assert_allclose(out, case.out, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[seen], case.lse[seen], rtol=1e-5, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("pools", [{"cache": "split"}, {"num_layers": 3}], ids=str)
def test_other_pools(pools, make_step) -> None:
    case = make_step(**pools)
    case.check(case.run())


@pytest.mark.quick(2)
@pytest.mark.parametrize("prefix_chunk", [1, 8192])
@pytest.mark.parametrize(
    "mask",
    [{"sliding_window": n} for n in (1, 3, 6, 19)]
    + [{"soft_cap": 0.7}, {"sliding_window": 10, "soft_cap": 2.0, "cache": "split"}],
    ids=str,
)
def test_masks(mask, prefix_chunk, make_step) -> None:
    case = make_step(**mask)
    case.check(case.run({"prefix_chunk": prefix_chunk}))
    case.check(jax.jit(lambda: case.run({"prefix_chunk": prefix_chunk}))())


def test_kernels_refuse_masks() -> None:
    for name in ("sm90", "cudnn"):
        with pytest.raises(ValueError, match="expected one of None, 'xla', 'reference' with a sl"):
            step(sliding_window=3, implementation=name).run()


def test_masks_without_a_cache(make_step) -> None:
    case = make_step(prefix_lens=(0, 0, 0, 0), sliding_window=3)
    case.check(without_cache(case))


DEEPSEEK: dict[str, Any] = {
    "q_lens": (40, 3), "prefix_lens": (70, 33), "heads": 2, "d_nope": 128, "d_v": 128,
    "d_ckv": 512, "d_kpe": 64, "page_size": 16, "dtype": "bfloat16",
}  # fmt: skip


def test_deepseek_sizes(make_step) -> None:
    case = make_step(**DEEPSEEK)
    case.check(case.run({"prefix_chunk": 64}))


@pytest.mark.full
def test_values_may_be_wider_than_keys(make_step) -> None:
    case = make_step(d_v=40)
    case.check(case.run())


def without_cache(case: Step, **changes):
    changes = {"kv_pages": None, "page_table": None, "seq_lens": None, **changes}
    return case.run({"layer": None}, **changes)


@pytest.mark.full
def test_prompts_from_nothing_need_no_cache(make_step) -> None:
    case = make_step(prefix_lens=(0, 0, 0, 0))
    case.check(case.run())
    case.check(without_cache(case))
    one = make_step(q_lens=(9,), prefix_lens=(0,), num_padding=0)
    one.check(without_cache(one, cu_q_lens=None))


@pytest.mark.full
def test_default_sizes_are_safe(make_step) -> None:
    case = make_step(q_lens=(4, 4), prefix_lens=(3, 11), num_padding=0)
    case.check(case.run({"max_q_len": None}))
    case.check(case.run({"max_q_len": None}, cu_q_lens=None))


@pytest.mark.full
def test_tokens_past_max_q_len_are_padding(make_step) -> None:
    case = make_step()
    out, lse = case.run({"max_q_len": 6})
    cut = case.out.copy(), case.lse.copy()
    cut[0][6], cut[1][6] = 0, -np.inf
    dataclasses.replace(case, out=cut[0], lse=cut[1]).check((out, lse))


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_seqs", [0, 2, 3])
def test_absent_sequences(num_seqs, make_step) -> None:
    case = make_step()
    present = int(case.arrays["cu_q_lens"][num_seqs])
    cut = case.out.copy(), case.lse.copy()
    cut[0][present:], cut[1][present:] = 0, -np.inf
    want = dataclasses.replace(case, out=cut[0], lse=cut[1])
    cu, lens, table = (case.arrays[name].copy() for name in ("cu_q_lens", "seq_lens", "page_table"))
    cu[num_seqs + 1 :], lens[num_seqs:], table[num_seqs:] = -7, 2**31 - 1, 2**31 - 1
    bad = {name: jnp.asarray(x) for name, x in zip(
        ("cu_q_lens", "seq_lens", "page_table"), (cu, lens, table), strict=True)}  # fmt: skip
    want.check(case.run(num_seqs=jnp.int32(num_seqs), **bad))
    want.check(case.run(num_seqs=num_seqs, **bad))


def test_tokens_without_a_place_are_padding(make_step) -> None:
    """As in decode: with q_len_b > seq_lens[b] the first tokens have negative places."""
    case = make_step(q_lens=(7, 5), prefix_lens=(0, 4))
    lens = case.arrays["seq_lens"].copy()
    lens[0] = 4
    out, lse = case.run(seq_lens=lens)
    assert (out[:3] == 0).all() and jnp.isneginf(lse[:3]).all()
    alone = without_cache(
        case, cu_q_lens=np.array([3, 7], np.int32)
    )  # the other four among themselves
    np.testing.assert_allclose(out[3:7], alone[0][3:7], atol=1e-6)
    np.testing.assert_allclose(lse[3:7], alone[1][3:7], atol=1e-6)


@pytest.mark.parametrize("seed", seeds(8, quick=3))
def test_bad_values_on_the_device_stay_in_bounds(seed, make_step) -> None:
    """Every defined row is finite, and what a good sequence gets does not change."""
    case = make_step()
    rng = np.random.default_rng(seed)
    extreme = np.array([-(2**31), -1, 0, 3, 13, 2**30, 2**31 - 1])
    cu, lens, table = (case.arrays[name].copy() for name in ("cu_q_lens", "seq_lens", "page_table"))
    first = {"cu_q_lens": 2, "seq_lens": 1, "page_table": 1}  # sequence 0 stays good
    for name, x in (("cu_q_lens", cu), ("seq_lens", lens), ("page_table", table)):
        x[first[name] :] = rng.choice(extreme, x[first[name] :].shape).astype(np.int32)
    finite = {
        name: jnp.asarray(np.nan_to_num(np.asarray(case.arrays[name], np.float32)))
        for name in ("kv_pages", "q_nope", "q_pe", "ckv", "kpe")
    }
    bad = {"cu_q_lens": jnp.asarray(cu), "seq_lens": jnp.asarray(lens), "page_table": table}
    out, lse = case.run(**finite, **bad)
    assert jnp.isfinite(out).all() and not jnp.isnan(lse).any()
    np.testing.assert_allclose(out[:7], case.out[:7], rtol=1e-5, atol=1e-6)
    assert (np.asarray(out)[np.isneginf(lse)] == 0).all()


@pytest.mark.full
def test_absent_pages_and_layers_hold_no_keys(make_step) -> None:
    """A wild id inside a length, and a layer outside the pool."""
    case = make_step(q_lens=(5,), prefix_lens=(21,), num_padding=0)
    table = case.arrays["page_table"].copy()
    table[0, [0, 3]] = 2147480000, -5
    kept = np.r_[4:12, 16:21]
    rows = case.arrays["kv_pages"][case.arrays["page_table"][0]].reshape(-1, 40)[kept]
    rows = np.concatenate([rows, np.zeros((5, 40), np.float32)])
    rows = np.pad(rows, ((0, -len(rows) % 4), (0, 0))).reshape(-1, 4, 40)
    want = case.run(
        kv_pages=rows, page_table=np.arange(len(rows), dtype=np.int32)[None],
        seq_lens=np.array([len(kept) + 5], np.int32),
    )  # fmt: skip
    for prefix_chunk in (1, 8192):
        got = case.run({"prefix_chunk": prefix_chunk}, page_table=table)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

    stacked = case.run({"layer": jnp.int32(7)}, kv_pages=case.arrays["kv_pages"][None])
    for x, y in zip(stacked, without_cache(case), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_nan_stays_in_its_sequence(make_step) -> None:
    case = make_step()
    ckv = case.arrays["ckv"].copy()
    ckv[8:13] = np.nan  # the last sequence
    out, lse = case.run(ckv=ckv)
    assert jnp.isnan(out[12]).all()
    np.testing.assert_allclose(out[:8], case.out[:8], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:8], case.lse[:8], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_reads_no_more_chunks_than_the_longest_prefix_has(make_step) -> None:
    """The table is far wider than the lengths; a loop over all of it would take minutes."""
    case = make_step(table_tokens=2**19)
    case.check(case.run({"prefix_chunk": 1}))


def test_under_jit_and_vmap(make_step) -> None:
    case = make_step()
    names = ("q_nope", "ckv")

    def one(q_nope, ckv):
        return case.run(q_nope=q_nope, ckv=ckv)

    stacked = [jnp.stack([case.arrays[n]] * 2) for n in names]
    for got in zip(*jax.jit(jax.vmap(one))(*stacked), strict=True):
        case.check(got)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd], ids=["grad", "jvp"])
@pytest.mark.parametrize("name", ["q_nope", "w_uv", "kv_pages"])
def test_no_derivative(name, transform, make_step) -> None:
    case = make_step()
    x = jnp.asarray(case.arrays[name])

    def total(x):
        return case.run(**{name: x})[0].sum()

    with pytest.raises(NotImplementedError, match="jax_mla.prefill is for inference: it has no de"):
        transform(total)(x)
    assert not jax.grad(lambda x: total(jax.lax.stop_gradient(x)))(x).any()


def test_the_pool_stays_in_place_behind_append_and_in_a_scan_over_layers(make_step) -> None:
    case = make_step(num_layers=3)
    arrays = {name: x for name, x in case.arrays.items() if x is not None}
    seq_of = np.repeat(np.arange(4), (7, 0, 1, 5))  # append takes each token as a sequence
    positions = jnp.array([9, 10, 11, 12, 13, 14, 15, 0, 22, 23, 24, 25, 26], jnp.int32)

    def all_layers(kv_pages, arrays):
        def one(pool, layer):
            new_rows = arrays["ckv"][:13], arrays["kpe"][:13]
            pool = jax_mla.append(
                pool, *new_rows, arrays["page_table"][seq_of], positions, layer=layer
            )
            return pool, case.run({"layer": layer}, **{**arrays, "kv_pages": pool})

        return jax.lax.scan(one, kv_pages, jnp.arange(3, dtype=jnp.int32))

    operands = jax.tree.map(jnp.asarray, (arrays.pop("kv_pages"), arrays))
    compiled = jax.jit(all_layers, donate_argnums=0).lower(*operands).compile()
    assert num_copies(compiled, operands[0].shape) == 0
    out, lse = compiled(*operands)[1]
    layer = case.options["layer"]
    case.check((out[layer], lse[layer]))


# ---- Sharding ----------------------------------------------------------------------------------

BY_HEADS = {
    "q_nope": P(None, "tp"), "q_pe": P(None, "tp"), "w_uk": P("tp"), "w_uv": P("tp"),
}  # fmt: skip


def put(case: Step, mesh, specs) -> dict[str, Any]:
    return {
        name: x if x is None else jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in case.arrays.items()
    }


def test_heads_on_auto_axes_communicate_nothing(make_step) -> None:
    case = make_step()
    fun = jax.jit(lambda arrays: case.run({"prefix_chunk": 40}, **arrays))
    compiled = fun.lower(put(case, cpu_mesh((4,), ("tp",)), BY_HEADS)).compile()
    assert collectives(compiled) == []
    got = compiled(put(case, cpu_mesh((4,), ("tp",)), BY_HEADS))
    assert got[0].sharding.spec[:2] == (None, "tp")
    case.check(got)


@pytest.mark.quick(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_pages_and_heads_in_shard_map(check_vma, make_step) -> None:
    case = make_step(page_multiple=2)
    mesh = cpu_mesh((2, 2), ("tp", "cp"))
    arrays = {k: x for k, x in put(case, mesh, {**BY_HEADS, "kv_pages": P("cp")}).items()}
    names = [name for name, x in arrays.items() if x is not None]
    specs = {**BY_HEADS, "kv_pages": P("cp")}

    def local(*operands):
        mine = dict(zip(names, operands, strict=True))
        begin = jax.lax.axis_index("cp") * mine["kv_pages"].shape[0]
        options = {"page_begin": begin, "axis_name": "cp", "prefix_chunk": 40}
        return case.run(options, **mine)

    fun = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs.get(name, P()) for name in names),
        out_specs=(P(None, "tp"), P(None, "tp")), check_vma=check_vma,
    )  # fmt: skip
    case.check(jax.jit(fun)(*(arrays[name] for name in names)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_data_parallel_in_shard_map(check_vma, make_step) -> None:
    """Each device has sequences and a pool of its own, with page ids of its own."""
    cases = [
        make_step(),
        make_step(q_lens=(3, 4, 0, 6), prefix_lens=(19, 0, 0, 2), table_tokens=27),
    ]
    sizes = max(c.arrays["kv_pages"].shape[0] for c in cases)
    cases = [
        dataclasses.replace(c, arrays={**c.arrays, "kv_pages": np.pad(
            c.arrays["kv_pages"], ((0, sizes - c.arrays["kv_pages"].shape[0]), (0, 0), (0, 0)))})
        for c in cases
    ]  # fmt: skip
    split = [n for n, x in cases[0].arrays.items() if x is not None and n not in ("w_uk", "w_uv")]
    mesh = cpu_mesh((2,), ("dp",))

    def local(*operands):
        return cases[0].run(**dict(zip(split, operands, strict=True)))

    fun = jax.jit(jax.shard_map(
        local, mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"), P("dp")), check_vma=check_vma,
    ))  # fmt: skip
    operands = [jnp.concatenate([c.arrays[n] for c in cases]) for n in split]
    compiled = fun.lower(*operands).compile()
    assert collectives(compiled) == []
    out, lse = compiled(*operands)
    tokens = cases[0].out.shape[0]
    assert cases[1].out.shape[0] == tokens
    for i, case in enumerate(cases):
        mine = slice(i * tokens, (i + 1) * tokens)
        case.check((np.asarray(out)[mine], np.asarray(lse)[mine]))


# ---- Errors ------------------------------------------------------------------------------------

CASE = step()


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({"q_nope": CASE.arrays["q_nope"][0]}, {}, "q_nope: expected .tokens"),
        ({"q_pe": CASE.arrays["q_pe"][:5]}, {}, "q_pe: expected shape"),
        ({"kpe": CASE.arrays["ckv"]}, {}, "kpe: expected shape"),
        ({"ckv": CASE.arrays["ckv"].astype(np.float16)}, {}, "ckv: expected float32"),
        ({"w_uk": CASE.arrays["w_uv"]}, {}, "w_uk: expected shape"),
        (
            {"q_nope": CASE.arrays["q_nope"] @ CASE.arrays["w_uk"][0]},
            {},
            "q_nope: expected d_nope = 16 as in w_uk, .*got 32, the width of ckv, .* by W_UK",
        ),
        ({"w_uv": CASE.arrays["w_uv"][:2]}, {}, "w_uv: expected shape"),
        ({"seq_lens": None}, {}, "kv_pages, page_table, seq_lens: expected all"),
        ({"kv_pages": None}, {}, "got only page_table, seq_lens"),
        ({"kv_pages": CASE.arrays["kv_pages"][..., :30]}, {}, "kv_pages: expected"),
        ({"seq_lens": CASE.arrays["seq_lens"][:2]}, {}, "seq_lens: expected shape"),
        ({"cu_q_lens": CASE.arrays["cu_q_lens"][:-1]}, {}, "cu_q_lens: expected .seqs"),
        ({"cu_q_lens": CASE.arrays["cu_q_lens"].astype(np.float32)}, {}, "cu_q_lens: expected int"),
        ({"cu_q_lens": None, "q_nope": None}, {}, "q_nope: expected an array"),
        ({"num_seqs": 5}, {}, "num_seqs: expected a number of sequences"),
        ({}, {"max_q_len": 0}, "max_q_len: expected an int in"),
        ({}, {"max_q_len": 2.0}, "max_q_len: expected an int, got float"),
        (
            {},
            {"max_q_len": 6},
            "max_q_len: expected at least the new tokens of every sequence, up to 7",
        ),
        ({}, {"prefix_chunk": -4}, "prefix_chunk: expected an int in"),
        ({}, {"sm_scale": 0.0}, "sm_scale: expected a positive"),
        ({}, {"sm_scale": 1e300}, "sm_scale: expected a positive"),
        ({}, {"sm_scale": 10**400}, "sm_scale: expected a positive number in .*, got inf"),
        ({"cu_q_lens": CASE.arrays["cu_q_lens"][:1]}, {}, "cu_q_lens: expected .seqs"),
        ({}, {"sm_scale": jnp.float32(1)}, "sm_scale: expected a Python number"),
        ({}, {"layer": 0}, "layer: expected None"),
        ({}, {"axis_name": "cp"}, "page_begin: expected an index"),
        ({}, {"axis_name": 3, "page_begin": 0}, "axis_name: expected names of mesh axes, got 3"),
        ({}, {"implementation": "flash"}, "implementation: expected one of None, 'sm90', 'cudnn'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "+".join(x),
)
def test_bad_arguments(changes, options, match) -> None:
    arrays = {**CASE.arrays, **changes}
    with pytest.raises((TypeError, ValueError), match=f"jax_mla.prefill: .*{match}"):
        jax_mla.prefill(*arrays.values(), **{**CASE.options, **options})


def test_values_in_numpy_arrays_are_checked() -> None:
    arrays = {**CASE.arrays, "cu_q_lens": CASE.arrays["cu_q_lens"] + 9}
    with pytest.raises(ValueError, match="cu_q_lens: expected places among the tokens"):
        jax_mla.prefill(*arrays.values(), **CASE.options)
    arrays = {**CASE.arrays, "cu_q_lens": np.array([0, 7, 6, 8, 13], np.int32)}
    with pytest.raises(ValueError, match="cu_q_lens: expected values that never fall, got 7"):
        jax_mla.prefill(*arrays.values(), **CASE.options)
    arrays = {**CASE.arrays, "seq_lens": CASE.arrays["seq_lens"] + 900}
    with pytest.raises(ValueError, match="seq_lens: expected lengths that fit"):
        jax_mla.prefill(*arrays.values(), **CASE.options)
    arrays = {**CASE.arrays, "seq_lens": np.minimum(CASE.arrays["seq_lens"], 6)}
    with pytest.raises(ValueError, match="seq_lens: expected lengths that include the new tokens"):
        jax_mla.prefill(*arrays.values(), **CASE.options)


@pytest.mark.full
def test_values_of_absent_sequences_are_not_checked() -> None:
    wild = {"cu_q_lens": np.array([0, 7, -3, 99, 2], np.int32)}
    wild |= {"seq_lens": np.array([16, -1, 2**31 - 1, 900], np.int32)}
    arrays = {**CASE.arrays, **wild, "num_seqs": 1}
    jax_mla.prefill(*arrays.values(), **CASE.options)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_row_that_is_not_finite_reaches_only_what_sees_it(implementation) -> None:
    """Also through a window, and from the cache."""
    rng = np.random.default_rng(0)
    shapes = {"q_nope": (6, 2, 16), "q_pe": (6, 2, 8), "ckv": (6, 32), "kpe": (6, 8)}
    shapes |= {"w_uk": (2, 16, 32), "w_uv": (2, 32, 12), "kv_pages": (3, 4, 40)}
    arrays: dict[str, Any] = {
        n: jnp.asarray(rng.standard_normal(x, np.float32)) for n, x in shapes.items()
    }
    arrays["ckv"] = arrays["ckv"].at[4].set(jnp.nan)
    arrays["kv_pages"] = arrays["kv_pages"].at[0, 1].set(jnp.inf)  # token 1 of the cache
    prefill: Any = jax_mla.prefill
    table, lens = jnp.array([[0, 1, 2]]), jnp.array([12])  # 6 cached tokens, 6 new ones
    for window, bad in ((None, [True] * 6), (7, [True, True, False, False, True, True])):
        out = prefill(
            *arrays.values(), table, lens,
            sm_scale=0.2, sliding_window=window, implementation=implementation,
        )  # fmt: skip
        assert np.isnan(np.asarray(out)).all((1, 2)).tolist() == bad
        assert np.isnan(np.asarray(out)).any((1, 2)).tolist() == bad


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_large_scores(implementation) -> None:
    """XLA must not fuse the scale into the difference from the maximum."""
    rng = np.random.default_rng(0)
    shapes = ((8, 2, 16), (8, 2, 8), (8, 32), (8, 8), (2, 16, 32), (2, 32, 12))
    q_nope, q_pe, ckv, kpe, w_uk, w_uv = (
        jnp.asarray(rng.standard_normal(x, np.float32)) * (1 if i > 3 else 1e6)
        for i, x in enumerate(shapes)
    )
    out = jax_mla.prefill(
        q_nope, q_pe, ckv, kpe, w_uk, w_uv, sm_scale=0.2, implementation=implementation
    )
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_scores_below_all_others_stay_hidden(implementation) -> None:
    """A query whose only score is -2.8e38 does not see what follows it."""
    eye, zero = jnp.eye(8), jnp.zeros((8, 8))
    q, values = jnp.full((4, 1, 8), -1e19), jnp.arange(4.0)[:, None] * jnp.ones((4, 8))
    ckv = jnp.concatenate([jnp.full((4, 8), 3.5e18), values], 1)
    w_uk, w_uv = jnp.concatenate([eye, zero], 1)[None], jnp.concatenate([zero, eye])[None]
    out = jax_mla.prefill(
        q, None, ckv, None, w_uk, w_uv, sm_scale=1.0, implementation=implementation
    )
    np.testing.assert_allclose(out[:, 0, 0], [0, 0.5, 1, 1.5])


def test_cu_q_lens_are_needed_if_the_parts_are_not_equal() -> None:
    case = step(num_padding=2)
    with pytest.raises(ValueError, match="cu_q_lens: expected an array unless"):
        case.run(cu_q_lens=None)


def test_explicit_axes_are_refused() -> None:
    mesh = cpu_mesh((2,), ("tp",), (AxisType.Explicit,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="q_nope: expected an array that is sharded over Auto"),
    ):
        CASE.run(**put(CASE, mesh, BY_HEADS))


@pytest.mark.full
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("size", [1, 8])
def test_arrays_that_no_explicit_axis_splits(size, implementation) -> None:
    mesh = cpu_mesh((size,), ("dp",), (AxisType.Explicit,))
    options = {"implementation": implementation}
    CASE.check(CASE.run(options, **put(CASE, mesh, {})))
    with jax.set_mesh(mesh):
        CASE.check(CASE.run(options))


def test_a_cache_on_explicit_axes_is_refused() -> None:
    mesh = cpu_mesh((2,), ("dp",), (AxisType.Explicit,))
    arrays = {"seq_lens": jax.device_put(CASE.arrays["seq_lens"], NamedSharding(mesh, P("dp")))}
    with pytest.raises(ValueError, match="seq_lens: expected an array that is sharded over Auto"):
        CASE.run(**arrays)


@pytest.mark.full
def test_the_kernel_is_for_cuda_alone(monkeypatch) -> None:
    """Where a GPU runs the kernel, calls on the CPU still run on XLA, unless they name it."""
    monkeypatch.setattr(_backends, "why_no_prefill_kernel", lambda **_: "")
    case = step(dtype="bfloat16")
    cpu = jax.devices("cpu")[0]
    arrays = jax.tree.map(lambda x: jax.device_put(x, cpu), case.arrays)
    case.check(case.run(**arrays))
    with pytest.raises(ValueError, match="implementation: expected one that runs on cpu, got 'sm9"):
        case.run({"implementation": "sm90"}, **arrays)


@pytest.mark.full
def test_a_program_for_both_platforms_has_the_kernel(monkeypatch) -> None:
    monkeypatch.setattr(_backends, "why_no_prefill_kernel", lambda **_: "")
    case = step(dtype="bfloat16")
    fun = jax.jit(lambda arrays: case.run(**arrays))
    arrays = jax.tree.map(jnp.asarray, case.arrays)
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_mla_prefill")]
    for platforms in (("cuda",), ("cpu", "cuda")):
        program = jax.export.export(fun, platforms=platforms, disabled_checks=checks)(arrays)
        assert program.mlir_module().count("jax_mla_prefill") == 2  # cached tokens, new ones
    case.check(program.call(arrays))


@pytest.mark.full
def test_in_a_partly_manual_region_neither_kernel_nor_reference_runs(monkeypatch) -> None:
    monkeypatch.setattr(_backends, "why_no_prefill_kernel", lambda **_: "")
    case = step()
    mesh = cpu_mesh((2, 2), ("dp", "tp"))

    def run(implementation):
        arrays = {name: x for name, x in case.arrays.items() if x is not None}
        names = list(arrays)

        def local(*operands):
            named = dict(zip(names, operands, strict=True))
            return case.run({"implementation": implementation}, **named)

        fun = jax.shard_map(
            local, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"dp"}, check_vma=False
        )
        return jax.jit(fun)(*jax.tree.map(jnp.asarray, tuple(arrays.values())))

    case.check(run(None))
    for name in ("sm90", "reference"):
        with pytest.raises(ValueError, match="expected 'cudnn' or 'xla' in a region that is manua"):
            run(name)


@pytest.mark.quick(1)
@pytest.mark.parametrize("has_symbolic_pages", [False, True], ids=["", "pages"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_export_with_symbolic_sizes(implementation, has_symbolic_pages) -> None:
    case = step(implementation=implementation)
    names = "tswnp" if has_symbolic_pages else "tsw"
    t, s, w, *pool_dims = jax.export.symbolic_shape(
        ", ".join(names), constraints=[f"{name} >= 1" for name in names]
    )
    shapes = {
        "q_nope": (t, None, None), "q_pe": (t, None, None), "ckv": (t, None), "kpe": (t, None),
        "page_table": (s, w), "seq_lens": (s,), "cu_q_lens": (s + 1,),
    }  # fmt: skip
    arrays = {n: jnp.asarray(x) for n, x in case.arrays.items() if x is not None}
    if has_symbolic_pages:
        shapes["kv_pages"] = (*pool_dims, None)
    structs = {}
    for name, x in arrays.items():
        symbols = shapes.get(name, x.shape)
        dims = tuple(n if d is None else d for d, n in zip(symbols, x.shape, strict=True))
        structs[name] = jax.ShapeDtypeStruct(dims, x.dtype)
    fun = jax.jit(lambda arrays: case.run(**arrays))
    program = jax.export.export(fun, platforms=["cpu"])(structs)
    case.check(program.call(arrays))


def test_cudnn_on_a_cpu_is_an_error() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("JAX has a GPU, and cuDNN's refusal comes from XLA")
    with pytest.raises(ValueError, match="implementation: expected a call that cuDNN takes"):
        step(dtype="bfloat16").run({"implementation": "cudnn"})


def test_the_kernel_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("JAX has a GPU")
    with pytest.raises(ValueError, match="expected one that takes this call, got 'sm90': "):
        step(**DEEPSEEK).run({"implementation": "sm90"})


# ---- On a GPU ----------------------------------------------------------------------------------


MODELS = {
    "deepseek": {"d_nope": 128, "d_kpe": 64, "d_v": 128, "d_ckv": 512},
    "glm": {"d_nope": 192, "d_kpe": 64, "d_v": 256, "d_ckv": 512},
    "mistral": {"d_nope": 64, "d_kpe": 64, "d_v": 128, "d_ckv": 256},
    "minicpm3": {"d_nope": 64, "d_kpe": 32, "d_v": 64, "d_ckv": 256},
}


@pytest.fixture
def hopper() -> Any:
    """Return the GPU, if the kernel runs on it."""
    device = jax.devices(GPU_PLATFORM)[0]
    if device.compute_capability != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype"),
    [("deepseek", "bfloat16"), ("deepseek", "float16"), ("glm", "bfloat16"),
     ("minicpm3", "float16")],
)  # fmt: skip
def test_sm90(model, dtype, hopper) -> None:
    """Prompts of several row tiles, with and without cached chunks that end within a block."""
    case = step(
        q_lens=(300, 0, 1, 129), prefix_lens=(700, 5, 64, 0), num_padding=40, heads=16,
        page_size=64, dtype=dtype, device=hopper, **MODELS[model],
    )  # fmt: skip
    with jax.default_device(hopper):
        arrays = jax.tree.map(jnp.asarray, case.arrays)
        for prefix_chunk in (1, 192, 1024):
            fun = jax.jit(functools.partial(case.run, {"prefix_chunk": prefix_chunk}))
            compiled = fun.lower(**arrays).compile()
            assert "jax_mla_prefill" in text(compiled)
            first = compiled(**arrays)
            case.check(first)
            for x, y in zip(first, compiled(**arrays), strict=True):
                np.testing.assert_array_equal(x, y)
        stacked = jnp.stack([case.arrays["ckv"]] * 2)
        for got in zip(*jax.vmap(lambda ckv: case.run(ckv=ckv))(stacked), strict=True):
            case.check(got)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_sm90_equals_the_reference_on_random_bounds(seed, model, hopper) -> None:
    """Ranges of queries that do not overlap, any ranges of keys, and wild values."""
    d_nope, d_kpe, d_v, _ = MODELS[model].values()
    rng = np.random.default_rng(seed)
    # 96 heads have several times as many items as a GPU has SMs.
    heads = 96 if seed % 4 == 0 else int(rng.integers(1, 6))
    num_queries, num_keys = rng.integers(1, 700, 2).tolist()
    seqs = int(rng.integers(1, 40))
    cuts = np.sort(rng.integers(0, num_queries + 1, 2 * seqs)).reshape(seqs, 2)
    if seed % 2:
        cuts[1:, 0] = cuts[:-1, 1]
    keys = np.sort(rng.integers(0, num_keys + 1, (seqs, 2)), axis=1)
    bounds = np.stack([*cuts.T, *keys.T]).astype(np.int32)
    if seed % 3 == 0:
        bounds[3, rng.integers(seqs)] = 2**31 - 1
        bounds[3, rng.integers(seqs)] = -(2**31)
        bounds[2, rng.integers(seqs)] = -(2**31)
        bounds[1, -1], bounds[0, 0] = 2**31 - 1, -5
        bounds[1, seqs // 2] = -(2**31) if seqs > 2 else bounds[1, seqs // 2]

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    prior = [None, None]
    if seed % 4 < 2:
        prior = [normal(num_queries, heads, d_v).astype(jnp.float32)]
        prior.append(3 + normal(num_queries, heads).astype(jnp.float32))
        empty = jnp.asarray(rng.random((num_queries, heads)) < 0.2)
        prior = [jnp.where(empty[..., None], 0, prior[0]), jnp.where(empty, -jnp.inf, prior[1])]
    operands = primitive.Operands(
        normal(num_queries, heads, d_nope), normal(num_queries, heads, d_kpe),
        normal(num_keys, heads, d_nope), normal(num_keys, d_kpe), normal(num_keys, heads, d_v),
        jnp.asarray(bounds), *prior,
    )  # fmt: skip
    begin, end = (np.clip(bounds[i], 0, num_keys)[:, None] for i in (2, 3))
    is_key = ((np.arange(num_keys) >= begin) & (np.arange(num_keys) < end)).any(0)
    operands = operands._replace(
        **{name: jnp.where(is_key.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)
           for name, x in operands._asdict().items() if name in ("k_nope", "kpe", "v")}
    )  # fmt: skip
    for causal, dtype in ((True, "bfloat16"), (False, "float32")):
        params = primitive.Params(0.1, causal, dtype, implementation="sm90")
        with jax.default_device(hopper):
            got = primitive.bind(operands, params)
        params = dataclasses.replace(params, implementation="reference")
        want = primitive.bind(operands, params)
        np.testing.assert_allclose(got[1], want[1], atol=2e-3)
        out, exact = (np.asarray(x[0], np.float32) for x in (got, want))
        np.testing.assert_array_equal(out[np.isneginf(want[1])], 0)
        assert np.linalg.norm(out - exact) <= 6e-3 * np.linalg.norm(exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cudnn(dtype) -> None:
    device = jax.devices(GPU_PLATFORM)[0]
    case = step(
        q_lens=(300, 0, 1, 129), prefix_lens=(700, 5, 64, 0), num_padding=40, heads=16, d_nope=128,
        d_v=128, d_ckv=512, d_kpe=64, page_size=64, dtype=dtype, device=device,
        implementation="cudnn",
    )  # fmt: skip
    with jax.default_device(device):
        for prefix_chunk in (1024, 8192):
            fun = jax.jit(functools.partial(case.run, {"prefix_chunk": prefix_chunk}))
            arrays = jax.tree.map(jnp.asarray, case.arrays)
            compiled = fun.lower(**arrays).compile()
            assert text(compiled).count("__cudnn$fmha") >= 2  # the new tokens, and a chunk
            case.check(compiled(**arrays))
        case.check(case.run({"implementation": "xla"}))
        stacked = jnp.stack([case.arrays["ckv"]] * 2)
        for got in zip(*jax.vmap(lambda ckv: case.run(ckv=ckv))(stacked), strict=True):
            case.check(got)
