"""Runs a call under `shard_map` where the sharding is known: from the types, or from `mesh=`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import _compat
from jax_mla._mesh import _collectives, _mesh_axes, _sharding
from jax_mla._mesh._sharding import Spec
from jax_mla._op import Call

# (operands, params) -> results: runs an op on one device's blocks of the operands, which are the
# op's NamedTuple.
Local = Callable[[Any, Any], list[jax.Array]]


# ---- What types and arrays say -----------------------------------------------------------------


def align_manual_axes(
    operands: Sequence[jax.Array], is_query: Sequence[bool] | None = None
) -> list[jax.Array]:
    """Mark the operands as varying over the same manual axes, as one local call needs.

    Args:
      operands: the operands, flat.
      is_query: `Call.is_query()`: the other operands, on which the new pools depend, are not marked
        for the sake of these. None: all operands are alike.
    """
    varying = [_compat.varying_axes(jax.typeof(x)) for x in operands]
    is_query = is_query or [False] * len(operands)
    every = frozenset[str]().union(*varying)
    others = frozenset[str]().union(*(v for v, q in zip(varying, is_query, strict=True) if not q))
    missing = [(every if q else others) - v for v, q in zip(varying, is_query, strict=True)]
    return [
        lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
        for x, axes in zip(operands, missing, strict=True)
    ]


def mesh_axes(types: Sequence[Any]) -> tuple[AbstractMesh | None, dict[AxisType, set[str]]]:
    """Return the mesh in the operands' types and its axes by kind, without Auto axes of size 1.

    An axis of size 1 splits nothing. But if it is Explicit it is part of the types, and if it is
    manual the call is local, and must not bring devices of its own into the program.
    """
    kinds: dict[AxisType, set[str]] = {kind: set() for kind in AxisType}
    for type_ in types:
        mesh = type_.sharding.mesh
        if not mesh.empty:
            for name, size, kind in zip(
                mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
            ):
                if size > 1 or kind != AxisType.Auto:
                    kinds[kind].add(name)
            return mesh, kinds
    return None, kinds


def specs_of(types: Sequence[Any]) -> list[Spec]:
    """Return the sharding in each operand's type, one entry a dimension."""
    return [_padded(t.sharding.spec, t.ndim) for t in types]


def spec_of_operand(name: str, operand: Any) -> Spec:
    """Return how the compiler has sharded an operand, one entry a dimension."""
    sharding = operand.sharding
    if isinstance(sharding, NamedSharding):
        return _padded(sharding.spec, len(operand.shape))
    if sharding.is_fully_replicated:
        return (None,) * len(operand.shape)
    raise ValueError(f"{name}: operands: expected NamedSharding, got {sharding}")


def _padded(spec: P, ndim: int) -> Spec:
    entries = _compat.partitions(spec)
    return entries + (None,) * (ndim - len(entries))


def check_types(call: Call, operands: Sequence[jax.Array]) -> None:
    """Check what the operands' types say about meshes.

    Raises:
      ValueError: an operand is unreduced (a sum over devices that is still to be taken), or
        operands are on different Explicit meshes.
    """
    first, first_mesh = "", None
    for name, x in zip(call.operand_names(), operands, strict=True):
        type_ = jax.typeof(x)
        if unreduced := _compat.unreduced_axes(type_):
            raise ValueError(
                f"{call.op.name}: {name}: expected a value, got one that is unreduced over "
                f"{sorted(unreduced)}; psum it (in a shard_map) or reshard it first"
            )
        mesh = type_.sharding.mesh
        if not _axes(mesh, AxisType.Explicit):
            continue
        if first_mesh is None:
            first, first_mesh = name, dict(mesh.shape)
        elif first_mesh != dict(mesh.shape):
            raise ValueError(
                f"{call.op.name}: {name}: expected an array on the mesh of {first}, {first_mesh}, "
                f"got one on {dict(mesh.shape)}"
            )


