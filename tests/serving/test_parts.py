"""The parts that jax_mla puts into sglang-jax, without a server."""

# pyright: reportMissingImports=false
# The engine is not where the linters run.

import asyncio
import math
import os
import types
from typing import Any, NamedTuple

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: tools/ci_serving.sh installs it")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.mem_cache.memory_pool import MLATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from jax_mla.integrations.sglang import devices, shutdown
from jax_mla.integrations.sglang.attention import JaxMlaAttentionBackend
from jax_mla.integrations.sglang.experts import grouped_product
from jax_mla.testing.hlo import collectives, memory, num_copies, pointers

HEADS, RANKS, PAGE_SIZE, TOKENS, LAYERS = 4, 2, 16, 8, 3


@pytest.fixture
def mesh() -> Any:
    """Make a mesh as the engine's: 2 data-parallel ranks, heads over 2 devices."""
    devices = np.array(jax.devices()[:4]).reshape(RANKS, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


class Step(NamedTuple):
    """The lengths and new tokens of two sequences on each of two ranks, and their pages."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]


# Both ranks have a sequence that decodes and a prompt of three tokens, each with own pages.
SHORT = Step((20, 3, 1, 33), (1, 3, 1, 3), ((3, 4, 1, 0), (2, 5, 6, 7)))


def backend_and_pool(
    mesh: Mesh, dtype: Any, step: Step = SHORT
) -> tuple[JaxMlaAttentionBackend, MLATokenToKVPool]:
    """Return a backend with the metadata of a step, and the engine's own pools."""
    num_pages = len(step.pages[0])
    pool = MLATokenToKVPool(
        size=6 * num_pages * PAGE_SIZE, page_size=PAGE_SIZE, dtype=dtype, kv_lora_rank=512,
        qk_rope_head_dim=64, layer_num=LAYERS, mesh=mesh, dp_size=RANKS, start_layer=0,
    )  # fmt: skip
    backend = JaxMlaAttentionBackend(
        pages_per_seq=num_pages, num_attn_heads=HEADS, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, page_size=PAGE_SIZE, mesh=mesh,
    )  # fmt: skip
    batch = types.SimpleNamespace(
        dp_size=RANKS, per_dp_bs_size=2, forward_mode=ForwardMode.EXTEND,
        seq_lens=np.array(step.seq_lens, np.int32), extend_seq_lens=np.array(step.q_lens),
        cache_loc=np.repeat(np.array(step.pages) * PAGE_SIZE, PAGE_SIZE).astype(np.int32),
    )  # fmt: skip
    backend.forward_metadata = backend.get_forward_metadata(batch)
    return backend, pool


def operands(mesh: Mesh, dtype: Any) -> tuple[jax.Array, ...]:
    """Return q, q_rope, k and k_rope of a step of RANKS * TOKENS tokens, as the engine has them."""
    key = jax.random.key(0)
    sizes = ((HEADS, 512), (HEADS, 64), (1, 512), (1, 64))
    specs = (P("data", "tensor"), P("data", "tensor"), P("data"), P())
    return tuple(
        jax.device_put(
            jax.random.normal(jax.random.fold_in(key, i), (RANKS * TOKENS, *size), dtype),
            NamedSharding(mesh, spec),
        )
        for i, (size, spec) in enumerate(zip(sizes, specs, strict=True))
    )


def layer(**options: Any) -> Any:
    fields = dict(layer_id=0, scaling=0.1, sliding_window_size=None, logit_cap=None) | options
    return types.SimpleNamespace(**fields)


def run(backend: Any, pool: Any, arrays: tuple[jax.Array, ...], **options: Any) -> Any:
    q, q_rope, k, k_rope = arrays
    return backend(q, k, k, layer(**options), None, pool, q_rope=q_rope, k_rope=k_rope)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn], ids=["bf16", "f32", "fp8"]
)
def test_pools_stay_in_place(mesh: Mesh, dtype: Any) -> None:
    """A step of several layers copies no pool and communicates nothing."""
    dtype = jnp.dtype(dtype)
    backend, pool = backend_and_pool(mesh, dtype)
    arrays = operands(mesh, jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)
    per_device = pool.kv_buffer[0].sharding.shard_shape(pool.kv_buffer[0].shape)
    pack = 4 // dtype.itemsize
    assert per_device == (13, PAGE_SIZE // pack, pack, 640)

    def step(buffers: list[jax.Array], arrays: tuple[jax.Array, ...]) -> Any:
        outs = []
        pools = types.SimpleNamespace(get_fused_kv_buffer=buffers.__getitem__)
        for i in range(LAYERS):
            out, buffers[i] = run(backend, pools, arrays, layer_id=i)
            outs.append(out)
        return outs, buffers

    compiled = jax.jit(step, donate_argnums=0).lower(pool.kv_buffer, arrays).compile()
    assert memory(compiled).alias_size_in_bytes == LAYERS * math.prod(per_device) * dtype.itemsize
    assert num_copies(compiled, per_device) == 0 and collectives(compiled) == []
    before = [pointers(buffer) for buffer in pool.kv_buffer]
    outs, buffers = compiled(pool.kv_buffer, arrays)
    assert [pointers(buffer) for buffer in buffers] == before
    assert all(np.isfinite(np.asarray(out, np.float32)).all() for out in outs)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_prompts(mesh: Mesh, implementation: str | None) -> None:
    """A prompt that goes to `prefill`, and sequences that do not, on the engine's own pools."""
    num_pages, tokens = 14, 192
    pages = tuple(tuple(np.random.default_rng(r).permutation(num_pages).tolist()) for r in (0, 1))
    step = Step((190, 20, 1, 180), (175, 4, 1, 180), pages)
    backend, pool = backend_and_pool(mesh, jnp.dtype(jnp.float32), step)
    backend.implementation = implementation
    heads, whole = P("data", "tensor"), P(None, "tensor")
    shapes = {
        "q_nope": (heads, (RANKS * tokens, HEADS, 128)),
        "q_rope": (heads, (RANKS * tokens, HEADS, 64)),
        "compressed": (P("data"), (RANKS * tokens, 512)),
        "k_rope": (P(), (RANKS * tokens, 1, 64)),
        "w_uk": (whole, (512, HEADS, 128)),
        "w_uv": (whole, (512, HEADS, 128)),
    }
    rng = np.random.default_rng(0)
    on_host = {n: rng.standard_normal(shape, np.float32) for n, (_, shape) in shapes.items()}
    arrays = {n: jax.device_put(x, NamedSharding(mesh, shapes[n][0])) for n, x in on_host.items()}

    def run_step(buffer: jax.Array, w_uk: jax.Array, w_uv: jax.Array, **tokens: jax.Array) -> Any:
        weights = {
            "w_uk": types.SimpleNamespace(value=w_uk),
            "w_uv": types.SimpleNamespace(value=w_uv),
        }
        model: Any = types.SimpleNamespace(attn_mqa=layer(), **weights)
        pools = types.SimpleNamespace(get_fused_kv_buffer=lambda _: buffer)
        return backend.attend_to_prompts(model, **tokens, token_to_kv_pool=pools)

    buffer = pool.kv_buffer[0]
    compiled = jax.jit(run_step, donate_argnums=0).lower(buffer, **arrays).compile()
    shape = buffer.sharding.shard_shape(buffer.shape)
    assert num_copies(compiled, shape) == 0 and collectives(compiled) == []
    out = np.asarray(compiled(buffer, **arrays)[0]).reshape(RANKS, tokens, HEADS, 128)
    of_rank = {
        n: on_host[n].reshape(RANKS, tokens, *on_host[n].shape[1:]) for n in list(shapes)[:4]
    }
    # The second sequence of the second rank has no cached token, so its keys are all known here.
    new = slice(1, 181)
    q_nope, q_rope, ckv, kpe = (of_rank[n][1, new] for n in list(shapes)[:4])
    k_nope, v = (np.einsum("tr,rhd->thd", ckv, on_host[n]) for n in ("w_uk", "w_uv"))
    scores = np.einsum("qhd,khd->hqk", q_nope, k_nope) + np.einsum("qhd,kd->hqk", q_rope, kpe[:, 0])
    scores = np.where(np.tri(180, dtype=bool), 0.1 * scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out[1, new], want, atol=2e-4 * np.abs(want).max())
    assert np.isfinite(out).all() and (out[0, 179:] == 0).all() and (out[1, 181:] == 0).all()


@pytest.mark.parametrize(
    ("device", "given", "flags"),
    [
        ("cuda", "", "--xla_gpu_enable_command_buffer=+WHILE"),
        ("cuda", "--a=b", "--a=b --xla_gpu_enable_command_buffer=+WHILE"),
        ("cuda", "--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer="),
        (
            "cpu",
            "--xla_force_host_platform_device_count=1",
            "--xla_force_host_platform_device_count=1 "
            "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        ),
    ],
)
def test_flags_of_xla(monkeypatch: Any, device: str, given: str, flags: str) -> None:
    """Loops are commands on a GPU, and a CPU unpacks one layer at a time, unless the user says so.

    The engine's processes inherit the flags.
    """
    for name, value in (("XLA_FLAGS", given), ("CUDA_VISIBLE_DEVICES", "0"), ("JAX_PLATFORMS", "")):
        monkeypatch.setenv(name, value)
    args: Any = types.SimpleNamespace(device=device, tp_size=1, nnodes=1, device_indexes=None)
    devices.show_to_engine(args)
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize("polls", [[1, 0, 0], [0, 1, 0, 1, 1, 0, 0]], ids=["one", "n > 1"])
def test_sigterm_waits_for_the_last_answer(monkeypatch: Any, polls: list[int]) -> None:
    """A request that the engine has just forgotten may still have to be answered or go on."""
    ended = []
    manager = types.SimpleNamespace(
        gracefully_exit=True, rid_to_state=["rid"], shutdown=lambda: ended.append("manager")
    )

    async def sleep(_: float) -> None:
        assert not ended
        manager.rid_to_state = ["rid"] * polls.pop(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(shutdown, "stop", lambda: ended.append("all"))
    asyncio.run(shutdown.stop_when_asked(manager))
    assert ended == ["manager", "all"] and not polls


@pytest.mark.parametrize("option", [dict(sliding_window_size=0), dict(logit_cap=-1.0)], ids=str)
def test_bad_masks_are_refused_by_name(mesh: Mesh, option: dict[str, Any]) -> None:
    backend, pool = backend_and_pool(mesh, jnp.bfloat16)
    with pytest.raises(ValueError, match="sliding_window|soft_cap"):
        run(backend, pool, operands(mesh, jnp.bfloat16), **option)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_experts_of_all_devices_add_up(ep_size: int) -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([0, 3, 1, 0, 5, 2, 0, 4], np.int32)
    lhs = rng.normal(size=(sizes.sum(), 32)).astype(np.float32)
    rhs = rng.normal(size=(8, 32, 16)).astype(np.float32)
    expert = np.repeat(np.arange(8), sizes)
    wanted = np.einsum("mk,mkn->mn", lhs, rhs[expert])
    local = 8 // ep_size
    x, counts = jnp.asarray(lhs), jnp.asarray(sizes)
    product = jax.jit(lambda w, offset: grouped_product(x, w, counts, group_offset=offset))
    got = sum(
        np.asarray(product(rhs[i * local :][:local], np.int32(i * local))) for i in range(ep_size)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_quantised_experts_are_refused_by_name() -> None:
    ones = jnp.ones((2, 2, 2))
    with pytest.raises(NotImplementedError, match="experts with rhs_scale"):
        grouped_product(ones[0], ones, jnp.ones(2, jnp.int32), rhs_scale=ones)


def test_default_precision_of_bfloat16() -> None:
    """The engine asks for the highest precision on CUDA, which grouped products need not have."""
    x = jnp.ones((2, 2), jnp.bfloat16)
    sizes = jnp.ones(2, jnp.int32)
    with jax.default_matmul_precision("highest"):
        jaxpr = jax.make_jaxpr(lambda: grouped_product(x, x[None].repeat(2, 0), sizes))()
    (product,) = [e for e in jaxpr.eqns if "ragged_dot" in e.primitive.name]
    assert set(product.params["precision"] or ()) <= {lax.Precision.DEFAULT}
