"""The argument `mesh=`: which mesh axes split what, said by the user."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jax_mla._sharding import PAGES, ROWS, Axes, Spec, axes_of, divides, entry_of, refuse_symbolic

ROLES = ("batch", "heads", PAGES)


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Says which mesh axes split what, where the types do not: the argument `mesh=`.

    Under `jit` this decides what is on Auto axes: JAX gathers a cache there that is sharded
    otherwise, and nothing here can see it. Where it can be seen, in the types or because the call
    is outside `jit`, such a cache is an error. No role: that dimension is on every device.

    Attributes:
      mesh: the mesh, or None for the current one (`jax.set_mesh`, or the manual region around).
      batch: axis or axes over which the sequences are split.
      heads: axis or axes over which the query heads are split.
      pages: axis or axes over which the pages of the cache are split (context parallelism).
    """

    mesh: Mesh | AbstractMesh | None = None
    batch: str | Axes | None = None
    heads: str | Axes | None = None
    pages: str | Axes | None = None

    def __post_init__(self) -> None:
        """Refuse what is no mesh and what are no names of axes."""
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise TypeError(
                f"jax_mla.MeshAxes: mesh: expected a mesh or None, got {type(self.mesh).__name__}"
            )
        for role in ROLES:
            given = getattr(self, role)
            axes = axes_of(given)
            are_names = all(isinstance(axis, str) for axis in axes) and not isinstance(given, list)
            if not are_names or len(set(axes)) < len(axes):  # a list would have no hash
                raise ValueError(
                    f"jax_mla.MeshAxes: {role}: expected None, the name of an axis or a tuple of "
                    f"different ones, got {given!r}"
                )

    @classmethod
    def of(cls, op: str, mesh: Mesh | AbstractMesh | MeshAxes) -> MeshAxes:
        """Read a plain mesh by the usual names: batch over dp, heads over tp, pages over cp."""
        if isinstance(mesh, MeshAxes):
            return mesh
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(f"{op}: mesh: expected a mesh or a MeshAxes, got {type(mesh).__name__}")
        has = dict(mesh.shape)
        usual = {"batch": "dp", "heads": "tp", "pages": "cp"}
        roles = {role: axis for role, axis in usual.items() if axis in has}
        if has and not roles:
            raise ValueError(
                f"{op}: mesh: expected an axis named dp, tp or cp, or a jax_mla.MeshAxes that says "
                f"which axes split what, got a mesh of {has}"
            )
        return cls(mesh, **roles)


def specs_from_roles(
    name: str,
    roles: MeshAxes,
    mesh: Mesh | AbstractMesh,
    manual: set[str],
    operand_factors: Sequence[Sequence[str]],
    shapes: Sequence[Sequence[Any]],
) -> list[Spec]:
    """Turn `mesh=` into a spec for each operand.

    Args:
      name: the op, for messages.
      roles: which axes split what.
      mesh: the mesh they belong to.
      manual: its axes that are manual already.
      operand_factors: factor of each dimension of each operand.
      shapes: shapes of the operands.

    Returns:
      One spec an operand.

    Raises:
      ValueError: an axis that the mesh does not have or that is manual, or a dimension that its
        axes do not divide.
    """
    sizes = dict(mesh.shape)
    by_prefix = {r: axes_of(getattr(roles, r)) for r in ROLES}
    for role, role_axes in by_prefix.items():
        for axis in role_axes:
            if axis not in sizes:
                raise ValueError(
                    f"{name}: mesh: expected {role} over axes of the mesh, {sorted(sizes)}, "
                    f"got {axis!r}"
                )
            if axis in manual:
                raise ValueError(
                    f"{name}: mesh: expected {role} over axes that are not manual, "
                    f"{sorted(set(sizes) - manual)}, got {axis!r}: a shard_map has split the "
                    "operands over it already; if all axes are manual, leave out mesh="
                )

    by_prefix[ROWS] = by_prefix["batch"]

    def entry(factor: str, size: Any) -> Any:
        role = factor.rstrip("0123456789")
        axes = by_prefix.get(role, ())
        refuse_symbolic(f"{name}: mesh", role, size, axes)
        if not divides(size, axes, sizes):
            raise ValueError(
                f"{name}: mesh: expected {role} to be a multiple of "
                f"{math.prod(sizes[a] for a in axes)}, the devices of {list(axes)}, got {size}; "
                "pass MeshAxes without it to replicate"
            )
        return entry_of(axes)

    return [
        tuple(entry(f, n) for f, n in zip(dims, shape, strict=True))
        for dims, shape in zip(operand_factors, shapes, strict=True)
    ]
