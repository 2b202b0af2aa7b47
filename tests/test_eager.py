"""Calls outside jit: one compiled function each, wherever the arrays are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla.ops.append import api as append_api
from jax_mla.ops.decode import api as decode_api
from jax_mla.testing.run import cpu_mesh

LAYERS, BATCH, HEADS, D_CKV, D_KPE, PAGES, SIZE = 3, 4, 4, 32, 8, 16, 4


def arrays() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    return {
        "q_nope": jax.random.normal(keys[0], (BATCH, HEADS, D_CKV)),
        "q_pe": jax.random.normal(keys[1], (BATCH, HEADS, D_KPE)),
        "pool": jax.random.normal(keys[2], (LAYERS, PAGES, SIZE, D_CKV + D_KPE)),
        "ckv": jax.random.normal(keys[3], (BATCH, D_CKV)),
        "kpe": jax.random.normal(keys[4], (BATCH, D_KPE)),
        "table": jnp.arange(PAGES, dtype=jnp.int32).reshape(BATCH, PAGES // BATCH),
        "lens": jnp.asarray([3, 16, 1, 7], jnp.int32),
    }


def append(a: dict[str, jax.Array], **options: Any) -> jax.Array:
    rows = (a["ckv"], a["kpe"], a["table"])
    return jax_mla.append(a["pool"], *rows, a["lens"] - 1, **options)


def decode(a: dict[str, jax.Array], **options: Any) -> tuple[jax.Array, jax.Array]:
    rows = (a["q_nope"], a["q_pe"], a["pool"], a["table"], a["lens"])
    return jax_mla.decode(*rows, sm_scale=0.2, return_lse=True, **options)


def expected(layer: int, page_begin: int = 0) -> tuple[Any, Any]:
    a = arrays()
    options: dict[str, Any] = {"layer": layer, "page_begin": page_begin}
    rows = (a["ckv"], a["kpe"], a["table"], a["lens"] - 1)
    pool = jax_mla.reference.append(a["pool"], *rows, **options)
    query = (a["q_nope"], a["q_pe"], a["pool"], a["table"], a["lens"])
    options |= {"sm_scale": 0.2, "return_lse": True}
    return pool, jax_mla.reference.decode(*query, **options)


def assert_expected(pool: Any, result: Any, layer: int, page_begin: int = 0) -> None:
    want_pool, want = expected(layer, page_begin)
    np.testing.assert_array_equal(pool, want_pool)
    for got, one in zip(result, want, strict=True):
        np.testing.assert_allclose(got, one, atol=1e-5)


@pytest.mark.parametrize("page_begin", [None, 3])
@pytest.mark.parametrize("layer", [1, np.int32(1), np.int64(1), np.array(1), "device"])
def test_indices_of_every_kind(layer, page_begin) -> None:
    a = arrays()
    layer = jnp.int32(1) if isinstance(layer, str) else layer
    options = {"layer": layer} | ({} if page_begin is None else {"page_begin": page_begin})
    assert_expected(append(a, **options), decode(a, **options), 1, page_begin or 0)


PLACES = ["default", "another device", "auto mesh", "explicit mesh"]


def place(a: dict[str, jax.Array], where: str) -> dict[str, jax.Array]:
    if where == "default":
        return a
    if where == "another device":
        return jax.device_put(a, jax.devices("cpu")[3])
    kind = AxisType.Auto if where == "auto mesh" else AxisType.Explicit
    mesh = cpu_mesh((2, 2), ("dp", "cp"), (kind,) * 2)
    specs = dict.fromkeys(a, P("dp")) | {"pool": P(None, "cp")}
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in a.items()}


@pytest.mark.parametrize("where", PLACES)
def test_nothing_is_transferred_implicitly(where: str) -> None:
    a = place(arrays(), where)
    positions = a["lens"] - 1
    jax.block_until_ready(positions)
    with jax.transfer_guard("disallow"):
        rows = (a["ckv"], a["kpe"], a["table"], positions)
        pool = jax_mla.append(a["pool"], *rows, layer=2, page_begin=0)
        result = decode(a, layer=2)
    assert_expected(pool, result, 2)
    if where != "default":
        assert pool.sharding.is_equivalent_to(a["pool"].sharding, pool.ndim)


@pytest.mark.parametrize("where", ["auto mesh", "explicit mesh"])
def test_with_a_mesh_nothing_is_transferred_implicitly(where: str) -> None:
    a = place(arrays(), where)
    mesh = a["pool"].sharding.mesh  # type: ignore[attr-defined]
    positions = a["lens"] - 1
    with jax.transfer_guard("disallow"):
        rows = (a["ckv"], a["kpe"], a["table"], positions)
        pool = jax_mla.append(a["pool"], *rows, layer=2, mesh=mesh)
        result = decode(a, layer=2, mesh=mesh)
    assert_expected(pool, result, 2)


def prompts(a: dict[str, jax.Array]) -> Any:
    """Return the new tokens and the weights of a step of BATCH prompts of one token."""
    w_uk = jnp.einsum("bhc,bhn->hnc", a["q_nope"], a["q_pe"])
    return a["q_pe"], a["q_pe"], a["ckv"], a["kpe"], w_uk, jnp.swapaxes(w_uk, 1, 2)


def results_of_prompts(where: str, name: str | None, guard: str) -> list[Any]:
    a = place(arrays(), where)
    cache = (a["pool"], a["table"], a["lens"])
    codes = (a["pool"].astype(jnp.float8_e4m3fn), *cache[1:])
    bounds = jnp.concatenate([jnp.zeros_like(a["lens"][:1]), jnp.cumsum(jnp.ones_like(a["lens"]))])
    three = jnp.full_like(bounds[0], 3)
    tokens, scale = prompts(a), jnp.full_like(a["ckv"][0, 0], 0.5)
    scaled: dict[str, Any] = {"kv_format": "fp8_e4m3", "kv_scale": (0.25, scale)}
    prefill: Any = functools.partial(jax_mla.prefill, sm_scale=0.2, implementation=name)
    mixed: Any = functools.partial(jax_mla.mixed_attention, sm_scale=0.2, implementation=name)
    with jax.transfer_guard(guard):
        return [
            prefill(*tokens),
            prefill(*tokens, *cache, num_seqs=3, layer=1),
            prefill(*tokens, *cache, bounds, three, layer=1),
            prefill(*tokens, *codes, layer=1, **scaled),
            mixed(*tokens, *cache, bounds, 3, layer=1),
            mixed(*tokens, *cache, bounds, three, layer=1),
        ]


@functools.cache
def wanted_of_prompts() -> list[np.ndarray]:
    results = results_of_prompts(PLACES[0], "reference", "allow")
    return [np.asarray(x) for x in jax.tree.leaves(results)]


@pytest.mark.full
@pytest.mark.parametrize("where", PLACES[:-1])
@pytest.mark.parametrize("chosen", [None, "reference"])
def test_prompts_transfer_nothing_implicitly(chosen: str | None, where: str) -> None:
    got = results_of_prompts(where, chosen, "disallow")
    for one, other in zip(jax.tree.leaves(got), wanted_of_prompts(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], got[2], rtol=1e-5, atol=1e-5)


def test_merge_transfers_nothing_implicitly() -> None:
    outs, lses = jnp.ones((3, 4, 8)), jnp.zeros((3, 4))
    over_axis = jax.vmap(functools.partial(jax_mla.merge, axis_name="cp"), axis_name="cp")
    with jax.transfer_guard("disallow"):
        results = [*jax_mla.merge(outs, lses), *over_axis(outs, lses)]
    for x, want in zip(results, (1, np.log(3)) * 2, strict=True):
        np.testing.assert_allclose(x, want, atol=1e-6)


def test_one_program_serves_all_layers() -> None:
    a = arrays()
    positions = a["lens"] - 1
    rows = (a["ckv"], a["kpe"], a["table"], positions)
    functions: list[Any] = [decode_api._decode, append_api._append]
    programs = [function.compiled for function in functions]
    for program in programs:
        program.clear_cache()

    def sizes() -> list[int]:
        return [program._cache_size() for program in programs]

    for layer in range(LAYERS):
        decode(a, layer=layer)
        jax_mla.append(a["pool"], *rows, layer=layer)
    assert sizes() == [1, 1]
    decode(a, layer=1, causal=False)
    assert sizes() == [2, 1]


def test_a_function_that_closes_over_its_arrays_is_traced() -> None:
    """Arrays that are not traced in a trace: nothing of the trace may stay behind."""
    a = arrays()
    with jax.checking_leaks():
        pool, result = jax.jit(lambda: (append(a, layer=1), decode(a, layer=1)))()
    assert_expected(pool, result, 1)
    assert_expected(append(a, layer=1), decode(a, layer=1), 1)
    text = jax.jit(lambda: decode(a, layer=1)).lower().as_text()
    assert "jax_mla_decode" in text


def test_without_jit() -> None:
    a = arrays()
    with jax.disable_jit():
        pool, result = append(a, layer=1), decode(a, layer=1)
    assert_expected(pool, result, 1)


def test_under_vmap() -> None:
    a = arrays()
    result = jax.vmap(lambda q: decode(a | {"q_nope": q}, layer=1), in_axes=0)(
        jnp.stack([a["q_nope"]] * 2)
    )
    for i in range(2):
        assert_expected(append(a, layer=1), [x[i] for x in result], 1)


def test_a_static_argument_of_another_type_is_refused_though_it_is_equal() -> None:
    a = arrays()
    decode(a, layer=1, causal=True)
    with pytest.raises(TypeError, match="causal: expected a bool, got int"):
        decode(a, layer=1, causal=1)


def test_rows_without_q_len() -> None:
    """Rank 2 is q_len 1, in both ops."""
    a = arrays()
    long = {name: a[name][:, None] for name in ("ckv", "kpe")}
    rows = (long["ckv"], long["kpe"], a["table"], (a["lens"] - 1)[:, None])
    want = jax_mla.append(a["pool"], *rows, layer=1)
    for op in (jax_mla.append, jax_mla.reference.append):
        short = (a["ckv"], a["kpe"], a["table"], a["lens"] - 1)
        np.testing.assert_array_equal(op(a["pool"], *short, layer=1), want)
    np.testing.assert_array_equal(jax.jit(lambda a: append(a, layer=1))(a), want)
