"""The parts of JAX that are not public or have changed between its versions, one function each.

If a new JAX breaks this package, the place to look is here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core
import jax.numpy as jnp
from jax._src import config, dispatch
from jax.interpreters import xla
from jax.sharding import PartitionSpec


def varying_axes(aval: Any) -> frozenset[str]:
    """Return the manual mesh axes over which a value may differ between devices (its "vma").

    The set is empty under `check_vma=False`, because JAX does not keep it up to date there.
    """
    return aval.manual_axis_type.varying if config._check_vma.value else frozenset()


def unreduced_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes over which a value still has to be summed, manual or Explicit."""
    return aval.manual_axis_type.unreduced | aval.sharding.spec.unreduced


def reduced_axes(aval: Any) -> frozenset[str]:
    """Return the Explicit axes over which a replicated value has an unreduced cotangent."""
    return aval.sharding.spec.reduced


def partitions(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the entries of a spec, which JAX refuses to iterate over if it has `reduced` axes.

    Before jax 0.10.2 a spec has no `partitions`, and any spec can be iterated over.
    """
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def result_type(like: Any, shape: Sequence[Any], dtype: Any, spec: PartitionSpec) -> Any:
    """Return the type of a result: its mesh and its manual axes are those of the operand `like`."""
    sharding = like.sharding.update(spec=spec)
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def make_callable_eagerly(primitive: jax.extend.core.Primitive) -> None:
    """Let a primitive run outside `jit`: JAX compiles each such call as a separate program."""
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))


def require_devices_to_lower(primitive: jax.extend.core.Primitive) -> None:
    """Make JAX give the device list to the lowering, as `custom_partitioning` inside it needs."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run cuDNN's attention, as `jax.nn.dot_product_attention(implementation="cudnn")` does.

    The public function rounds lse to the dtype of q, which costs several percent of accuracy when
    results are merged. It also needs values as wide as keys, and padding them takes an eighth of
    the time.

    Args:
      q: [batch, q_len, heads, d_qk], bfloat16 or float16.
      k: [batch, kv_len, heads, d_qk].
      v: [batch, kv_len, heads, d_v].
      q_lens: [batch] int32, at least 1.
      kv_lens: [batch] int32, at least 1.
      scale: factor on the scores.
      causal: whether query i sees only the keys up to i.

    Returns:
      out [batch, q_len, heads, d_v] and lse [batch, q_len, heads] float32. What lies beyond q_lens
      has no meaning.

    Raises:
      NotImplementedError: cuDNN or the GPU does not take the call.
      RuntimeError: there is no cuDNN.
    """
    # Not at the top: if it moves, everything but `prefill` through cuDNN still works.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    results: Any = cudnn.dot_product_attention(
        q, k, v, q_seqlen=q_lens, kv_seqlen=kv_lens,
        scale=scale, mask_type=mask, return_residual=True,
    )  # fmt: skip
    out, lse = results
    return out, jnp.swapaxes(lse, 1, 2)


# ---- The lowering context, which `jax.interpreters.mlir` hands to every lowering rule -----------


def operand_types(ctx: Any) -> Sequence[Any]:
    """Return the abstract values of the operands that are being lowered."""
    return ctx.avals_in


def result_types(ctx: Any) -> Sequence[Any]:
    """Return the abstract values of the results that are being lowered."""
    return ctx.avals_out


def with_types(ctx: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return the context of a lowering with other operand and result types."""
    return ctx.replace(avals_in=list(operands), avals_out=list(results))


def platforms_to_lower_for(ctx: Any) -> Sequence[str]:
    """Return the platforms for which the code of one lowering rule has to work."""
    return ctx.platforms or ctx.module_context.platforms


def num_devices_to_export_for(ctx: Any) -> int:
    """Return the number of devices of the program if it is lowered for `jax.export`, or 0."""
    context = ctx.module_context
    if not context.lowering_parameters.for_export:
        return 0
    return getattr(context.axis_context, "num_devices", 1) or 1
