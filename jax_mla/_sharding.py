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

Spec = tuple[Any, ...]
Axes = tuple[str, ...]

PAGES = "pages"
ROWS = "rows"
WHOLE = "whole_"


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


def pool_factors(groups: Sequence[str], shapes: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Factors of the pools [*groups, (num_layers,) num_pages, page_size, d] of an op."""
    return [
        [
            *groups,
            *[f"{WHOLE}layers"] * (len(shape) - len(groups) - 3),
            PAGES,
            f"{WHOLE}page_size",
            f"{WHOLE}last{i}",
        ]
        for i, shape in enumerate(shapes)
    ]


def scalar_factors(dims: Sequence[str], shape: Sequence[Any], name: str) -> list[str]:
    """Factors of an operand that has one value for all of `dims`, or one for each along some."""
    return [
        factor if size != 1 else f"{WHOLE}{name}{i}"
        for i, (factor, size) in enumerate(zip(dims, shape, strict=True))
    ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of an op's operands and results.

    Attributes:
      op: name of the op, for messages.
      operand_names: names of the operands, for messages.
      operand_factors: factor of each dimension of each operand.
      result_factors: factor of each dimension of each result.
      first_pool: index of the first operand that is a pool; the rest are pools too.
    """

    op: str
    operand_names: Sequence[str]
    operand_factors: Sequence[Sequence[str]]
    result_factors: Sequence[Sequence[str]]
    first_pool: int


def make_plan(
    layout: Layout,
    shapes: Sequence[Sequence[Any]],
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    *,
    strict: bool,
    exchange: bool,
) -> Plan:
    """Choose the axes of every factor from the operands' shardings.

    Args:
      layout: the op's dimensions.
      shapes: global shapes of the operands.
      specs: how the operands are sharded now, one entry a dimension.
      sizes: size of each mesh axis.
      strict: refuse operands that ask for different axes for one factor, instead of resharding the
        later one.
      exchange: leave `rows` split, for the op to exchange; otherwise they are gathered first.

    Returns:
      The plan.

    Raises:
      ValueError: the cache is sharded on a dimension that cannot be served, or (`strict`) operands
        disagree or are sharded on a symbolic dimension.
    """
    axes = _axes_of_pools(layout, shapes, specs, sizes)
    wanted = _axes_wanted(layout, specs, sizes, axes, strict=strict, exchange=exchange)
    # An axis of size 1 that splits the pages may split something else as well.
    taken = {a for f, own in axes.items() for a in own if sizes[a] > 1 or f != PAGES}
    sized = _sized(layout, shapes, wanted)
    for factor, (size, asked) in sized.items():
        if strict:
            refuse_symbolic(layout.op, factor, size, tuple(a for a in asked if sizes[a] > 1))
        kept = asked if factor == ROWS else tuple(a for a in asked if a not in taken)
        if divides(size, kept, sizes):
            axes[factor] = kept
            taken.update(kept if factor != ROWS else ())

    rows = axes.get(ROWS, ())
    pages = tuple(a for a in axes[PAGES] if sizes[a] > 1)
    merge = bool(pages) and not any(PAGES in dims for dims in layout.result_factors)
    restore = _restorable(axes, sized, sizes) if merge else {}
    final = {f: axes.get(f, ()) + restore.get(f, ()) for f in {*axes, *restore}}

    def spec(dims: Sequence[str], table: Mapping[str, Axes]) -> Spec:
        return tuple(entry_of(table.get(f, ())) for f in dims)

    return Plan(
        operands=tuple(spec(dims, axes) for dims in layout.operand_factors),
        results=tuple(spec(dims, final) for dims in layout.result_factors),
        pages=pages,
        rows=rows,
        merge=merge,
        restore=tuple((layout.result_factors[0].index(f), a) for f, a in sorted(restore.items())),
        typed=not rows and pages == axes[PAGES],
    )


def _axes_of_pools(
    layout: Layout,
    shapes: Sequence[Sequence[Any]],
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
) -> dict[str, Axes]:
    """Axes of the cache's dimensions: as they are, or an error."""
    axes: dict[str, Axes] = {}
    first = layout.first_pool
    for i in range(first, len(specs)):
        what = f"{layout.op}: {layout.operand_names[i]}"
        dims = zip(layout.operand_factors[i], shapes[i], specs[i], strict=True)
        for factor, size, entry in dims:
            asked = axes_of(entry)
            if factor.startswith(WHOLE):
                if any(sizes[a] > 1 for a in asked):
                    _refuse_pool(what, factor, asked)
            elif axes.setdefault(factor, asked) != asked:
                raise ValueError(
                    f"{what}: expected its {factor} dimension sharded over {list(axes[factor])} "
                    f"as in {layout.operand_names[first]}, got {list(asked)}"
                )
            elif not divides(size, asked, sizes):
                refuse_symbolic(what, factor, size, asked)
                count = math.prod(sizes[a] for a in asked)
                raise ValueError(
                    f"{what}: expected its {factor} dimension to be a multiple of {count}, the "
                    f"devices of {list(asked)}, got {size}"
                )
    return axes


def _axes_wanted(
    layout: Layout,
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    pools: Mapping[str, Axes],
    *,
    strict: bool,
    exchange: bool,
) -> dict[str, Axes]:
    """Axes that the other operands ask for; of two that disagree the first is heard."""
    wanted: dict[str, Axes] = {}
    asked_by: dict[str, str] = {}
    for i in range(layout.first_pool):
        for dim, (factor, entry) in enumerate(
            zip(layout.operand_factors[i], specs[i], strict=True)
        ):
            asked = axes_of(entry)
            whole = factor.startswith(WHOLE) or (factor == ROWS and not exchange)
            if not asked or whole or factor in pools:
                continue
            first = wanted.setdefault(factor, asked)
            asked_by.setdefault(factor, layout.operand_names[i])
            if strict and first != asked and any(sizes[a] > 1 for a in asked):
                raise ValueError(
                    f"{layout.op}: {layout.operand_names[i]}: expected dimension {dim} sharded "
                    f"over {list(first)} as in {asked_by[factor]}, got {list(asked)}"
                )
    return wanted


def _sized(
    layout: Layout, shapes: Sequence[Sequence[Any]], wanted: Mapping[str, Axes]
) -> dict[str, tuple[Any, Axes]]:
    """Add the size of its dimension to each factor of `wanted`."""
    size_of = {
        factor: size
        for dims, shape in zip(layout.operand_factors, shapes, strict=True)
        for factor, size in zip(dims, shape, strict=True)
    }
    return {factor: (size_of[factor], asked) for factor, asked in wanted.items()}


def _refuse_pool(what: str, factor: str, axes: Axes) -> None:
    dimension = factor.removeprefix(WHOLE).rstrip("0123456789")
    raise ValueError(
        f"{what}: expected only its num_pages dimension sharded, got its {dimension} "
        f"dimension sharded over {list(axes)}; shard the cache over pages instead: "
        "PartitionSpec(axis) for a pool, PartitionSpec(None, axis) for a stacked one"
    )


def divides(size: Any, axes: Axes, sizes: Mapping[str, int]) -> bool:
    """Whether a dimension of this size can be split over these axes; never if it is symbolic."""
    return not axes or (isinstance(size, int) and size % math.prod(sizes[a] for a in axes) == 0)


def refuse_symbolic(what: str, factor: str, size: Any, axes: Axes) -> None:
    """Refuse to split a dimension whose size is not known: no device knows its part."""
    if axes and not isinstance(size, int):
        dimension = factor.rstrip("0123456789")
        raise ValueError(
            f"{what}: a symbolic dimension cannot be sharded: expected a known size for "
            f"{dimension} over {list(axes)}, got {size}"
        )


def _restorable(
    axes: Mapping[str, Axes], wanted: Mapping[str, tuple[Any, Axes]], sizes: Mapping[str, int]
) -> dict[str, Axes]:
    """Axes that a query dimension lost to the pages and that can split the merged result again.

    After the merge every device has the whole of that dimension, so taking its own part is free,
    but only the minor axes of a dimension can be split off the parts that are left. Of two
    dimensions that lost the same axis the first gets it back.
    """
    free = set(axes[PAGES]).difference(*(own for f, own in axes.items() if f != PAGES))
    restore: dict[str, Axes] = {}
    for factor, (size, asked) in wanted.items():
        kept = axes.get(factor, ())
        lost = asked[len(kept) :]
        whole = asked[: len(kept)] == kept and divides(size, asked, sizes)
        if lost and whole and free.issuperset(lost):
            restore[factor] = lost
            free.difference_update(lost)
    return restore
