"""Sharded calls: right answers with exactly the communication that docs/sharding.md promises."""

import contextlib
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla.testing.hlo import Collective, collectives, memory, num_copies, pointers
from jax_mla.testing.inputs import decode_inputs
from jax_mla.testing.run import cpu_mesh

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

L, B, Q, H, D_CKV, D_KPE, SIZE = 2, 4, 2, 8, 32, 8, 4
INPUTS = decode_inputs(
    seq_lens=(0, 5, 16, 11), q_len=Q, num_heads=H, d_ckv=D_CKV, d_kpe=D_KPE, page_size=SIZE,
    dtype="float32", num_layers=L, page_multiple=8,
)  # fmt: skip
ARGS = INPUTS.args()
OPTIONS = {**INPUTS.kwargs(), "return_lse": True}
NUM_PAGES, MAX = ARGS[2].shape[1], ARGS[3].shape[1]
KINDS = {
    "auto": (AxisType.Auto,) * 3,
    "explicit": (AxisType.Explicit,) * 3,
    "mixed_dp": (AxisType.Explicit, AxisType.Auto, AxisType.Auto),
    "mixed_tp_cp": (AxisType.Auto, AxisType.Explicit, AxisType.Explicit),
}


def make_mesh(kind: str = "auto", names=("dp", "tp", "cp"), sizes=(2, 2, 2)) -> jax.sharding.Mesh:
    return cpu_mesh(sizes, names, KINDS[kind][: len(names)])


def specs(batch=None, heads=None, pages=None) -> tuple[P, ...]:
    """Shardings of q_nope, q_pe, kv_pages, page_table, seq_lens."""
    query = P(batch, None, heads)
    return query, query, P(None, pages), P(batch), P(batch)


def put(arrays, mesh, specs_):
    return [
        jax.device_put(jnp.array(x), NamedSharding(mesh, s))
        for x, s in zip(arrays, specs_, strict=True)
    ]


def context(mesh, kind: str):
    return contextlib.nullcontext() if kind == "auto" else jax.set_mesh(mesh)


@functools.cache
def reference():
    out, lse = jax_mla.reference.decode(*ARGS, **OPTIONS)
    return np.asarray(out), np.asarray(lse)


def decode(*args, **kwargs):
    return jax_mla.decode(*args, **OPTIONS, **kwargs)


def check(got, want=None) -> None:
    for a, b in zip(got, want or reference(), strict=True):
        a = np.asarray(a)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        np.testing.assert_allclose(a[finite], b[finite], atol=1e-5)


def compile_and_check(fun, args, want=None):
    compiled = jax.jit(fun).lower(*args).compile()
    got = compiled(*args)
    check(got, want)
    return got, collectives(compiled)


def gather(*shape: int, itemsize: int = 4) -> Collective:
    return Collective("all-gather", itemsize * math.prod(shape), (shape,))


def merge_of(b: int, h: int, shards: int = 2) -> list[Collective]:
    """One max over lse with a slot a shard, one sum over the weighted out; in order of bytes."""
    lse, out = (shards, b, Q, h), (b, Q, h, D_CKV)
    return [
        Collective("all-reduce", 4 * math.prod(lse), (lse,)),
        Collective("all-reduce", 4 * math.prod(out), (out,)),
    ]


CASES = [
    {"batch": b, "heads": h, "pages": p}
    for b, h, p in itertools.product((None, "dp"), (None, "tp"), (None, "cp"))
] + [
    {"batch": ("dp", "cp"), "heads": "tp"},
    {"batch": ("cp", "dp"), "heads": "tp"},
    {"heads": ("tp", "cp"), "batch": "dp"},
    {"pages": ("cp", "dp"), "heads": "tp"},
    {"pages": ("dp", "tp", "cp")},
]


def case_id(case) -> str:
    return ",".join(f"{k}@{v if isinstance(v, str) else '+'.join(v)}" for k, v in case.items() if v)


