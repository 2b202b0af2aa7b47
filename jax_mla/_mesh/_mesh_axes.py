"""The argument `mesh=`: the caller says which mesh axes split what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jax_mla._mesh._sharding import (
    PAGES,
    ROWS,
    Axes,
    Layout,
    Spec,
    axes_of,
    divides,
    entry_of,
    refuse_symbolic,
)

ROLES = ("batch", "heads", PAGES, "local_pages")
FIELDS = (*ROLES, "replicated")
USUAL_NAMES = {"batch": "dp", "heads": "tp", PAGES: "cp"}


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Says which mesh axes split what, if the types do not say: the argument `mesh=`.

    Every axis of the mesh that has more than one device must be named: in a role, or in
    `replicated`. An axis that is manual already (inside a `shard_map` over some axes) is not named.
    A dimension whose role is None is not split.

    JAX moves arrays on Auto axes to the shardings named here. Under `jit` this includes the cache,
    because its sharding is not known while tracing. If it is known, from the types or outside
    `jit`, a cache that is sharded differently is an error.

    Attributes:
      mesh: the mesh, or None for the current one (`jax.set_mesh`, or the manual region around).
      batch: axis or axes that split the sequences.
      heads: axis or axes that split the query heads.
      pages: axis or axes that split the pages of the cache (context parallelism). Page ids are
        global.
      local_pages: the axis or axes of `batch`, if every group of sequences has its own part of the
        pool, in which page ids start at 0. A group then never reads or writes another's part, and
        nothing is communicated. None if page ids are global.
      replicated: axis or axes that split nothing in this call: every operand is the same along
        them. Under `jax.vmap` also the axis that splits the mapped dimension (`spmd_axis_name`),
        because a mapped call does not see that dimension.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch: str | Axes | None = None
    heads: str | Axes | None = None
    pages: str | Axes | None = None
    local_pages: str | Axes | None = None
    replicated: str | Axes | None = None

    def __post_init__(self) -> None:
        """Check the types of the fields, and that they do not contradict each other.

        Raises:
          TypeError: `mesh` is neither a mesh nor None.
          ValueError: a field is neither None nor axis names, an axis is replicated and split, or
            local pages are not split as the sequences are, and by nothing else.
        """
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise TypeError(
                f"jax_mla.MeshAxes: mesh: expected a mesh or None, got {type(self.mesh).__name__}"
            )
        for field in FIELDS:
            given = getattr(self, field)
            axes = axes_of(given)
            are_names = all(isinstance(axis, str) for axis in axes) and not isinstance(given, list)
            if not are_names or len(set(axes)) < len(axes):  # a list cannot be hashed
                raise ValueError(
                    f"jax_mla.MeshAxes: {field}: expected None, the name of an axis or a tuple of "
                    f"different ones, got {given!r}"
                )
        for role in ROLES:
            common = set(axes_of(getattr(self, role))).intersection(axes_of(self.replicated))
            if common:
                raise ValueError(
                    f"jax_mla.MeshAxes: replicated: expected axes that split nothing, got "
                    f"{sorted(common)}, which {role} names too"
                )
        if local := axes_of(self.local_pages):
            self._check_local_pages(local)

    def _check_local_pages(self, local: Axes) -> None:
        if local != axes_of(self.batch):
            raise ValueError(
                "jax_mla.MeshAxes: local_pages: expected the axes of batch in the same order, "
                f"{list(axes_of(self.batch))}, because a group owns its sequences and its pages, "
                f"got {list(local)}"
            )
        if axes_of(self.pages):
            raise ValueError(
                "jax_mla.MeshAxes: pages: expected None, because the pages are split over "
                f"local_pages, {list(local)}, got {self.pages!r}"
            )
        if common := set(axes_of(self.heads)).intersection(local):
            raise ValueError(
                "jax_mla.MeshAxes: heads: expected axes that local_pages does not name, got "
                f"{sorted(common)}"
            )

    @classmethod
    def of(cls, op: str, mesh: Mesh | AbstractMesh | MeshAxes) -> MeshAxes:
        """Return `mesh=` as MeshAxes: in a plain mesh dp is batch, tp is heads and cp is pages.

        Args:
          op: name of the op, for messages.
          mesh: the argument `mesh=`.

        Raises:
          TypeError: it is neither a mesh nor MeshAxes.
          ValueError: a plain mesh without any of these axes.
        """
        if isinstance(mesh, MeshAxes):
            return mesh
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(f"{op}: mesh: expected a mesh or a MeshAxes, got {type(mesh).__name__}")
        has = dict(mesh.shape)
        roles = {role: axis for role, axis in USUAL_NAMES.items() if axis in has}
        if has and not roles:
            raise ValueError(
                f"{op}: mesh: expected an axis named dp, tp or cp, or a jax_mla.MeshAxes that says "
                f"which axes split what, got a mesh of {has}"
            )
        return cls(mesh, **roles)

    def check(self, op: str, mesh: Mesh | AbstractMesh, manual: Collection[str]) -> None:
        """Check the named axes against the mesh.

        Args:
          op: name of the op, for messages.
          mesh: the mesh they belong to.
          manual: its axes that are manual already.

        Raises:
          ValueError: the mesh does not have a named axis, a named axis is manual, or an axis with
            more than one device is not named.
        """
        sizes = dict(mesh.shape)
        named = {field: axes_of(getattr(self, field)) for field in FIELDS}
        for field, axes in named.items():
            for axis in axes:
                if axis not in sizes:
                    raise ValueError(
                        f"{op}: mesh: expected {field} over axes of the mesh, {sorted(sizes)}, "
                        f"got {axis!r}"
                    )
                if axis in manual:
                    raise ValueError(
                        f"{op}: mesh: expected {field} over axes that are not manual, "
                        f"{sorted(set(sizes).difference(manual))}, got {axis!r}: a shard_map has "
                        "split the operands over it already; if all axes are manual, leave out "
                        "mesh="
                    )
        unnamed = {
            axis: size
            for axis, size in sizes.items()
            if size > 1 and axis not in manual and not any(axis in axes for axes in named.values())
        }
        if unnamed:
            raise ValueError(
                f"{op}: mesh: expected every axis of the mesh named, or the cache could be "
                f"gathered over it, got {unnamed} unnamed; say jax_mla.MeshAxes(batch=..., "
                "heads=..., pages=..., replicated=...), where replicated names the axes that "
                "split nothing"
            )

    def specs(self, layout: Layout, mesh: Mesh | AbstractMesh) -> list[Spec]:
        """Return the spec that this gives to each operand.

        Args:
          layout: the op's dimensions.
          mesh: the mesh that the axes belong to.

        Raises:
          ValueError: a dimension is symbolic, or the devices along its axes do not divide it.
        """
        sizes = dict(mesh.shape)
        by_factor = {role: axes_of(getattr(self, role)) for role in ROLES}
        local = axes_of(self.local_pages)
        by_factor[ROWS] = by_factor["batch"]
        by_factor[PAGES] = by_factor[PAGES] or local

        def entry(factor: str, size: Any) -> Any:
            role = factor.rstrip("0123456789")
            axes = by_factor.get(role, ())
            refuse_symbolic(f"{layout.op}: mesh", role, size, axes)
            if not divides(size, axes, sizes):
                advice = (
                    "local_pages gives every group as many"
                    if axes == local
                    else "to replicate it, pass a MeshAxes that names them in replicated="
                )
                raise ValueError(
                    f"{layout.op}: mesh: expected {role} to be a multiple of "
                    f"{math.prod(sizes[a] for a in axes)}, the number of devices along "
                    f"{list(axes)}, got {size}; {advice}"
                )
            return entry_of(axes)

        return [
            tuple(entry(f, n) for f, n in zip(operand.factors, operand.shape, strict=True))
            for operand in layout.operands
        ]
