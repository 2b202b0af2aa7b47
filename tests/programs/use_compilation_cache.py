"""Compile decode in several ways with a persistent cache; print which of them were found in it.

Usage: use_compilation_cache.py FOLDER
"""

import json
import sys

import jax
import jax.monitoring
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mla

SHAPES = ((4, 1, 4, 256), (4, 1, 4, 32), (16, 4, 288), (4, 4), (4,))
DTYPES = (jnp.bfloat16,) * 3 + (jnp.int32,) * 2
SPECS = (P("dp", None, "tp"), P("dp", None, "tp"), P("cp"), P("dp"), P("dp"))

events: list[str] = []
found: dict[str, list[str]] = {}


def note(event: str, **_: str | int) -> None:
    events.append(event.rsplit("/", 1)[-1])


def compile_decode(name: str, on: Mesh | None, **kwargs) -> None:
    def decode(*args):
        return jax_mla.decode(*args, sm_scale=0.1, **kwargs)

    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=None if on is None else NamedSharding(on, spec))
        for shape, dtype, spec in zip(SHAPES, DTYPES, SPECS, strict=True)
    ]
    events.clear()
    jax.jit(decode).lower(*args).compile()
    found[name] = [e for e in events if e in ("cache_hits", "cache_misses")]


def main(folder: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.monitoring.register_event_listener(note)
    compile_decode("one device", None)
    names = ("dp", "tp", "cp")
    auto = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)
    compile_decode("mesh=", auto, mesh=auto)
    explicit = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(explicit):
        compile_decode("explicit", explicit)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    compile_decode("auto, pointer left out of the key", auto)
    compile_decode("auto, other parameters", auto, causal=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
