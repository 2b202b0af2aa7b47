# ruff: noqa: E501
"""ragged_paged_attention of raw projections: the norm of ckv, the rotation of kpe and q_pe."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla.testing.cases import RaggedCase
from jax_mla.testing.run import device_of, why_not

# Without types, because options are made from dictionaries.
append: Any = jax_mla.append
attend: Any = jax_mla.ragged_paged_attention
reference: Any = jax_mla.reference.ragged_paged_attention
pytestmark = pytest.mark.usefixtures("no_rank_promotion")

MIXED = RaggedCase(
    "mixed", ((1, 40), (9, 9), (0, 5), (20, 70), (4, 2)), num_padding=3, num_absent=2, num_heads=3
)
UNIFORM = RaggedCase("uniform", ((3, 50), (3, 3), (3, 2)), is_uniform=True, num_layers=2)
FULL: dict[str, Any] = {"d_ckv": 512, "d_kpe": 64, "page_size": 64}
# Many short sequences, so that a worker has several, and some without a place for the new row.
DECODE = RaggedCase(
    "decode", tuple((1, i * 37 % 150 if i % 9 else 0) for i in range(200)) + ((1, 700), (1, 2000)),
    is_uniform=True, **FULL,
)  # fmt: skip
CASES = (
    MIXED,
    dataclasses.replace(MIXED, name="mixed_split", cache="split", dtype="float16", num_heads=16),
    dataclasses.replace(MIXED, name="mixed_e4m3", kv_format="fp8_e4m3", **FULL),
    dataclasses.replace(MIXED, name="mixed_kpe_bf16", kv_format="fp8_e4m3", cache="mixed", **FULL),
    dataclasses.replace(MIXED, name="mixed_ds_mla", kv_format="fp8_ds_mla", **FULL),
    UNIFORM,
    dataclasses.replace(UNIFORM, name="uniform_ds_mla", kv_format="fp8_ds_mla", **FULL),
    DECODE,
    RaggedCase("decode_step", ((1, 5), (1, 64), (1, 1), (1, 200)), is_uniform=True, **FULL),
    dataclasses.replace(DECODE, name="decode_e4m3", kv_format="fp8_e4m3", num_heads=16),
    dataclasses.replace(
        DECODE, name="decode_kpe_bf16", kv_format="fp8_e4m3", cache="mixed", num_heads=12
    ),
    dataclasses.replace(DECODE, name="decode_ds_mla", kv_format="fp8_ds_mla", num_heads=8),
    dataclasses.replace(DECODE, name="decode_24", num_heads=24, cache="split"),
    dataclasses.replace(DECODE, name="decode_128", num_heads=128),
    dataclasses.replace(DECODE, name="decode_128_e4m3", num_heads=128, kv_format="fp8_e4m3"),
    dataclasses.replace(
        DECODE, name="decode_small", num_heads=40, d_ckv=256, d_kpe=32, dtype="float16"
    ),
)


def transforms(case: RaggedCase, num_positions: int = 80) -> dict[str, Any]:
    weight = 1 + np.random.default_rng(7).standard_normal(case.d_ckv, np.float32) / 4
    return {
        "norm_weight": jnp.asarray(weight), "norm_eps": 1e-5,
        "rope_table": jax_mla.rope_table(num_positions, case.d_kpe), "rope_interleaved": False,
    }  # fmt: skip


def transformed(inputs: Any, backend: str, options: dict[str, Any]) -> list[jax.Array]:
    """q_pe, ckv and kpe as `append` makes them: each token writes a page of its own."""
    places = np.maximum([place for _, place in inputs.places()], 0)
    size, tokens = int(places.max()) + 1, np.arange(len(places))
    ckv, kpe, q_pe = (jnp.asarray(x[:, None]) for x in (inputs.ckv, inputs.kpe, inputs.q_pe))
    d_ckv = ckv.shape[-1]
    pool = jnp.zeros((len(tokens), size, d_ckv + kpe.shape[-1]), ckv.dtype)
    q_pe, pool = append(
        pool, ckv, kpe, jnp.asarray(tokens[:, None], jnp.int32),
        jnp.asarray(places[:, None], jnp.int32), q_pe=q_pe, backend=backend, **options,
    )  # fmt: skip
    rows = pool[tokens, places]
    return [q_pe[:, 0], rows[:, :d_ckv], rows[:, d_ckv:]]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_of_append_and_then_the_plain_call(case, interleaved, backend, on_device) -> None:
    if backend == "reference":
        pytest.skip("XLA rounds by what it fuses")
    if reason := why_not(case, backend):
        pytest.skip(f"{backend}: {reason}")
    inputs = case.inputs()
    options = transforms(case) | {"rope_interleaved": interleaved}
    fun = functools.partial(attend, **inputs.kwargs(), return_lse=True, backend=backend)
    q_nope, q_pe, ckv, kpe, *rest = inputs.args()
    got = jax.jit(functools.partial(fun, **options))(q_nope, q_pe, ckv, kpe, *rest)
    want = jax.jit(fun)(q_nope, *transformed(inputs, backend, options), *rest)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


BOTH = ("norm_weight", "rope_table")
# The lengths of "wild" are clamped, and the angles of "short_table" are those of its last row.
BY_DEFINITION = [
    ("mixed", BOTH[:1]), ("mixed", BOTH[1:]), ("mixed", BOTH), ("wild", BOTH),
    ("short_table", BOTH), ("uniform", BOTH),
]  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "parts"), BY_DEFINITION)
def test_by_definition(name, parts) -> None:
    """On the CPU, in float32. (Other backends follow from the test above.)"""
    case = dataclasses.replace(UNIFORM if name == "uniform" else MIXED, dtype="float32")
    if name == "wild":
        case = dataclasses.replace(case, seq_lens=(40, 2**31 - 1, 5, -7, 2, 0, 0))
    inputs = case.inputs()
    given = transforms(case, 5 if name == "short_table" else 80)
    options = {n: given[n] for n in (*parts, "norm_eps")}
    options["rope_interleaved"] = "rope_table" in parts
    with jax.default_device(device_of("cpu")):
        q_nope, q_pe, ckv, kpe, *rest = inputs.args()
        call = functools.partial(attend, **inputs.kwargs(), return_lse=True)
        got = [
            call(q_nope, q_pe, ckv, kpe, *rest, backend=b, **options) for b in (None, "reference")
        ]
        want = jax.jit(functools.partial(reference, **inputs.kwargs(), return_lse=True, **options))(
            q_nope, q_pe, ckv, kpe, *rest
        )
    for one in got:
        for a, b in zip(one, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


BAD = [
    ({"norm_weight": jnp.ones(3)}, ValueError, "norm_weight: expected shape (256), the width of ckv, got (3,)"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps: expected a number in [0, 3.4e+38], got -1.0"),
    ({"norm_eps": np.nan, "norm_weight": None}, ValueError, "norm_eps: expected a number in [0, 3.4e+38], got nan"),
    ({"rope_table": jnp.ones((9, 3))}, ValueError, "rope_table: expected shape (*, 32), the width of kpe, got (9, 3)"),
    ({"rope_interleaved": 0}, TypeError, "rope_interleaved: expected a bool, got int"),
    ({"seq_lens": np.array([40, 9, 5, 81, 2, 0, 0], np.int32)}, ValueError, "seq_lens: expected lengths for which rope_table has positions in [0, 81), got 81"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(changes, error, message) -> None:
    case = dataclasses.replace(MIXED, table_tokens=96)
    inputs = case.inputs()
    names = ("q_nope", "q_pe", "ckv", "kpe", "kv_pages", "page_table", "seq_lens", "cu_q_lens")
    given = dict(zip(names, inputs.args(), strict=False)) | inputs.kwargs() | transforms(case)
    with pytest.raises(error) as caught:
        attend(**given | changes)
    assert str(caught.value).startswith(f"jax_mla.ragged_paged_attention: {message}")


def test_codes_cannot_be_rotated() -> None:
    case = dataclasses.replace(MIXED, kv_format="fp8_e4m3", has_codes=True)
    rotated = {"rope_table": transforms(case)["rope_table"], "rope_interleaved": True}
    args, kwargs = case.inputs().args(), case.inputs().kwargs()
    with pytest.raises(TypeError, match="ckv: expected .* or float32 with rope_table, got float8"):
        attend(*args, **kwargs, **rotated)
    rows = [x.astype(jnp.bfloat16) for x in args[2:4]]
    with pytest.raises(TypeError, match="q_pe: expected .* or float32 with rope_table, got float8"):
        attend(*args[:2], *rows, *args[4:], **kwargs, **rotated)


@pytest.mark.cuda_build
@pytest.mark.parametrize("case", [MIXED, UNIFORM], ids=lambda case: case.name)
def test_rotated_queries_lie_in_scratch(case) -> None:
    """On CUDA the scratch is larger by their bytes."""

    def scratch_bytes(**options: Any) -> int:
        inputs = case.inputs()
        fun = jax.jit(functools.partial(attend, **inputs.kwargs(), **options))
        lowered = fun.trace(*inputs.args()).lower(lowering_platforms=("cuda",)).as_text()
        call = next(line for line in lowered.splitlines() if "@jax_mla_ragged(" in line)
        results = call.rsplit("->", 1)[1]
        return int(results.rsplit("tensor<", 1)[1].split("xui8")[0])

    more = scratch_bytes(**transforms(case)) - scratch_bytes()
    assert 0 <= more - case.inputs().q_pe.nbytes < 128
