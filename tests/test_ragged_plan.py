"""The plan of a CUDA ragged call: which calls take one, and that XLA makes it once."""

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

import jax_mla
from jax_mla.testing.ragged import ragged_inputs

TARGET = "jax_mla_ragged"
SHARDING_DOC = pathlib.Path(__file__).parent.parent / "docs" / "sharding.md"
HEADS, D_CKV, D_KPE, PAGE_SIZE, PAGES, LAYERS = 4, 512, 64, 64, 8, 3


def lowered_text(fun, seqs: int, tokens: int, *, ragged: bool) -> str:
    """The program for CUDA, as it is lowered on a machine without a GPU."""
    bf16, int32 = jnp.bfloat16, jnp.int32

    def of(shape, dtype=bf16):
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = [
        of((tokens, HEADS, D_CKV)), of((tokens, HEADS, D_KPE)), of((tokens, D_CKV)),
        of((tokens, D_KPE)), of((LAYERS, PAGES, PAGE_SIZE, D_CKV + D_KPE)), of((seqs, 2), int32),
        of((seqs,), int32),
    ]  # fmt: skip
    if ragged:
        operands.append(of((seqs + 1,), int32))
    return jax.jit(fun).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def one_layer(*operands):
    return jax_mla.ragged_paged_attention(*operands, sm_scale=0.1, layer=0)


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    ("seqs", "tokens", "ragged", "plans"),
    [(4, 4, True, 1), (4, 9, True, 1), (4, 4, False, 0), (4, 12, False, 0), (1, 512, False, 1)],
)
def test_which_calls_have_a_plan(seqs: int, tokens: int, ragged: bool, plans: int) -> None:
    text = lowered_text(one_layer, seqs, tokens, ragged=ragged)
    assert text.count("@jax_mla_ragged_plan(") == plans
    assert text.count("@jax_mla_ragged(") == 1


@pytest.mark.cuda_build
def test_the_documented_targets_are_all_that_export_asks_for() -> None:
    names = re.search(r"^names = (\(.*\))$", SHARDING_DOC.read_text(), re.MULTILINE)
    assert names
    checks = [
        export.DisabledSafetyCheck.custom_call(f"jax_mla_{name}")
        for name in ast.literal_eval(names[1])
    ]
    inputs = ragged_inputs(seqs=((1, 40), (9, 9)))
    fun = jax.jit(functools.partial(jax_mla.ragged_paged_attention, **inputs.kwargs()))
    exported = export.export(fun, platforms=("cpu", "cuda"), disabled_checks=checks)(*inputs.args())
    assert "@jax_mla_ragged_plan" in exported.mlir_module()


def step(loop: str):
    def layers(q_nope, q_pe, ckv, kpe, pool, table, lens, cu_q_lens):
        def layer(carry, n):
            q_nope, pool = carry
            out, pool = jax_mla.ragged_paged_attention(
                q_nope, q_pe, ckv, kpe, pool, table, lens, cu_q_lens, sm_scale=0.1, layer=n
            )
            return (out, pool), None

        carry = (q_nope, pool)
        if loop == "scan":
            return lax.scan(layer, carry, jnp.arange(LAYERS))[0]
        for n in range(LAYERS):
            carry, _ = layer(carry, n)
        return carry

    return layers


@pytest.mark.gpu
@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_a_step_has_one_plan(loop: str) -> None:
    bf16, int32 = jnp.bfloat16, jnp.int32
    lens = jnp.array([70, 3, 64, 100], int32)
    operands = [
        jnp.ones((9, HEADS, D_CKV), bf16), jnp.ones((9, HEADS, D_KPE), bf16),
        jnp.ones((9, D_CKV), bf16), jnp.ones((9, D_KPE), bf16),
        jnp.ones((LAYERS, PAGES, PAGE_SIZE, D_CKV + D_KPE), bf16),
        jnp.arange(8, dtype=int32).reshape(4, 2), lens, jnp.array([0, 1, 2, 8, 9], int32),
    ]  # fmt: skip
    text = jax.jit(step(loop), donate_argnums=4).lower(*operands).compile().as_text()
    assert text is not None
    plan, call = (f'custom_call_target="{name}"' for name in ("jax_mla_ragged_plan", TARGET))
    assert text.count(plan) == 1
    assert text.count(call) == (1 if loop == "scan" else LAYERS)


@pytest.mark.cuda_build
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_ds_mla"])
def test_the_plan_is_for_the_format_of_the_cache(kv_format: str) -> None:
    """It decides which backend takes the call, and into which tiles that cuts the rows."""
    inputs = ragged_inputs(seqs=((1, 40), (9, 9)), kv_format=kv_format)
    fun = jax.jit(functools.partial(jax_mla.ragged_paged_attention, **inputs.kwargs()))
    text = fun.trace(*inputs.args()).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @jax_mla_ragged" in line]
    assert len(calls) == 2 and all(f'kv_format = "{kv_format}"' in line for line in calls)
