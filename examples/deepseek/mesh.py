"""Where arrays live on a mesh: batch over dp, heads and hidden widths over tp, pages over cp.

The model code knows nothing of this: parameters and cache are placed with `NamedSharding`, and
`jax.jit` does the rest; jax_mla's ops bring their own partitioning.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES: tuple[str, ...] = ("dp", "tp", "cp")

# Which dimension of a stacked parameter is split over tp: heads, or a feed-forward width. Outputs
# of a split `o` or `down` are summed by XLA. What is not listed is replicated.
TP_DIMENSION = {
    "q": 2,  # [layers, hidden, heads, d]
    "q_b": 2,  # [layers, rank, heads, d]
    "w_uk": 1,  # [layers, heads, d, d_ckv]
    "w_uv": 1,  # [layers, heads, d_ckv, d]
    "o": 1,  # [layers, heads, d, hidden]
    "gate": 2,  # [layers, hidden, width]
    "up": 2,
    "down": 1,  # [layers, width, hidden]
    "shared_gate": 2,
    "shared_up": 2,
    "shared_down": 1,
    "expert_gate": 3,  # [layers, experts, hidden, width]
    "expert_up": 3,
    "expert_down": 2,  # [layers, experts, width, hidden]
    "head": 0,  # [vocab, hidden]
}


def parse_mesh(text: str) -> dict[str, int]:
    """Read `dp=2,tp=2,cp=2`, any subset in any order.

    Args:
      text: from the command line; empty for one device.

    Returns:
      Size of each axis, 1 where not given.

    Raises:
      ValueError: something else is in it.
    """
    sizes: dict[str, int] = {axis: 1 for axis in AXES}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--mesh: expected AXIS=SIZE with AXIS one of {AXES}, got {part!r}")
        sizes[name] = int(size)
    return sizes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Puts host arrays onto a mesh. Every process holds the whole host array and keeps its share.

    Attributes:
      mesh: with the axes dp, tp, cp.
    """

    mesh: Mesh

    @classmethod
    def over(cls, sizes: dict[str, int], devices: Sequence[Any] | None = None) -> "Placement":
        """Make a mesh of the first devices; with several processes, of all of them.

        Args:
          sizes: from `parse_mesh`.
          devices: default: all of JAX's default platform.

        Returns:
          The placement.

        Raises:
          ValueError: there are not as many devices.
        """
        shape = tuple(sizes[axis] for axis in AXES)
        num_devices, devices = int(np.prod(shape)), devices or jax.devices()
        needs_all = jax.process_count() > 1
        if num_devices > len(devices) or (needs_all and num_devices < len(devices)):
            bound = "exactly" if needs_all else "at most"
            raise ValueError(
                f"--mesh: expected {bound} {len(devices)} devices in all, got {num_devices}"
            )
        return cls(Mesh(np.asarray(devices[:num_devices]).reshape(shape), AXES))

    def put(self, array: np.ndarray, *spec: str | None) -> jax.Array:
        """Place one host array by the mesh axis of each leading dimension."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def put_parameter(self, name: str, array: np.ndarray) -> jax.Array:
        """Place a parameter; a width that tp does not divide stays whole."""
        dimension = TP_DIMENSION.get(name)
        if dimension is None or array.shape[dimension] % self.mesh.shape["tp"]:
            return self.put(array)
        return self.put(array, *[None] * dimension, "tp")

    def zeros(self, shape: tuple[int, ...], dtype: object, *spec: str | None) -> jax.Array:
        """Allocate zeros on the devices, without a host copy."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.jit(jax.numpy.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)
