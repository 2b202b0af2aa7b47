"""Place arrays on a mesh: the batch over dp, heads and hidden widths over tp, pages over cp.

The model code does not mention the mesh. Parameters and cache are placed with `NamedSharding`,
`jax.jit` follows, and jax_mla's operations bring their own partitioning.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES: tuple[str, ...] = ("dp", "tp", "cp")

# The dimension of each stacked parameter that tp splits: heads, or a feed-forward width. XLA sums
# the outputs of a split `o` or `down`. Parameters that are not listed are replicated.
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
    """Read `dp=2,tp=2,cp=2`. Axes may be left out and may be in any order.

    Args:
      text: from the command line. Empty for one device.

    Returns:
      The size of each axis. An axis that is left out has size 1.

    Raises:
      ValueError: `text` has another form.
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
    """Puts host arrays on a mesh.

    Every process passes the whole host array, and its devices take their part.

    Attributes:
      mesh: has the axes dp, tp and cp.
    """

    mesh: Mesh

    @classmethod
    def over(cls, sizes: dict[str, int], devices: Sequence[Any] | None = None) -> "Placement":
        """Make a mesh of the first devices, or of all devices if there are several processes.

        Args:
          sizes: from `parse_mesh`.
          devices: the devices to use. None means all of JAX's default platform.

        Returns:
          The placement.

        Raises:
          ValueError: the number of devices does not fit.
        """
        shape = tuple(sizes[axis] for axis in AXES)
        num_devices, devices = int(np.prod(shape)), devices or jax.devices()
        needs_all = jax.process_count() > 1
        if needs_all and num_devices != len(devices):
            raise ValueError(
                f"--mesh: expected exactly {len(devices)} devices in all, those of all processes, "
                f"got {num_devices}"
            )
        if num_devices > len(devices):
            raise ValueError(
                f"--mesh: expected at most {len(devices)} devices in all, got {num_devices}; to "
                "try the mesh on virtual CPU devices, set JAX_PLATFORMS=cpu "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}"
            )
        return cls(Mesh(np.asarray(devices[:num_devices]).reshape(shape), AXES))

    def put(self, array: np.ndarray, *spec: str | None) -> jax.Array:
        """Place a host array. `spec` names the mesh axis of each leading dimension."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def put_parameter(self, name: str, array: np.ndarray) -> jax.Array:
        """Place a parameter. It is replicated if tp does not divide its width."""
        dimension = TP_DIMENSION.get(name)
        if dimension is None or array.shape[dimension] % self.mesh.shape["tp"]:
            return self.put(array)
        return self.put(array, *[None] * dimension, "tp")

    def zeros(self, shape: tuple[int, ...], dtype: object, *spec: str | None) -> jax.Array:
        """Allocate zeros on the devices, without a copy on the host."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.jit(jax.numpy.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)
