"""Turns an op into JAX primitives. The non-public parts of JAX that this needs are in `_compat.py`.

Every op has two kinds of primitives. The *inner* one is strictly local: it runs on one device, its
operands have the ranks that the FFI handlers expect, and it lowers to the handler on `cpu` and
`cuda`, or to the reference if the caller asks for that. The *outer* one is what users trace. It has
the batching rule and the sharding, and it lowers to

* a `shard_map`, where the types say the sharding (Explicit axes),
* `custom_partitioning` with a Shardy rule, where only the compiler knows it (Auto axes),
* the local call, in a fully manual region or on one device.

With `mesh=` the `shard_map` is made first, and the outer primitive is bound inside it.

`_sharding.py` decides which dimension is split over which mesh axes, and what is communicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import _compat
from jax_mla._mesh import _collectives, _dispatch, _mesh_axes, _sharding
from jax_mla._mesh._sharding import Spec
from jax_mla._op import Call, Op, PlanCall, operand_names
from jax_mla._version import __version__

Operands = TypeVar("Operands")
Named = TypeVar("Named", bound=NamedTuple)


def define(op: Op) -> tuple[Callable[..., list[jax.Array]], Callable[..., list[jax.Array]]]:
    """Make the primitives of an op.

    Args:
      op: the op.

    Returns:
      A function (operands, params, mesh=None) -> results that binds the outer primitive, and a
      function (operands, params) -> results that binds the inner one, for code on one device.
    """
    inner = _inner(op)

    def bind_inner(operands: Any, params: Any) -> list[jax.Array]:
        flat, tree = jax.tree.flatten(operands)
        aligned = _dispatch.align_manual_axes(flat, Call(op, tree, params).is_query())
        return inner.bind(*aligned, tree=tree, params=params)

    # There are two outer primitives, because JAX is told for a primitive as a whole whether its
    # lowering needs the device list. With it JAX refuses an AbstractMesh, and a program with two
    # meshes. Only custom_partitioning needs it.
    typed, auto = _outer(op, bind_inner), _outer(op, bind_inner)
    _compat.require_devices_to_lower(auto)

    def bind(
        operands: Any, params: Any, *, mesh: Mesh | _mesh_axes.MeshAxes | None = None
    ) -> list[jax.Array]:
        flat, tree = jax.tree.flatten(operands)
        call = Call(op, tree, params)
        _dispatch.check_types(call, flat)
        if mesh is not None:
            axes = _mesh_axes.MeshAxes.of(op.name, mesh)
            return _dispatch.by_roles(call, typed, axes, flat)
        _, kinds = _dispatch.mesh_axes([jax.typeof(x) for x in flat])
        known = (kinds[AxisType.Explicit] or kinds[AxisType.Manual]) and not kinds[AxisType.Auto]
        outer = typed if known else auto
        aligned = _dispatch.align_manual_axes(flat, call.is_query())
        return outer.bind(*aligned, tree=tree, params=params)

    return bind, bind_inner


def _inner(op: Op) -> jax.extend.core.Primitive:
    inner = jax.extend.core.Primitive(f"{op.name}_local")
    inner.multiple_results = True
    _compat.make_callable_eagerly(inner)
    inner.def_abstract_eval(
        lambda *types, tree, params: _typed_results(Call(op, tree, params), types, None)
    )
    mlir.register_lowering(inner, functools.partial(_lower_inner, op, None))
    for platform in ("cpu", "cuda"):  # one rule each, for programs that are lowered for both
        rule = functools.partial(_lower_inner, op, platform)
        mlir.register_lowering(inner, rule, platform=platform)
    return inner


def _outer(op: Op, bind_inner: Callable[..., Any]) -> jax.extend.core.Primitive:
    outer = jax.extend.core.Primitive(op.name)
    outer.multiple_results = True
    _compat.make_callable_eagerly(outer)
    outer.def_abstract_eval(functools.partial(_outer_abstract_eval, op))
    mlir.register_lowering(outer, functools.partial(_lower_outer, op, bind_inner))
    advice = ", or differentiate jax_mla.reference instead"
    refuse_derivative = functools.partial(_refuse_derivative, op.name, advice)
    ad.primitive_jvps[outer] = ad.primitive_transposes[outer] = refuse_derivative
    batching.primitive_batchers[outer] = functools.partial(_batch, op, outer)
    return outer


# ---- Types -------------------------------------------------------------------------------------


def _typed_results(call: Call, types: Sequence[Any], specs: Sequence[Spec] | None) -> list[Any]:
    """Return the types of the results, with the operands' mesh and manual axes.

    Args:
      call: the call.
      types: types of the operands.
      specs: sharding of each result over Explicit axes; None for none.
    """
    varying = [_compat.varying_axes(t) for t in types]
    is_query = call.is_query()
    others = [v for v, query in zip(varying, is_query, strict=True) if not query]
    queries = [v for v, query in zip(varying, is_query, strict=True) if query] or others
    if len(set(others)) > 1 or len(set(queries)) > 1:
        raise TypeError(
            f"{call.op.name}: operands: expected all to vary over the same manual mesh axes, got "
            f"{[sorted(axes) for axes in varying]}"
        )

    def model(axes: frozenset[str]) -> Any:
        found = [t for t, v in zip(types, varying, strict=True) if v == axes]
        return next((t for t in found if not t.sharding.mesh.empty), found[0])

    results = call.results(types)
    specs = specs or [(None,) * len(r.shape) for r in results]
    is_pool = [_sharding.PAGES in dims for dims in call.layout(types).results]
    return [
        _compat.result_type(model(others[0] if pool else queries[0]), r.shape, r.dtype, P(*spec))
        for r, spec, pool in zip(results, specs, is_pool, strict=True)
    ]


def _outer_abstract_eval(op: Op, *types: Any, tree: Any, params: Any) -> list[Any]:
    call = Call(op, tree, params)
    mesh, kinds = _dispatch.mesh_axes(types)
    if kinds[AxisType.Manual] and kinds[AxisType.Auto]:
        auto = ", ".join(sorted(kinds[AxisType.Auto]))
        manual = ", ".join(sorted(kinds[AxisType.Manual]))
        raise ValueError(
            f"{op.name}: mesh: expected all axes manual, or none, got manual axes {{{manual}}} "
            f"and auto axes {{{auto}}}, over which the sharding of the operands cannot be known. "
            f"Pass mesh=jax_mla.MeshAxes(batch=..., heads=..., pages=..., replicated=...) that "
            f"names the auto axes, or make them manual too (shard_map over all axis_names); with "
            f"axis_name= only the latter is possible"
        )
    if mesh is None or not kinds[AxisType.Explicit]:
        return _typed_results(call, types, None)
    plan = call.plan(types, _dispatch.specs_of(types), mesh, strict=True)
    return _typed_results(call, types, plan.results)


def without_derivative(name: str, operands: Operands) -> Operands:
    """Return the operands of a function that is no primitive; their derivative is refused.

    Args:
      name: of the function.
      operands: a tree of arrays.
    """

    @jax.custom_jvp
    def same(operands: Operands) -> Operands:
        return operands

    same.defjvp(functools.partial(_refuse_derivative, name, ""))
    return same(operands)


def _refuse_derivative(name: str, advice: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"{name} is for inference: it has no derivative. Wrap its arguments in "
        f"jax.lax.stop_gradient{advice}"
    )


def _batch(
    op: Op,
    outer: jax.extend.core.Primitive,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    tree: Any,
    params: Any,
) -> tuple[list[jax.Array], list[int | None]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    mapped, result_dims, params = op.batch(
        tree.unflatten(operands), tree.unflatten(dims), size, params
    )
    is_query = Call(op, tree, params).is_query()
    flat = _dispatch.align_manual_axes(jax.tree.leaves(mapped), is_query)
    return outer.bind(*flat, tree=tree, params=params), result_dims


def insert_axis(x: jax.Array, dim: int | None, size: int, axis: int) -> jax.Array:
    """Move the mapped axis of `x` to `axis`, or repeat `x` along a new axis there."""
    if dim is not None:
        return jnp.moveaxis(x, dim, axis)
    x = jnp.expand_dims(x, axis)
    return jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def insert_axes(
    operands: Named,
    dims: Named,
    size: int,
    *,
    shared: Collection[str] = (),
    pools: str | None = None,
) -> Named:
    """Move the mapped axis of every operand to its front, or repeat the operand along a new one.

    Args:
      operands: a named tuple of arrays, tuples of arrays and None.
      dims: the mapped axis of each, or None.
      size: size of the axis.
      shared: names of operands that get an axis of size 1 if they are not mapped.
      pools: name of a tuple that stays as it is if nothing in it is mapped.
    """

    def in_front(name: str, x: Any, dim: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, tuple):
            if name == pools and not jax.tree.leaves(dim):
                return x
            return tuple(in_front(name, *one) for one in zip(x, dim, strict=True))
        return insert_axis(x, dim, 1 if name in shared else size, 0)

    fields = zip(operands._fields, operands, dims, strict=True)
    return operands._replace(**{field[0]: in_front(*field) for field in fields})


# ---- Lowering ----------------------------------------------------------------------------------


def _lower_inner(
    op: Op, platform: str | None, ctx: Any, *operands: Any, tree: Any, params: Any
) -> Any:
    """Lower to the platform's handler, or to the reference if the caller asks for it."""
    platform = platform or _compat.platforms_to_lower_for(ctx)[0]
    call = op.ffi(platform, tree.unflatten(_compat.operand_types(ctx)), params)
    if call is None:

        def reference(*args: jax.Array) -> list[jax.Array]:
            return op.reference(tree.unflatten(args), params)

        return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands)
    types, results = list(_compat.operand_types(ctx)), list(_compat.result_types(ctx))
    names, values = operand_names(tree.unflatten(types)), list(operands)
    if call.plan is not None:
        plan, plan_type = _lower_plan(call.plan, ctx, dict(zip(names, values, strict=True)))
        values.append(plan)
        types.append(plan_type)
        names.append("plan")
    num_results = len(results)
    if call.scratch_shape is not None:
        results.append(ShapedArray(call.scratch_shape, np.dtype(np.uint8)))
    aliases = {names.index(name): result for name, result in call.aliases.items()}
    rule = jax.ffi.ffi_lowering(call.target, operand_output_aliases=aliases)
    ctx = _compat.with_types(ctx, types, results)
    return rule(ctx, *values, operands=",".join(names), **call.attrs)[:num_results]


