"""Decides which dimension of an op is split over which mesh axes, and what has to be communicated.

The policy is the same for every kind of mesh (see `docs/sharding.md`):

* The cache stays where it is. Its pages may be split over any axes. A dimension of the query that
  is split over the same axes is gathered: that is a few kilobytes.
* Page ids are global. A device owns `num_local_pages` pages from `rank * num_local_pages` on and
  attends to those. One max and one sum over the axes that split the pages merge the partial
  results.
* Local pages are the exception, which the caller has to request: every group of sequences has its
  own part of the pool, in which page ids start at 0. Nothing is exchanged or merged.
* Every other split is independent work and needs no communication.

An op names each dimension of its operands and results by a *factor*. Dimensions with the same
factor are split alike. Four kinds of factors are special:

* `pages` is the page dimension of a pool. An operand that has it is a pool.
* `rows` may be split, but every device needs all of it, so the op exchanges it itself.
* `batch` splits work that is independent but for one thing, which the op sees to itself. Either new
  rows lie along it, which every device needs, or a sequence's tokens may lie on several devices.
* A factor that starts with `whole_` cannot be split.
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
BATCH = "batch"
WHOLE = "whole_"


@dataclasses.dataclass(frozen=True)
class Operand:
    """The dimensions of one operand.

    Attributes:
      name: what messages call it.
      factors: factor of each dimension.
      shape: size of each dimension over all devices; a size may be symbolic.
    """

    name: str
    factors: tuple[str, ...]
    shape: tuple[Any, ...]

    @property
    def is_pool(self) -> bool:
        """Whether this is a pool of the cache."""
        return PAGES in self.factors


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of an op's operands and results.

    Attributes:
      op: name of the op, for messages.
      operands: the operands in the order of the primitive.
      results: factor of each dimension of each result.
      merges: whether the first two results are out and lse.
    """

    op: str
    operands: tuple[Operand, ...]
    results: tuple[tuple[str, ...], ...]
    merges: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of each factor."""
        return {f: n for x in self.operands for f, n in zip(x.factors, x.shape, strict=True)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is split.

    Attributes:
      operands: spec of each operand, as the local call needs it.
      results: spec of each result.
      pages: axes that split the pages, major to minor; none if the pages are local.
      rows: axes over which the op has to exchange its new rows first.
      merge: whether the first two results, out and lse, are partial and have to be merged over
        `pages`. Results with a page dimension are pools and are never merged.
      restore: (dimension, axes) pairs. The query gave these axes up to the pages; they split this
        dimension of the results again.
      typed: whether the types of the local results say over which axes they are equal. They do not
        say it after an all-gather, nor if an axis of size 1 splits the pages (there is no merge),
        nor of results besides split pools that are not merged.
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


def pool_factors(
    groups: Sequence[str], pools: Sequence[Any], has_layer: bool
) -> tuple[list[str], ...]:
    """Return the factors of pools [*groups, (num_layers,) num_pages, page_size (/ pack, pack), d].

    With `has_layer` the pools have the dimension num_layers.
    """
    front = [*groups, *[f"{WHOLE}layers"] * has_layer, PAGES]
    rows = [f"{WHOLE}page_size", f"{WHOLE}pack"]
    return tuple(
        [*front, *rows[: len(pool.shape) - len(front) - 1], f"{WHOLE}last{i}"]
        for i, pool in enumerate(pools)
    )


def scalar_factors(dims: Sequence[str], shape: Sequence[Any], name: str) -> list[str]:
    """Return the factors of an operand that has size 1 or the full size in each of `dims`."""
    return [
        factor if size != 1 else f"{WHOLE}{name}{i}"
        for i, (factor, size) in enumerate(zip(dims, shape, strict=True))
    ]


def rope_factors(groups: list[str], rope_table: Any) -> list[str] | None:
    """Name the dimensions of a table of angles, [*groups, positions, width]; None for no table."""
    if rope_table is None:
        return None
    front = scalar_factors(groups, rope_table.shape[:-2], "rope")
    return [*front, "whole_positions", "whole_angles"]


def scale_factors(dims: Sequence[str], scale: Any, name: str) -> list[str] | None:
    """Return the factors of scales, which have one more dimension than `dims`; None for None."""
    if scale is None:
        return None
    return [*scalar_factors(dims, scale.shape[:-1], name), f"{WHOLE}{name}s"]


def make_plan(
    layout: Layout,
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    *,
    strict: bool,
    exchange: bool,
    local_pages: bool = False,
) -> Plan:
    """Choose the axes of every factor from the shardings of the operands.

    Args:
      layout: the op's dimensions.
      specs: how the operands are sharded now, one entry a dimension.
      sizes: size of each mesh axis.
      strict: refuse operands that ask for different axes for one factor. Otherwise the first is
        followed and the later ones are resharded.
      exchange: leave `rows` and `batch` split, for the op to exchange. Otherwise they are gathered
        first.
      local_pages: page ids count from 0 in each part of the pool. The pages are split over the
        axes of the sequences, and a part holds all pages of its sequences.

    Returns:
      The plan.

    Raises:
      ValueError: the cache is sharded in a way that cannot be served, or (`strict`) operands
        disagree or are sharded on a symbolic dimension.
    """
    axes = axes_of_pools(layout, specs, sizes)
    keep_rows = exchange or local_pages
    wanted = _axes_wanted(layout, specs, sizes, axes, strict=strict, keep_rows=keep_rows)
    # An axis that splits local pages, or an axis of size 1 that splits the pages, may split another
    # dimension at the same time.
    global_pages = () if local_pages else axes.get(PAGES, ())
    pages = tuple(a for a in global_pages if sizes[a] > 1)
    taken = {*pages, *(a for f, own in axes.items() if f != PAGES for a in own)}
    for factor, asked in wanted.items():
        size = layout.sizes[factor]
        if strict:
            refuse_symbolic(layout.op, factor, size, tuple(a for a in asked if sizes[a] > 1))
        kept = asked if factor == ROWS else tuple(a for a in asked if a not in taken)
        if divides(size, kept, sizes):
            axes[factor] = kept
            taken.update(kept if factor != ROWS else ())

    rows = () if local_pages else axes.get(ROWS, ()) or axes.get(BATCH, ())
    merge = bool(pages) and layout.merges
    # One call makes them and the pools, so JAX takes them to differ wherever the pools do.
    has_others = bool(pages) and not merge and any(PAGES not in dims for dims in layout.results)
    restore = _restorable(layout, axes, wanted, sizes) if merge else {}
    final = {f: axes.get(f, ()) + restore.get(f, ()) for f in {*axes, *restore}}

    def spec(dims: Sequence[str], table: Mapping[str, Axes]) -> Spec:
        return tuple(entry_of(table.get(f, ())) for f in dims)

    return Plan(
        operands=tuple(spec(x.factors, axes) for x in layout.operands),
        results=tuple(spec(dims, final) for dims in layout.results),
        pages=pages,
        rows=tuple(a for a in rows if sizes[a] > 1),
        merge=merge,
        restore=tuple((layout.results[0].index(f), a) for f, a in sorted(restore.items())),
        typed=not rows and pages == global_pages and not has_others,
    )


def axes_of_pools(
    layout: Layout, specs: Sequence[Spec], sizes: Mapping[str, int]
) -> dict[str, Axes]:
    """Return the axes that split each factor of the pools.

    Args:
      layout: the op's dimensions.
      specs: how the operands are sharded, one entry a dimension.
      sizes: size of each mesh axis.

    Raises:
      ValueError: a pool is sharded on a dimension that cannot be split, the pools of a pair are
        sharded differently, or the devices do not divide a dimension.
    """
    axes: dict[str, Axes] = {}
    first = ""
    for operand, spec in zip(layout.operands, specs, strict=True):
        if not operand.is_pool:
            continue
        what = f"{layout.op}: {operand.name}"
        first = first or operand.name
        for factor, size, entry in zip(operand.factors, operand.shape, spec, strict=True):
            asked = axes_of(entry)
            if factor.startswith(WHOLE):
                if any(sizes[a] > 1 for a in asked):
                    _refuse_pool(what, factor, asked)
            elif axes.setdefault(factor, asked) != asked:
                raise ValueError(
                    f"{what}: expected its {factor} dimension sharded over {list(axes[factor])} "
                    f"as in {first}, got {list(asked)}"
                )
            elif not divides(size, asked, sizes):
                refuse_symbolic(what, factor, size, asked)
                count = math.prod(sizes[a] for a in asked)
                raise ValueError(
                    f"{what}: expected its {factor} dimension to be a multiple of {count}, the "
                    f"number of devices along {list(asked)}, got {size}"
                )
    return axes


def _axes_wanted(
    layout: Layout,
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    pools: Mapping[str, Axes],
    *,
    strict: bool,
    keep_rows: bool,
) -> dict[str, Axes]:
    """Return the axes that the other operands ask for; if two disagree, those of the first."""
    wanted: dict[str, Axes] = {}
    asked_by: dict[str, str] = {}
    for operand, spec in zip(layout.operands, specs, strict=True):
        if operand.is_pool:
            continue
        for factor, entry in zip(operand.factors, spec, strict=True):
            asked = axes_of(entry)
            whole = factor.startswith(WHOLE) or (factor in (ROWS, BATCH) and not keep_rows)
            if not asked or whole or factor in pools:
                continue
            first = wanted.setdefault(factor, asked)
            asked_by.setdefault(factor, operand.name)
            if strict and first != asked and any(sizes[a] > 1 for a in asked):
                raise ValueError(
                    f"{layout.op}: {operand.name}: expected its {_dimension(factor)} sharded over "
                    f"{list(first)} as in {asked_by[factor]}, got {list(asked)}"
                )
    return wanted


def _dimension(factor: str) -> str:
    """Return what messages call a dimension."""
    return factor.removeprefix(WHOLE).rstrip("0123456789")


def _refuse_pool(what: str, factor: str, axes: Axes) -> None:
    raise ValueError(
        f"{what}: expected only its num_pages dimension sharded, got its {_dimension(factor)} "
        f"dimension sharded over {list(axes)}; shard the cache over pages instead: "
        "PartitionSpec(axis) for a pool, PartitionSpec(None, axis) for a stacked one"
    )


def divides(size: Any, axes: Axes, sizes: Mapping[str, int]) -> bool:
    """Return whether a dimension of this size can be split evenly over these axes.

    A symbolic size cannot, because no device would know the size of its part.
    """
    return not axes or (isinstance(size, int) and size % math.prod(sizes[a] for a in axes) == 0)


def refuse_symbolic(what: str, factor: str, size: Any, axes: Axes) -> None:
    """Raise ValueError if a dimension of symbolic size is to be split."""
    if axes and not isinstance(size, int):
        dimension = factor.rstrip("0123456789")
        raise ValueError(
            f"{what}: a symbolic dimension cannot be sharded: expected a known size for "
            f"{dimension} over {list(axes)}, got {size}"
        )


def _restorable(
    layout: Layout,
    axes: Mapping[str, Axes],
    wanted: Mapping[str, Axes],
    sizes: Mapping[str, int],
) -> dict[str, Axes]:
    """Return the axes that a dimension of the query lost to the pages and the result gets back.

    After the merge every device has the whole of that dimension, so it keeps its own part for free.
    Only the minor axes of a dimension can be split off again. If two dimensions lost the same axis,
    the first gets it back.
    """
    free = set(axes[PAGES]).difference(*(own for f, own in axes.items() if f != PAGES))
    restore: dict[str, Axes] = {}
    for factor, asked in wanted.items():
        kept = axes.get(factor, ())
        lost = asked[len(kept) :]
        can_split = asked[: len(kept)] == kept and divides(layout.sizes[factor], asked, sizes)
        if lost and can_split and free.issuperset(lost):
            restore[factor] = lost
            free.difference_update(lost)
    return restore
