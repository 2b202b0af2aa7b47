"""ragged_paged_attention in JAX: sharding, vmap, in place, lowering, export."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import KINDS, PADDING, check_step, context, gather, laid_out, make_mesh, put, size_of

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.hlo import Collective, collectives, memory, num_copies, pointers
from jax_mla.testing.ragged import ragged_inputs

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

H, D_CKV, D_KPE, LAYERS = 4, 32, 8, 2
SHAPE: dict[str, Any] = {
    "num_heads": H, "d_ckv": D_CKV, "d_kpe": D_KPE, "page_size": 4, "dtype": "float32",
    "num_layers": LAYERS,
}  # fmt: skip
SEQS, Q = 4, 2
UNIFORM = ragged_inputs(seqs=((Q, 5), (Q, 16), (Q, 2), (Q, 9)), is_uniform=True, **SHAPE)
RAGGED = ragged_inputs(seqs=((1, 5), (4, 16), (0, 7), (2, 9)), num_padding=1, **SHAPE)
TOKENS = SEQS * Q
assert len(UNIFORM.q_nope) == len(RAGGED.q_nope) == TOKENS


def arguments(inputs, multiple: int = 8) -> list[Any]:
    """The arguments without NaN, and with pages that divide among devices."""
    args: list[Any] = [x if x is None else jnp.nan_to_num(x) for x in inputs.args()[:8]]
    extra = -args[4].shape[1] % multiple
    args[4] = jnp.pad(args[4], ((0, 0), (0, extra), (0, 0), (0, 0)))
    return args if inputs.cu_q_lens is not None else args[:7]


def attend(*args, **kwargs) -> Any:
    return jax_mla.ragged_paged_attention(
        *args, sm_scale=0.2, layer=jnp.int32(1), return_lse=True, **kwargs
    )


@functools.cache
def reference(inputs_id: str, num_seqs: int | None = None):
    args = arguments(UNIFORM if inputs_id == "uniform" else RAGGED)
    return jax_mla.reference.ragged_paged_attention(
        *args, num_seqs=num_seqs, sm_scale=0.2, layer=1, return_lse=True
    )


def specs(batch, heads, pages, num_args: int) -> tuple[P, ...]:
    rows, query = P(batch), P(batch, heads)
    return (query, query, rows, rows, P(None, pages), rows, rows, P())[:num_args]


def merge_of(tokens: tuple[int, ...], heads: int, shards: int) -> list[Collective]:
    lse, out = (shards, *tokens, heads), (*tokens, heads, D_CKV)
    return [Collective("all-reduce", 4 * int(np.prod(s)), (s,)) for s in (lse, out)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "batch", "pages"),
    [
        ("ragged", None, None), ("ragged", None, "cp"), ("ragged", None, ("dp", "cp")),
        ("uniform", None, "cp"), ("uniform", "dp", None), ("uniform", "dp", "cp"),
    ],
)  # fmt: skip
def test_sharded(name, batch, pages, kind) -> None:
    """In place on every device. Heads cost nothing, pages a merge, sequences their new rows."""
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    mesh, spec = make_mesh(kind), specs(batch, "tp", pages, len(args))
    fun = jax.jit(attend, donate_argnums=4)
    with context(mesh, kind):
        placed = put(args, mesh, spec)
        compiled = fun.lower(*placed).compile()
        before, shard = pointers(placed[4]), placed[4].addressable_shards[0].data.shape
        got = fun(*placed)
    check_step(got, reference(name))
    assert pointers(got[2]) == before and num_copies(compiled, shard) == 0
    assert got[2].sharding.is_equivalent_to(NamedSharding(mesh, spec[4]), 4)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec[0]), 3)
    tokens = (SEQS // size_of(batch), Q) if name == "uniform" else (TOKENS,)
    expected = [gather(SEQS, Q, D_CKV + D_KPE + 2)] if batch else []
    expected += merge_of(tokens, H // 2, size_of(pages)) if pages else []
    assert collectives(compiled) == sorted(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["uniform", "ragged"])
@pytest.mark.parametrize("has_layer", [True, False])
@pytest.mark.parametrize("form", ["wide", "packs"])
def test_sharded_pools_of_other_engines(form, has_layer, name, kind) -> None:
    """In place on every device, with the collectives of other pools, and the padding stays."""
    is_uniform = name == "uniform"
    args, want = arguments(UNIFORM if is_uniform else RAGGED), [*reference(name)]
    args[4], want[2] = (laid_out(x if has_layer else x[1], form) for x in (args[4], want[2]))
    mesh = make_mesh(kind)
    spec = [*specs("dp" if is_uniform else None, "tp", "cp", len(args))]
    spec[4] = spec[4] if has_layer else P("cp")
    options: dict[str, Any] = {"layer": 1 if has_layer else None, "packs": form == "packs"}
    fun = functools.partial(
        jax_mla.ragged_paged_attention, **options, sm_scale=0.2, return_lse=True
    )
    fun = jax.jit(fun, donate_argnums=4)
    with context(mesh, kind):
        placed = put(args, mesh, spec)
        placed[4] = jnp.copy(placed[4])  # not the host's memory
        compiled = fun.lower(*placed).compile()
        before, shard = pointers(placed[4]), placed[4].addressable_shards[0].data.shape
        got = fun(*placed)
    check_step(got, want)
    assert pointers(got[2]) == before and num_copies(compiled, shard) == 0
    tokens = (SEQS // 2, Q) if is_uniform else (TOKENS,)
    expected = [gather(SEQS, Q, D_CKV + D_KPE + 2)] if is_uniform else []
    assert collectives(compiled) == sorted(expected + merge_of(tokens, H // 2, 2))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("batch", "pages"), [("dp", "dp"), ("dp", "tp"), (None, ("tp", "cp"))])
def test_axes_that_pages_take_from_the_query(batch, pages, kind) -> None:
    mesh, args = make_mesh(kind), arguments(UNIFORM)
    with context(mesh, kind):
        placed = put(args, mesh, specs(batch, "tp", pages, 7))
        shard = placed[4].addressable_shards[0].data.shape
        compiled = jax.jit(attend, donate_argnums=4).lower(*placed).compile()
        check_step(compiled(*placed), reference("uniform"))
    assert num_copies(compiled, shard) == 0
    assert all(shape[-2:] != shard[-2:] for c in collectives(compiled) for shape in c.shapes)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_axes_of_size_1(kind, sizes) -> None:
    mesh, args = make_mesh(kind, sizes=sizes), arguments(UNIFORM)
    with context(mesh, kind):
        check_step(
            jax.jit(attend)(*put(args, mesh, specs("dp", "tp", "cp", 7))), reference("uniform")
        )


@pytest.mark.quick(1)
@pytest.mark.parametrize("chosen", [None, "reference"])
@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_mesh_argument(name, chosen) -> None:
    """Also with absent sequences: in a uniform call each device has some of them."""
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    for num_seqs in (None, 3):
        fun = functools.partial(attend, num_seqs=num_seqs, mesh=make_mesh(), backend=chosen)
        check_step(fun(*args), reference(name, num_seqs))
        check_step(jax.jit(fun)(*args), reference(name, num_seqs))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["uniform", "ragged"])
@pytest.mark.parametrize("is_partly", [False, True], ids=["manual", "partly"])
def test_manual_region(is_partly, name, check_vma) -> None:
    """The types say that the cache is the same along the axis that splits the heads."""
    args, mesh = arguments(UNIFORM if name == "uniform" else RAGGED), make_mesh()
    roles: dict[str, Any] = {"mesh": jax_mla.MeshAxes(batch="dp", heads="tp")} if is_partly else {}

    def fun(*args):
        begin = jax.lax.axis_index("cp") * args[4].shape[1]
        out, lse, pool = attend(*args, page_begin=begin, **roles)
        return *jax_mla.merge(out, lse, axis_name="cp"), pool

    spec = specs(None, None if is_partly else "tp", "cp", len(args))
    region = jax.shard_map(
        fun, mesh=mesh, in_specs=spec, out_specs=(spec[0], spec[0], spec[4]), check_vma=check_vma,
        **({"axis_names": {"cp"}} if is_partly else {}),
    )  # fmt: skip
    check_step(jax.jit(region)(*args), reference(name))


@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_vmap_of_the_query_is_more_heads(name) -> None:
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    q_nope, q_pe = jnp.stack([args[0], args[0] * 2]), jnp.stack([args[1], args[1] * 3], axis=1)
    rest = args[2:]
    fun = jax.jit(jax.vmap(attend, in_axes=(0, 1, *(None for _ in rest)), out_axes=(0, 0, None)))
    before = _ffi.extension().call_counts()["ragged_cpu"]
    out, lse, pool = jax.block_until_ready(fun(q_nope, q_pe, *rest))
    assert _ffi.extension().call_counts()["ragged_cpu"] == before + 1
    for i in range(2):
        want = jax_mla.reference.ragged_paged_attention(
            q_nope[i], q_pe[:, i], *rest, sm_scale=0.2, layer=1, return_lse=True
        )
        check_step((out[i], lse[i], pool), want)


def test_vmap_of_anything_else_is_refused() -> None:
    args = arguments(RAGGED)
    for i, name in ((2, "ckv"), (4, "kv_pages"), (7, "cu_q_lens")):
        axes = [0 if j == i else None for j in range(8)]
        mapped = [jnp.stack([x, x]) if j == i else x for j, x in enumerate(args)]
        with pytest.raises(ValueError, match=f"vmap: expected only .* got {name} mapped"):
            jax.vmap(attend, in_axes=axes)(*mapped)


def test_no_derivative() -> None:
    q_nope, *rest = arguments(RAGGED)
    with pytest.raises(NotImplementedError, match="ragged_paged_attention is for inference"):
        jax.grad(lambda q: attend(q, *rest)[0].sum())(q_nope)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["packed", "split", "packs"])
def test_scan_over_layers_copies_nothing(form) -> None:
    """The pool is carried, and the handler writes it in place."""
    q_nope, q_pe, ckv, kpe, pool, *place = arguments(RAGGED)
    pool = jnp.zeros((3, 256, 4, D_CKV + D_KPE))  # large beside everything else
    cache = (pool[..., :D_CKV] * 1, pool[..., D_CKV:] * 1) if form == "split" else pool
    if form == "packs":
        cache = jnp.zeros((3, 256, 2, 2, D_CKV + D_KPE + PADDING))

    def forward(op, q_nope, cache):
        def body(carry, layer):
            q_nope, cache = carry
            out, cache = op(
                q_nope,
                q_pe,
                ckv * (layer + 1),
                kpe,
                cache,
                *place,
                sm_scale=0.2,
                layer=layer,
                packs=form == "packs",
            )
            return (q_nope + out, cache), None

        return jax.lax.scan(body, (q_nope, cache), jnp.arange(3, dtype=jnp.int32))[0]

    fun = jax.jit(functools.partial(forward, jax_mla.ragged_paged_attention), donate_argnums=1)
    want = jax.jit(functools.partial(forward, jax_mla.reference.ragged_paged_attention))(
        q_nope, cache
    )
    compiled = fun.lower(q_nope, cache).compile()
    pools = jax.tree.leaves(cache)
    before, num_bytes = [pointers(p) for p in pools], sum(p.nbytes for p in pools)
    assert all(
        num_copies(compiled, p.shape) == num_copies(compiled, p.shape[1:]) == 0 for p in pools
    )
    stats = memory(compiled)
    assert stats.alias_size_in_bytes == num_bytes
    assert stats.temp_size_in_bytes < num_bytes // 4
    got = fun(q_nope, cache)
    assert [pointers(p) for p in jax.tree.leaves(got[1])] == before
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_input_stays_valid_without_donation() -> None:
    args = arguments(RAGGED)
    before = np.array(args[4])
    _, _, pool = attend(*args)  # outside jit
    np.testing.assert_array_equal(args[4], before)
    assert (np.asarray(pool) != before).any()


def test_a_pair_comes_back_as_a_pair() -> None:
    args = arguments(RAGGED)
    args[4] = (args[4][..., :D_CKV], args[4][..., D_CKV:])
    out, _, pools = attend(*args)
    assert isinstance(pools, tuple)
    check_step((out, _, jnp.concatenate(pools, axis=-1)), reference("ragged"))


def test_lowering_by_platform() -> None:
    def text(platform, **kwargs):
        fun = jax.jit(functools.partial(attend, **kwargs))
        return fun.trace(*arguments(RAGGED)).lower(lowering_platforms=(platform,)).as_text()

    assert "@jax_mla_ragged" in text("cpu")
    assert "@jax_mla" not in text("cpu", backend="reference")
    assert "@jax_mla" not in text("tpu", backend="reference")
    message = "^jax_mla.ragged_paged_attention: platform: expected one of cpu, cuda, got tpu"
    with pytest.raises(ValueError, match=message):
        text("tpu")


@pytest.mark.parametrize("chosen", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_export_with_symbolic_sizes(name, chosen) -> None:
    """Tokens and sequences may be symbolic, if the number of tokens of a sequence is not."""
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    if name == "uniform":
        (seqs,) = export.symbolic_shape("s")
        tokens = Q * seqs
    else:
        tokens, seqs = export.symbolic_shape("t, s")
    first = [tokens] * 4 + [LAYERS, seqs, seqs, seqs + 1]
    structs = [
        jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for n, x in zip(first, args, strict=False)
    ]
    checks = [export.DisabledSafetyCheck.custom_call("jax_mla_ragged")]
    fun = functools.partial(attend, backend=chosen)
    with jax.default_device(jax.devices("cpu")[0]):
        exported = export.export(jax.jit(fun), platforms=("cpu",), disabled_checks=checks)(*structs)
        check_step(exported.call(*args), reference(name))
        if name == "uniform":
            fewer = [x if i == 4 else x[: (Q if i < 4 else 1) * 3] for i, x in enumerate(args)]
            got, want = exported.call(*fewer), fun(*fewer)
            check_step(got, want)
            if chosen == "cpu":  # the reference rounds differently when it knows how many there are
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_array_equal(a, b)


# ---- Raw projections ---------------------------------------------------------------------------


def raw_options() -> dict[str, Any]:
    weight = 1 + jnp.arange(D_CKV, dtype=jnp.float32) / D_CKV
    return {
        "norm_weight": weight,
        "rope_table": jax_mla.rope_table(40, D_KPE),
        "rope_interleaved": True,
    }


@functools.cache
def raw_reference(name: str):
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    return jax_mla.reference.ragged_paged_attention(
        *args, sm_scale=0.2, layer=1, return_lse=True, **raw_options()
    )


def check_raw_step(got, want) -> None:
    """The rows are computed, so they are not those of the reference bit for bit."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    copies: dict[str, np.ndarray] = {}
    for shard in got[2].addressable_shards:  # but all copies of a page are the same
        first = copies.setdefault(str(shard.index), np.asarray(shard.data))
        np.testing.assert_array_equal(shard.data, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "batch", "pages"),
    [("ragged", None, "cp"), ("uniform", "dp", None), ("uniform", "dp", "cp")],
)
def test_raw_rows_are_sharded_like_others(name, batch, pages, kind) -> None:
    """By the positions of whole sequences, with the collectives of the plain call, in place."""
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    mesh, spec = make_mesh(kind), specs(batch, "tp", pages, len(args))
    options = raw_options()
    arrays = {name: options.pop(name) for name in ("norm_weight", "rope_table")}
    fun = jax.jit(lambda arrays, *args: attend(*args, **arrays, **options), donate_argnums=5)
    with context(mesh, kind):
        placed = put(args, mesh, spec)
        placed[4] = jnp.copy(placed[4])  # not the host's memory
        arrays = dict(zip(arrays, put(arrays.values(), mesh, [P(), P()]), strict=True))
        compiled = fun.lower(arrays, *placed).compile()
        before, shard = pointers(placed[4]), placed[4].addressable_shards[0].data.shape
        got = fun(arrays, *placed)
    check_raw_step(got, raw_reference(name))
    assert pointers(got[2]) == before and num_copies(compiled, shard) == 0
    tokens = (SEQS // size_of(batch), Q) if name == "uniform" else (TOKENS,)
    expected = [gather(SEQS, Q, D_CKV + D_KPE + 2)] if batch else []
    expected += merge_of(tokens, H // 2, size_of(pages)) if pages else []
    assert collectives(compiled) == sorted(expected)


@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_raw_rows_in_a_manual_region(name) -> None:
    """page_begin= shortens sequences, which changes no angle."""
    args, mesh = arguments(UNIFORM if name == "uniform" else RAGGED), make_mesh()

    def fun(*args):
        begin = jax.lax.axis_index("cp") * args[4].shape[1]
        out, lse, pool = attend(*args, page_begin=begin, **raw_options())
        return *jax_mla.merge(out, lse, axis_name="cp"), pool

    spec = specs(None, "tp", "cp", len(args))
    region = jax.shard_map(
        fun, mesh=mesh, in_specs=spec, out_specs=(spec[0], spec[0], spec[4]), check_vma=True
    )
    check_raw_step(jax.jit(region)(*args), raw_reference(name))


@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_raw_rows_mapped_and_exported(name) -> None:
    args = arguments(UNIFORM if name == "uniform" else RAGGED)
    fun = functools.partial(attend, **raw_options())
    mapped = jax.vmap(fun, in_axes=(0, 1, *(None for _ in args[2:])), out_axes=(0, 0, None))
    q_nope, q_pe = jnp.stack([args[0], args[0] * 2]), jnp.stack([args[1], args[1] * 3], axis=1)
    out, lse, pool = jax.jit(mapped)(q_nope, q_pe, *args[2:])
    check_raw_step((out[0], lse[0], pool), raw_reference(name))
    check_raw_step((out[1], lse[1], pool), fun(q_nope[1], q_pe[:, 1], *args[2:]))
    checks = [export.DisabledSafetyCheck.custom_call("jax_mla_ragged")]
    exported = export.export(jax.jit(fun), platforms=("cpu",), disabled_checks=checks)(*args)
    check_raw_step(exported.call(*args), raw_reference(name))
