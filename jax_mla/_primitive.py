"""How an op becomes JAX primitives: the one file that touches JAX's primitive machinery.

Every op is two kinds of primitive. The *inner* one is strictly local: one device, ranks as the FFI
handlers want them, lowered to the handler on `cpu` and `cuda` and to the reference elsewhere. The
*outer* one is what users trace: it has the batching rule and the sharding, and lowers to

* a `shard_map` where the sharding is in the types (Explicit axes),
* `custom_partitioning` with a Shardy rule where only the compiler knows it (Auto axes),
* the local call inside a fully manual region or on one device.

Which dimension may be split over which mesh axes, and what is communicated, is in `_sharding.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax._src import dispatch  # no public way to say that a lowering needs the device list
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import _collectives, _dispatch, _mesh_axes, _sharding
from jax_mla._sharding import Spec
from jax_mla._version import __version__

Params = dict[str, Any]
Factors = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Op:
    """What an op supplies. Operands and results are flat lists; params are hashable.

    Attributes:
      name: public name of the op, also in messages.
      results: (operand shapes and dtypes, params) -> result shapes and dtypes.
      local: (inner bind, operands, params) -> results; folds batch dimensions and calls the inner
        primitive once. Runs on one device's blocks.
      reference: (operands, params) -> results, in jax.numpy.
      ffi: (platform, operand avals, params) -> FfiCall, or None for the reference. Raises if no
        backend serves the call.
      batch: (operands, mapped dims, size, params) -> (operands, result dims, params).
      operand_names: what messages call the operands.
      factors: (operand shapes, params) -> (operand factors, result factors), see `_sharding.py`.
      page_begin: index of `page_begin` among the operands.
      first_pool: index of the first pool; the rest are pools too.
      exchange: (operands, axes) -> operands, where the `rows` dimension, split over these axes, is
        gathered; None if no dimension has that factor.
      keep_owned: operands -> operands without what this device's pages have no part in; None if
        that saves nothing.
    """

    name: str
    results: Callable[[Sequence[Any], Params], list[jax.ShapeDtypeStruct]]
    local: Callable[..., list[jax.Array]]
    reference: Callable[..., Sequence[jax.Array]]
    ffi: Callable[[str, Sequence[Any], Params], FfiCall | None]
    batch: Callable[..., tuple[list[jax.Array], list[int], Params]]
    operand_names: tuple[str, ...]
    factors: Callable[[Sequence[Any], Params], tuple[Factors, Factors]]
    page_begin: int
    first_pool: int
    exchange: Callable[[Sequence[jax.Array], _sharding.Axes], Sequence[jax.Array]] | None = None
    keep_owned: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] | None = None

    def layout(self, shapes: Sequence[Any], params: Params) -> _sharding.Layout:
        """Name the dimensions of a call with operands of these shapes."""
        operands, results = self.factors(shapes, params)
        return _sharding.Layout(self.name, self.operand_names, operands, results, self.first_pool)

    def plan(
        self, shapes: Sequence[Any], specs: Sequence[Spec], mesh: Any, params: Params, strict: bool
    ) -> _sharding.Plan:
        """Choose how a call with these operands is split over the mesh."""
        # Inside a manual region an exchange would not have the type that the region wants.
        exchange = not any(kind == AxisType.Manual for kind in mesh.axis_types)
        layout, sizes = self.layout(shapes, params), dict(mesh.shape)
        return _sharding.make_plan(layout, shapes, specs, sizes, strict=strict, exchange=exchange)


@dataclasses.dataclass(frozen=True)
class FfiCall:
    """One FFI custom call.

    Attributes:
      target: registered target name.
      attrs: numpy scalars or strings.
      aliases: operand index -> result index that shares its buffer.
      scratch_shape: of an extra uint8 result that is thrown away, or None for no such result.
    """

    target: str
    attrs: dict[str, Any]
    aliases: dict[int, int]
    scratch_shape: tuple[Any, ...] | None = None


def define(op: Op) -> Callable[..., list[jax.Array]]:
    """Make the primitives of `op`; return the function that binds the outer one."""
    inner = jax.extend.core.Primitive(f"{op.name}_local")
    inner.multiple_results = True
    inner.def_impl(functools.partial(xla.apply_primitive, inner))
    inner.def_abstract_eval(lambda *avals, **params: _typed_results(op, avals, None, params))
    mlir.register_lowering(inner, functools.partial(_lower_inner, op, None))
    for platform in ("cpu", "cuda"):
        rule = functools.partial(_lower_inner, op, platform)
        mlir.register_lowering(inner, rule, platform=platform)

    def bind_inner(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        return inner.bind(*_dispatch.align_manual_axes(operands), **params)

    # Two, since JAX is told of a primitive as a whole that its lowering needs the device list, and
    # refuses it for an AbstractMesh then; but only what the compiler decides needs the list.
    typed, auto = _outer(op, bind_inner), _outer(op, bind_inner)
    dispatch.prim_requires_devices_during_lowering.add(auto)

    def bind(
        *operands: jax.Array, mesh: Mesh | _mesh_axes.MeshAxes | None = None, **params: Any
    ) -> list[jax.Array]:
        _dispatch.check_types(op.name, op.operand_names, operands)
        if mesh is not None:
            roles = _mesh_axes.MeshAxes.of(op.name, mesh)
            return _dispatch.by_roles(op, typed, roles, operands, params)
        _, kinds = _dispatch.mesh_axes([jax.typeof(x) for x in operands])
        known = (kinds[AxisType.Explicit] or kinds[AxisType.Manual]) and not kinds[AxisType.Auto]
        outer = typed if known else auto
        return outer.bind(*_dispatch.align_manual_axes(operands), **params)

    return bind


def _outer(op: Op, bind_inner: Callable[..., Any]) -> jax.extend.core.Primitive:
    outer = jax.extend.core.Primitive(op.name)
    outer.multiple_results = True
    outer.def_impl(functools.partial(xla.apply_primitive, outer))
    outer.def_abstract_eval(functools.partial(_outer_abstract_eval, op))
    mlir.register_lowering(outer, functools.partial(_lower_outer, op, bind_inner))
    ad.primitive_jvps[outer] = functools.partial(_refuse_derivative, op.name)
    ad.primitive_transposes[outer] = functools.partial(_refuse_derivative, op.name)
    batching.primitive_batchers[outer] = functools.partial(_batch, op, outer)
    return outer


def _typed_results(
    op: Op, avals: Sequence[Any], specs: Sequence[Spec] | None, params: Params
) -> list[Any]:
    """Give the results the mesh and the manual axes that the operands' types have."""
    if len({_dispatch.varying_axes(a) for a in avals}) > 1:
        raise TypeError(
            f"{op.name}: operands: expected all to vary over the same manual mesh axes, got "
            f"{[sorted(_dispatch.varying_axes(a)) for a in avals]}"
        )
    first = next((a for a in avals if not a.sharding.mesh.empty), avals[0])
    results = op.results(avals, params)
    specs = specs or [(None,) * len(r.shape) for r in results]
    return [
        first.update(
            shape=r.shape,
            dtype=r.dtype,
            weak_type=False,
            sharding=first.sharding.update(spec=P(*spec)),
        )
        for r, spec in zip(results, specs, strict=True)
    ]


