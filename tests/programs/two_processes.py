"""One of two processes with four CPU devices each; the pages of the cache are split between them.

Usage: two_processes.py PORT INDEX
"""

import functools
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla.testing.hlo import collectives, pointers
from jax_mla.testing.inputs import decode_inputs

NAMES, SIZES = ("cp", "dp", "tp"), (2, 2, 2)  # cp spans the processes
QUERY = P("dp", None, "tp")
SPECS = (QUERY, QUERY, P(None, "cp"), *(P("dp"),) * 5)


def arguments():
    inputs = decode_inputs(
        seq_lens=(0, 5, 16, 11), num_heads=4, d_ckv=64, d_kpe=16, page_size=4, dtype="float32",
        num_layers=2, page_multiple=8,
    )  # fmt: skip
    pool = np.where(np.isnan(inputs.kv_pages), 0, inputs.kv_pages)
    rng = np.random.default_rng(0)
    ckv, kpe = (rng.standard_normal((4, 1, d), dtype=np.float32) for d in (64, 16))
    lens = inputs.seq_lens
    return (inputs.q_nope, inputs.q_pe, pool, inputs.page_table, lens, ckv, kpe, lens[:, None] - 1)


def step(q_nope, q_pe, pool, table, lens, ckv, kpe, positions, *, ops, **kwargs):
    pool = ops.append(pool, ckv, kpe, table, positions, layer=1, **kwargs)
    out, lse = ops.decode(
        q_nope, q_pe, pool, table, lens, sm_scale=0.2, layer=1, return_lse=True, **kwargs
    )
    return out, lse, pool


def check(name: str, on: jax.sharding.Mesh, **kwargs) -> None:
    """Compare one sharded step with the reference; print that it is right."""
    arrays = arguments()
    want = [np.asarray(x) for x in step(*arrays, ops=jax_mla.reference)]
    args = [
        jax.make_array_from_callback(x.shape, NamedSharding(on, s), lambda i, x=x: x[i])
        for x, s in zip(arrays, SPECS, strict=True)
    ]
    fun = jax.jit(functools.partial(step, ops=jax_mla, **kwargs), donate_argnums=2)
    kinds = [c.kind for c in collectives(fun.lower(*args).compile())]
    assert kinds == ["all-gather", "all-reduce", "all-reduce"], kinds
    before = pointers(args[2])
    got = fun(*args)
    assert pointers(got[2]) == before
    for a, b in zip(got, want, strict=True):
        for shard in a.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), b[shard.index], atol=1e-5)
    print("ok", name, flush=True)


def main(port: str, index: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    assert jax.process_count() == 2 and len(jax.devices()) == 8
    auto = jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 3)
    check("auto", auto)
    check("mesh=", auto, mesh=auto)
    explicit = jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(explicit):
        check("explicit", explicit)


if __name__ == "__main__":
    main(*sys.argv[1:])
