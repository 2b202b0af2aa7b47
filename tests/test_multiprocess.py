"""Two processes with four CPU devices each, talking through gloo: JAX's own multi-host path."""

import os
import pathlib
import socket
import subprocess
import sys

WORKER = '''
"""One of two processes; the pages of the cache are split between them."""
import sys
import jax
port, index = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)

import functools
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_mla
from jax_mla.testing.hlo import collectives, pointers
from jax_mla.testing.inputs import decode_inputs

assert jax.process_count() == 2 and len(jax.devices()) == 8
inputs = decode_inputs(
    seq_lens=(0, 5, 16, 11), num_heads=4, d_ckv=64, d_kpe=16, page_size=4, dtype="float32",
    num_layers=2, page_multiple=8,
)
pool = np.where(np.isnan(inputs.kv_pages), 0, inputs.kv_pages)
rng = np.random.default_rng(0)
ckv, kpe = (rng.standard_normal((4, 1, d), dtype=np.float32) for d in (64, 16))
arrays = (
    inputs.q_nope, inputs.q_pe, pool, inputs.page_table, inputs.seq_lens, ckv, kpe,
    inputs.seq_lens[:, None] - 1,
)

def step(q_nope, q_pe, pool, table, lens, ckv, kpe, positions, *, ops, **kwargs):
    pool = ops.append(pool, ckv, kpe, table, positions, layer=1, **kwargs)
    out, lse = ops.decode(
        q_nope, q_pe, pool, table, lens, sm_scale=0.2, layer=1, return_lse=True, **kwargs
    )
    return out, lse, pool

want = [np.asarray(x) for x in step(*arrays, ops=jax_mla.reference)]
names, sizes = ("cp", "dp", "tp"), (2, 2, 2)  # cp spans the processes
query = P("dp", None, "tp")
specs = (query, query, P(None, "cp"), *(P("dp"),) * 5)

def globally(mesh):
    return [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, s), lambda i, x=x: x[i])
        for x, s in zip(arrays, specs, strict=True)
    ]

def run(name, on, **kwargs):
    args = globally(on)
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

auto = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)
run("auto", auto)
run("mesh=", auto, mesh=auto)
explicit = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * 3)
with jax.set_mesh(explicit):
    run("explicit", explicit)
'''


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes(tmp_path: pathlib.Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(worker), str(free_port())]
    workers = [
        subprocess.Popen(
            [*command, str(i)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for process in workers:
            process.kill()
    for process, (printed, errors) in zip(workers, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
        done = [line for line in printed.splitlines() if line.startswith("ok ")]
        assert done == ["ok auto", "ok mesh=", "ok explicit"]
