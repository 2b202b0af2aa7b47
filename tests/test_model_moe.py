"""The experts of the model example: every way to compute them gives the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek import moe
from examples.deepseek.config import Config, Moe, parse_config
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.moe import Experts, hopper_product, moe_mlp, route
from examples.deepseek.recall_model import init_params, raw_config
from examples.deepseek.weights import Fp8, parameters, unpack

CONFIG = parse_config(raw_config())
ROUTINGS = {
    "v2-lite": Moe(64, 6, 32, 2, "softmax", 1, 1, False, 1.0),
    "v2": Moe(160, 6, 32, 2, "softmax", 8, 3, False, 16.0),
    "v3": Moe(256, 8, 32, 1, "sigmoid", 8, 4, True, 2.5),
    "groups of one": Moe(16, 4, 32, 1, "sigmoid", 16, 6, True, 2.5),
}


@pytest.fixture(params=["by comparing", "by sorting"])
def ranking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test as for few tokens and as for many."""
    if request.param == "by sorting":
        monkeypatch.setattr(moe, "MAX_COMPARISONS", 0)


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
    out, _ = jax.jit(functools.partial(moe_mlp, CONFIG.moe, experts))(weights, x, is_live)
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


@pytest.mark.full
@pytest.mark.parametrize("product", ["dense", "ragged_dot"])
@pytest.mark.parametrize("mesh", ["", "dp=2,tp=4", "dp=2,tp=2,cp=2,experts=width"])
@pytest.mark.usefixtures("ranking")
def test_products_and_splits_agree_with_one_expert_after_the_other(product: str, mesh: str) -> None:
    sizes = parse_mesh(mesh)
    placement = Placement.over(sizes, jax.devices("cpu"))
    tree = parameters(CONFIG, jnp.dtype(jnp.float32))["layers"][1]
    weights = {
        name: jax.device_put(x, placement.sharding(tree[name])) for name, x in layer().items()
    }
    got = run(Experts(product, placement.mesh, placement.experts), weights)
    np.testing.assert_allclose(got, expected(), atol=2e-5, rtol=1e-4)


def route_by_top_k(
    config: Moe, router: jax.Array, bias: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What `route` has to return, with jax.lax.top_k for each choice."""
    logits = jnp.einsum("...d,ed->...e", x, router)
    v3 = config.scoring == "sigmoid"
    affinity = jax.nn.sigmoid(logits) if v3 else jax.nn.softmax(logits)
    score = affinity + bias if v3 else affinity
    if config.num_groups > 1:
        grouped = score.reshape(*x.shape[:-1], config.num_groups, -1)
        best = jax.lax.top_k(grouped, min(1 + v3, grouped.shape[-1]))[0].sum(-1)
        groups = jax.lax.top_k(best, config.num_groups_per_token)[1]
        is_open = jax.nn.one_hot(groups, config.num_groups, dtype=bool).any(-2)
        closed = -jnp.inf if v3 else 0.0
        score = jnp.where(is_open[..., None], grouped, closed).reshape(score.shape)
    chosen = jax.lax.top_k(score, config.num_experts_per_token)[1]
    weights = jnp.take_along_axis(affinity, chosen, axis=-1)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.scale, chosen


@pytest.mark.quick(1)
@pytest.mark.usefixtures("ranking")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("experts", ["all differ", "seven kinds", "all equal"])
@pytest.mark.parametrize("tokens", [(1,), (2, 64)])
def test_routing_is_the_one_by_top_k(routing: str, experts: str, tokens: tuple) -> None:
    config, rng = ROUTINGS[routing], np.random.default_rng(0)
    num_kinds = {"all differ": config.num_experts, "seven kinds": 7, "all equal": 1}[experts]
    # The experts of a kind have equal scores.
    kinds = rng.permutation(config.num_experts) % num_kinds
    router = jnp.asarray(rng.standard_normal((num_kinds, 48))[kinds], jnp.float32)
    bias = jnp.asarray(rng.standard_normal(num_kinds)[kinds], jnp.float32)
    x = jnp.asarray(rng.standard_normal((*tokens, 48)), jnp.float32)
    got = jax.jit(functools.partial(route, config))(router, bias, x)
    wanted = jax.jit(functools.partial(route_by_top_k, config))(router, bias, x)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("ranking")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.full
def test_gradient_of_the_weights_is_the_one_by_top_k(routing: str) -> None:
    config, rng = ROUTINGS[routing], np.random.default_rng(0)
    router, bias, x, factors = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in (
            (config.num_experts, 48),
            (config.num_experts,),
            (24, 48),
            (24, config.num_experts_per_token),
        )
    )

    def total(router, route):
        return (route(config, router, bias, x)[0] * factors).sum()

    got, wanted = (jax.grad(total)(router, function) for function in (route, route_by_top_k))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("ranking")
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_of_nan_chooses_different_experts_and_leaves_the_others_alone(routing: str) -> None:
    config, rng = ROUTINGS[routing], np.random.default_rng(0)
    router = jnp.asarray(rng.standard_normal((config.num_experts, 48)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((8, 48)), jnp.float32)
    bias = jnp.zeros(config.num_experts)
    _, chosen = route(config, router, bias, x.at[3].set(jnp.nan))
    _, wanted = route(config, router, bias, x)
    own = np.asarray(chosen)[3]
    assert len(set(own.tolist())) == config.num_experts_per_token
    assert (own >= 0).all() and (own < config.num_experts).all()
    np.testing.assert_array_equal(np.delete(chosen, 3, 0), np.delete(wanted, 3, 0))


@pytest.mark.usefixtures("ranking")
@pytest.mark.parametrize("num_choices", [1, 1000])
@pytest.mark.parametrize("num_kinds", [1, 80])
def test_choices_are_sorted_by_expert(num_choices: int, num_kinds: int) -> None:
    # Experts 64 to 79 are another device's; 256 stands for padding.
    chosen = np.random.default_rng(0).integers(0, num_kinds, num_choices).astype(np.int32)
    chosen[::5] = 256
    order, place, sizes = jax.jit(functools.partial(moe._sort, num_experts=64))(chosen)
    np.testing.assert_array_equal(order, np.argsort(chosen, stable=True))
    np.testing.assert_array_equal(place, np.argsort(order))
    np.testing.assert_array_equal(sizes, np.bincount(chosen, minlength=64)[:64])
    assert order.dtype == place.dtype == sizes.dtype == jnp.int32


@pytest.mark.quick(1)
@pytest.mark.usefixtures("ranking")
def test_padding_of_nan_does_not_reach_other_tokens() -> None:
    x, is_live = inputs()
    assert CONFIG.moe is not None
    call = jax.jit(functools.partial(moe_mlp, CONFIG.moe, Experts("ragged_dot")))
    wanted, _ = call(layer(), x, is_live)
    got, _ = call(layer(), jnp.where(is_live[:, None], x, jnp.nan), is_live)
    np.testing.assert_array_equal(np.asarray(got)[is_live], np.asarray(wanted)[is_live])


@pytest.mark.full
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
