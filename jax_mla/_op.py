"""What an op provides so that `_primitive.py` can turn it into JAX primitives.

The operands of an op are a NamedTuple, so that code refers to each of them by name. In an op on the
cache the field `kv_pages` or `index_pages` is a tuple of pools, one or two, and there is a field
`page_begin`. A field may be None: that operand is absent. The same NamedTuple also carries what
belongs to the operands: their types, their mapped dimensions, the names of their dimensions. JAX
primitives take flat lists; a `Call` knows how to go from one form to the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jax_mla._mesh import _sharding

Factors = list[list[str]]


@dataclasses.dataclass(frozen=True)
class PlanCall:
    """A custom call that computes an operand of an `FfiCall` from few others.

    XLA runs equal computations once. So all calls with the same few operands share one plan, such
    as the unrolled layers of a step. The body of a `scan` computes its own in every iteration.

    Attributes:
      target: registered target name.
      attrs: numpy scalars or strings.
      operands: names of the operands that it takes.
      num_bytes: size of its uint8 result, which is the operand `plan` of the `FfiCall`.
    """

    target: str
    attrs: dict[str, Any]
    operands: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class FfiCall:
    """One FFI custom call. Its handler finds operands by their names, see csrc/core/operands.h.

    Attributes:
      target: registered target name.
      attrs: numpy scalars or strings.
      aliases: name of an operand -> index of the result that shares its buffer.
      scratch_shape: shape of an extra uint8 result that the caller never sees; None for none.
      plan: the call that makes one more operand; None for none.
    """

    target: str
    attrs: dict[str, Any]
    aliases: dict[str, int]
    scratch_shape: tuple[Any, ...] | None = None
    plan: PlanCall | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
    """How an op runs on devices that each have a part of the pages, if not by merging out and lse.

    Attributes:
      params: params of the op -> those of a call on a part.
      merge: (results of that call, operands, params of the op, axes that split the pages) ->
        results of the op, which are the same on all devices along these axes.
    """

    params: Callable[[Any], Any]
    merge: Callable[[list[jax.Array], Any, Any, _sharding.Axes], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Op:
    """An op: its types, its local computation, its batching rule, the names of its dimensions.

    `operands` is the op's NamedTuple. `params` is hashable and has a `repr` that is the same in
    every process. Results are flat lists.

    Attributes:
      name: public name of the op, also in messages.
      results: (types of the operands, params) -> shapes and dtypes of the results.
      local: (bind, operands, params) -> results on one device: folds the batch dimensions and calls
        `bind(operands, params)`, which is the inner primitive, once.
      reference: (operands, params) -> results, in jax.numpy.
      ffi: (platform, types of the operands, params) -> the custom call, or None to run `reference`.
        Raises ValueError if no backend takes the call.
      batch: (operands, mapped dimensions, size, params) -> (operands, result dimensions, params).
        The dimension of a result that is not mapped is None.
      factors: (types of the operands, params) -> (factors of each operand's dimensions, factors of
        each result's dimensions); see `_sharding.py`.
      merges: whether the first two results are out and lse, which are partial where a device has
        a part of the pages only.
      query: names of the operands on which no pool in the results depends. On manual axes the
        others, and so the pools, may be the same on devices where these differ.
      take_rows: (operands, params, axes) -> the operands as a device needs them where rows are
        split over these axes: with the new rows of all devices, or cut to its own tokens. None if
        no dimension has the factor `rows` or `batch`.
      keep_owned: (operands, params) -> operands without the work for pages that this device does
        not own; None if there is nothing to save.
      parts: how parts of the pages are used; None if `merges` says it.
      renamed: (field, name) pairs: what messages call operands, where it is not the field's name.
    """

    name: str
    results: Callable[[Any, Any], list[jax.ShapeDtypeStruct]]
    local: Callable[[Callable[..., Any], Any, Any], list[jax.Array]]
    reference: Callable[[Any, Any], list[jax.Array]]
    ffi: Callable[[str, Any, Any], FfiCall | None]
    batch: Callable[[Any, Any, int, Any], tuple[Any, list[Any], Any]]
    factors: Callable[[Any, Any], tuple[Any, Factors]]
    merges: bool
    query: tuple[str, ...] = ()
    take_rows: Callable[[Any, Any, _sharding.Axes], Any] | None = None
    keep_owned: Callable[[Any, Any], Any] | None = None
    parts: Parts | None = None
    renamed: tuple[tuple[str, str], ...] = ()


def operand_names(operands: Any) -> list[str]:
    """Return the name of each operand: its field, with an index if the field holds two pools."""
    names = []
    for field, value in zip(operands._fields, operands, strict=True):
        several = isinstance(value, tuple) and len(value) > 1
        if value is not None:
            names += [f"{field}[{i}]" for i in range(len(value))] if several else [field]
    return names


def pools_in_place(operands: Any, first: int) -> dict[str, int]:
    """Return `FfiCall.aliases` of a call whose results from `first` on are its pools."""
    names = [name for name in operand_names(operands) if name.startswith("kv_pages")]
    return {name: first + i for i, name in enumerate(names)}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op, without its arrays. Hashable.

    Attributes:
      op: the op.
      tree: the `PyTreeDef` of the operands.
      params: static parameters.
    """

    op: Op
    tree: Any
    params: Any

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """Return one item for each operand as the op's NamedTuple."""
        return self.tree.unflatten(flat)

    def results(self, types: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the results."""
        return self.op.results(self.unflatten(types), self.params)

    def operand_names(self) -> list[str]:
        """Return the names of the operands, as messages use them."""
        renamed = dict(self.op.renamed)
        names = operand_names(self.unflatten(range(self.tree.num_leaves)))
        return [renamed.get(name, name) for name in names]

    def is_query(self) -> list[bool]:
        """Return for each operand whether no pool in the results depends on it."""
        return [name in self.op.query for name in self.operand_names()]

    def layout(self, types: Sequence[Any]) -> _sharding.Layout:
        """Return the names of all dimensions, for operands of these shapes."""
        factors, results = self.op.factors(self.unflatten(types), self.params)
        operands = zip(self.operand_names(), self.tree.flatten_up_to(factors), types, strict=True)
        return _sharding.Layout(
            op=self.op.name,
            operands=tuple(_sharding.Operand(n, tuple(f), tuple(t.shape)) for n, f, t in operands),
            results=tuple(tuple(dims) for dims in results),
            merges=self.op.merges,
        )

    def plan(
        self,
        types: Sequence[Any],
        specs: Sequence[_sharding.Spec],
        mesh: Mesh | AbstractMesh,
        *,
        strict: bool,
        local_pages: bool = False,
    ) -> _sharding.Plan:
        """Choose how this call, with operands sharded like this, is split over the mesh.

        `_sharding.make_plan` describes `strict` and `local_pages`.
        """
        # In a manual region the result of an exchange would not have the type that is wanted there.
        exchange = AxisType.Manual not in mesh.axis_types
        sizes = dict(mesh.shape)
        return _sharding.make_plan(
            self.layout(types),
            specs,
            sizes,
            strict=strict,
            exchange=exchange,
            local_pages=local_pages,
        )
