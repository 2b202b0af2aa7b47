"""Place arrays on a mesh.

| axis | splits |
|---|---|
| dp | the sequences; each group of devices has its own part of the cache |
| tp | heads, the widths of dense and shared feed-forward networks, the vocabulary |
| cp | the pages of the cache |

All devices share out the experts, whatever the axes are: by number, or by width.

The model code does not mention the mesh, except for the experts (moe.py). Parameters and cache are
placed with `NamedSharding`, `jax.jit` follows, and jax_mla's operations bring their own
partitioning.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jax_mla

from .config import Config
from .weights import Parameter

AXES: tuple[str, ...] = ("dp", "tp", "cp")
AUTO = (AxisType.Auto,) * len(AXES)
EXPERT_SPLITS = ("number", "width")


def parse_mesh(text: str) -> dict[str, Any]:
    """Read `dp=2,tp=2,cp=2,experts=width`. Parts may be left out and may be in any order.

    Args:
      text: from the command line. Empty for one device.

    Returns:
      The size of each axis, 1 if it is left out, and "experts": "number" or "width".

    Raises:
      ValueError: `text` has another form.
    """
    sizes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name in sizes:
            raise ValueError(f"--mesh: expected each name once, got {text!r}")
        if name == "experts" and size in EXPERT_SPLITS:
            sizes[name] = size
        elif name in AXES and size.isdecimal() and int(size) > 0:
            sizes[name] = int(size)
        else:
            raise ValueError(
                f"--mesh: expected AXIS=SIZE with AXIS one of {AXES}, or experts=number or "
                f"experts=width, got {part!r}"
            )
    return {axis: 1 for axis in AXES} | {"experts": EXPERT_SPLITS[0]} | sizes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Puts arrays on a mesh.

    Attributes:
      mesh: has the axes dp, tp and cp.
      experts: what the devices share out of the experts, "number" or "width".
    """

    mesh: Mesh | AbstractMesh
    experts: str = EXPERT_SPLITS[0]

    @classmethod
    def over(cls, sizes: dict[str, Any], devices: Sequence[Any] | None = None) -> "Placement":
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
        num_devices, devices = math.prod(shape), devices or jax.devices()
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
        mesh = Mesh(np.asarray(devices[:num_devices]).reshape(shape), AXES, axis_types=AUTO)
        return cls(mesh, sizes["experts"])

    @classmethod
    def planned(cls, sizes: dict[str, Any]) -> "Placement":
        """Make a placement without devices: its shardings give shapes, but hold no array.

        Args:
          sizes: from `parse_mesh`.
        """
        shape = tuple(sizes[axis] for axis in AXES)
        return cls(AbstractMesh(shape, AXES, axis_types=AUTO), sizes["experts"])

    @property
    def device(self) -> Any:
        """One of the devices; they are all of a kind."""
        assert isinstance(self.mesh, Mesh)
        return self.mesh.devices.flat[0]

    @property
    def num_groups(self) -> int:
        """Groups of devices that have a part of the cache of their own."""
        return self.mesh.shape["dp"] if self.has_local_pages else 1

    @property
    def has_local_pages(self) -> bool:
        """Whether the cache is split over dp. If its pages are split over cp, dp replicates it."""
        return self.mesh.shape["cp"] == 1

    @property
    def pages_axis(self) -> str:
        """The axis that splits the pages of the cache."""
        return "dp" if self.has_local_pages else "cp"

    @property
    def splits_heads_only(self) -> bool:
        """Whether every device has all sequences and the whole cache."""
        return self.mesh.shape["dp"] == self.mesh.shape["cp"] == 1

    @property
    def mesh_axes(self) -> jax_mla.MeshAxes | None:
        """What jax_mla has to be told: local page ids. It sees everything else by itself."""
        if self.num_groups == 1:
            return None
        return jax_mla.MeshAxes(self.mesh, batch="dp", heads="tp", local_pages="dp")

    def check(self, config: Config) -> None:
        """Check that the mesh can split a model.

        Args:
          config: sizes.

        Raises:
          ValueError: tp does not divide the heads, the devices do not divide the experts, or a
            model with an indexer has both dp and cp.
        """
        tp = self.mesh.shape["tp"]
        dp, cp = self.mesh.shape["dp"], self.mesh.shape["cp"]
        if config.index is not None and dp > 1 and cp > 1:
            raise ValueError(
                f"--mesh: expected dp or cp, but not both, for {config.model_type}, which was not "
                f"tried with both, got dp={dp} and cp={cp}"
            )
        if config.num_heads % tp:
            raise ValueError(f"--mesh: expected tp to divide {config.num_heads} heads, got {tp}")
        if config.moe is None:
            return
        total, what = config.moe.num_experts, "experts; try experts=width"
        if self.experts == "width":
            block = config.fp8_block[0] if config.fp8_block else 1
            total = -(-config.moe.intermediate_size // block)
            what = f"blocks of {block}, the width of an expert in FP8"
            if block == 1:
                what = "values, the width of an expert"
        if total % self.mesh.size:
            raise ValueError(
                f"--mesh: expected a number of devices that divides {total} {what}, got "
                f"{self.mesh.size}"
            )

    def axes_of(self, role: str) -> str | tuple[str, ...] | None:
        """Return the mesh axes that split a dimension of a parameter."""
        if role in ("experts", "expert_width"):
            is_split = (role == "experts") == (self.experts == "number")
            return self.mesh.axis_names if is_split else None
        return "tp"  # heads, width, vocab

    def sharding(self, parameter: Parameter) -> NamedSharding:
        """Return where a parameter is. A dimension that tp does not divide is whole everywhere."""
        spec: list[Any] = [None] * len(parameter.shape)
        for dimension, role in parameter.split:
            axes = self.axes_of(role)
            size = self.mesh.size if isinstance(axes, tuple) else self.mesh.shape["tp"]
            if axes is not None and parameter.shape[dimension] % size == 0:
                spec[dimension] = axes
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def put(self, array: np.ndarray, *spec: str | None) -> jax.Array:
        """Place a host array. `spec` names the mesh axis of each leading dimension."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def build(
        self, parameter: Parameter, read: Callable[[tuple[slice, ...]], np.ndarray]
    ) -> jax.Array:
        """Place a parameter. `read` is asked only for the parts that this process needs."""
        sharding: Any = self.sharding(parameter)
        return jax.make_array_from_callback(parameter.shape, sharding, read)  # type: ignore[arg-type]

    def zeros(self, shape: tuple[int, ...], dtype: object, *spec: str | None) -> jax.Array:
        """Allocate zeros on the devices, without a copy on the host."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.jit(jax.numpy.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)
