"""Run an exported program and compare its results with saved ones, bit for bit.

Usage: run_exported.py PROGRAM DATA

DATA is an npz file with arg0 to arg4, out, lse and pool; arrays of bfloat16 are saved as uint16.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla  # noqa: F401, registers the handlers

SPECS = (P("dp", None, "tp"), P("dp", None, "tp"), P("cp"), P("dp"), P("dp"))


def main(program_file: str, data_file: str) -> None:
    program = export.deserialize(bytearray(pathlib.Path(program_file).read_bytes()))
    data = np.load(data_file)
    args = [jnp.asarray(data[f"arg{i}"]) for i in range(5)]
    args[:3] = [x.view(jnp.bfloat16) for x in args[:3]]
    if program.nr_devices > 1:
        mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "cp"), axis_types=(AxisType.Auto,) * 3)
        args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, SPECS, strict=True)]
    out, lse, pool = jax.jit(program.call)(*args)
    np.testing.assert_array_equal(np.asarray(out).view(np.uint16), data["out"])
    np.testing.assert_array_equal(np.asarray(lse), data["lse"])
    np.testing.assert_array_equal(np.asarray(pool).view(np.uint16), data["pool"])
    print("same", program.nr_devices, *program.platforms)


if __name__ == "__main__":
    main(*sys.argv[1:])
