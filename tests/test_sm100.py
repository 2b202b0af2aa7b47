"""The backend sm100, as far as it can be tested without a Blackwell GPU."""

import pathlib
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cutlass_headers import SOURCE
from jax import export

import jax_mla
from jax_mla._runtime import _backends, _ffi

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = SOURCE / "examples"
BLACKWELL = 100
NUM_CASES = 400

has_sm100 = "sm100" in dict(_ffi.extension().backends_by_name())
needs_sm100 = pytest.mark.skipif(not has_sm100, reason="this build has no sm100 backend")


def call(**changed: Any) -> _backends.DecodeCall:
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "batch": 3,
        "q_len": 1,
        "num_heads": 128,
        "d_ckv": 512,
        "d_kpe": 64,
        "page_size": 128,
        "max_pages_per_seq": 8,
        "packed_width": 576,
    }
    return _backends.DecodeCall(**(fields | changed))


def answers(compute_capability: int = BLACKWELL, **changed: Any) -> dict[str, str]:
    """What each CUDA backend says to a call on a GPU of that capability."""
    extension, shape = _ffi.extension(), call(**changed).shape()
    return dict(extension.decode_backends("CUDA", shape, compute_capability, is_described=True))


@needs_sm100
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_heads": 1},
        {"num_heads": 200},
        {"page_size": 384},
        {"packed_width": 640},
        {"num_splits": 3},
        {"batch_invariant": True},
        {"max_pages_per_seq": 0},
    ],
)
def test_takes(changed: dict[str, Any]) -> None:
    assert answers(**changed)["sm100"] == ""


@needs_sm100
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"compute_capability": 90}, "needs compute capability 10.0, got 9.0"),
        ({"compute_capability": 103}, "needs compute capability 10.0, got 10.3"),
        ({"dtype": "float16"}, "needs bfloat16, got float16"),
        ({"d_ckv": 256, "d_kpe": 32}, "needs d_ckv, d_kpe = 512, 64, got 256, 32"),
        ({"q_len": 2}, "needs q_len 1, got 2"),
        ({"q_len": 0}, "takes no ragged calls (cu_q_lens)"),
        ({"page_size": 64}, "needs a page_size that is a multiple of 128, got 64"),
        ({"packed_width": 0}, "needs a packed pool, got ckv and kpe in two"),
        ({"kv_format": "fp8_e4m3"}, "needs a cache in bfloat16, got fp8_e4m3"),
        ({"kv_format": "fp8_ds_mla"}, "needs a cache in bfloat16, got fp8_ds_mla"),
        (
            {"batch": 40000, "num_heads": 129},
            "needs at most 65535 groups of 128 heads in all sequences, got 80000",
        ),
        (
            {"batch": 65535, "max_pages_per_seq": 1 << 20},
            f"needs at most 2^31 pages of 128 tokens in all groups of 128 heads, got {65535 << 20}",
        ),
        (
            {"row_alignment": 4},
            "needs rows of kv_pages that are a multiple of 16 bytes, got a multiple of 4 at most",
        ),
    ],
)
def test_declines(changed: dict[str, Any], reason: str) -> None:
    assert answers(**changed)["sm100"] == reason


@needs_sm100
def test_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where every other backend declines."""
    assert list(answers())[-1] == "sm100"
    taken = [("sm80", "no"), ("sm100", "")]
    monkeypatch.setattr(_backends, "_answers", lambda platform, call: taken)
    _backends.require("cuda", call(), "sm100")
    with pytest.raises(ValueError, match=r"sm100: runs by name only \(compiled, never run\)"):
        _backends.require("cuda", call(), "")
    status = next(s for s in _backends.statuses(None, "cuda") if s.name == "sm100")
    assert not status.chosen and not status.reason
    assert str(status) == "sm100 (cuda): by name only: compiled, never run; can run"


@needs_sm100
def test_a_call_elsewhere_is_declined_by_name() -> None:
    """While it is lowered: here there is no Blackwell GPU."""
    if _backends._compute_capability() == BLACKWELL:
        pytest.skip("this is one")
    args = jnp.ones((1, 16, 512), "bfloat16"), jnp.ones((1, 16, 64), "bfloat16")
    args += jnp.ones((2, 128, 576), "bfloat16"), jnp.zeros((1, 2), "int32"), jnp.ones(1, "int32")

    def decode(*xs: Any) -> Any:
        return jax_mla.decode(*xs, sm_scale=1.0, backend="sm100")

    with pytest.raises(ValueError, match="sm100: (needs compute capability|the GPU cannot be)"):
        jax.jit(decode).trace(*args).lower(lowering_platforms=("cuda",))


@needs_sm100
def test_scratch_has_room_for_every_array() -> None:
    """Summed here once more, from csrc/decode/sm100/plan.h."""

    def up(num_bytes: int) -> int:
        return -(-num_bytes // 256) * 256

    entries, tiles, rows, parts, width = 3 * 2, 8, 6 * 128, 8, 640
    want = up(entries * tiles * 4) + 2 * up(entries * 4)
    want += up(rows * 512 * 2) * 2 + up(rows * 64 * 2) + up(rows * 4)  # padded heads
    want += up(rows * parts * 512 * 4) + up(rows * parts * 4)
    want += up((3 + 1) * 128 * width * 2)  # last pages
    shape = call(num_heads=200, packed_width=width)
    assert _backends.scratch_shape("jax_mla.decode", shape, "sm100") == (want,)
    assert _backends.ragged_bytes(shape, 3, "sm100")[0] >= want
    # It is the named backend's, so other calls do not pay for it.
    assert _backends.scratch_shape("jax_mla.decode", shape) != (want,)
    short = _backends.scratch_shape(
        "jax_mla.decode", call(max_pages_per_seq=1, packed_width=576), "sm100"
    )[0]
    assert short == up(12) * 3 + up(4 * 128 * 576 * 2)  # one part, whole heads


@needs_sm100
@pytest.mark.parametrize("name", ["batch", "max_pages_per_seq"])
def test_symbolic_sizes_are_refused(name: str) -> None:
    (size,) = export.symbolic_shape("n")
    with pytest.raises(ValueError, match=f"{name}: expected a number for backend='sm100', got n"):
        _backends.scratch_shape("jax_mla.decode", call(**{name: size}), "sm100")


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.skipif(not EXAMPLES.exists(), reason="needs nvidia-cutlass, with its examples")
def test_arguments_and_kernels_around_cutlass(tmp_path: pathlib.Path) -> None:
    """All but CUTLASS's kernel, which a model replaces (tests/cuda/sm100_arguments.cu)."""
    path = tmp_path / "sm100_arguments"
    command = ["nvcc", "-O3", "-std=c++20", "-DNDEBUG", "-arch=native", "--expt-relaxed-constexpr"]
    command += ["-DJAX_MLA_WITH_CUDA", f"-I{ROOT / 'csrc'}", "-o", str(path)]
    folders = ("include", "examples/common", "examples/77_blackwell_fmha")
    command += [f"-isystem={SOURCE / folder}" for folder in folders]
    sources = ("decode/sm100/backend.cc", "decode/schedule/plan.cc", "gpu/launch.cc")
    command += [str(ROOT / "tests/cuda/sm100_arguments.cu")]
    command += [str(ROOT / "csrc" / source) for source in sources]
    subprocess.run(command, check=True)
    done = subprocess.run([str(path), str(NUM_CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