def check_pools(op: str, name: str, pools: Sequence[jax.Array], has_layer: bool) -> None:
    """Check how the pools are sharded, if they are arrays and not traced, as outside `jit`.

    The compiler comes to the same result, but reports it as an internal error.

    Args:
      op: name of the op, for messages.
      name: name of the argument.
      pools: one pool or two, as `kv_cache.pool_sizes` takes them.
      has_layer: whether the pools are stacked.

    Raises:
      ValueError: a pool is sharded on a dimension other than its pages, or the pools of a pair are
        sharded differently.
    """
    shardings = [None if isinstance(x, Tracer) else x.sharding for x in pools]
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    if len(named) < len(pools) or not any(_compat.partitions(s.spec) for s in named):
        return
    names = [name] if len(pools) == 1 else [f"{name}[0]", f"{name}[1]"]
    factors = _sharding.pool_factors((), pools, has_layer)
    operands = tuple(
        _sharding.Operand(name, tuple(dims), x.shape)
        for name, dims, x in zip(names, factors, pools, strict=True)
    )
    specs = [_padded(s.spec, x.ndim) for s, x in zip(named, pools, strict=True)]
    sizes = {axis: size for s in named for axis, size in s.mesh.shape.items()}
    _sharding.axes_of_pools(_sharding.Layout(op, operands, results=()), specs, sizes)


# ---- Calls -------------------------------------------------------------------------------------


