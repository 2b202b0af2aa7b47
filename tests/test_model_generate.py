"""Pieces of the model example, and its command line on one process and on two."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from examples.deepseek import generate
from examples.deepseek.checkpoint import save
from examples.deepseek.config import Moe, parse_config
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.model import paged_forward
from examples.deepseek.moe import route
from examples.deepseek.pages import UNUSED_PAGE, PageAllocator
from examples.deepseek.recall_model import init_params, raw_config
from examples.deepseek.sampling import sample

SCRIPT = Path(__file__).parents[1] / "examples" / "deepseek" / "generate.py"


def run_script(*args: str, devices: int = 1) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    paths = [str(Path(p).resolve()) for p in sys.path if p]  # where jax_mla was found
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--prompts", "3", "--questions", "4", *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def texts_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if " tokens | ..." in line]


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


def test_generate_streams_answers_and_reports() -> None:
    output = finish(run_script())
    assert len(texts_of(output)) == 3
    assert "decode cpu (cpu: cpu; mesh of one device)" in output
    assert "12 of 12 right" in output


def test_generate_continues_own_prompts() -> None:
    prompts = ("--prompt", "kale=41 fig=07 oak=93 fig=", "--prompt", "ant=50 bee=61 ant=")
    output = finish(run_script(*prompts, "--max-new-tokens", "1", "--dtype", "float32"))
    assert [line.split("...")[1] for line in texts_of(output)] == ["07", "50"]


def test_generate_runs_a_foreign_checkpoint(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads a tokenizer.json")
    words = ["<unk>", "the", "cache", "holds", "latent", "pages"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "eos_token_id": [9]}
    raw = raw_config(vocab_size=len(words), **sizes)
    save(tmp_path, raw, init_params(parse_config(raw), jax.random.key(0)), [])
    (tmp_path / "vocabulary.json").unlink()
    options = ("--checkpoint", str(tmp_path), "--max-new-tokens", "4")
    refused = run_script(*options, "--prompt", "the cache")
    assert "expected vocabulary.json or tokenizer.json" in refused.communicate(timeout=240)[1]
    assert refused.returncode == 1
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = texts_of(finish(run_script(*options, "--prompt", "the cache", "--prompt", "pages")))
    assert [len(text.split("...")[1].split()) for text in texts] == [4, 4]


def test_mistakes_are_one_line() -> None:
    for wrong, words in (
        (["--prompt", "spam"], "not in this checkpoint's vocabulary: 'spam'"),
        (["--mesh", "tp=3"], "--mesh: expected at most 1 devices in all, got 3"),
        (["--checkpoint", "/nowhere"], "/nowhere/config.json"),
    ):
        process = run_script(*wrong)
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == 1
        assert words in errors and "Traceback" not in errors


def test_sampling_options_run() -> None:
    output = finish(run_script("--temperature", "0.5", "--top-p", "0.9"))
    assert "12 of 12 right" in output


def test_two_processes_generate_the_same_tokens() -> None:
    expected = texts_of(finish(run_script("--dtype", "float32")))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    cluster = ("--coordinator", f"localhost:{port}", "--num-processes", "2")
    options = ("--dtype", "float32", "--mesh", "dp=2,tp=2,cp=2", *cluster)
    processes = [run_script(*options, "--process-id", str(i), devices=4) for i in range(2)]
    first, second = [finish(p) for p in processes]
    assert texts_of(first) == expected
    assert not texts_of(second)


def test_both_ops_run_on_the_backend_asked_for() -> None:
    config = parse_config(raw_config(vocab_size=8))
    params = init_params(config, jax.random.key(0))
    d_qk = config.kv_lora_rank + config.qk_rope_head_dim
    cache = jnp.zeros((config.num_layers, 2, 4, d_qk))
    one = jnp.zeros((1, 1), jnp.int32)
    for backend, calls in (("cpu", True), ("reference", False)):
        step = functools.partial(paged_forward, config, max_positions=8, backend=backend)
        program = jax.jit(step).lower(params, cache, one, one, one).as_text()
        assert ("jax_mla_append" in program) == ("jax_mla_decode" in program) == calls


def test_time_of_a_step_counts_the_steps_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """The longest text ended after 2 steps of the 64 asked for."""
    engine: Any = SimpleNamespace(
        seconds={"prefill": 1.0, "decode": 3.0, "compile": 0.0},
        chunk=64,
        backends=lambda q_len: [b for b in jax_mla.backends(platform="cpu") if b.chosen],
        placement=Placement.over(parse_mesh(""), jax.devices("cpu")),
    )
    screen: Any = SimpleNamespace(ids=[[1], [1, 2]])
    task = generate.Task([[1, 2], [3]], np.full((2, 64), -1, np.int32), [])
    generate.report(engine, task, screen)
    assert "3 tokens in 3.00 s: 1 tokens/s (1500.0 ms a step" in capsys.readouterr().out


def test_greedy_temperature_and_top_p() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(**options: float) -> np.ndarray:
        drawn = jax.vmap(lambda key: sample(logits, key, **options)[0])(keys)
        return np.bincount(np.asarray(drawn), minlength=4) / len(keys)

    assert sample(logits, keys[0]).tolist() == [0]
    np.testing.assert_allclose(shares(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    sharper = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(shares(temperature=0.5), sharper / sharper.sum(), atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    assert shares(temperature=1.0, top_p=1e-9)[0] == 1


def test_pages_are_permuted_and_never_shared() -> None:
    allocator = PageAllocator(num_pages=12, page_size=4, batch=3, max_pages_per_seq=5)
    assert allocator.grow(np.array([9, 0, 4]))
    assert not allocator.grow(np.array([12, 0, 4]))
    assert allocator.grow(np.array([13, 1, 5]))
    held = allocator.page_table[allocator.page_table != UNUSED_PAGE]
    assert len(held) == len(set(held)) == 7 and held.max() < 12
    assert held.tolist() != sorted(held)
    with pytest.raises(ValueError, match="expected at most 20 tokens, got 21"):
        allocator.grow(np.array([21, 1, 5]))
    with pytest.raises(ValueError, match="no page is free"):
        allocator.grow(np.array([20, 20, 20]))
    allocator.release(0)
    assert (allocator.page_table[0] == UNUSED_PAGE).all()


def test_mesh_arguments() -> None:
    assert parse_mesh("cp=4,dp=2") == {"dp": 2, "tp": 1, "cp": 4}
    for text in ("pp=2", "tp", "tp=0", "tp=x"):
        with pytest.raises(ValueError, match="--mesh"):
            parse_mesh(text)
    with pytest.raises(ValueError, match="expected at most 8 devices in all, got 16"):
        Placement.over(parse_mesh("tp=16"), jax.devices("cpu")[:8])


def test_the_balance_bias_chooses_experts_but_never_weighs_them() -> None:
    config = Moe(4, 2, 8, 0, "sigmoid", 1, 1, True, 3.0)
    affinity = jnp.array([0.6, 0.5, 0.4, 0.3])
    x, router = jnp.ones((1, 1, 1)), (jnp.log(affinity) - jnp.log1p(-affinity))[None]
    plain = route(config, router, jnp.zeros(4), x)[0, 0]
    np.testing.assert_allclose(plain, [3 * 0.6 / 1.1, 3 * 0.5 / 1.1, 0, 0], rtol=1e-5)
    biased = route(config, router, jnp.array([0, 0, 0, 9.0]), x)[0, 0]
    np.testing.assert_allclose(biased, [3 * 0.6 / 0.9, 0, 0, 3 * 0.3 / 0.9], rtol=1e-5)