def size_of(axes) -> int:
    return 2 ** (0 if axes is None else 1 if isinstance(axes, str) else len(axes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_combination(kind, case) -> None:
    """Nothing for sequences and heads; one max and one sum for pages."""
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs(**case))
        (out, lse), found = compile_and_check(decode, args)
        b, h = B // size_of(case.get("batch")), H // size_of(case.get("heads"))
        assert found == (merge_of(b, h, size_of(case["pages"])) if case.get("pages") else [])
        want = NamedSharding(mesh, specs(**case)[0])
        assert out.sharding.is_equivalent_to(want, 4) and lse.sharding.is_equivalent_to(want, 3)
        if kind == "explicit":
            spec = jax.typeof(out).sharding.spec
            assert (spec[0], spec[2]) == (case.get("batch"), case.get("heads"))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_pages_on_one_axis(kind) -> None:
    """The cache stays; the query is gathered over tp, and its sum comes back scattered."""
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", "tp"))
        (out, _), found = compile_and_check(decode, args)
    b = B // 2
    scattered = (b, Q, H // 2, D_CKV)
    assert found == sorted(
        [
            gather(b, Q, H, D_CKV),
            gather(b, Q, H, D_KPE),
            merge_of(b, H)[0],
            Collective("reduce-scatter", 4 * math.prod(scattered), (scattered,)),
        ]
    )
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_on_one_of_two_axes_of_the_pages(kind) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", ("cp", "tp")))
        (out, _), found = compile_and_check(decode, args)
    b = B // 2
    gathers = [gather(b, Q, H, D_CKV), gather(b, Q, H, D_KPE)]
    assert found == sorted([*gathers, *merge_of(b, H, 4)])
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_and_pages_on_one_axis(kind) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", "dp"))
        (out, _), found = compile_and_check(decode, args)
    h = H // 2
    scattered = (B // 2, Q, h, D_CKV)
    gathers = [gather(B, Q, h, D_CKV), gather(B, Q, h, D_KPE), gather(B, MAX), gather(B)]
    total = Collective("reduce-scatter", 4 * math.prod(scattered), (scattered,))
    assert found == sorted([*gathers, merge_of(B, h)[0], total])
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_sequences_and_pages_on_one_axis(kind) -> None:
    """Of the two dimensions that lose the axis, the query's own gets it back."""
    mesh = make_mesh(kind)
    spec = [P(None, None, "tp"), P(None, None, "tp"), P(None, "tp"), P("tp"), P("tp")]
    with context(mesh, kind):
        args = put(ARGS, mesh, spec)
        (out, _), found = compile_and_check(decode, args)
    scattered = (B, Q, H // 2, D_CKV)
    query = [gather(B, Q, H, D_CKV), gather(B, Q, H, D_KPE)]
    total = Collective("reduce-scatter", 4 * math.prod(scattered), (scattered,))
    assert found == sorted([*query, gather(B, MAX), gather(B), merge_of(B, H)[0], total])
    assert out.sharding.is_equivalent_to(args[0].sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [(3, 4), (0,), (0, 1)], ids=str)
def test_replicated_operands_are_sliced_not_communicated(kind, whole) -> None:
    mesh = make_mesh(kind)
    spec = [P() if i in whole else s for i, s in enumerate(specs("dp", "tp", None))]
    with context(mesh, kind):
        _, found = compile_and_check(decode, put(ARGS, mesh, spec))
    assert found == []


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_other_names_and_split_cache(kind) -> None:
    mesh = make_mesh(kind, names=("rows", "x"), sizes=(2, 4))
    q_nope, q_pe, pool, table, lens = ARGS
    cache = (pool[..., :D_CKV], pool[..., D_CKV:])
    q_spec, _, pool_spec, table_spec, lens_spec = specs("rows", None, "x")
    with context(mesh, kind):
        query = put((q_nope, q_pe, table, lens), mesh, (q_spec, q_spec, table_spec, lens_spec))
        args = (*query[:2], tuple(put(cache, mesh, (pool_spec,) * 2)), *query[2:])
        _, found = compile_and_check(decode, args)
    assert found == merge_of(B // 2, H, 4)


def test_auto_mesh_as_the_current_one() -> None:
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        _, found = compile_and_check(decode, put(ARGS, mesh, specs("dp", "tp", "cp")))
    assert found == merge_of(B // 2, H // 2)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("pages", ["cp", "tp"])
def test_axes_of_size_1_stay_in_the_types(sizes, kind, pages) -> None:
    mesh = make_mesh(kind, sizes=sizes)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", pages))
        (out, _), found = compile_and_check(decode, args)
        if kind == "explicit":
            assert jax.typeof(out).sharding == jax.typeof(args[0]).sharding
            jax.jit(lambda a, b: a + b)(out, args[0])
    if dict(mesh.shape)[pages] == 1:
        assert found == []


def test_out_shardings_alone_do_not_gather() -> None:
    mesh = make_mesh()
    fun = jax.jit(decode, out_shardings=NamedSharding(mesh, P("dp", None, "tp")))
    args = put(ARGS, mesh, specs("dp", "tp", "cp"))
    compiled = fun.lower(*args).compile()
    check(compiled(*args))
    assert collectives(compiled) == merge_of(B // 2, H // 2)


# ---- mesh=, manual regions ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES[-6:], ids=case_id)
def test_mesh_argument(kind, case) -> None:
    if "mixed" in kind and any(isinstance(axes, tuple) for axes in case.values()):
        pytest.skip("JAX gathers the result if axes of two kinds split one of its dimensions")
    mesh = make_mesh(kind)
    axes = jax_mla.MeshAxes(mesh, **case)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs(**case))
        _, found = compile_and_check(functools.partial(decode, mesh=axes), args)
    b, h = B // size_of(case.get("batch")), H // size_of(case.get("heads"))
    assert found == (merge_of(b, h, size_of(case["pages"])) if case.get("pages") else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("axes", "result"),
    [
        ({"batch": "dp", "heads": "dp", "pages": "dp"}, P("dp")),
        ({"batch": ("dp", "tp"), "heads": "tp", "pages": "tp"}, P(("dp", "tp"))),
        (
            {"batch": "dp", "heads": ("tp", "cp"), "pages": ("cp", "dp")},
            P("dp", None, ("tp", "cp")),
        ),
        ({"batch": "dp", "heads": "dp"}, P("dp")),
    ],
    ids=str,
)
def test_mesh_argument_with_an_axis_on_several_dimensions(kind, axes, result) -> None:
    mesh = make_mesh(kind)
    roles = jax_mla.MeshAxes(mesh, **axes)
    with context(mesh, kind):
        out, lse = jax.jit(functools.partial(decode, mesh=roles))(*ARGS)
    check((out, lse))
    if "mixed" not in kind:  # JAX gathers where axes of two kinds split one dimension
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, result), 4)


def test_plain_mesh_argument_uses_the_usual_names() -> None:
    mesh = make_mesh()
    _, found = compile_and_check(
        functools.partial(decode, mesh=mesh), put(ARGS, mesh, specs("dp", "tp", "cp"))
    )
    assert found == merge_of(B // 2, H // 2)
    check(decode(*ARGS, mesh=mesh))  # eager, from one device


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_mesh_argument_outside_set_mesh(kind, jit) -> None:
    """The operands may be sharded as it says, replicated, or have no mesh in their types."""
    mesh = make_mesh(kind)
    roles = jax_mla.MeshAxes(mesh, batch="dp", heads="tp", pages="cp")
    fun = jit(functools.partial(decode, mesh=roles))
    for args in (put(ARGS, mesh, specs("dp", "tp", "cp")), put(ARGS, mesh, specs()), ARGS):
        check(fun(*args))
    fun = jit(functools.partial(jax_mla.append, layer=1, mesh=mesh))
    want = jax_mla.reference.append(*append_args(), layer=1)
    spec = (P(None, "cp"), *(P("dp"),) * 4)
    for args in (put(append_args(), mesh, spec), map(jnp.array, append_args())):
        np.testing.assert_array_equal(fun(*args), want)


@pytest.mark.parametrize("op", ["decode", "append"])
def test_mesh_argument_compiles_once_outside_jit(op) -> None:
    mesh, compiled = make_mesh(), []
    rows = [jnp.array(x) for x in append_args()]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(duration_secs)

    def call() -> None:
        if op == "decode":
            jax.block_until_ready(decode(*ARGS, mesh=mesh))
        else:
            jax.block_until_ready(jax_mla.append(*rows, layer=1, mesh=mesh))

    call()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 2.5)(1.0)
        assert compiled  # the event is called what it was
        compiled.clear()
        call()
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_mesh_argument_never_moves_the_cache() -> None:
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, specs("dp", "tp", "tp"))
        with pytest.raises(
            ValueError, match="kv_pages: expected the sharding .*cp.*never moves the cache"
        ):
            decode(*args, mesh=mesh)


@pytest.mark.parametrize("spec", [P(None, "tp"), P(None, None, "cp"), P(None, ("cp", "tp"))])
def test_mesh_argument_outside_jit_never_moves_the_cache(spec) -> None:
    """No type says it on Auto axes, but the array does."""
    mesh = make_mesh()
    args = put(ARGS, mesh, specs("dp", "tp"))
    args[2] = jax.device_put(args[2], NamedSharding(mesh, spec))
    rows = (args[2], *map(jnp.array, append_args()[1:]))
    message = r"kv_pages: expected the sharding .*cp.*never moves the cache"
    with pytest.raises(ValueError, match="jax_mla.decode: " + message):
        decode(*args, mesh=mesh)
    with pytest.raises(ValueError, match="jax_mla.append: " + message):
        jax_mla.append(*rows, layer=1, mesh=mesh)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mesh_argument_ignores_axes_of_size_1_of_the_cache(kind) -> None:
    mesh = make_mesh(kind, sizes=(2, 1, 2))
    roles = jax_mla.MeshAxes(batch="dp", heads="tp", pages="cp")
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, specs("dp", "tp", ("tp", "cp")))
        check(decode(*args, mesh=roles))


def test_plain_mesh_argument_without_the_usual_names_is_an_error() -> None:
    """It would say that nothing is sharded, and the cache would be gathered."""
    mesh = make_mesh(names=("data", "model"), sizes=(2, 4))
    with pytest.raises(ValueError, match=r"mesh: expected an axis named dp, tp or cp.*MeshAxes"):
        decode(*ARGS, mesh=mesh)


@pytest.mark.parametrize("kind", KINDS)
def test_in_64_bit_mode(kind) -> None:
    """Counts of devices and tokens stay int32: tests promote strictly."""
    mesh = make_mesh(kind)
    with jax.enable_x64(True), context(mesh, kind):
        check(jax.jit(decode)(*put(ARGS, mesh, specs("dp", "tp", "cp"))))
        check(jax_mla.reference.decode(*ARGS, **OPTIONS))


def test_mesh_argument_over_manual_axes_is_an_error() -> None:
    """In a `shard_map` over all axes the operands are one device's blocks already."""
    mesh = make_mesh()
    fun = jax.shard_map(
        functools.partial(decode, mesh=mesh), mesh=mesh, in_specs=P(), out_specs=P()
    )
    message = r"mesh: expected batch over axes that are not manual, \[\], got 'dp': a shard_map has"
    with pytest.raises(ValueError, match=message):
        fun(*ARGS)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mesh_argument_has_to_be_the_current_mesh(kind) -> None:
    """With other sizes every device would take pages that it does not have for its own."""
    current, other = (make_mesh(kind, ("dp", "cp"), sizes) for sizes in ((2, 4), (4, 2)))
    permuted = make_mesh(kind, ("cp", "dp"), (4, 2))
    message = r"mesh: expected the axes of the current mesh.*'cp': 4.*got a mesh of .*'cp': 2"
    with jax.set_mesh(current):
        args = put(ARGS, current, specs("dp", None, "cp"))
        with pytest.raises(ValueError, match=message):
            decode(*args, mesh=other)
        check(decode(*args, mesh=permuted))


def manual(*args):
    begin = jax.lax.axis_index("cp") * args[2].shape[1]
    return jax_mla.merge(*decode(*args, page_begin=begin), axis_name="cp")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_manual_region(kind, check_vma) -> None:
    mesh = make_mesh(kind)
    in_specs = specs("dp", "tp", "cp")
    fun = jax.shard_map(
        manual, mesh=mesh, in_specs=in_specs, out_specs=(in_specs[0],) * 2, check_vma=check_vma
    )
    with context(mesh, kind):
        _, found = compile_and_check(fun, put(ARGS, mesh, in_specs))
    assert found == merge_of(B // 2, H // 2)


def test_manual_region_checks_that_parts_are_merged() -> None:
    """Partial results are not replicated, and the types know it."""
    mesh = make_mesh()
    in_specs = specs("dp", "tp", "cp")
    fun = jax.shard_map(decode, mesh=mesh, in_specs=in_specs, out_specs=(in_specs[0],) * 2)
    with pytest.raises(ValueError, match="replicated across mesh axis 'cp'"):
        jax.jit(fun)(*put(ARGS, mesh, in_specs))


PARTLY = {"axis_names": {"cp"}, "in_specs": (P(), P(), P(None, "cp"), P(), P()), "out_specs": P()}


@pytest.mark.parametrize("set_mesh", [False, True])
def test_partly_manual_is_refused_with_the_way_out(set_mesh) -> None:
    mesh = make_mesh()
    args = put(ARGS, mesh, specs("dp", "tp", "cp"))
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        fun = jax.jit(jax.shard_map(manual, mesh=mesh, **PARTLY))
        message = r"manual axes \{cp\} and auto axes \{dp, tp\}.*mesh=jax_mla.MeshAxes"
        with pytest.raises(ValueError, match=message):
            fun.lower(*args)


@pytest.mark.parametrize("check_vma", [True, False])
def test_partly_manual_with_mesh_argument(check_vma) -> None:
    mesh = make_mesh()

    def fun(*args):
        begin = jax.lax.axis_index("cp") * args[2].shape[1]
        axes = jax_mla.MeshAxes(batch="dp", heads="tp")
        return jax_mla.merge(*decode(*args, page_begin=begin, mesh=axes), axis_name="cp")

    partly = jax.shard_map(fun, mesh=mesh, check_vma=check_vma, **PARTLY)
    _, found = compile_and_check(partly, put(ARGS, mesh, specs("dp", "tp", "cp")))
    assert found == merge_of(B // 2, H // 2)


def test_partly_manual_with_the_rest_explicit() -> None:
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, specs("dp", "tp", "cp"))
        _, found = compile_and_check(jax.shard_map(manual, **PARTLY), args)
    reduces = [c for c in found if c.kind == "all-reduce"]
    assert reduces == merge_of(B // 2, H // 2)
    if jax.__version_info__ >= (0, 11):  # 0.10 gathers at the border of any such region
        assert found == reduces


# ---- What cannot be served ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "dimension"),
    [
        (P(None, None, None, "cp"), "last"),
        (P(None, None, "cp"), "page_size"),
        (P("cp"), "layers"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["decode", "append"])
def test_cache_sharded_elsewhere_is_an_error(kind, spec, dimension, op) -> None:
    """While tracing if the types show it, else while compiling; it says what to do."""
    mesh = make_mesh(kind)
    message = (
        rf"jax_mla.{op}: kv_pages: expected only its num_pages dimension sharded, got its "
        rf"{dimension} dimension sharded over \['cp'\]; shard the cache over pages"
    )
    error = ValueError if "auto" not in kind and "dp" not in kind else jax.errors.JaxRuntimeError
    with context(mesh, kind):
        q_nope, q_pe, pool, table, lens = put(ARGS, mesh, specs())
        pool = jax.device_put(jnp.array(ARGS[2]), NamedSharding(mesh, spec))
        if op == "decode":
            lowered = lambda: jax.jit(decode).lower(q_nope, q_pe, pool, table, lens)  # noqa: E731
        else:
            rows = put(append_args()[1:], mesh, (P(),) * 4)
            lowered = lambda: jax.jit(  # noqa: E731
                functools.partial(jax_mla.append, layer=0)
            ).lower(pool, *rows)
        if error is ValueError:
            with pytest.raises(ValueError, match=message):
                lowered()
        else:
            with pytest.raises(error, match=message):
                lowered().compile()


def test_explicit_operands_that_disagree_are_an_error() -> None:
    mesh = make_mesh("explicit")
    spec = list(specs("dp", None, None))
    spec[3] = P("tp")
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"page_table: expected dimension 0 sharded over \['dp'\]"),
    ):
        jax.jit(decode).lower(*put(ARGS, mesh, spec))


@pytest.mark.parametrize("region", ["explicit", "manual"])
def test_unreduced_operand_is_an_error(region) -> None:
    """Attention to a sum is not the sum of the attentions to its terms."""
    mesh = make_mesh("explicit", ("tp",), (8,))
    q_nope, *rest = ARGS

    def explicit(x, w, *rest):
        out = P(None, None, None, None, unreduced=frozenset({"tp"}))
        return decode(jnp.einsum("bqhi,id->bqhd", x, w, out_sharding=out), *rest)

    def local(x, w, *rest):
        out = jax.lax.pcast(jnp.einsum("bqhi,id->bqhd", x, w), "tp", to="unreduced")
        return decode(out, *rest)

    in_specs = (P(None, None, None, "tp"), P("tp"), *specs()[1:])
    fun = (
        explicit if region == "explicit" else jax.shard_map(local, in_specs=in_specs, out_specs=P())
    )
    message = r"jax_mla.decode: q_nope: expected a value, got one that is unreduced over \['tp'\]"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.jit(fun).lower(*put((q_nope, np.eye(D_CKV, dtype=np.float32), *rest), mesh, in_specs))


@pytest.mark.parametrize("mesh_argument", [False, True])
@pytest.mark.parametrize("operand", range(5))
def test_reduced_operand_is_a_replicated_one(operand, mesh_argument) -> None:
    mesh = make_mesh("explicit")
    spec = list(specs("dp", None, "cp"))
    kwargs = {"mesh": jax_mla.MeshAxes(batch="dp", pages="cp")} if mesh_argument else {}
    with jax.set_mesh(mesh):
        args = put(ARGS, mesh, spec)
        typed = P(*spec[operand].partitions, reduced=frozenset({"tp"}))
        args[operand] = jax.sharding.reshard(args[operand], typed)
        assert jax.typeof(args[operand]).sharding.spec.reduced
        (out, _), found = compile_and_check(functools.partial(decode, **kwargs), args)
        check(decode(*args, **kwargs))
        assert jax.typeof(out).sharding == NamedSharding(
            mesh.abstract_mesh, P("dp", None, None, None)
        )
    assert found == merge_of(B // 2, H)


def test_operands_on_two_explicit_meshes_are_an_error() -> None:
    one, other = make_mesh("explicit"), make_mesh("explicit", ("x",), (8,))
    args = put(ARGS, one, specs("dp", "tp"))
    args[2] = jax.device_put(jnp.array(ARGS[2]), NamedSharding(other, P(None, "x")))
    message = r"kv_pages: expected an array on the mesh of q_nope, .*'dp': 2.*got one on .*'x': 8"
    with pytest.raises(ValueError, match=message):
        decode(*args)


# ---- append ------------------------------------------------------------------------------------


@functools.cache
def append_args() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    ckv = rng.standard_normal((B, Q, D_CKV)).astype(np.float32)
    kpe = rng.standard_normal((B, Q, D_KPE)).astype(np.float32)
    lens = INPUTS.seq_lens
    positions = np.stack([lens - 2, lens - 1], axis=1).astype(np.int32)
    positions[3, 0] = MAX * SIZE  # past the table
    pool = np.where(np.isnan(INPUTS.kv_pages), 0, INPUTS.kv_pages)
    return pool, ckv, kpe, INPUTS.page_table, positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "pages"),
    [
        (None, None), (None, "cp"), (None, ("tp", "cp")), ("dp", None), ("dp", "cp"),
        ("dp", "dp"), (("tp", "dp"), "cp"), (("dp", "tp"), ("dp", "cp")),
    ],
)  # fmt: skip
def test_append(kind, batch, pages) -> None:
    """In place on every device; a sharded batch costs one all-gather of the new rows and slots."""
    mesh = make_mesh(kind)
    spec = (P(None, pages), P(batch), P(batch), P(batch), P(batch))
    fun = jax.jit(functools.partial(jax_mla.append, layer=jnp.int32(1)), donate_argnums=0)
    want = jax_mla.reference.append(*append_args(), layer=1)
    with context(mesh, kind):
        pool, *rows = put(append_args(), mesh, spec)
        compiled = fun.lower(pool, *rows).compile()
        before = pointers(pool)
        shard = pool.addressable_shards[0].data.shape
        got = fun(pool, *rows)
    np.testing.assert_array_equal(got, want)
    assert pointers(got) == before and num_copies(compiled, shard) == 0
    words = D_CKV + D_KPE + 2  # float32: 4 bytes a value and a slot is two int32
    assert collectives(compiled) == ([gather(B, Q, words)] if batch else [])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec[0]), 4)


