"""Say what a model needs on each device of a mesh, from its config.json alone.

Nothing is read or allocated, and the devices need not exist. `generate.py --plan` prints it.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .config import Config
from .mesh import Placement
from .model import Place, paged_attention, paged_forward
from .moe import Experts
from .pages import row_layout
from .sparse import SparseCache, index_pool, require_indexer
from .weights import Fp8, Parameter, is_parameter, parameters


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter.

    Attributes:
      name: its name in the tree.
      count: in how many layers it is; 1 for those outside of the layers.
      parameter: shape and dtype of one.
      part: the shape of the part on a device.
      num_bytes: what all of them take on a device.
    """

    name: str
    count: int
    parameter: Parameter
    part: tuple[int, ...]
    num_bytes: int


def weight_rows(config: Config, placement: Placement, dtype: Any) -> list[Row]:
    """Describe the parameters on a device.

    Args:
      config: sizes.
      placement: the mesh, which may be abstract.
      dtype: dtype of the weights that are not in FP8.

    Returns:
      A row for each kind, the largest first.
    """
    tree = parameters(config, jnp.dtype(dtype))
    kinds: collections.Counter[tuple[str, Parameter]] = collections.Counter()
    for path, parameter in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_parameter):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        kinds[".".join(name for name in names if name not in ("layers", "")), parameter] += 1
    rows = []
    for (name, parameter), count in kinds.items():
        part = placement.sharding(parameter).shard_shape(parameter.shape)
        num_bytes = count * math.prod(part) * jnp.dtype(parameter.dtype).itemsize
        rows.append(Row(name, count, parameter, part, num_bytes))
    return sorted(rows, key=lambda row: -row.num_bytes)


def unpacked_bytes(config: Config, placement: Placement, dtype: Any) -> int:
    """Return the bytes of the unpacked matrices of a layer in FP8, of the largest one."""
    layers = parameters(config, jnp.dtype(dtype))["layers"]
    most = 0
    for layer in layers:
        sizes = [
            math.prod(placement.sharding(weight.codes).shard_shape(weight.codes.shape))
            for weight in layer.values()
            if isinstance(weight, Fp8)
        ]
        most = max(most, sum(sizes) * jnp.dtype(dtype).itemsize)
    return most


def step_shapes(
    config: Config, placement: Placement, dtype: Any, *, slots: int, pages: int, page_size: int
) -> tuple[jax.ShapeDtypeStruct, Any]:
    """Trace a decode step by shapes.

    Args:
      config: sizes.
      placement: the mesh.
      dtype: dtype of the model.
      slots: sequences.
      pages: pages of the cache.
      page_size: tokens in a page.

    Returns:
      The shapes of the hidden states and of the cache.
    """
    struct = jax.ShapeDtypeStruct
    params = jax.tree.map(
        lambda p: struct(p.shape, p.dtype), parameters(config, dtype), is_leaf=is_parameter
    )
    width, cache_dtype = row_layout(config, None, dtype)
    ints = struct((slots,), jnp.int32)
    place = Place(struct((slots, 8), jnp.int32), ints)  # type: ignore[arg-type]
    attend = paged_attention(config, "reference", mesh=placement.mesh_axes)
    experts = Experts("dense", placement.mesh, placement.experts)

    def step(params, cache, tokens, positions, place):
        return paged_forward(
            config, params, cache, tokens, positions, place,
            max_positions=8 * page_size, attend=attend, experts=experts,
        )  # fmt: skip

    cache: Any = struct((config.num_layers, pages, page_size, width), cache_dtype)
    if config.index is not None:
        cache = SparseCache(cache, index_pool(config.index, pages, page_size, jnp.dtype(dtype)))
    return jax.eval_shape(step, params, cache, ints, ints, place)


def show(
    config: Config,
    placement: Placement,
    dtype: Any,
    kv_format: str | None,
    index_format: str | None = None,
) -> None:
    """Print what each device holds.

    Args:
      config: sizes.
      placement: the mesh, which may be abstract.
      dtype: dtype of the model.
      kv_format: how the cache is stored, see `pages.row_layout`.
      index_format: how index keys are stored, see `sparse.index_pool`.
    """
    dtype = jnp.dtype(dtype)
    require_indexer(config, index_format)
    width, cache_dtype = row_layout(config, kv_format, dtype)
    rows = weight_rows(config, placement, dtype)
    axes = dict(placement.mesh.shape) | {"experts": placement.experts}
    print(f"{placement.mesh.size} devices, {axes}. A device holds:\n")
    print(f"{'MB':>10}  {'layers':>6}  {'dtype':<15}{'shape':<22}{'its part':<22}name")
    for row in rows:
        shape = row.parameter.shape
        part = "whole" if row.part == shape else str(row.part)
        print(
            f"{row.num_bytes / 1e6:>10,.1f}  {row.count:>6}  "
            f"{jnp.dtype(row.parameter.dtype).name:<15}{shape!s:<22}{part:<22}{row.name}"
        )
    total = sum(row.num_bytes for row in rows)
    row_bytes = config.num_layers * width * cache_dtype.itemsize
    if config.index is not None:
        keys = index_pool(config.index, 1, 1, dtype, index_format)
        row_bytes += math.prod(keys.shape) * keys.dtype.itemsize
    parts, axis = placement.mesh.shape[placement.pages_axis], placement.pages_axis
    held = "all pages" if parts == 1 else f"1 in {parts} pages ({axis}={parts})"
    print(
        f"\n{total / 1e9:10.2f} GB of weights"
        f"\n{unpacked_bytes(config, placement, dtype) / 1e9:10.2f} GB at most for the unpacked "
        "FP8 weights of a layer, while it runs"
        f"\n{row_bytes / 1e3:10.2f} KB of cache a token; a device holds the tokens of {held}"
    )
