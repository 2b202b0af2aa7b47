"""Loading the extension, and the handlers' own checks of their arguments."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jax_mla._runtime import _ffi

B, Q, H, C, R, M, PAGES, PAGE = 2, 1, 4, 64, 16, 3, 8, 16
BF16, F32, S32 = jnp.bfloat16, jnp.float32, jnp.int32


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that imports this jax_mla, whatever the current directory is."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(_ffi.__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


# ---- Loading -----------------------------------------------------------------------------------


def test_versions_are_known() -> None:
    built, runtime = _ffi.extension().ffi_api_version(), _ffi.runtime_api_version()
    assert (0, 1) <= tuple(built) <= runtime


@pytest.mark.parametrize("built", [(0, 1), (0, 3)])
def test_older_or_equal_extension_is_accepted(built: tuple[int, int]) -> None:
    _ffi.check_api_version(built, (0, 3))


@pytest.mark.parametrize("built", [(0, 4), (1, 0)])
def test_newer_extension_is_an_import_error_that_says_what_to_do(built: tuple[int, int]) -> None:
    with pytest.raises(ImportError, match=r"offers 0\.3\. Install a newer jaxlib .*or rebuild"):
        _ffi.check_api_version(built, (0, 3))


def test_refused_extension_leaves_jax_alive() -> None:
    result = run_python("""
        import pathlib, tempfile
        import jax, jax.numpy as jnp
        fake = pathlib.Path(tempfile.mkdtemp())
        (fake / "xla/ffi/api").mkdir(parents=True)
        (fake / "xla/ffi/api/c_api.h").write_text(
            "#define XLA_FFI_API_MAJOR 0\\n#define XLA_FFI_API_MINOR 1\\n")
        jax.ffi.include_dir = lambda: str(fake)
        try:
            import jax_mla
        except ImportError as error:
            print("ImportError:", error)
        print("sum", jnp.ones(3).sum())
    """)
    assert "ImportError: jax_mla was built for XLA FFI" in result.stdout, result.stderr
    assert "sum 3.0" in result.stdout, result.stderr


def import_from(tree: pathlib.Path) -> str:
    """Import a copy of the package that has no extension; return what Python prints."""
    for path in pathlib.Path(_ffi.__file__).parents[1].rglob("*.py"):
        copy = tree / "jax_mla" / path.relative_to(pathlib.Path(_ffi.__file__).parents[1])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import jax_mla"]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode == 1
    return result.stderr


def test_import_in_the_source_tree_says_to_leave_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    message = import_from(tmp_path)
    assert f"ImportError: Python imported jax_mla from its source tree, {tmp_path}" in message
    assert "start Python in another directory" in message
    assert "pip install -e ." in message and "tools/dev_build.sh" in message
    assert "No module named 'jax_mla._extension'" in message


def test_installed_package_without_extension_says_to_install_again(tmp_path: pathlib.Path) -> None:
    message = import_from(tmp_path)
    assert f"ImportError: jax_mla in {tmp_path / 'jax_mla'} has no compiled extension" in message
    assert "pip install --force-reinstall" in message


def test_extension_for_another_python_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "jax_mla").mkdir()
    (tmp_path / "jax_mla" / "_extension.cpython-399-x86_64-linux-gnu.so").touch()
    message = import_from(tmp_path)
    running = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert f"cannot be loaded by {running}" in message
    assert "Found: _extension.cpython-399-x86_64-linux-gnu.so" in message


@pytest.mark.parametrize("text", [None, "", "#define XLA_FFI_API_MAJOR 0\n"])
def test_jaxlib_without_a_readable_header_is_an_import_error(
    text: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    if text is not None:
        header.write_text(text)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(ImportError, match=rf"XLA FFI version of jaxlib .* in {header}. Reinstall"):
        _ffi.runtime_api_version()


def test_registering_again_is_harmless() -> None:
    _ffi.extension.__wrapped__()
    decode(call_arguments())


# ---- Handlers ----------------------------------------------------------------------------------


def zeros(dtype: Any, *shape: int) -> jax.Array:
    return jnp.zeros(shape, dtype)


ATTENTION_ATTRS: dict[str, Any] = {
    "sm_scale": np.float32(1), "causal": True, "num_splits": np.int64(0), "batch_invariant": False,
    "backend": "", "has_layer": False, "max_seq_len": np.int64(0), "kv_format": "",
    "sliding_window": np.int64(0), "soft_cap": np.float32(0),
    "norm_eps": np.float32(0), "rope_interleaved": False,
}  # fmt: skip


def call_arguments() -> dict[str, Any]:
    """Return valid operands, results and attributes of the decode target."""
    return {
        "q_nope": zeros(BF16, B, Q, H, C),
        "q_pe": zeros(BF16, B, Q, H, R),
        "page_table": zeros(S32, B, M),
        "seq_lens": zeros(S32, B),
        "layer": zeros(S32, 1),
        "page_begin": zeros(S32, 1),
        "pools": (zeros(BF16, PAGES, PAGE, C + R),),
        "out": jax.ShapeDtypeStruct((B, Q, H, C), BF16),
        "lse": jax.ShapeDtypeStruct((B, Q, H), F32),
        "attrs": dict(ATTENTION_ATTRS),
    }


def named_pools(pools: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    if len(pools) == 1:
        return {"kv_pages": pools[0]}
    return {f"kv_pages[{i}]": pool for i, pool in enumerate(pools)}


def decode(call: dict[str, Any]) -> Any:
    """Call the target with the operands of `call`, last ones first: their order does not matter."""
    results = call.get("results", (call["out"], call["lse"]))
    target = jax.ffi.ffi_call("jax_mla_decode", results)
    arrays = {n: x for n, x in call.items() if isinstance(x, jax.Array)} | named_pools(
        call["pools"]
    )
    names = call.get("operands", ",".join(reversed(arrays)))
    operands = reversed(arrays.values())
    return jax.block_until_ready(target(*operands, operands=names, **call["attrs"]))


BAD_DECODE = {
    "q_nope rank": (
        {"q_nope": zeros(BF16, B, H, C)},
        "q_nope: expected rank 4, got bfloat16[2,4,64]",
    ),
    "q_nope dtype": (
        {"q_nope": zeros(S32, B, Q, H, C)},
        "q_nope: expected bfloat16, float16 or float32, got int32[2,1,4,64]",
    ),
    "q_pe heads": (
        {"q_pe": zeros(BF16, B, Q, 3, R)},
        "q_pe: expected bfloat16[2,1,4,*], got bfloat16[2,1,3,16]",
    ),
    "q_pe dtype": (
        {"q_pe": zeros(F32, B, Q, H, R)},
        "q_pe: expected bfloat16[2,1,4,*], got float32[2,1,4,16]",
    ),
    "page_table rows": (
        {"page_table": zeros(S32, 1, M)},
        "page_table: expected int32[2,*], got int32[1,3]",
    ),
    "page_table dtype": (
        {"page_table": zeros(F32, B, M)},
        "page_table: expected int32[2,*], got float32[2,3]",
    ),
    "seq_lens": ({"seq_lens": zeros(S32, 3)}, "seq_lens: expected int32[2], got int32[3]"),
    "layer": ({"layer": zeros(S32)}, "layer: expected int32[1], got int32[]"),
    "page_begin": ({"page_begin": zeros(S32, 2)}, "page_begin: expected int32[1], got int32[2]"),
    "pool width": (
        {"pools": (zeros(BF16, PAGES, PAGE, C),)},
        "kv_pages: expected bfloat16[num_pages,page_size,d], or page_size/pack,pack, without "
        "layers in front, d from 80 to 1048576, got bfloat16[8,16,64]",
    ),
    "pool too wide": (
        {"pools": (zeros(BF16, 1, 1, 2**20 + 1),)},
        "d from 80 to 1048576, got bfloat16[1,1,1048577]",
    ),
    "pool with layers": (
        {"pools": (zeros(BF16, 2, PAGES, 2, PAGE, C + R),)},
        "without layers in front, d from 80 to 1048576, got bfloat16[2,8,2,16,80]",
    ),
    "pool rank": (
        {"pools": (zeros(BF16, PAGE, C + R),)},
        "kv_pages: expected bfloat16[num_pages,page_size,d]",
    ),
    "pool dtype": ({"pools": (zeros(F32, PAGES, PAGE, C + R),)}, "got float32[8,16,80]"),
    "page size": (
        {"pools": (zeros(BF16, PAGES, 0, C + R),)},
        "kv_pages: expected a page_size of at least 1, got bfloat16[8,0,80]",
    ),
    "pack size": (
        {"pools": (zeros(BF16, PAGES, 4, 0, C + R),)},
        "kv_pages: expected a page_size of at least 1, got bfloat16[8,4,0,80]",
    ),
    "split pools": (
        {"pools": (zeros(BF16, PAGES, PAGE, C), zeros(BF16, PAGES, 8, R))},
        "kv_pages[1]: expected the layers, pages and page_size of kv_pages[0] bfloat16[8,16,64], "
        "got bfloat16[8,8,16]",
    ),
    "no pool": (
        {"pools": ()},
        "kv_pages: expected bfloat16[num_pages,page_size,d], or page_size/pack,pack, without "
        "layers in front, d from 80 to 1048576, got no operand",
    ),
    "three pools": (
        {"pools": (zeros(BF16, PAGES, PAGE, C), zeros(BF16, PAGES, PAGE, R), zeros(S32, 1))},
        "kv_pages[2]: expected no such operand in this call, got one",
    ),
    "unknown operand": (
        {"window": zeros(S32, 1)},
        "window: expected no such operand in this call, got one",
    ),
    "operand that the format does not have": (
        {"kv_scale": zeros(F32, 1, 2)},
        "kv_scale: expected no such operand in this call, got one",
    ),
    "missing operand": ({"seq_lens": None}, "seq_lens: expected int32[2], got no operand"),
    "missing query": (
        {"q_nope": None},
        "q_nope: expected bfloat16, float16 or float32, got no operand",
    ),
    "too few names": (
        {"operands": "q_nope,q_pe"},
        "operands: expected 7 names, one for each buffer, got q_nope,q_pe",
    ),
    "no names": ({"operands": ""}, "operands: expected 7 names, one for each buffer, got "),
    "tokens end to end": (
        {"cu_q_lens": zeros(S32, B + 1)},
        "cu_q_lens: expected new rows with it, got none",
    ),
    "out": (
        {"out": jax.ShapeDtypeStruct((B, Q, H, R), BF16)},
        "out: expected bfloat16[2,1,4,64], got bfloat16[2,1,4,16]",
    ),
    "lse": (
        {"lse": jax.ShapeDtypeStruct((B, Q, H), BF16)},
        "lse: expected float32[2,1,4], got bfloat16[2,1,4]",
    ),
    "results": (
        {"results": (jax.ShapeDtypeStruct((B, Q, H, C), BF16),)},
        "results: expected out, lse and optional scratch, got 1",
    ),
}


@pytest.mark.parametrize("name", BAD_DECODE)
def test_bad_decode_names_tensor_expected_and_got(name: str) -> None:
    change, message = BAD_DECODE[name]
    expected = rf"INVALID_ARGUMENT: jax_mla_decode: .*{re.escape(message)}"
    with pytest.raises(JaxRuntimeError, match=expected):
        decode(call_arguments() | change)


@pytest.mark.parametrize(
    ("attr", "value", "message"),
    [
        ("num_splits", np.int64(-1), "num_splits: expected a size below 2^31, got -1"),
        ("backend", "sm90", 'backend: expected "cpu" on this platform, got "sm90"'),
        ("kv_format", "fp7", "kv_format: expected a known format, got fp7"),
        ("kv_format", "fp8_e4m3", "kv_scale: expected float32[2,2], got no operand"),
        (
            "kv_format",
            "fp8_ds_mla",
            "q_nope, q_pe: expected 512 and 64 dimensions for kv_format fp8_ds_mla, got 64 and 16",
        ),
    ],
)
def test_bad_decode_attribute(attr: str, value: Any, message: str) -> None:
    call = call_arguments()
    call["attrs"][attr] = value
    with pytest.raises(JaxRuntimeError, match=re.escape(message)):
        decode(call)


E4M3 = jnp.float8_e4m3fn
FP8 = {"kv_scale": zeros(F32, 1, 2), "pools": (zeros(E4M3, PAGES, PAGE, C + R),)}
BAD_FORMAT = {
    "scale shape": (
        "fp8_e4m3",
        {"kv_scale": zeros(F32, 3, 2)},
        "kv_scale: expected float32[2,2], got float32[3,2]",
    ),
    "scale dtype": (
        "fp8_e4m3",
        {"kv_scale": zeros(BF16, 1, 2)},
        "kv_scale: expected float32[1,2], got bfloat16[1,2]",
    ),
    "query scale": (
        "fp8_e4m3",
        {"q_scale": zeros(F32, 1, 2)},
        "q_scale: expected float32[1,1], got float32[1,2]",
    ),
    "pool": (
        "fp8_e4m3",
        {"pools": (zeros(BF16, PAGES, PAGE, C + R),)},
        "kv_pages: expected float8_e4m3fn[num_pages,page_size,d]",
    ),
    "packed": (
        "fp8_e4m3+bf16",
        {},
        "operands: expected two split pools for kv_format fp8_e4m3+bf16, got one packed pool",
    ),
    "kpe": (
        "fp8_e4m3+bf16",
        {"pools": (zeros(E4M3, PAGES, PAGE, C), zeros(E4M3, PAGES, PAGE, R))},
        "kv_pages[1]: expected bfloat16[num_pages,page_size,d]",
    ),
}


@pytest.mark.parametrize("name", BAD_FORMAT)
def test_bad_format_names_tensor_expected_and_got(name: str) -> None:
    kv_format, change, message = BAD_FORMAT[name]
    call = call_arguments() | FP8 | change
    call["attrs"]["kv_format"] = kv_format
    with pytest.raises(JaxRuntimeError, match=re.escape(f"jax_mla_decode: {message}")):
        decode(call)


def test_missing_decode_attribute_is_an_error() -> None:
    call = call_arguments()
    del call["attrs"]["causal"]
    with pytest.raises(JaxRuntimeError, match="expected 13 attributes but got 12"):
        decode(call)


def test_pool_of_a_stack_needs_a_layer() -> None:
    """Rank 3 is not a stacked pool."""
    call = call_arguments()
    call["attrs"]["has_layer"] = True
    with pytest.raises(JaxRuntimeError, match=r"with layers in front, .*got bfloat16\[8,16,80\]"):
        decode(call)


APPEND_ATTRS: dict[str, Any] = {
    "has_layer": False, "kv_format": "", "norm_eps": np.float32(0), "rope_interleaved": False,
}  # fmt: skip


def append(pool: jax.Array, change: dict[str, Any], *, is_aliased: bool = True) -> Any:
    operands = {
        "ckv": zeros(BF16, B, Q, C),
        "kpe": zeros(BF16, B, Q, R),
        "page_table": zeros(S32, B, M),
        "positions": zeros(S32, B, Q),
        "layer": zeros(S32, 1),
        "page_begin": zeros(S32, 1),
        "kv_pages": pool,
    } | change
    target = jax.ffi.ffi_call(
        "jax_mla_append",
        (jax.ShapeDtypeStruct(pool.shape, pool.dtype),),
        input_output_aliases={6: 0} if is_aliased else {},
    )
    names = ",".join(operands)
    return jax.block_until_ready(target(*operands.values(), operands=names, **APPEND_ATTRS))


BAD_APPEND = {
    "ckv": ({"ckv": zeros(BF16, C)}, "ckv: expected rank 3, got bfloat16[64]"),
    "kpe": ({"kpe": zeros(BF16, 1, Q, R)}, "kpe: expected bfloat16[2,1,*], got bfloat16[1,1,16]"),
    "positions": (
        {"positions": zeros(S32, B, 2)},
        "positions: expected int32[2,1], got int32[2,2]",
    ),
    "page_table": ({"page_table": zeros(S32, M)}, "page_table: expected rank 2, got int32[3]"),
    "rows of page_table": (
        {"page_table": zeros(S32, 1, M)},
        "page_table: expected int32[2,*], got int32[1,3]",
    ),
    "unknown": ({"slots": zeros(S32, B)}, "slots: expected no such operand in this call, got one"),
}


@pytest.mark.parametrize("name", BAD_APPEND)
def test_bad_append_names_tensor_expected_and_got(name: str) -> None:
    change, message = BAD_APPEND[name]
    with pytest.raises(JaxRuntimeError, match=re.escape(f"jax_mla_append: {message}")):
        append(zeros(BF16, PAGES, PAGE, C + R), change)


TRANSFORMS: dict[str, Any] = {
    "norm_weight": zeros(F32, C), "rope_table": zeros(F32, 9, R), "rope_lens": zeros(S32, B),
}  # fmt: skip


def ragged(change: dict[str, Any], *, q_len: int = 0, is_aliased: bool = True, **attrs: Any) -> Any:
    tokens = (B, q_len) if q_len else (5,)
    operands = {
        "q_nope": zeros(BF16, *tokens, H, C),
        "q_pe": zeros(BF16, *tokens, H, R),
        "ckv": zeros(BF16, *tokens, C),
        "kpe": zeros(BF16, *tokens, R),
        "page_table": zeros(S32, B, M),
        "seq_lens": zeros(S32, B),
        "layer": zeros(S32, 1),
        "page_begin": zeros(S32, 1),
        "kv_pages": zeros(BF16, PAGES, PAGE, C + R),
    }
    if not q_len:
        operands |= {"cu_q_lens": zeros(S32, B + 1), "num_seqs": zeros(S32, 1)}
    operands |= change
    out = [
        jax.ShapeDtypeStruct((*tokens, H, C), BF16),
        jax.ShapeDtypeStruct((*tokens, H), F32),
        jax.ShapeDtypeStruct((PAGES, PAGE, C + R), operands["kv_pages"].dtype),
    ]
    aliases = {list(operands).index("kv_pages"): 2} if is_aliased else {}
    target = jax.ffi.ffi_call("jax_mla_ragged", out, input_output_aliases=aliases)
    attrs = ATTENTION_ATTRS | {"operands": ",".join(operands)} | attrs
    return jax.block_until_ready(target(*operands.values(), **attrs))


BAD_RAGGED = {
    "ckv": ({"ckv": zeros(BF16, 4, C)}, "ckv: expected bfloat16[5,64], got bfloat16[4,64]"),
    "kpe": ({"kpe": zeros(F32, 5, R)}, "kpe: expected bfloat16[5,16], got float32[5,16]"),
    "cu_q_lens": ({"cu_q_lens": zeros(S32, B)}, "cu_q_lens: expected int32[3], got int32[2]"),
    "num_seqs": ({"num_seqs": zeros(S32)}, "num_seqs: expected int32[1], got int32[]"),
    "seq_lens": ({"seq_lens": zeros(S32, 3)}, "seq_lens: expected int32[2], got int32[3]"),
    "page_table": ({"page_table": zeros(S32, M)}, "page_table: expected rank 2, got int32[3]"),
    "norm_weight": (
        TRANSFORMS | {"norm_weight": zeros(F32, R)},
        "norm_weight: expected float32[64], got float32[16]",
    ),
    "rope_table": (
        TRANSFORMS | {"rope_table": zeros(F32, 9, C)},
        "rope_table: expected float32[*,16], got float32[9,64]",
    ),
    "rope_lens": (
        TRANSFORMS | {"rope_lens": zeros(S32, 3)},
        "rope_lens: expected int32[2], got int32[3]",
    ),
    "codes": ({"q_scale": zeros(F32, B, 1)}, "q_scale: expected an FP8 cache, got another"),
    "lengths to rotate by": (
        {"rope_lens": zeros(S32, B)},
        "rope_lens: expected no such operand in this call, got one",
    ),
}


@pytest.mark.parametrize("name", BAD_RAGGED)
def test_bad_ragged_names_tensor_expected_and_got(name: str) -> None:
    change, message = BAD_RAGGED[name]
    with pytest.raises(JaxRuntimeError, match=re.escape(f"jax_mla_ragged: {message}")):
        ragged(change)


def test_ragged_that_is_not_in_place_is_an_internal_error() -> None:
    for q_len in (0, 2):
        with pytest.raises(JaxRuntimeError, match="INTERNAL: jax_mla_ragged: pool result 0"):
            ragged({}, q_len=q_len, is_aliased=False)
        ragged({}, q_len=q_len)
        ragged(TRANSFORMS, q_len=q_len)


def test_ragged_pool_of_a_stack_needs_a_layer() -> None:
    with pytest.raises(JaxRuntimeError, match=r"with layers in front, .*got bfloat16\[8,16,80\]"):
        ragged({}, has_layer=True)


def test_uniform_call_with_another_number_of_sequences_is_refused() -> None:
    message = r"jax_mla_ragged: page_table: expected int32\[2,\*\], got int32\[3,3\]"
    with pytest.raises(JaxRuntimeError, match=message):
        ragged({"page_table": zeros(S32, 3, M)}, q_len=2)


def test_queries_that_are_codes_cannot_be_rotated() -> None:
    scales = {"kv_scale": zeros(F32, 1, 2), "q_scale": zeros(F32, B, 1)}
    pool = {"kv_pages": zeros(E4M3, PAGES, PAGE, C + R)}
    message = "rope_table: expected none with q_scale, whose queries are codes, got one"
    with pytest.raises(JaxRuntimeError, match=f"jax_mla_ragged: {message}"):
        ragged(TRANSFORMS | scales | pool, kv_format="fp8_e4m3")


def test_append_that_is_not_in_place_is_an_internal_error() -> None:
    pool = zeros(BF16, PAGES, PAGE, C + R)
    with pytest.raises(JaxRuntimeError, match="INTERNAL: jax_mla_append: pool result 0"):
        append(pool, {}, is_aliased=False)
    append(pool, {})


def test_calls_are_counted() -> None:
    before = _ffi.extension().call_counts()
    decode(call_arguments())
    append(zeros(BF16, PAGES, PAGE, C + R), {})
    after = _ffi.extension().call_counts()
    assert after["decode_cpu"] == before["decode_cpu"] + 1
    assert after["append_cpu"] == before["append_cpu"] + 1