def test_append_rows_in_bfloat16_move_as_such() -> None:
    mesh = make_mesh()
    pool, ckv, kpe, table, positions = append_args()
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (pool, ckv, kpe)] + [table, positions]
    args = put(arrays, mesh, (P(None, "cp"), *(P("dp"),) * 4))
    compiled = jax.jit(functools.partial(jax_mla.append, layer=1)).lower(*args).compile()
    want = jax_mla.reference.append(*map(jnp.asarray, arrays), layer=1)
    np.testing.assert_array_equal(compiled(*args), want)
    assert collectives(compiled) == [gather(B, Q, D_CKV + D_KPE + 4, itemsize=2)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_append_in_a_manual_region(check_vma) -> None:
    mesh = make_mesh()
    spec = (P(None, "cp"), P(), P(), P(), P())

    def local(pool, *rows):
        begin = jax.lax.axis_index("cp") * pool.shape[1]
        return jax_mla.append(pool, *rows, layer=1, page_begin=begin)

    fun = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec[0], check_vma=check_vma)
    compiled = jax.jit(fun, donate_argnums=0).lower(*put(append_args(), mesh, spec)).compile()
    args = put(append_args(), mesh, spec)
    before = pointers(args[0])
    got = compiled(*args)
    np.testing.assert_array_equal(got, jax_mla.reference.append(*append_args(), layer=1))
    assert pointers(got) == before and collectives(compiled) == []