def by_type(
    call: Call, local: Local, mesh: AbstractMesh, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Run a call with the specs that the operands' types give.

    Args:
      call: the call.
      local: runs it on one device's blocks.
      mesh: the mesh in the operands' types.
      operands: the operands, flat.
    """
    types = [jax.typeof(x) for x in operands]
    plan = call.plan(types, specs_of(types), mesh, strict=True)
    with jax.sharding.use_abstract_mesh(mesh):
        return _shard_map(
            call, plan, mesh, None, local, align_manual_axes(operands, call.is_query())
        )


def by_roles(
    call: Call,
    outer: jax.extend.core.Primitive,
    axes: _mesh_axes.MeshAxes,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """Run a call with the specs that `mesh=` gives.

    Args:
      call: the call.
      outer: the primitive to bind to one device's blocks.
      axes: the argument `mesh=`.
      operands: the operands, flat.

    Raises:
      ValueError: the mesh is missing, has no devices or is not the current one, its axes do not fit
        the call, or a pool is known to be sharded differently.
    """
    name = call.op.name
    mesh, current = _meshes(name, axes)
    has_devices = current is not None or not isinstance(mesh, AbstractMesh)
    if not has_devices and not any(map(_is_placed, operands)):
        raise ValueError(
            f"{name}: mesh: expected a Mesh, or arrays that are placed on one, got an "
            "AbstractMesh, which has no devices"
        )
    around = current or _abstract(mesh)
    layout = call.layout(operands)
    specs = axes.specs(layout, around)
    local = bool(_sharding.axes_of(axes.local_pages))
    plan = call.plan(operands, specs, around, strict=True, local_pages=local)
    for operand, x, spec in zip(layout.operands, operands, specs, strict=True):
        if operand.is_pool:
            _refuse_to_move(f"{name}: {operand.name}", x, spec, around)
    return _run_roles(call, outer, plan, mesh, current, *operands)


def num_local_groups(op: str, mesh: Mesh | _mesh_axes.MeshAxes | None) -> int:
    """Return how many groups of sequences have a part of the pool of their own.

    Args:
      op: name of the op, for messages.
      mesh: the argument `mesh=`.

    Returns:
      The number of groups; 0 if page ids are global.

    Raises:
      ValueError: the mesh is missing or is not the current one, or its axes do not fit it.
    """
    if mesh is None:
        return 0
    axes = _mesh_axes.MeshAxes.of(op, mesh)
    local = _sharding.axes_of(axes.local_pages)
    sizes = dict(_meshes(op, axes)[0].shape) if local else {}
    return math.prod(sizes[a] for a in local) if local else 0


def _meshes(op: str, axes: _mesh_axes.MeshAxes) -> tuple[Mesh | AbstractMesh, AbstractMesh | None]:
    """Return the mesh of the argument `mesh=`, and the current one if there is one."""
    current = jax.sharding.get_abstract_mesh()
    mesh = current if axes.mesh is None else axes.mesh
    if mesh.empty:
        raise ValueError(
            f"{op}: mesh: expected MeshAxes(mesh=...) outside jax.set_mesh, got no mesh"
        )
    if not current.empty and dict(mesh.shape) != dict(current.shape):
        raise ValueError(
            f"{op}: mesh: expected the axes of the current mesh (jax.set_mesh, or the manual "
            f"region around), {dict(current.shape)}, got a mesh of {dict(mesh.shape)}"
        )
    # In a manual region over some of the axes, only the other axes are left to split over.
    around = _abstract(mesh) if current.empty else current
    axes.check(op, around, _axes(around, AxisType.Manual))
    return mesh, None if current.empty else current


def _refuse_to_move(what: str, pool: jax.Array, wanted: Spec, mesh: AbstractMesh) -> None:
    """Raise ValueError if a pool is known to be sharded differently from what `mesh=` says.

    An array tells its sharding over all axes, a traced value only over the axes in its type.
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


def _is_placed(x: jax.Array) -> bool:
    """Return whether an array says on which devices it is, or need not know it yet."""
    return isinstance(x, Tracer) or isinstance(x.sharding, NamedSharding)


# Outside jit, shard_map would compile and run each operation of its body by itself.
@functools.partial(jax.jit, static_argnums=range(5), inline=True)
def _run_roles(
    call: Call,
    outer: jax.extend.core.Primitive,
    plan: _sharding.Plan,
    mesh: Mesh | AbstractMesh,
    current: AbstractMesh | None,
    *operands: jax.Array,
) -> list[jax.Array]:
    def local(blocks: Any, params: Any) -> list[jax.Array]:
        flat, tree = jax.tree.flatten(blocks)
        aligned = align_manual_axes(flat, Call(call.op, tree, params).is_query())
        return outer.bind(*aligned, tree=tree, params=params)

    return _shard_map(
        call, plan, mesh, current, local, align_manual_axes(operands, call.is_query())
    )


def _shard_map(
    call: Call,
    plan: _sharding.Plan,
    mesh: Mesh | AbstractMesh,
    current: AbstractMesh | None,
    local: Local,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """Run `local` on every device's blocks, manual over all axes that are not manual yet."""
    around = current or _abstract(mesh)
    manual, explicit = (_axes(around, kind) for kind in (AxisType.Manual, AxisType.Explicit))
    if explicit:  # shard_map wants the types that in_specs say; it is never the cache that moves
        operands = [
            _reshard(x, around, _only(spec, explicit))
            for x, spec in zip(operands, plan.operands, strict=True)
        ]
    return jax.shard_map(
        lambda *blocks: _collectives.run_local(call, plan, local, blocks),
        mesh=mesh if current is None else None,
        # An empty set means all axes, except Explicit ones that a vmap around this maps over.
        axis_names=frozenset(around.axis_names).difference(manual) if manual else frozenset(),
        in_specs=tuple(P(*s) for s in plan.operands),
        out_specs=[P(*s) for s in plan.results],
        check_vma=plan.typed,
    )(*operands)


def _reshard(x: jax.Array, mesh: AbstractMesh, wanted: tuple[_sharding.Axes, ...]) -> jax.Array:
    """Return `x` with this sharding over the Explicit axes in its type."""
    type_ = jax.typeof(x)
    typed = tuple(_sharding.axes_of(entry) for entry in specs_of([type_])[0])
    if typed == wanted and not _compat.reduced_axes(type_):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*wanted)))


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _axes(mesh: AbstractMesh, kind: AxisType) -> set[str]:
    """Return the names of the mesh's axes of one kind."""
    return {n for n, k in zip(mesh.axis_names, mesh.axis_types, strict=True) if k == kind}


def _only(spec: Spec, names: set[str]) -> tuple[_sharding.Axes, ...]:
    """Return `spec` without the axes that are not in `names`."""
    return tuple(tuple(a for a in _sharding.axes_of(e) if a in names) for e in spec)
