"""The experts of the model example: every way to compute them gives the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek.config import Config, parse_config
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.moe import Experts, hopper_product, moe_mlp
from examples.deepseek.recall_model import init_params, raw_config
from examples.deepseek.weights import Fp8, parameters, unpack

CONFIG = parse_config(raw_config())


def layer(config: Config = CONFIG) -> dict[str, jax.Array]:
    weights = init_params(config, jax.random.key(0))["layers"][1]
    return {
        name: x
        for name, x in weights.items()
        if "expert" in name or "router" in name or "shared" in name
    }


def inputs(tokens: int = 24) -> tuple[jax.Array, jax.Array]:
    """Tokens, some of which are padding."""
    x = jax.random.normal(jax.random.key(1), (tokens, CONFIG.hidden_size))
    return x, jnp.arange(tokens) % 5 > 0


def run(experts: Experts, weights: dict) -> np.ndarray:
    assert CONFIG.moe is not None
    x, is_live = inputs()
    out, _ = jax.jit(moe_mlp, static_argnums=(0, 1))(CONFIG.moe, experts, weights, x, is_live)
    return np.asarray(out)[np.asarray(is_live)]


def expected() -> np.ndarray:
    """One expert after the other, in numpy."""
    assert CONFIG.moe is not None
    weights, (x, is_live) = layer(), inputs()
    shared = {"shared_down": jnp.zeros_like(weights["shared_down"])}
    _, chosen = moe_mlp(CONFIG.moe, Experts(), weights | shared, x)
    logits = jax.nn.sigmoid(x @ weights["router"].T)
    scale = np.take_along_axis(np.asarray(logits), np.asarray(chosen), -1)
    scale = scale / scale.sum(-1, keepdims=True)
    gate_up = np.asarray(weights["shared_gate_up"])
    rows = []
    for row, own, factors in zip(np.asarray(x), np.asarray(chosen), scale, strict=True):

        def mlp(gate, up, down, row=row):
            inner = gate @ row
            return down @ (inner / (1 + np.exp(-inner)) * (up @ row))

        total = mlp(gate_up[:, 0], gate_up[:, 1], np.asarray(weights["shared_down"]))
        for expert, factor in zip(own, factors, strict=True):
            gate, up = np.asarray(weights["expert_gate_up"])[expert].transpose(1, 2, 0)
            total = total + factor * mlp(gate, up, np.asarray(weights["expert_down"])[expert].T)
        rows.append(total)
    return np.stack(rows)[np.asarray(is_live)]


@pytest.mark.parametrize("product", ["dense", "ragged_dot"])
@pytest.mark.parametrize("mesh", ["", "dp=2,tp=4", "dp=2,tp=2,cp=2,experts=width"])
def test_products_and_splits_agree_with_one_expert_after_the_other(product: str, mesh: str) -> None:
    sizes = parse_mesh(mesh)
    placement = Placement.over(sizes, jax.devices("cpu"))
    tree = parameters(CONFIG, jnp.dtype(jnp.float32))["layers"][1]
    weights = {
        name: jax.device_put(x, placement.sharding(tree[name])) for name, x in layer().items()
    }
    got = run(Experts(product, placement.mesh, placement.experts), weights)
    np.testing.assert_allclose(got, expected(), atol=2e-5, rtol=1e-4)


def test_weights_in_fp8_are_multiplied_as_their_values() -> None:
    def quantise(name: str, x: jax.Array) -> jax.Array | Fp8:
        if "router" in name:
            return x
        block = tuple(16 if n % 16 == 0 and i != 0 else 1 for i, n in enumerate(x.shape))
        blocks = tuple(n // b for n, b in zip(x.shape, block, strict=True))
        scales = jnp.linspace(0.5, 2, int(np.prod(blocks))).reshape(blocks)
        return Fp8(x.astype(jnp.float8_e4m3fn), scales, block)

    weights = {name: quantise(name, x) for name, x in layer().items()}
    values = {name: unpack(x, jnp.float32) for name, x in weights.items()}
    down = weights["expert_down"]
    assert isinstance(down, Fp8)
    full = np.kron(np.asarray(down.scales), np.ones((1, 16, 16)))
    product = np.asarray(down.codes, np.float32) * full
    np.testing.assert_allclose(values["expert_down"], product, rtol=1e-6)
    np.testing.assert_allclose(run(Experts(), weights), run(Experts(), values), rtol=1e-5)


def test_tiles_are_ones_that_tokamax_takes() -> None:
    pytest.importorskip("tokamax", reason="needs tokamax (Python 3.12)")
    few, many = hopper_product(1).config, hopper_product(1000).config
    assert (few.block_m, few.block_n) == (64, 128)
    assert (many.block_m, many.block_n) == (128, 128)
