"""The CPU backend's own promises: every vector kernel, any number of threads, little memory."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quick import some

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.cases import CASES, RAGGED_CASES, Case, RaggedCase
from jax_mla.testing.run import check, check_ragged, run

SMALL = Case("small", seq_lens=(0, 1, 40, 70, 600), q_len=2, d_ckv=256, d_kpe=32, page_size=16)
VARIABLE = "JAX_MLA_CPU_KERNEL"  # names the vector kernel of a process
KERNELS = _ffi.extension().cpu_kernels()
QUICK = (
    "deepseek",
    "deepseek_f16",
    "deepseek_f32",
    "wide_odd",
    "deepseek_ds_mla",
    "mixed_f16_e4m3",
)
QUICK_RAGGED = ("mixed", "mixed_f16", "codes_e4m3", "mixed_step_ds_mla")
KERNEL = os.environ.get(VARIABLE, KERNELS[0])


@pytest.fixture(params=[KERNEL], ids="kernel_{}".format)
def kernel(request: pytest.FixtureRequest) -> str:
    """For tests of the vector kernels: test_every_kernel runs them with each one."""
    assert _ffi.extension().cpu_kernel() == request.param
    return request.param


def test_baseline_is_always_there() -> None:
    assert KERNELS[-1] == "baseline"


@pytest.mark.skipif(VARIABLE in os.environ, reason=f"{VARIABLE} names the kernel to test")
@pytest.mark.parametrize("name", KERNELS[1:])
def test_every_kernel(name: str, pytestconfig: pytest.Config) -> None:
    """Run the tests of the vector kernels with one that is not this processor's best."""
    chosen = f"kernel_{name}" + ("" if pytestconfig.option.all else " and not full")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__, "-k", chosen]
    env = {**os.environ, VARIABLE: name}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_unknown_kernel_is_refused() -> None:
    code = """
        import jax.numpy as jnp
        import jax_mla
        from jax_mla._runtime import _ffi
        from jax_mla.testing.inputs import decode_inputs
        inputs = decode_inputs(seq_lens=(5,))
        try:
            jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend="cpu")
        except ValueError as error:
            print(error)
        print(repr(_ffi.extension().cpu_kernel()))
    """
    expected = f"cpu: {VARIABLE}: expected one of {', '.join(KERNELS)}, got 'mmx'\n''\n"
    assert run_with_cpus(code, 1, {VARIABLE: "mmx"}).endswith(expected)


# test_decode.py and test_ragged.py run all of them with this processor's best kernel.
@pytest.mark.parametrize("case", some(CASES, QUICK) if VARIABLE in os.environ else ())
def test_matches_the_reference(case: Case, kernel: str) -> None:
    check(case, "cpu")


@pytest.mark.parametrize("case", some(RAGGED_CASES, QUICK_RAGGED) if VARIABLE in os.environ else ())
def test_ragged_matches_the_reference(case: RaggedCase, kernel: str) -> None:
    check_ragged(case, "cpu")


@pytest.mark.parametrize(
    ("d_ckv", "d_kpe"), [(8, 8), (24, 16), (33, 7), (40, 24), (128, 8), (104, 72)], ids=str
)
def test_dims_that_do_not_fill_a_chunk(d_ckv: int, d_kpe: int, kernel: str) -> None:
    check(dataclasses.replace(SMALL, d_ckv=d_ckv, d_kpe=d_kpe), "cpu")


@pytest.mark.parametrize("num_heads", [1, 3, 8, 17, 40, 70, 130])
def test_rows_that_do_not_fill_a_vector_or_a_row_tile(num_heads: int, kernel: str) -> None:
    check(dataclasses.replace(SMALL, num_heads=num_heads), "cpu")