# ---- Layer scan, vmap, eager, AOT --------------------------------------------------------------


def step(q, q_pe, pool, table, lens, ckv, kpe, positions, *, ops=jax_mla, **kwargs):
    def layer(carry, index):
        q, pool = carry
        pool = ops.append(pool, ckv, kpe, table, positions, layer=index, **kwargs)
        out = ops.decode(q, q_pe, pool, table, lens, sm_scale=0.3, layer=index, **kwargs)
        return (q + out, pool), None

    return jax.lax.scan(layer, (q, pool), jnp.arange(L, dtype=jnp.int32))[0]


@pytest.mark.parametrize("kind", [*KINDS, "mesh"])
@pytest.mark.parametrize(
    ("batch", "heads", "pages"),
    [(None, "tp", "cp"), ("dp", "tp", "cp"), ("dp", "tp", None), (None, "tp", "tp")],
)
def test_scan_over_layers_in_place(kind, batch, heads, pages) -> None:
    pool, ckv, kpe, table, positions = append_args()
    arrays = (*ARGS[:2], pool, table, ARGS[4], ckv, kpe, positions)
    spec = (*specs(batch, heads, pages), P(batch), P(batch), P(batch))
    want = step(*map(jnp.asarray, arrays), ops=jax_mla.reference)
    mesh = make_mesh("auto" if kind == "mesh" else kind)
    axes = jax_mla.MeshAxes(mesh, batch=batch, heads=heads, pages=pages)
    fun = functools.partial(step, **({"mesh": axes} if kind == "mesh" else {}))
    with context(mesh, "auto" if kind == "mesh" else kind):
        args = put(arrays, mesh, spec)
        args[2] = jax.jit(lambda x: x + 0)(args[2])  # not the host's memory
        jitted = jax.jit(fun, donate_argnums=2)
        compiled = jitted.lower(*args).compile()
        before, shard = pointers(args[2]), args[2].addressable_shards[0].data
        q, pool = jitted(*args)
    check((q, pool), [np.asarray(x) for x in want])
    assert pointers(pool) == before
    assert num_copies(compiled, shard.shape) == num_copies(compiled, shard.shape[1:]) == 0
    assert memory(compiled).alias_size_in_bytes == shard.nbytes
    cache_shapes = {shard.shape[i:] for i in (0, 1)} | {pool.shape[i:] for i in (0, 1)}
    found = collectives(compiled)
    assert not any(cache_shapes & set(c.shapes) for c in found)
    reduces = 2 if pages else 0
    gathers = (1 if batch else 0) + (2 if pages == heads else 0)
    assert len(found) == reduces + gathers


