"""Times the loading of a checkpoint of DeepSeek-V2-Lite's shape: 31 GB of bfloat16.

    python benchmarks/bench_load.py DIR

writes the checkpoint to DIR, unless it is there, and loads it onto the first device. It prints the
time, and the most memory that the process held in addition to the files, which are mapped. Files
that were just written stand in the system's page cache; `--drop-caches` empties it first (as root).
"""

import argparse
import json
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_model import QUICK, V2_LITE  # noqa: E402

from examples.deepseek.checkpoint import load, published_tensors  # noqa: E402
from examples.deepseek.config import Config, load_config, parse_config  # noqa: E402
from examples.deepseek.mesh import Placement, parse_mesh  # noqa: E402
from examples.deepseek.tensor_files import INDEX, write  # noqa: E402
from examples.deepseek.weights import parameters  # noqa: E402


def write_checkpoint(directory: pathlib.Path, raw: dict[str, Any]) -> None:
    """Write config.json and a file for each layer, with random rows."""
    directory.mkdir(parents=True, exist_ok=True)
    config, rng = parse_config(raw), np.random.default_rng(0)
    tree = parameters(config, np.dtype(np.float32))
    layers, file_of = tree.pop("layers"), {}
    for n, part in enumerate([tree | {"layers": []}, *({"layers": [layer]} for layer in layers)]):
        params = jax.tree.map(
            lambda p: np.broadcast_to(rng.random(p.shape[-1], np.float32) - 0.5, p.shape), part
        )
        tensors = {
            name.replace("layers.0.", f"layers.{n - 1}."): tensor.astype(jnp.bfloat16)
            for name, tensor in published_tensors(config, params).items()
        }
        name = f"model-{n:05}.safetensors"
        write(directory / name, tensors)
        file_of |= dict.fromkeys(tensors, name)
    (directory / INDEX).write_text(json.dumps({"weight_map": file_of}))
    (directory / "config.json").write_text(json.dumps(raw))  # the last one: all others are there


def held_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Watch:
    """Watches how much memory the process holds."""

    def __init__(self) -> None:
        """Start to watch."""
        self.most = held_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the most that was held."""
        self._end.set()
        self._thread.join()
        return self.most

    def _run(self) -> None:
        while not self._end.wait(0.01):
            self.most = max(self.most, held_bytes())


def largest_parameter(config: Config, dtype: Any) -> int:
    """Return the bytes of the largest array of the model."""
    leaves = jax.tree.leaves(parameters(config, dtype))
    return max(int(np.prod(p.shape)) * np.dtype(p.dtype).itemsize for p in leaves)


def main(argv: Sequence[str] | None = None) -> None:
    """Write, load, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="a tiny checkpoint, for a CPU")
    parser.add_argument("--drop-caches", action="store_true", help="read from the disk")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    if not (args.directory / "config.json").exists():
        write_checkpoint(args.directory, QUICK if args.quick else V2_LITE)
        print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
    if args.drop_caches:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")
    config, placement = load_config(args.directory), Placement.over(parse_mesh(""))
    jax.block_until_ready(placement.put(np.zeros(1)))
    before, watch, start = held_bytes(), Watch(), time.perf_counter()
    params = jax.block_until_ready(load(args.directory, config, jnp.bfloat16, placement.build))
    seconds, most = time.perf_counter() - start, watch.stop() - before
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    on_host = size if placement.device.platform == "cpu" else 0
    print(
        f"{placement.device.device_kind}: {size / 1e9:.2f} GB loaded in {seconds:.1f} s, "
        f"{size / seconds / 1e9:.2f} GB/s; at most {(most - on_host) / 1e9:.2f} GB of memory held "
        f"for it; the largest array has {largest_parameter(config, jnp.bfloat16) / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
