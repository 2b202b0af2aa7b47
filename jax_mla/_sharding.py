"""Which dimension of an op is split over which mesh axes, and what that costs.

The policy, the same for every kind of mesh (see `docs/sharding.md`):

* The cache is stationary: its pages stay where they are, split over any axes. What wants an axis
  that the pages have is gathered instead; that is at most the query, a few kilobytes.
* Page ids are global. A device owns the pages [rank * num_local_pages, ...) and attends to those;
  the partial results are merged with one max and one sum over the axes that split the pages.
* Everything else that is split is independent work and costs nothing.

An op describes its dimensions by *factors*: dimensions with the same factor are split alike.
`pages` is the pool's page dimension; `rows` may be split but every device needs all of it, so the
op exchanges it itself; a factor that starts with `whole_` cannot be split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

Spec = tuple[Any, ...]
Axes = tuple[str, ...]

PAGES = "pages"
ROWS = "rows"
WHOLE = "whole_"


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Says which mesh axes split what, where the types do not: the argument `mesh=`.

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

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | MeshAxes) -> MeshAxes:
        """Read a plain mesh by the usual names: batch over dp, heads over tp, pages over cp."""
        if isinstance(mesh, MeshAxes):
            return mesh
        has = dict(mesh.shape)
        return cls(
            mesh,
            batch="dp" if "dp" in has else None,
            heads="tp" if "tp" in has else None,
            pages="cp" if "cp" in has else None,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is split.

    Attributes:
      operands: spec of each operand as the local call wants it.
      results: spec of each result.
      pages: axes that split the pages, major to minor.
      rows: axes over which the op has to exchange its rows first.
      merge: whether the results are partial over `pages`.
      restore: (dimension, axes) pairs: axes that the query gave up to the pages and that split
        the results again, along that dimension.
      typed: whether the types of the local results say over which axes they are the same. They do
        not after an all-gather, nor if pages are split over an axis of size 1 (no merge).
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    pages: Axes
    rows: Axes
    merge: bool
    restore: tuple[tuple[int, Axes], ...]
    typed: bool


def axes_of(entry: Any) -> Axes:
    """Return a PartitionSpec entry as a tuple of axis names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def entry_of(axes: Axes) -> Any:
    """Return a tuple of axis names as a PartitionSpec entry."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def make_plan(
    name: str,
    operand_names: Sequence[str],
    operand_factors: Sequence[Sequence[str]],
    result_factors: Sequence[Sequence[str]],
    shapes: Sequence[Sequence[int]],
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    *,
    first_pool: int,
    strict: bool,
    exchange: bool,
) -> Plan:
    """Choose the axes of every factor from the operands' shardings.

    Args:
      name: the op, for messages.
      operand_names: names of the operands, for messages.
      operand_factors: factor of each dimension of each operand.
      result_factors: factor of each dimension of each result.
      shapes: global shapes of the operands.
      specs: how the operands are sharded now, one entry a dimension.
      sizes: size of each mesh axis.
      first_pool: index of the first operand that is a pool; the rest are pools too.
      strict: refuse operands that ask for different axes for one factor, instead of resharding the
        later one.
      exchange: leave `rows` split, for the op to exchange; otherwise they are gathered first.

    Returns:
      The plan.

    Raises:
      ValueError: the cache is sharded on a dimension that cannot be served, or (`strict`) operands
        disagree.
    """
    axes: dict[str, Axes] = {}
    wanted: dict[str, tuple[str, Axes]] = {}
    taken: set[str] = set()
    order = [*range(first_pool, len(specs)), *range(first_pool)]
    for i in order:
        is_pool = i >= first_pool
        for dim, (factor, entry) in enumerate(zip(operand_factors[i], specs[i], strict=True)):
            asked = axes_of(entry)
            split = any(sizes[a] > 1 for a in asked)
            if factor.startswith(WHOLE) or (factor == ROWS and not exchange):
                if split and is_pool:
                    _refuse_pool(name, operand_names[i], factor, asked)
                continue
            if is_pool and i > first_pool and axes.get(factor, ()) != asked:
                raise ValueError(
                    f"{name}: {operand_names[i]}: expected its {factor} dimension sharded over "
                    f"{list(axes.get(factor, ()))} as in {operand_names[first_pool]}, got "
                    f"{list(asked)}"
                )
            if is_pool:
                axes[factor] = asked
                wanted[factor] = (operand_names[i], asked)
                _check_divisible(name, operand_names[i], factor, shapes[i][dim], asked, sizes)
                taken.update(a for a in asked if sizes[a] > 1 or factor != PAGES)
            elif asked and factor not in wanted:
                wanted[factor] = (operand_names[i], asked)
                kept = asked if factor == ROWS else tuple(a for a in asked if a not in taken)
                if _divides(shapes[i][dim], kept, sizes):
                    axes[factor] = kept
                    taken.update(kept if factor != ROWS else ())
            elif split and strict and wanted[factor][1] != asked and wanted[factor][1]:
                raise ValueError(
                    f"{name}: {operand_names[i]}: expected dimension {dim} sharded over "
                    f"{list(wanted[factor][1])} as in {wanted[factor][0]}, got {list(asked)}"
                )
    rows = axes.get(ROWS, ())
    pages = tuple(a for a in axes.get(PAGES, ()) if sizes[a] > 1)
    merge = bool(pages) and not any(PAGES in dims for dims in result_factors)
    restore = _restorable(axes, wanted) if merge else {}
    final = {f: axes.get(f, ()) + restore.get(f, ()) for f in {*axes, *restore}}

    def spec(dims: Sequence[str], table: Mapping[str, Axes]) -> Spec:
        return tuple(entry_of(table.get(f, ())) for f in dims)

    return Plan(
        operands=tuple(spec(dims, axes) for dims in operand_factors),
        results=tuple(spec(dims, final) for dims in result_factors),
        pages=pages,
        rows=rows,
        merge=merge,
        restore=tuple((result_factors[0].index(f), a) for f, a in sorted(restore.items())),
        typed=not rows and pages == axes.get(PAGES, ()),
    )


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
    by_prefix = {r: axes_of(getattr(roles, r)) for r in ("batch", "heads", PAGES)}
    for role, role_axes in by_prefix.items():
        for axis in role_axes:
            if axis not in sizes or axis in manual:
                have = sorted(set(sizes) - manual)
                raise ValueError(
                    f"{name}: mesh: expected {role} over axes of the mesh that are not manual, "
                    f"{have}, got {axis!r}"
                )

    by_prefix[ROWS] = by_prefix["batch"]

    def entry(factor: str, size: Any) -> Any:
        axes = by_prefix.get(factor.rstrip("0123456789"), ())
        if not _divides(size, axes, sizes):
            raise ValueError(
                f"{name}: mesh: expected {factor.rstrip('0123456789')} to be a multiple of "
                f"{math.prod(sizes[a] for a in axes)}, the devices of {list(axes)}, got {size}; "
                "pass MeshAxes without it to replicate"
            )
        return entry_of(axes)

    return [
        tuple(entry(f, n) for f, n in zip(dims, shape, strict=True))
        for dims, shape in zip(operand_factors, shapes, strict=True)
    ]


def _refuse_pool(name: str, pool: str, factor: str, axes: Axes) -> None:
    dimension = factor.removeprefix(WHOLE).rstrip("0123456789")
    raise ValueError(
        f"{name}: {pool}: expected only its num_pages dimension sharded, got its {dimension} "
        f"dimension sharded over {list(axes)}; shard the cache over pages instead: "
        "PartitionSpec(axis) for a pool, PartitionSpec(None, axis) for a stacked one"
    )


def _divides(size: Any, axes: Axes, sizes: Mapping[str, int]) -> bool:
    return not axes or isinstance(size, int) and size % math.prod(sizes[a] for a in axes) == 0


def _check_divisible(
    name: str, operand: str, factor: str, size: Any, axes: Axes, sizes: Mapping[str, int]
) -> None:
    if axes and not _divides(size, axes, sizes):
        raise ValueError(
            f"{name}: {operand}: expected its {factor} dimension to be a multiple of "
            f"{math.prod(sizes[a] for a in axes)}, the devices of {list(axes)}, got {size}"
        )


def _restorable(
    axes: Mapping[str, Axes], wanted: Mapping[str, tuple[str, Axes]]
) -> dict[str, Axes]:
    """Axes that a query dimension lost to the pages and that can split the merged result again.

    After the merge every device has the whole of that dimension, so taking its own part is free,
    but only the minor axes of a dimension can be split off the parts that are left.
    """
    restore: dict[str, Axes] = {}
    pages = axes[PAGES]
    for factor, (_, asked) in wanted.items():
        kept = axes.get(factor, ())
        lost = asked[len(kept) :]
        if factor != PAGES and lost and asked[: len(kept)] == kept and set(lost) <= set(pages):
            restore[factor] = lost
    return restore