VMAPS = [
    # in_axes, axes of the mapped dimension, of the batch and of the pages
    ("query", (0, 0, None, None, None), "cp", "dp", None),
    ("query, merged", (0, 0, None, None, None), None, "dp", "cp"),
    ("sequences", (0, 0, None, 0, 0), None, "dp", None),
    ("sequences, mapped axis sharded", (0, 0, None, 0, 0), "dp", None, None),
    ("pools, mapped axis sharded", (0, 0, 0, 0, 0), "dp", None, None),
    ("pools, mapped axis sharded, merged", (0, 0, 0, 0, 0), "dp", None, "cp"),
    ("pools", (None, None, 0, None, None), None, "dp", None),
]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("in_axes", "mapped", "batch", "pages"), [v[1:] for v in VMAPS], ids=[v[0] for v in VMAPS]
)
def test_vmap_adds_no_collective(kind, in_axes, mapped, batch, pages) -> None:
    mesh = make_mesh(kind)
    stacked = [
        x if d is None else jnp.stack([x, x * 1]) for x, d in zip(ARGS, in_axes, strict=True)
    ]
    spec = [
        s if d is None else P(mapped, *s)
        for s, d in zip(specs(batch, "tp", pages), in_axes, strict=True)
    ]
    want = jax.vmap(
        functools.partial(jax_mla.reference.decode, **OPTIONS), in_axes=in_axes
    )(*stacked)  # fmt: skip
    with context(mesh, kind):
        _, found = compile_and_check(
            jax.vmap(decode, in_axes=in_axes),
            put(stacked, mesh, spec),
            [np.asarray(x) for x in want],
        )
    assert [c.kind for c in found] == (["all-reduce"] * 2 if pages else [])