def _lower_plan(plan: PlanCall, ctx: Any, operands: dict[str, Any]) -> tuple[Any, ShapedArray]:
    """Return the result of the custom call and its type."""
    types = dict(zip(operands, _compat.operand_types(ctx), strict=True))
    result = ShapedArray((plan.num_bytes,), np.dtype(np.uint8))
    ctx = _compat.with_types(ctx, [types[name] for name in plan.operands], [result])
    rule = jax.ffi.ffi_lowering(plan.target)
    values = [operands[name] for name in plan.operands]
    (value,) = rule(ctx, *values, operands=",".join(plan.operands), **plan.attrs)
    return value, result


def _without_mesh() -> Any:
    """Return a context that hides the current mesh from local code."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _lower_outer(op: Op, bind_inner: Any, ctx: Any, *operands: Any, tree: Any, params: Any) -> Any:
    call = Call(op, tree, params)
    types = _compat.operand_types(ctx)
    mesh, kinds = _dispatch.mesh_axes(types)

    def local(blocks: Any, params: Any) -> list[jax.Array]:
        return op.local(bind_inner, blocks, params)

    if mesh is not None and kinds[AxisType.Explicit] and not kinds[AxisType.Auto]:
        fun = functools.partial(_dispatch.by_type, call, local, mesh)
    else:
        if kinds[AxisType.Manual] or _is_export(op.name, ctx):
            fun = functools.partial(_on_flat, call, local)
        else:
            fun = _partitioned(call, local, types)
        # Local code must not see Explicit axes in the types of its operands.
        ctx = _compat.with_types(ctx, _plain(types), _plain(_compat.result_types(ctx)))

    def run(*args: jax.Array) -> list[jax.Array]:
        with _without_mesh():
            return fun(args)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _on_flat(call: Call, local: _dispatch.Local, blocks: Sequence[jax.Array]) -> list[jax.Array]:
    return local(call.unflatten(blocks), call.params)


def _plain(types: Sequence[Any]) -> list[ShapedArray]:
    """Return the types without mesh and sharding."""
    return [ShapedArray(t.shape, t.dtype) for t in types]


def _is_export(name: str, ctx: Any) -> bool:
    """Return whether this is `jax.export`, for one device, and refuse it for more.

    Nothing is partitioned on one device, so the program needs none of the metadata that
    `_partitioned` adds. JAX cannot replace symbolic sizes in all operations that have metadata.
    """
    devices = _compat.num_devices_to_export_for(ctx)
    if devices > 1:
        raise ValueError(
            f"{name}: jax.export: expected shardings that are known at trace time, got an Auto "
            f"mesh of {devices} devices, whose partitioning callback cannot be serialised. Use "
            "Explicit axes (jax.set_mesh) or pass mesh=, if the op takes them, or call it in a "
            "shard_map"
        )
    return devices == 1


def _partitioned(
    call: Call, local: _dispatch.Local, types: Sequence[Any]
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Return `local` as a `custom_partitioning` function of operands of these shapes."""

    @custom_partitioning
    def partitioned(*args: jax.Array) -> list[jax.Array]:
        return list(_on_flat(call, local, args))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        specs = [_dispatch.spec_of_operand(call.op.name, x) for x in operands]
        plan = call.plan(operands, specs, mesh, strict=False)

        def run(*blocks: jax.Array) -> list[jax.Array]:
            with _without_mesh():
                return _collectives.run_local(call, plan, local, blocks)

        named = functools.partial(NamedSharding, mesh)
        return (
            mesh,
            run,
            [named(P(*s)) for s in plan.results],
            tuple(named(P(*s)) for s in plan.operands),
        )

    layout = call.layout(types)
    sides = [x.factors for x in layout.operands], layout.results
    rule = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in sides)
    # Shardy's verifier wants them in order of first appearance.
    names = dict.fromkeys(f for side in sides for dims in side for f in dims)
    whole = tuple(f for f in names if f.startswith(_sharding.WHOLE))
    partitioned.def_partition(
        partition=partition, sharding_rule=rule, need_replication_factors=whole
    )

    def fun(args: Sequence[jax.Array]) -> list[jax.Array]:
        # The program names only a pointer to the partitioning callback. If the pointer is left out
        # of the persistent cache's key, this tells calls with other parameters apart.
        with set_xla_metadata(jax_mla=repr((__version__, call.op.name, call.tree, call.params))):
            return partitioned(*args)

    return fun
