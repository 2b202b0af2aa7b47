"""The product of a step's tokens with their experts, in place of the engine's TPU kernel."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# What the engine's kernel does for quantised experts, and nothing here does.
_NOT_SERVED = ("rhs_scale", "rhs_bias", "existing_out", "activation_quantized_dtype")


@functools.cache
def _ragged_dot() -> Callable[..., jax.Array]:
    """Return the fastest grouped product that is here: tokamax's on a GPU, else JAX's."""
    if jax.default_backend() == "gpu" and importlib.util.find_spec("tokamax"):
        return importlib.import_module("tokamax").ragged_dot
    return lax.ragged_dot


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: Any = jnp.float32,
    group_offset: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Multiply the rows of each group with the group's matrix; the engine's `gmm`.

    Args:
      lhs: [rows, k]. The rows of group 0, then those of group 1, and so on.
      rhs: [local_groups, k, n]. The matrices of the groups that this device has.
      group_sizes: [num_groups] int32. The rows of each group, on whatever device it is.
      preferred_element_type: dtype of the result.
      group_offset: int32. The first group that this device has.
      **options: tuning of the engine's kernel, which is ignored, and what is not served: None.

    Returns:
      [rows, n]. 0 for rows of groups that this device does not have.

    Raises:
      NotImplementedError: quantised experts, or experts with a bias.
    """
    for name in _NOT_SERVED:
        if options.get(name) is not None:
            raise NotImplementedError(f"jax_mla.integrations.sglang: experts with {name}")
    # The engine asks for the highest precision on CUDA. That is for float32: bfloat16 has no other.
    precision = None if lhs.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(
        _ragged_dot(), precision=precision, preferred_element_type=preferred_element_type
    )
    local_groups = rhs.shape[0]
    if local_groups == group_sizes.shape[0]:
        return product(lhs, rhs, group_sizes)
    # This device's rows lie in the middle. They are rolled to the front, and back.
    assert group_offset is not None
    sizes = lax.dynamic_slice(group_sizes, (group_offset,), (local_groups,))
    is_before = jnp.arange(group_sizes.shape[0]) < group_offset
    begin = jnp.sum(jnp.where(is_before, group_sizes, 0))
    out = product(jnp.roll(lhs, -begin, axis=0), rhs, sizes)
    is_local = jnp.arange(lhs.shape[0]) < jnp.sum(sizes)
    return jnp.roll(jnp.where(is_local[:, None], out, 0), begin, axis=0)