@pytest.mark.parametrize("in_axes", [(0, 0, None, None, None), (0, 0, None, 0, 0), (0, 0, 0, 0, 0)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_over_a_sharded_axis_with_mesh_argument(kind, in_axes) -> None:
    """Explicit types say which axis vmap maps over; on Auto axes `spmd_axis_name=` has to."""
    mesh = make_mesh(kind)
    roles = jax_mla.MeshAxes(mesh, heads="tp", pages="cp")
    stacked = [
        x if d is None else jnp.stack([x, x * 1]) for x, d in zip(ARGS, in_axes, strict=True)
    ]
    spec = [
        s if d is None else P("dp", *s)
        for s, d in zip(specs(None, "tp", "cp"), in_axes, strict=True)
    ]
    over = "dp" if kind == "auto" else None
    fun = jax.vmap(functools.partial(decode, mesh=roles), in_axes, spmd_axis_name=over)
    want = [np.stack([x, x]) for x in reference()]
    with context(mesh, kind):
        _, found = compile_and_check(fun, put(stacked, mesh, spec), want)
    if kind == "auto" or jax.__version_info__ >= (0, 11):  # 0.10 gathers for any such shard_map
        assert [c.kind for c in found] == ["all-reduce"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_aot(kind) -> None:
    mesh = make_mesh(kind)
    with context(mesh, kind):
        args = put(ARGS, mesh, specs("dp", "tp", "cp"))
        check(decode(*args))
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
        compiled = jax.jit(decode).lower(*structs).compile()
        check(compiled(*args))
        pool, *rows = append_args()
        pool, *rows = put((pool, *rows), mesh, (P(None, "cp"), *(P("dp"),) * 4))
        got = jax_mla.append(pool, *rows, layer=1)
        np.testing.assert_array_equal(got, jax_mla.reference.append(*append_args(), layer=1))
        assert not pool.is_deleted()
    assert collectives(compiled) == merge_of(B // 2, H // 2)


def test_empty_shards_are_neutral() -> None:
    """All pages of all sequences on one device; the others own nothing."""
    q_nope, q_pe, pool, table, lens = ARGS
    front = jnp.concatenate([pool, jnp.full((L, 3 * NUM_PAGES, *pool.shape[2:]), jnp.nan)], axis=1)
    mesh = make_mesh(names=("cp",), sizes=(4,))
    args = put((q_nope, q_pe, front, table, lens), mesh, specs(pages="cp"))
    (out, lse), found = compile_and_check(decode, args)
    assert found == merge_of(B, H, 4)
    assert (np.asarray(out[0]) == 0).all() and np.isneginf(np.asarray(lse[0])).all()
