"""A model with weights in FP8: results as of its values, and one layer unpacked at a time."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek.config import Config, parse_config
from examples.deepseek.model import Place, paged_forward
from examples.deepseek.recall_model import raw_config
from examples.deepseek.weights import Fp8, Parameter, parameters, unpack

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
TOKENS = 8


def make(num_layers: int) -> tuple[Config, Any]:
    """A model whose experts are most of it."""
    sizes = {"num_hidden_layers": num_layers, "moe_intermediate_size": 256, "hidden_size": 64}
    config = parse_config(raw_config(quantization_config=FP8, num_attention_heads=2, **sizes))
    rng = np.random.default_rng(0)

    def draw(parameter: Parameter) -> jax.Array:
        scale = 0.05 if len(parameter.shape) > 1 else 1.0
        return jnp.asarray(rng.normal(size=parameter.shape) * scale, parameter.dtype)

    return config, jax.tree.map(draw, parameters(config, jnp.dtype(jnp.float32)))


def compile_step(config: Config, params: Any) -> tuple[Any, tuple]:
    ints = jnp.arange(TOKENS, dtype=jnp.int32)
    cache = jnp.zeros((config.num_layers, TOKENS, 16, 576))
    args = (cache, ints, jnp.zeros_like(ints), Place(ints[:, None], jnp.ones_like(ints)))

    @jax.jit
    def step(params, cache, tokens, positions, place):
        return paged_forward(config, params, cache, tokens, positions, place, max_positions=16)[0]

    return step.lower(params, *args).compile(), args


def memory_of_four_layers() -> tuple[float, float]:
    """Temporary bytes of four more layers, and what they may be if one is unpacked at a time."""
    config, params = make(2)
    few, _ = compile_step(config, params)
    config, params = make(6)
    step, args = compile_step(config, params)
    temporary = [each.memory_analysis().temp_size_in_bytes for each in (few, step)]
    layer = params["layers"][-1]
    one = 4 * sum(weight.codes.size for weight in layer.values() if isinstance(weight, Fp8))
    return temporary[1] - temporary[0], 0.5 * one + 4 * args[0].nbytes / config.num_layers


@pytest.mark.full
def test_a_step_unpacks_one_layer_at_a_time() -> None:
    # In a process of its own: on some CPUs XLA prefers a scheduler that unpacks all layers at once,
    # which only a flag turns off.
    flags = f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_concurrency_optimized_scheduler=false"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = "import test_model_fp8; print(*test_model_fp8.memory_of_four_layers())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    needed, most = map(float, done.stdout.split())
    assert needed < most


@pytest.mark.full
def test_a_step_with_codes_is_that_with_their_values() -> None:
    config, params = make(6)
    step, args = compile_step(config, params)
    values = jax.tree.map(
        lambda x: unpack(x, jnp.float32), params, is_leaf=lambda x: isinstance(x, Fp8)
    )
    plain, _ = compile_step(config, values)
    np.testing.assert_allclose(step(params, *args), plain(values, *args), rtol=1e-4, atol=1e-5)
