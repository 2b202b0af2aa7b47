"""Weights in FP8 in blocks, without a server."""

# pyright: reportMissingImports=false
# The engine is not where the linters run.

import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: tools/ci_serving.sh installs it")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from sgl_jax.srt.configs.load_config import LoadConfig
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.configs.quantization_config import QuantizationConfig
from sgl_jax.srt.layers.moe import EPMoE
from sgl_jax.srt.model_loader.loader import get_model_loader

from jax_mla.integrations.sglang import devices, install
from jax_mla.testing.hlo import memory

BLOCK = 128
AXES, EXPLICIT = ("data", "tensor"), (AxisType.Explicit,) * 2


@pytest.fixture
def mesh() -> Any:
    """Make a mesh as the engine's: 2 data-parallel ranks, heads and widths over 2 devices."""
    install()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES, axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        yield mesh


def make_experts(mesh: Mesh, ep_size: int, hidden_size: int, width: int) -> EPMoE:
    """Return eight experts as the engine makes them, of which tokens choose two, not loaded."""
    quantization = QuantizationConfig(
        is_static_checkpoint=True, moe_weight_dtype=jnp.float8_e4m3fn,
        moe_activation_dtype=jnp.float8_e4m3fn, weight_block_size=(BLOCK, BLOCK),
    )  # fmt: skip
    experts = nnx.eval_shape(
        lambda: EPMoE(
            hidden_size, 8, 2, ep_size, mesh, width, jnp.float32, jnp.float32,
            quantization_config=quantization,
        )
    )  # fmt: skip
    experts.quantize_weights(is_static=True)
    for name in ("wi_0", "wi_1", "wo"):
        weight = getattr(experts, name)
        sharding = NamedSharding(experts.moe_mesh, weight.value.sharding.spec)
        weight.value = jax.ShapeDtypeStruct(
            weight.value.shape, jnp.float8_e4m3fn, sharding=sharding
        )
    return experts


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_experts_whose_blocks_are_cut(mesh: Mesh, ep_size: int) -> None:
    """The width of 192 is 1.5 blocks, and over 4 devices each has 48 of them."""
    hidden_size, num_experts, num_tokens = 160, 8, 24
    experts = make_experts(mesh, ep_size, hidden_size, 192)
    rng = np.random.default_rng(0)
    matrices = {}
    for name in ("wi_0", "wi_1", "wo"):
        weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale")
        _, num_in, num_out = weight.value.shape
        codes = rng.standard_normal(weight.value.shape).astype(jnp.float8_e4m3fn)
        scales = rng.uniform(0.01, 0.2, scale.value.shape).astype(np.float32)
        full = scales.repeat(BLOCK, 1)[:, :num_out].repeat(BLOCK, 2)[:, :, :num_in]
        matrices[name] = codes.astype(np.float32) * full.swapaxes(1, 2)
        weight.value = jax.device_put(codes, weight.value.sharding)
        scale.value = jax.device_put(scales, scale.value.sharding)
    x = rng.standard_normal((num_tokens, hidden_size), np.float32)
    chosen = np.stack([rng.permutation(num_experts)[:2] for _ in range(num_tokens)])
    of_token = {name: matrix[chosen] for name, matrix in matrices.items()}
    gate, up = (np.einsum("tk,teko->teo", x, of_token[n]) for n in ("wi_0", "wi_1"))
    want = np.einsum("tek,teko->to", gate / (1 + np.exp(-gate)) * up, of_token["wo"])
    whole = [jax.device_put(a, NamedSharding(mesh, jax.P())) for a in (x, np.ones((num_tokens, 2)))]
    got = jax.jit(experts.__call__)(*whole, jax.device_put(chosen, whole[0].sharding))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def bytes_of_step(num_layers: int) -> int:
    """Return what a step of that many layers needs beside their weights."""
    install()
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES, axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        layers = [nnx.split(make_experts(mesh, 1, 256, 512)) for _ in range(num_layers)]

        def step(states: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
            for (graph, _), state in zip(layers, states, strict=True):
                x = nnx.merge(graph, state)(x, weights, chosen)
            return x

        tokens = (
            jax.ShapeDtypeStruct((16, size), dtype, sharding=NamedSharding(mesh, jax.P()))
            for size, dtype in ((256, jnp.float32), (2, jnp.float32), (2, jnp.int32))
        )
        compiled = jax.jit(step).lower([state for _, state in layers], *tokens).compile()
        return memory(compiled).temp_size_in_bytes


def test_a_step_unpacks_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    args: Any = types.SimpleNamespace(device="cpu", tp_size=1, nnodes=1, device_indexes=None)
    devices.show_to_engine(args)  # its flag makes the difference
    code = "import test_fp8 as t; print(t.bytes_of_step(2), t.bytes_of_step(6))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.check_output([sys.executable, "-P", "-c", code], env=env, text=True)
    few, many = map(int, out.split())
    assert many < 1.1 * few


def test_weights_stay_in_fp8(mesh: Mesh, checkpoints: pathlib.Path) -> None:
    """A loaded model has a byte a weight; only the up-projections are in the model's dtype."""
    config = ModelConfig(str(checkpoints / "v3_fp8"), dtype="float32")
    vars(config.hf_config).update(ep_size=1, moe_backend="epmoe", use_absorbed_mla=True)
    model = get_model_loader(LoadConfig(), mesh).load_model(model_config=config)
    leaves = jax.tree.leaves_with_path(model)
    matrices = {jax.tree_util.keystr(path): x for path, x in leaves if x.ndim > 1}
    codes = [x for x in matrices.values() if x.dtype == jnp.float8_e4m3fn]
    scales = [x for name, x in matrices.items() if "_scale" in name]
    wide = {name.split(".")[-2] for name, x in matrices.items() if x.dtype.itemsize > 1}
    assert wide - {"weight_scale", "wi_0_scale", "wi_1_scale", "wo_scale"} == {
        "embedding", "kernel", "w_uk", "w_uv",
    }  # fmt: skip
    assert sum(x.nbytes for x in scales) < 0.02 * sum(x.nbytes for x in codes)
