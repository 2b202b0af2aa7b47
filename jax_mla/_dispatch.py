"""Runs a call under `shard_map`, where the sharding is known: from types, or from `mesh=`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import _collectives, _mesh_axes, _sharding
from jax_mla._sharding import Spec

if TYPE_CHECKING:
    from jax_mla._primitive import Op

Params = dict[str, Any]
Local = Callable[[Sequence[jax.Array], Params], list[jax.Array]]


# ---- What types say ----------------------------------------------------------------------------


def varying_axes(aval: Any) -> frozenset[str]:
    """Manual mesh axes over which a value differs between devices."""
    return aval.manual_axis_type.varying


def align_manual_axes(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Mark all operands as varying over the same manual axes, as one local call needs."""
    varying = [varying_axes(jax.typeof(x)) for x in operands]
    union = frozenset[str]().union(*varying)
    return [
        lax.pcast(x, tuple(sorted(union - v)), to="varying") if union - v else x
        for x, v in zip(operands, varying, strict=True)
    ]


def mesh_axes(avals: Sequence[Any]) -> tuple[AbstractMesh | None, dict[AxisType, set[str]]]:
    """Return the mesh in the operands' types and those of its axes that matter, by kind.

    An axis of size 1 splits nothing, but an Explicit one is part of the types all the same.
    """
    kinds: dict[AxisType, set[str]] = {kind: set() for kind in AxisType}
    for aval in avals:
        mesh = aval.sharding.mesh
        if not mesh.empty:
            for name, size, kind in zip(
                mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
            ):
                if size > 1 or kind == AxisType.Explicit:
                    kinds[kind].add(name)
            return mesh, kinds
    return None, kinds


def specs_of(avals: Sequence[Any]) -> list[Spec]:
    """Return each operand's sharding in its type, one entry a dimension."""
    return [_padded(a.sharding.spec, a.ndim) for a in avals]


def spec_of_operand(name: str, operand: Any) -> Spec:
    """Return how the compiler has sharded an operand, one entry a dimension."""
    sharding = operand.sharding
    if isinstance(sharding, NamedSharding):
        return _padded(sharding.spec, len(operand.shape))
    if sharding.is_fully_replicated:
        return (None,) * len(operand.shape)
    raise ValueError(f"{name}: operands: expected NamedSharding, got {sharding}")


def _padded(spec: P, ndim: int) -> Spec:
    # JAX refuses to unpack the spec of an operand that is typed *reduced*.
    return spec.partitions + (None,) * (ndim - len(spec.partitions))


def check_types(name: str, operand_names: Sequence[str], operands: Sequence[Any]) -> None:
    """Refuse operands whose types say that they are no values yet, or on which mesh they disagree.

    Raises:
      ValueError: an operand that is unreduced (a sum over devices still to be taken), or operands
        on different Explicit meshes.
    """
    first, on = "", None
    for operand_name, x in zip(operand_names, operands, strict=False):
        aval = jax.typeof(x)
        unreduced = aval.manual_axis_type.unreduced | aval.sharding.spec.unreduced
        if unreduced:
            raise ValueError(
                f"{name}: {operand_name}: expected a value, got one that is unreduced over "
                f"{sorted(unreduced)}; psum it (in a shard_map) or reshard it first"
            )
        mesh = aval.sharding.mesh
        if not _axes(mesh, AxisType.Explicit):
            continue
        if on is None:
            first, on = operand_name, dict(mesh.shape)
        elif on != dict(mesh.shape):
            raise ValueError(
                f"{name}: {operand_name}: expected an array on the mesh of {first}, {on}, "
                f"got one on {dict(mesh.shape)}"
            )


# ---- Calls -------------------------------------------------------------------------------------


def by_type(
    op: Op, local: Local, mesh: AbstractMesh, params: Params, *args: jax.Array
) -> list[jax.Array]:
    """Run with the specs that the operands' types give."""
    avals = [jax.typeof(x) for x in args]
    plan = op.plan([a.shape for a in avals], specs_of(avals), mesh, params, strict=True)
    with jax.sharding.use_abstract_mesh(mesh):
        return _shard_map(op, plan, mesh, None, local, align_manual_axes(args), params)


