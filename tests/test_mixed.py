"""mixed_attention against the definition of ragged_paged_attention between the two products."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick import seeds, some

import jax_mla
from jax_mla.ops import _ragged
from jax_mla.ops.mixed import run
from jax_mla.ops.prefill.operands import Weights
from jax_mla.testing.cases import RAGGED_CASES, RaggedCase
from jax_mla.testing.compare import decode_exactly
from jax_mla.testing.hlo import collectives, num_copies, pointers, text
from jax_mla.testing.run import GPU_PLATFORM, cpu_mesh, defined_ragged

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

D_NOPE, D_V = 16, 24  # with 256 + 32 dims 22 new tokens make prefill pay
DEFINITION = "reference"
STEP = RaggedCase(
    "step",
    ((1, 70), (50, 50), (1, 1), (0, 40), (30, 130), (5, 5), (24, 24)),
    num_padding=6,
    num_heads=4,
    dtype="float32",
)


def is_taken(case: RaggedCase) -> bool:
    """Whether the op takes the case, and the definition decides all of its results."""
    is_plain = not (case.is_uniform or case.has_codes or case.max_seq_len or case.num_splits)
    # Of a length that the table has no room for, the new rows are not written, and prefill takes
    # them from the operands.
    return is_plain and not case.batch_invariant and not case.seq_lens


CASES = [
    dataclasses.replace(case, dtype="float32", num_heads=min(case.num_heads, 8))
    for case in RAGGED_CASES
    if is_taken(case)
]


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of a call, and what the definition gives for them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: np.ndarray
    pools: Any
    rounding: float  # of the cache, relative

    def run(self, *args: Any, **options: Any) -> Any:
        return jax_mla.mixed_attention(*(args or self.args), **self.kwargs, **options)

    def check(self, got: Any) -> None:
        out, pools = np.asarray(got[0], np.float32), got[1]
        for pool, want in zip(jax.tree.leaves(pools), jax.tree.leaves(self.pools), strict=True):
            np.testing.assert_array_equal(
                np.asarray(pool).view(np.uint8), np.asarray(want).view(np.uint8)
            )
        np.testing.assert_array_equal(out[(self.out == 0).all((1, 2))], 0)
        scale = np.abs(self.out).max()
        np.testing.assert_allclose(out, self.out, atol=self.rounding * scale, rtol=0)


@functools.lru_cache(maxsize=4)
def make_call(case: RaggedCase, d_nope: int = D_NOPE, d_v: int = D_V) -> Call:
    """Make a call, with random weights around the inputs of a case, in numpy."""
    inputs, rng = case.inputs(), np.random.default_rng(2)
    num_tokens, num_heads, d_kpe = inputs.q_pe.shape
    d_ckv, dtype = inputs.ckv.shape[-1], inputs.dtype

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)

    is_padding = np.isnan(inputs.q_nope.astype(np.float32)).all((1, 2), keepdims=True)
    q_nope = normal(num_tokens, num_heads, d_nope)
    q_nope = np.where(is_padding, dtype.type(np.nan), q_nope)
    w_uk = normal(num_heads, d_nope, d_ckv, scale=d_ckv**-0.5)
    w_uv = normal(num_heads, d_ckv, d_v, scale=d_ckv**-0.5)
    absorbed = np.einsum("thn,hnc->thc", q_nope.astype(np.float32), w_uk.astype(np.float32))
    sm_scale = 2 * (d_nope + d_kpe) ** -0.5
    step = dataclasses.replace(
        inputs, q_nope=absorbed, q_pe=inputs.q_pe.astype(np.float32), sm_scale=sm_scale
    )
    if case.page_ids:
        latents, _, *pools = defined_ragged(step, **case.mask())
    else:
        pools = step.new_pools()
        latents = decode_exactly(step.token_by_token(pools), **case.mask())[0][:, 0]
    out = np.einsum("thc,hcv->thv", latents, w_uv.astype(np.float32))
    kwargs = {**inputs.kwargs(), **case.mask(), "sm_scale": sm_scale}
    kwargs.pop("max_seq_len", None)
    rounding = 0.08 if case.kv_format else 2e-2 if case.dtype != "float32" else 1e-5
    q_pe, kpe = (inputs.q_pe, inputs.kpe) if d_kpe else (None, None)
    rows = (q_nope, q_pe, inputs.ckv, kpe, w_uk, w_uv)
    args = (*jax.tree.map(jnp.asarray, rows), *inputs.args()[4:])
    return Call(args, kwargs, out, pools, rounding)


QUICK = (
    "mixed", "stacked_split", "wide_odd", "packs_stacked", "page_3", "window_20",
    "prompts", "shared_prefix",
    "bounds_past_the_tokens", "page_ids", "mixed_e4m3", "mixed_step_ds_mla",
)  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", some(CASES, QUICK))
def test_matches_the_definition(case: RaggedCase) -> None:
    call = make_call(case)
    call.check(jax.jit(functools.partial(call.run, implementation=DEFINITION))())


@pytest.mark.parametrize("name", ["mixed", "wide_split", "window_20", "bounds_fall", "mixed_e4m3"])
def test_all_absorbed(name: str) -> None:
    call = make_call(next(case for case in CASES if case.name == name))
    call.check(jax.jit(call.run)())


@pytest.mark.full
@pytest.mark.parametrize("max_absorbed_tokens", [1, 2, 6, 7, 512])
def test_any_number_of_absorbed_tokens(max_absorbed_tokens: int) -> None:
    call = make_call(STEP)
    options = {"max_absorbed_tokens": max_absorbed_tokens, "prefix_chunk": 48}
    call.check(jax.jit(functools.partial(call.run, implementation=DEFINITION, **options))())


@pytest.mark.full
def test_eager_call_keeps_its_arguments() -> None:
    call = make_call(STEP)
    for _ in range(2):
        call.check(call.run(implementation=DEFINITION))


@pytest.mark.parametrize("implementation", [None, DEFINITION])
def test_no_derivative(implementation: str | None) -> None:
    call = make_call(STEP)

    def total(q_nope):
        return call.run(q_nope, *call.args[1:], implementation=implementation)[0].sum()

    with pytest.raises(NotImplementedError, match="^jax_mla.mixed_attention is for inference"):
        jax.grad(total)(call.args[0])


@pytest.mark.full
def test_with_64_bit_types() -> None:
    call = make_call(STEP)
    with jax.enable_x64(True):
        call.check(jax.jit(functools.partial(call.run, implementation=DEFINITION))())


@pytest.mark.full
@pytest.mark.parametrize("num_seqs", [np.int32(5), np.full((1, 1), 5, np.int32)], ids=["0d", "2d"])
def test_forms_of_num_seqs(num_seqs: np.ndarray) -> None:
    call = make_call(STEP)
    want = call.run(*call.args[:10], 5, implementation=DEFINITION)
    for implementation in (None, DEFINITION):
        got = call.run(*call.args[:10], jnp.asarray(num_seqs), implementation=implementation)
        np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]))
        np.testing.assert_allclose(np.asarray(got[0]), np.asarray(want[0]), atol=1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("implementation", [None, DEFINITION])
def test_export_with_symbolic_sizes(implementation: str | None) -> None:
    call = make_call(STEP)
    t, s = export.symbolic_shape("t, s")
    dims = {0: (t,), 1: (t,), 2: (t,), 3: (t,), 7: (s,), 8: (s,), 9: (s + 1,)}
    args = [x for x in call.args if x is not None]
    structs = [
        jax.ShapeDtypeStruct((*dims.get(i, x.shape[:1]), *x.shape[1:]), x.dtype)
        for i, x in enumerate(args)
    ]
    fun = jax.jit(functools.partial(call.run, implementation=implementation))
    checks = [
        export.DisabledSafetyCheck.custom_call(f"jax_mla_{op}") for op in ("append", "ragged")
    ]
    exported = export.export(fun, disabled_checks=checks, platforms=["cpu"])(*structs)
    call.check(exported.call(*args))


@pytest.mark.full
def test_page_begin() -> None:
    """Pages of which the pool has a part, as in a shard_map."""
    call = make_call(STEP)
    *head, pool, table, lens, bounds, num_seqs = call.args
    moved = (*head, pool, table + 5, lens, bounds, num_seqs)
    call.check(call.run(*moved, implementation=DEFINITION, page_begin=5))


@pytest.mark.full
def test_whole_step_is_absorbed_where_prefill_has_no_kernel() -> None:
    """Without a GPU there is no choice, so nothing of prefill is in the program."""
    if jax.default_backend() == "gpu":
        pytest.skip("for a CPU")
    call = make_call(STEP)
    program = text(jax.jit(call.run).lower().compile())
    assert "while" not in program
    assert "while" in text(
        jax.jit(functools.partial(call.run, implementation=DEFINITION)).lower().compile()
    )


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", seeds(20, quick=5))
def test_choice(seed: int) -> None:
    """Against a loop over the sequences, on random bounds."""
    rng = np.random.default_rng(seed)
    num_tokens, most = 60, int(rng.integers(1, 61))
    cu = rng.integers(-5, 70, 9).astype(np.int32)
    bounds = np.asarray(_ragged.bounds(jnp.asarray(cu), None, num_tokens))
    got = run.choose(jnp.asarray(bounds), 8, most, num_tokens)
    q_lens = np.diff(bounds)
    used, absorbed = 0, set()
    for seq in np.argsort(q_lens, kind="stable").tolist():
        used += q_lens[seq]
        if q_lens[seq] < 8 and used <= most:
            absorbed.add(seq)
    source: list[int] = []
    for seq, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        assert bool(got.is_absorbed[seq]) == (seq in absorbed)
        assert int(got.bounds[seq]) == len(source)
        source += range(begin, end) if seq in absorbed else ()
    assert int(got.bounds[-1]) == len(source)
    assert got.source[: len(source)].tolist() == source
    rest = np.asarray(got.source[len(source) :])
    assert (rest >= num_tokens).all() and len(set(rest.tolist())) == len(rest)


def test_sequences_that_decode_come_before_short_prompts() -> None:
    bounds = np.cumsum([0, *[100] * 6, *[1] * 100]).astype(np.int32)
    got = run.choose(jnp.asarray(bounds), 171, 512, 1000)
    assert got.is_absorbed.tolist() == [True] * 4 + [False] * 2 + [True] * 100


def test_where_prefill_pays() -> None:
    """The number that the docstring gives, and those of other models."""

    def tokens(d_nope: int, d_kpe: int, d_v: int, d_ckv: int) -> int:
        struct: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        weights = Weights(struct((1, d_nope, d_ckv)), struct((1, d_ckv, d_v)))
        return run.min_prefill_tokens(weights, d_kpe)

    assert tokens(128, 64, 128, 512) == 171  # DeepSeek, Kimi
    assert tokens(192, 64, 256, 512) == 399  # GLM
    assert tokens(64, 32, 64, 256) == 86  # MiniCPM3
    assert tokens(512, 64, 512, 512) > 2**30  # nothing is saved


def test_pool_stays_in_place() -> None:
    call = make_call(STEP)
    args = list(call.args)
    args[6] = jnp.array(args[6])
    fun = jax.jit(functools.partial(call.run, implementation=DEFINITION), donate_argnums=6)
    compiled = fun.lower(*args).compile()
    assert num_copies(compiled, args[6].shape) == 0
    before = pointers(args[6])
    got = fun(*args)
    assert pointers(got[1]) == before
    call.check(got)


@pytest.mark.full
def test_heads_on_auto_axes_communicate_nothing() -> None:
    call, mesh = make_call(STEP), cpu_mesh((4,), ("tp",))
    specs = {0: P(None, "tp"), 1: P(None, "tp"), 4: P("tp"), 5: P("tp")}
    args = [
        jax.device_put(x, NamedSharding(mesh, specs.get(i, P())))
        for i, x in enumerate(call.args)
        if x is not None
    ]
    fun = jax.jit(functools.partial(call.run, implementation=DEFINITION))
    compiled = fun.lower(*args).compile()
    assert collectives(compiled) == []
    got = compiled(*args)
    assert got[0].sharding.spec[:2] == (None, "tp")
    call.check(got)


def test_shard_map() -> None:
    call, mesh = make_call(STEP), cpu_mesh((2,), ("tp",))
    args = [x for x in call.args if x is not None]
    specs = {0: P(None, "tp"), 1: P(None, "tp"), 4: P("tp"), 5: P("tp")}
    fun = jax.shard_map(
        functools.partial(call.run, implementation=DEFINITION),
        mesh=mesh,
        in_specs=tuple(specs.get(i, P()) for i in range(len(args))),
        out_specs=(P(None, "tp"), P()),
        check_vma=False,
    )
    call.check(jax.jit(fun)(*args))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_nope": (5, 4)}, ValueError, r"q_nope: expected \[tokens, num_heads, d_nope\]"),
        ({"w_uk": (4, 16, 255)}, ValueError, r"w_uk: expected shape \(4, 16, 256\)"),
        ({"w_uv": (3, 256, 24)}, ValueError, r"w_uv: expected shape \(4, 256, \*\)"),
        ({"cu_q_lens": (4,)}, ValueError, r"cu_q_lens: expected shape \(8\)"),
        ({"cu_q_lens": (8,)}, TypeError, "cu_q_lens: expected int32"),
        ({"seq_lens": (4,)}, ValueError, r"seq_lens: expected shape \(7\)"),
        ({"max_absorbed_tokens": 0}, ValueError, r"max_absorbed_tokens: expected an int in \[1"),
        ({"max_absorbed_tokens": 2.0}, TypeError, "max_absorbed_tokens: expected an int"),
        ({"sm_scale": -1.0}, ValueError, "sm_scale: expected a positive number"),
        ({"implementation": "fast"}, ValueError, "implementation: expected one of"),
        ({"implementation": "cudnn"}, ValueError, "implementation: expected one of"),
        (
            {"implementation": "sm90", "sliding_window": 3},
            ValueError,
            "implementation: expected one of None, 'reference' with a sliding window",
        ),
        ({"backend": "fast"}, ValueError, "backend: expected"),
        ({"kv_format": "fp8_e4m3"}, TypeError, "kv_pages: expected"),
        ({"layer": 1}, ValueError, "layer: expected None"),
        (
            {"seq_lens": np.ones(7, np.int32), "cu_q_lens": np.array([0] + [2] * 7, np.int32)},
            ValueError,
            "seq_lens: expected lengths that include the new tokens, got 1 for sequence 0 with 2",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = make_call(STEP)
    names = "q_nope q_pe ckv kpe w_uk w_uv kv_pages page_table seq_lens cu_q_lens".split()
    arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    for name, value in changes.items():
        arguments[name] = jnp.zeros(value, jnp.float32) if isinstance(value, tuple) else value
    with pytest.raises(error, match=f"^jax_mla.mixed_attention: {message}"):
        jax_mla.mixed_attention(**arguments)


@pytest.mark.full
@pytest.mark.parametrize("implementation", [None, DEFINITION])
def test_arrays_that_no_explicit_axis_splits(implementation: str | None) -> None:
    call, mesh = make_call(STEP), cpu_mesh((8,), ("tp",), (AxisType.Explicit,))
    args = jax.device_put(call.args, NamedSharding(mesh, P()))
    call.check(call.run(*args, implementation=implementation))
    with jax.set_mesh(mesh):
        call.check(call.run(implementation=implementation))


def test_explicit_axes_are_refused() -> None:
    call, mesh = make_call(STEP), cpu_mesh((2,), ("tp",), (AxisType.Explicit,))
    sharded = jax.device_put(call.args[0], NamedSharding(mesh, P(None, "tp")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="q_nope: expected an array that is sharded over Auto"),
    ):
        call.run(sharded, *call.args[1:])


def test_partly_manual_region_is_refused() -> None:
    call, mesh = make_call(STEP), cpu_mesh((2, 2), ("dp", "tp"))
    args = [x for x in call.args if x is not None]
    fun = jax.shard_map(
        call.run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"dp"}, check_vma=False
    )
    message = r"mesh: expected all axes manual, or none, got a manual region in which .'tp'"
    with pytest.raises(ValueError, match=f"^jax_mla.mixed_attention: {message}"):
        jax.jit(fun)(*args)


def test_pool_with_sharded_rows_is_refused() -> None:
    call, mesh = make_call(STEP), cpu_mesh((2,), ("tp",))
    args = list(call.args)
    args[6] = jax.device_put(args[6], NamedSharding(mesh, P(None, None, "tp")))
    with pytest.raises(ValueError, match="^jax_mla.mixed_attention: kv_pages: expected .* sharded"):
        call.run(*args)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kv_format"),
    [("bfloat16", None), ("float16", None), ("bfloat16", "fp8_e4m3"), ("bfloat16", "fp8_ds_mla")],
)
def test_sm90(dtype: str, kv_format: str | None) -> None:
    """DeepSeek's sizes: prompts behind cached tokens and not, beside sequences that decode."""
    device = jax.devices(GPU_PLATFORM)[0]
    if device.compute_capability != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")
    case = RaggedCase(
        "sm90",
        ((1, 700), (300, 300), (1, 1), (200, 1000), (0, 9), (30, 90), (171, 200), (1, 64)),
        num_padding=9, num_heads=64, d_ckv=512, d_kpe=64, page_size=64, dtype=dtype, num_layers=2,
        kv_format=kv_format,
    )  # fmt: skip
    call = make_call(case, 128, 128)
    for options in ({}, {"max_absorbed_tokens": 2}, {"prefix_chunk": 128}):
        args: list[Any] = [
            x if x is None else jnp.copy(jax.device_put(x, device)) for x in call.args
        ]
        fun = jax.jit(functools.partial(call.run, **options), donate_argnums=6)
        compiled = fun.lower(*args).compile()
        assert "jax_mla_prefill" in text(compiled)
        assert num_copies(compiled, args[6].shape) == 0
        before = pointers(args[6])
        got = fun(*args)
        assert pointers(got[1]) == before
        call.check(got)