def all_float16() -> np.ndarray:
    """Every finite float16, denormals included."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    return values[np.isfinite(values)]


def test_float16_is_converted_exactly(kernel: str) -> None:
    """One key a sequence: out is that key, for every finite value there is."""
    values = np.resize(all_float16(), (1024, 64))
    pool = jnp.zeros((1024, 1, 64 + 8), jnp.float16).at[:, 0, :64].set(values)
    out = jax_mla.decode(
        jnp.zeros((1024, 1, 64), jnp.float16),
        jnp.zeros((1024, 1, 8), jnp.float16),
        pool,
        jnp.arange(1024, dtype=jnp.int32)[:, None],
        jnp.ones(1024, jnp.int32),
        sm_scale=1.0,
        backend="cpu",
    )
    np.testing.assert_array_equal(out[:, 0], values)


def test_bfloat16_result_is_rounded_to_nearest_even(kernel: str) -> None:
    """Two keys of equal weight: out is the mean of two bfloat16 numbers, rounded once."""
    rng = np.random.default_rng(0)
    pair = rng.standard_normal((64, 2, 32), np.float32).astype(ml_dtypes.bfloat16)
    pool = jnp.zeros((64, 2, 32 + 8), jnp.bfloat16).at[:, :, :32].set(pair)
    out = jax_mla.decode(
        jnp.zeros((64, 1, 32), jnp.bfloat16),
        jnp.zeros((64, 1, 8), jnp.bfloat16),
        pool,
        jnp.arange(64, dtype=jnp.int32)[:, None],
        jnp.full(64, 2, jnp.int32),
        sm_scale=1.0,
        backend="cpu",
    )
    mean = pair.astype(np.float32).sum(1) / 2
    np.testing.assert_array_equal(out[:, 0], mean.astype(ml_dtypes.bfloat16))


def test_nan_after_a_causal_query_does_not_reach_it(kernel: str) -> None:
    inputs = dataclasses.replace(SMALL, seq_lens=(70,), q_len=3).inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    options = {**inputs.kwargs(), "backend": "cpu"}
    clean = jax_mla.decode(q_nope, q_pe, pool, table, lens, **options)
    last_page, last_slot = int(table[0, 69 // 16]), 69 % 16
    pool = pool.at[last_page, last_slot].set(jnp.nan)
    out = jax_mla.decode(q_nope, q_pe, pool, table, lens, **options)
    np.testing.assert_array_equal(out[:, :2], clean[:, :2])
    assert np.isnan(np.asarray(out[:, 2], np.float32)).all()


def test_batch_invariant_without_asking(kernel: str) -> None:
    inputs = SMALL.inputs()
    q_nope, q_pe, pool, table, lens = inputs.args()
    options = {**inputs.kwargs(), "backend": "cpu", "return_lse": True}
    together = jax_mla.decode(q_nope, q_pe, pool, table, lens, **options)
    alone = jax_mla.decode(q_nope[4:], q_pe[4:], pool, table[4:], lens[4:], **options)
    for whole, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(whole[4:], one)


def test_num_splits_bounds_the_parts() -> None:
    """One part and many parts differ in rounding at most; both are right."""
    long = dataclasses.replace(SMALL, seq_lens=(3000,), num_heads=1, dtype="float32")
    whole, parts = dataclasses.replace(long, num_splits=1), dataclasses.replace(long, num_splits=7)
    check(whole, "cpu")
    check(parts, "cpu")
    assert (run(whole, "cpu")[0] != run(parts, "cpu")[0]).any()


def test_many_devices_at_once() -> None:
    """Eight virtual devices share one thread pool: handlers that wait must not block each other."""
    inputs = SMALL.inputs()
    expected = jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend="cpu")
    devices = jax.devices("cpu")
    placed = [jax.device_put(inputs.args(), device) for device in devices]
    step = jax.jit(lambda *args: jax_mla.decode(*args, **inputs.kwargs(), backend="cpu"))
    for _ in range(5):
        outs = [step(*args) for args in placed]
        for out in outs:
            np.testing.assert_array_equal(out, expected)


def run_with_cpus(code: str, num_cpus: int, env: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run Python code in a process that may use the first `num_cpus` CPUs only."""
    limit = f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{num_cpus}])\n"
    command = [sys.executable, "-P", "-c", limit + textwrap.dedent(code)]
    package = pathlib.Path(jax_mla.__file__).parents[1]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": str(package),
            **env,
        },
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot limit the threads here")
def test_result_does_not_depend_on_the_number_of_threads() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one CPU")
    code = """
        import hashlib, jax, numpy as np
        import jax_mla
        from jax_mla.testing.inputs import decode_inputs
        inputs = decode_inputs(seq_lens=(2000, 0, 700, 33), num_heads=20, page_size=16)
        out = jax_mla.decode(*inputs.args(), **inputs.kwargs(), backend="cpu", return_lse=True)
        print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in out)).hexdigest())
    """
    assert run_with_cpus(code, 1) == run_with_cpus(code, 2)


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_memory_of_a_call_is_small_beside_the_cache() -> None:
    """Peak resident memory of a call that reads a 151 MB cache, over the memory before it."""
    code = """
        import functools, pathlib, re
        import jax, jax.numpy as jnp
        import jax_mla

        def kilobytes(field):
            status = pathlib.Path("/proc/self/status").read_text()
            return int(re.search(rf"{field}:\\s+(\\d+)", status)[1])

        pool = jnp.ones((2048, 64, 576), jnp.bfloat16)
        table = jnp.arange(2048, dtype=jnp.int32).reshape(8, 256)
        q_nope, q_pe = jnp.ones((8, 16, 512), jnp.bfloat16), jnp.ones((8, 16, 64), jnp.bfloat16)
        step = jax.jit(functools.partial(jax_mla.decode, sm_scale=0.1, backend="cpu"))
        args = jax.block_until_ready((q_nope, q_pe, pool, table))
        jax.block_until_ready(step(*args, jnp.full(8, 100, jnp.int32)))
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = kilobytes("VmRSS")
        jax.block_until_ready(step(*args, jnp.full(8, 256 * 64, jnp.int32)))
        print(pool.nbytes // 1024, kilobytes("VmHWM") - before)
    """
    cache_kilobytes, extra_kilobytes = map(int, run_with_cpus(code, 2).split())
    assert extra_kilobytes < cache_kilobytes / 8