def by_roles(
    op: Op,
    outer: Any,
    roles: _mesh_axes.MeshAxes,
    operands: Sequence[jax.Array],
    params: Params,
) -> list[jax.Array]:
    """Run with the specs that `mesh=` gives."""
    current = jax.sharding.get_abstract_mesh()
    mesh = current if roles.mesh is None else roles.mesh
    if mesh.empty:
        raise ValueError(
            f"{op.name}: mesh: expected MeshAxes(mesh=...) outside jax.set_mesh, got no mesh"
        )
    if not current.empty and dict(mesh.shape) != dict(current.shape):
        raise ValueError(
            f"{op.name}: mesh: expected the axes of the current mesh (jax.set_mesh, or the manual "
            f"region around), {dict(current.shape)}, got a mesh of {dict(mesh.shape)}"
        )
    # Around this there may be a manual region over some axes: then only the rest is ours.
    around = _abstract(mesh) if current.empty else current
    shapes = [x.shape for x in operands]
    operand_factors, _ = op.factors(shapes, params)
    manual = _axes(around, AxisType.Manual)
    specs = _mesh_axes.specs_from_roles(op.name, roles, mesh, manual, operand_factors, shapes)
    plan = op.plan(shapes, specs, around, params, strict=True)
    for i in range(op.first_pool, len(operands)):
        _refuse_to_move(f"{op.name}: {op.operand_names[i]}", operands[i], specs[i], around)
    frozen = tuple(sorted(params.items()))
    return _run_roles(op, outer, plan, mesh, None if current.empty else current, frozen, *operands)


def _refuse_to_move(what: str, pool: jax.Array, wanted: Spec, mesh: AbstractMesh) -> None:
    """Refuse a pool that is sharded otherwise than `mesh=` says, as far as that is known here.

    Of an array all axes are known, of what is being traced only those in its type.
    """
    if not isinstance(pool, Tracer) and isinstance(pool.sharding, NamedSharding):
        sharding, known = pool.sharding, set(mesh.axis_names)
    else:
        sharding, known = jax.typeof(pool).sharding, _axes(mesh, AxisType.Explicit)

    def splitting(spec: Spec, sizes: Mapping[str, int]) -> tuple[_sharding.Axes, ...]:
        return _only(spec, {axis for axis, size in sizes.items() if size > 1})

    have = splitting(_padded(sharding.spec, pool.ndim), sharding.mesh.shape)
    if any(have) and have != splitting(_only(wanted, known), mesh.shape):
        raise ValueError(
            f"{what}: expected the sharding that mesh= says, {P(*wanted)}, got {sharding.spec}; "
            "the op never moves the cache"
        )


# Called outside jit, shard_map would run, and compile, every operation within by itself.
@functools.partial(jax.jit, static_argnums=range(6), inline=True)
def _run_roles(
    op: Op,
    outer: Any,
    plan: _sharding.Plan,
    mesh: Mesh | AbstractMesh,
    current: AbstractMesh | None,
    frozen: tuple[tuple[str, Any], ...],
    *operands: jax.Array,
) -> list[jax.Array]:
    def local(args: Sequence[jax.Array], params: Params) -> list[jax.Array]:
        return outer.bind(*align_manual_axes(args), **params)

    args = align_manual_axes(operands)
    return _shard_map(op, plan, mesh, current, local, args, dict(frozen))


def _shard_map(
    op: Op,
    plan: _sharding.Plan,
    mesh: Mesh | AbstractMesh,
    current: AbstractMesh | None,
    local: Local,
    args: Sequence[jax.Array],
    params: Params,
) -> list[jax.Array]:
    """Run `local` on every device's blocks, manual over all axes that are not manual yet."""
    around = current or _abstract(mesh)
    manual, explicit = (_axes(around, kind) for kind in (AxisType.Manual, AxisType.Explicit))
    if explicit:  # shard_map refuses operands of another type; only what is small is ever moved
        wanted = [_only(spec, explicit) for spec in plan.operands]
        args = [
            x
            if want == _typed_spec(x) and not jax.typeof(x).sharding.spec.reduced
            else jax.sharding.reshard(x, NamedSharding(around, P(*want)))
            for x, want in zip(args, wanted, strict=True)
        ]
    return jax.shard_map(
        lambda *blocks: _collectives.run_local(op, plan, mesh.shape, local, blocks, params),
        mesh=mesh if current is None else None,
        # Left empty JAX takes all, without those Explicit ones that a vmap around this maps over.
        axis_names=frozenset(around.axis_names).difference(manual) if manual else frozenset(),
        in_specs=tuple(P(*s) for s in plan.operands),
        out_specs=[P(*s) for s in plan.results],
        check_vma=plan.typed,
    )(*args)


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _axes(mesh: AbstractMesh, kind: AxisType) -> set[str]:
    """Names of the mesh's axes of one kind."""
    return {n for n, k in zip(mesh.axis_names, mesh.axis_types, strict=True) if k == kind}


def _typed_spec(x: jax.Array) -> tuple[_sharding.Axes, ...]:
    """The sharding in the type of `x`: a tuple of axes for each dimension."""
    return tuple(_sharding.axes_of(entry) for entry in specs_of([jax.typeof(x)])[0])


def _only(spec: Spec, names: set[str]) -> tuple[_sharding.Axes, ...]:
    """`spec` without the axes that are not in `names`."""
    return tuple(tuple(a for a in _sharding.axes_of(e) if a in names) for e in spec)
