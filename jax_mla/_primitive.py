"""How an op becomes JAX primitives: the one file that touches JAX's primitive machinery.

Every op is two primitives. The *inner* one is strictly local: one device, ranks as the FFI
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
from jax import lax
from jax._src import dispatch  # no public way to say that a lowering needs the device list
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import _sharding

Params = dict[str, Any]
Spec = tuple[Any, ...]
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
      first_pool: index of the first pool among the operands.
      exchange: (operands, axes) -> operands, where the `rows` dimension, split over these axes, is
        gathered; None if no dimension has that factor.
    """

    name: str
    results: Callable[[Sequence[Any], Params], list[jax.ShapeDtypeStruct]]
    local: Callable[..., list[jax.Array]]
    reference: Callable[..., Sequence[jax.Array]]
    ffi: Callable[[str, Sequence[Any], Params], FfiCall | None]
    batch: Callable[..., tuple[list[jax.Array], list[int], Params]]
    operand_names: tuple[str, ...]
    factors: Callable[[Sequence[Any], Params], tuple[Factors, Factors]]
    first_pool: int = 6
    exchange: Callable[[Sequence[jax.Array], _sharding.Axes], Sequence[jax.Array]] | None = None

    def plan(
        self, shapes: Sequence[Any], specs: Sequence[Spec], mesh: Any, params: Params, strict: bool
    ) -> _sharding.Plan:
        """Choose how a call with these operands is split over the mesh."""
        operand_factors, result_factors = self.factors(shapes, params)
        return _sharding.make_plan(
            self.name, self.operand_names, operand_factors, result_factors, shapes, specs,
            dict(mesh.shape), first_pool=self.first_pool, strict=strict,
            # Inside a manual region its result would lack the type that the region wants.
            exchange=not any(kind == AxisType.Manual for kind in mesh.axis_types),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FfiCall:
    """One FFI custom call.

    Attributes:
      target: registered target name.
      attrs: numpy scalars or strings.
      aliases: operand index -> result index that shares its buffer.
      scratch_bytes: size of an extra uint8 result that is thrown away, or None for no such result.
    """

    target: str
    attrs: dict[str, Any]
    aliases: dict[int, int]
    scratch_bytes: Any = None


def define(op: Op) -> Callable[..., list[jax.Array]]:
    """Make the two primitives of `op`; return the function that binds the outer one."""
    inner = jax.extend.core.Primitive(f"{op.name}_local")
    inner.multiple_results = True
    inner.def_impl(functools.partial(xla.apply_primitive, inner))
    inner.def_abstract_eval(lambda *avals, **params: _typed_results(op, avals, None, params))
    mlir.register_lowering(inner, functools.partial(_lower_inner, op, None))
    for platform in ("cpu", "cuda"):
        rule = functools.partial(_lower_inner, op, platform)
        mlir.register_lowering(inner, rule, platform=platform)

    outer = jax.extend.core.Primitive(op.name)
    outer.multiple_results = True
    outer.def_impl(functools.partial(xla.apply_primitive, outer))
    outer.def_abstract_eval(functools.partial(_outer_abstract_eval, op))

    def bind_inner(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        return inner.bind(*_align_manual_axes(operands), **params)

    mlir.register_lowering(outer, functools.partial(_lower_outer, op, bind_inner))
    dispatch.prim_requires_devices_during_lowering.add(outer)
    ad.primitive_jvps[outer] = functools.partial(_refuse_derivative, op.name)
    ad.primitive_transposes[outer] = functools.partial(_refuse_derivative, op.name)
    batching.primitive_batchers[outer] = functools.partial(_batch, op, outer)

    def bind(
        *operands: jax.Array, mesh: Mesh | _sharding.MeshAxes | None = None, **params: Any
    ) -> list[jax.Array]:
        if mesh is not None:
            return _by_roles(op, outer, _sharding.MeshAxes.of(mesh), operands, params)
        return outer.bind(*_align_manual_axes(operands), **params)

    return bind


# ---- Types -----------------------------------------------------------------------------------


def _varying(aval: Any) -> frozenset[str]:
    """Manual mesh axes over which a value differs between devices."""
    return aval.manual_axis_type.varying


def _align_manual_axes(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Mark all operands as varying over the same manual axes, as one local call needs."""
    varying = [_varying(jax.typeof(x)) for x in operands]
    union = frozenset[str]().union(*varying)
    return [
        lax.pcast(x, tuple(sorted(union - v)), to="varying") if union - v else x
        for x, v in zip(operands, varying, strict=True)
    ]


def _mesh_axes(avals: Sequence[Any]) -> tuple[AbstractMesh | None, dict[AxisType, set[str]]]:
    """Return the mesh in the operands' types and its axes of size > 1 by kind."""
    kinds: dict[AxisType, set[str]] = {kind: set() for kind in AxisType}
    for aval in avals:
        mesh = aval.sharding.mesh
        if not mesh.empty:
            for name, size, kind in zip(
                mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
            ):
                if size > 1:
                    kinds[kind].add(name)
            return mesh, kinds
    return None, kinds


def _specs(avals: Sequence[Any]) -> list[Spec]:
    """Return each operand's sharding in its type, one entry a dimension."""
    return [tuple(a.sharding.spec) + (None,) * (a.ndim - len(a.sharding.spec)) for a in avals]


def _typed_results(
    op: Op, avals: Sequence[Any], specs: Sequence[Spec] | None, params: Params
) -> list[Any]:
    """Give the results the mesh and the manual axes that the operands' types have."""
    if len({_varying(a) for a in avals}) > 1:
        raise TypeError(
            f"{op.name}: operands: expected all to vary over the same manual mesh axes, got "
            f"{[sorted(_varying(a)) for a in avals]}"
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
    mesh, kinds = _mesh_axes(avals)
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
    plan = op.plan([a.shape for a in avals], _specs(avals), mesh, params, strict=True)
    return _typed_results(op, avals, plan.results, params)


# ---- Transformations -------------------------------------------------------------------------


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
    return outer.bind(*_align_manual_axes(operands), **params), result_dims


# ---- Lowering --------------------------------------------------------------------------------


def _lower_inner(op: Op, platform: str | None, ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower to the platform's handler; to the reference where there is none or it is asked for."""
    where = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    call = op.ffi(where, ctx.avals_in, params)
    if call is None:
        reference = mlir.lower_fun(lambda *args: list(op.reference(args, params)), True)
        return reference(ctx, *operands)
    if call.scratch_bytes is not None:
        scratch = ShapedArray((call.scratch_bytes,), np.dtype(np.uint8))
        ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    rule = jax.ffi.ffi_lowering(call.target, operand_output_aliases=call.aliases)
    results = rule(ctx, *operands, **call.attrs)
    return results[:-1] if call.scratch_bytes is not None else results


def _without_mesh() -> Any:
    """Context without a mesh: local code must not see the mesh it happens to be lowered under."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _lower_outer(op: Op, inner_bind: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    mesh, kinds = _mesh_axes(ctx.avals_in)
    if mesh is not None and kinds[AxisType.Explicit] and not kinds[AxisType.Auto]:
        fun = functools.partial(_by_type, op, inner_bind, mesh, params)
    else:
        if kinds[AxisType.Manual]:
            fun = functools.partial(_local, op, inner_bind, params)
        else:
            _refuse_export(op.name, ctx)
            shapes = tuple(a.shape for a in ctx.avals_in)
            fun = _partitioned(op, inner_bind, shapes, tuple(sorted(params.items())))
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


def _local(op: Op, inner_bind: Any, params: Params, *args: jax.Array) -> list[jax.Array]:
    return list(op.local(inner_bind, args, params))


def _by_type(
    op: Op, inner_bind: Any, mesh: AbstractMesh, params: Params, *args: jax.Array
) -> list[jax.Array]:
    """Run under `shard_map`, with the specs that the operands' types give."""
    avals = [jax.typeof(x) for x in args]
    plan = op.plan([a.shape for a in avals], _specs(avals), mesh, params, strict=True)
    local = functools.partial(op.local, inner_bind)
    with jax.sharding.use_abstract_mesh(mesh):
        return _shard_map(op, plan, mesh, None, local, _align_manual_axes(args), params)


def _by_roles(
    op: Op,
    outer: Any,
    roles: _sharding.MeshAxes,
    operands: Sequence[jax.Array],
    params: Params,
) -> list[jax.Array]:
    """Run under `shard_map`, with the specs that `mesh=` gives."""
    current = jax.sharding.get_abstract_mesh()
    mesh = current if roles.mesh is None else roles.mesh
    if mesh.empty:
        raise ValueError(
            f"{op.name}: mesh: expected MeshAxes(mesh=...) outside jax.set_mesh, got no mesh"
        )
    # Around this there may be a manual region over some axes: then only the rest is ours.
    kinds = zip(current.axis_names, current.axis_types, strict=True)
    manual = {name for name, kind in kinds if kind == AxisType.Manual}
    shapes = [x.shape for x in operands]
    operand_factors, _ = op.factors(shapes, params)
    specs = _sharding.specs_from_roles(op.name, roles, mesh, manual, operand_factors, shapes)
    plan = op.plan(shapes, specs, mesh if current.empty else current, params, strict=True)

    def local(args: Sequence[jax.Array], params: Params) -> list[jax.Array]:
        return outer.bind(*_align_manual_axes(args), **params)

    explicit = {n for n, k in zip(current.axis_names, current.axis_types) if k == AxisType.Explicit}
    for i, (x, spec) in enumerate(zip(operands, specs, strict=True)):
        have = _typed_spec(x)
        if i >= op.first_pool and any(have) and have != _only(spec, explicit):
            raise ValueError(
                f"{op.name}: {op.operand_names[i]}: expected the sharding that mesh= says, "
                f"{P(*spec)}, got {jax.typeof(x).sharding.spec}; the op never moves the cache"
            )
    around = None if current.empty else current
    return _shard_map(op, plan, mesh, around, local, _align_manual_axes(operands), params)


def _shard_map(
    op: Op,
    plan: _sharding.Plan,
    mesh: Mesh | AbstractMesh,
    current: AbstractMesh | None,
    local: Callable[[Sequence[jax.Array], Params], list[jax.Array]],
    args: Sequence[jax.Array],
    params: Params,
) -> list[jax.Array]:
    """Run `local` on every device's blocks, manual over all axes that are not manual yet."""
    around = current or (mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)
    kinds = dict(zip(around.axis_names, around.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    if explicit:  # shard_map refuses operands of another type; only what is small is ever moved
        wanted = [_only(spec, explicit) for spec in plan.operands]
        args = [
            x if want == _typed_spec(x) else jax.sharding.reshard(x, P(*want))
            for x, want in zip(args, wanted, strict=True)
        ]
    return jax.shard_map(
        lambda *blocks: _sharding.run_local(
            plan, mesh.shape, local, blocks, params, exchange=op.exchange
        ),
        mesh=mesh if current is None else None,
        axis_names={name for name, kind in kinds.items() if kind != AxisType.Manual},
        in_specs=tuple(P(*s) for s in plan.operands),
        out_specs=[P(*s) for s in plan.results],
        # What an all-gather returns is the same everywhere, but its type does not say so.
        check_vma=not plan.rows,
    )(*args)


def _typed_spec(x: jax.Array) -> tuple[_sharding.Axes, ...]:
    """The sharding in the type of `x`: a tuple of axes for each dimension."""
    return tuple(_sharding.axes_of(entry) for entry in _specs([jax.typeof(x)])[0])


def _only(spec: Spec, names: set[str]) -> tuple[_sharding.Axes, ...]:
    """`spec` without the axes that are not in `names`."""
    return tuple(tuple(a for a in _sharding.axes_of(e) if a in names) for e in spec)


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
        specs = [_spec_of(op.name, a) for a in operands]
        plan = op.plan([a.shape for a in operands], specs, mesh, params, strict=False)

        def lower(*args: jax.Array) -> list[jax.Array]:
            with _without_mesh():
                return _sharding.run_local(
                    plan, mesh.shape, local, args, params, exchange=op.exchange
                )

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


def _spec_of(name: str, operand: Any) -> Spec:
    sharding = operand.sharding
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec)
    elif sharding.is_fully_replicated:
        spec = ()
    else:
        raise ValueError(f"{name}: operands: expected NamedSharding, got {sharding}")
    return spec + (None,) * (len(operand.shape) - len(spec))