def _outer_abstract_eval(op: Op, *avals: Any, **params: Any) -> list[Any]:
    mesh, kinds = _dispatch.mesh_axes(avals)
    if kinds[AxisType.Manual] and kinds[AxisType.Auto]:
        auto = ", ".join(sorted(kinds[AxisType.Auto]))
        manual = ", ".join(sorted(kinds[AxisType.Manual]))
        raise ValueError(
            f"{op.name}: mesh: expected all axes manual, or none, got manual axes {{{manual}}} "
            f"and auto axes {{{auto}}}, where the op cannot know how its operands are sharded. "
            f"Pass mesh=jax_mla.MeshAxes(batch=..., heads=..., pages=...) naming the auto axes "
            f"that shard each, or make them manual too (shard_map over all axis_names)"
        )
    if mesh is None or not kinds[AxisType.Explicit]:
        return _typed_results(op, avals, None, params)
    plan = op.plan([a.shape for a in avals], _dispatch.specs_of(avals), mesh, params, strict=True)
    return _typed_results(op, avals, plan.results, params)


def _refuse_derivative(name: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"{name} is for inference: it has no derivative. Wrap its arguments in "
        "jax.lax.stop_gradient, or differentiate jax_mla.reference instead"
    )


def _batch(
    op: Op,
    outer: Any,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    operands, result_dims, params = op.batch(operands, dims, size, params)
    return outer.bind(*_dispatch.align_manual_axes(operands), **params), result_dims


def _lower_inner(op: Op, platform: str | None, ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower to the platform's handler; to the reference where there is none or it is asked for."""
    where = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    call = op.ffi(where, ctx.avals_in, params)
    if call is None:
        reference = mlir.lower_fun(lambda *args: list(op.reference(args, params)), True)
        return reference(ctx, *operands)
    if call.scratch_shape is not None:
        scratch = ShapedArray(call.scratch_shape, np.dtype(np.uint8))
        ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    rule = jax.ffi.ffi_lowering(call.target, operand_output_aliases=call.aliases)
    results = rule(ctx, *operands, **call.attrs)
    return results[:-1] if call.scratch_shape is not None else results


def _without_mesh() -> Any:
    """Context without a mesh: local code must not see the mesh it happens to be lowered under."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _lower_outer(op: Op, inner_bind: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    mesh, kinds = _dispatch.mesh_axes(ctx.avals_in)
    local = functools.partial(op.local, inner_bind)
    if mesh is not None and kinds[AxisType.Explicit] and not kinds[AxisType.Auto]:
        fun = functools.partial(_dispatch.by_type, op, local, mesh, params)
    else:
        if kinds[AxisType.Manual]:
            fun = lambda *args: local(args, params)  # noqa: E731
        else:
            _refuse_export(op.name, ctx)
            shapes = tuple(a.shape for a in ctx.avals_in)
            frozen = tuple(sorted(params.items()))
            partitioned = _partitioned(op, inner_bind, shapes, frozen)

            def fun(*args: jax.Array) -> list[jax.Array]:
                # The program holds but a pointer to what the call does. Without the pointer in the
                # key of the persistent cache, calls with other parameters would be found there.
                with set_xla_metadata(jax_mla=repr((__version__, op.name, frozen))):
                    return partitioned(*args)

        # Explicit axes in the types would make the local code typed as well.
        plain = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
        outs = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_out]
        ctx = ctx.replace(avals_in=plain, avals_out=outs)

    def without_context(*args: jax.Array) -> list[jax.Array]:
        with _without_mesh():
            return fun(*args)

    return mlir.lower_fun(without_context, multiple_results=True)(ctx, *operands)


def _refuse_export(name: str, ctx: Any) -> None:
    context = ctx.module_context
    devices = getattr(context.axis_context, "num_devices", 1) or 1
    if context.lowering_parameters.for_export and devices > 1:
        raise ValueError(
            f"{name}: jax.export: expected shardings that are known at trace time, got an Auto "
            f"mesh of {devices} devices, whose partitioning callback cannot be serialised. Use "
            "Explicit axes (jax.set_mesh), or pass mesh="
        )


@functools.cache
def _partitioned(
    op: Op, inner_bind: Any, shapes: tuple[Any, ...], frozen: tuple[tuple[str, Any], ...]
) -> Any:
    """Return the op as a `custom_partitioning` function for operands of these shapes."""
    params = dict(frozen)
    local = functools.partial(op.local, inner_bind)

    @custom_partitioning
    def call(*args: jax.Array) -> list[jax.Array]:
        return list(local(args, params))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        specs = [_dispatch.spec_of_operand(op.name, a) for a in operands]
        plan = op.plan([a.shape for a in operands], specs, mesh, params, strict=False)

        def lower(*args: jax.Array) -> list[jax.Array]:
            with _without_mesh():
                return _collectives.run_local(op, plan, mesh.shape, local, args, params)

        named = functools.partial(NamedSharding, mesh)
        return (
            mesh,
            lower,
            [named(P(*s)) for s in plan.results],
            tuple(named(P(*s)) for s in plan.operands),
        )

    operand_factors, result_factors = op.factors(shapes, params)
    rule = " -> ".join(
        ", ".join(" ".join(dims) for dims in side) for side in (operand_factors, result_factors)
    )
    # In order of first appearance, as Shardy's verifier wants them.
    names = dict.fromkeys(n for dims in (*operand_factors, *result_factors) for n in dims)
    whole = tuple(n for n in names if n.startswith(_sharding.WHOLE))
    call.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole)
    return call
