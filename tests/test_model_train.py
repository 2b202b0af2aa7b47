"""The training script: its attention agrees with the paged one, and it trains."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek import recall, train_recall
from examples.deepseek.checkpoint import load
from examples.deepseek.config import load_config, parse_config
from examples.deepseek.model import Place, logits, paged_forward
from examples.deepseek.options import RECALL
from examples.deepseek.recall_model import init_params, mimetic, raw_config
from examples.deepseek.train_recall import text_logits, train_step

SCRIPT = Path(__file__).parents[1] / "examples" / "deepseek" / "train_recall.py"
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
}


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="float32 runs on the CPU backend")
def test_training_attention_equals_paged_attention() -> None:
    config, page_size = load_config(RECALL), 8
    params = load(RECALL, config, np.float32)
    tokens, _ = recall.sample_texts(jax.random.key(0), 2, 12, jnp.array([8, 10]))
    expected, _ = text_logits(config, params, tokens)
    batch, length = tokens.shape
    pages_per_seq = -(-length // page_size)
    page_table = jnp.arange(batch * pages_per_seq, dtype=jnp.int32).reshape(batch, pages_per_seq)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    lens = jnp.full(batch, length, jnp.int32)
    place = Place(page_table, lens, jnp.arange(batch + 1, dtype=jnp.int32) * length)
    cache = jnp.zeros((config.num_layers, batch * pages_per_seq, page_size, 512 + 64))
    hidden, _ = paged_forward(
        config, params, cache, tokens.reshape(-1), positions, place, max_positions=length
    )
    got = logits(config, params, hidden).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, atol=1e-3 * float(jnp.abs(expected).max()))


@pytest.mark.full
def test_a_few_steps_reduce_the_loss_and_balance_the_experts() -> None:
    config = parse_config(raw_config(**TINY))
    params = mimetic(config, init_params(config, jax.random.key(0)))
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    state, losses = (params, tuple(zeros), jnp.int32(0), jax.random.key(1)), []
    for _ in range(25):
        lr, pair_range = jnp.float32(2e-3), jnp.array([2, 4])
        state, loss, _ = train_step(config, (8, 12, jnp.dtype("float32")), state, lr, pair_range)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.3
    bias = state[0]["layers"][1]["router_bias"]
    assert 0 < float(jnp.abs(bias).max()) <= 25e-3 + 1e-6


def test_texts_are_what_the_task_says() -> None:
    num_pairs = jnp.array([5, 12])
    tokens, is_answer = map(np.asarray, recall.sample_texts(jax.random.key(3), 2, 20, num_pairs))
    assert (tokens[:, 0] == recall.BOS).all() and not is_answer[:, 0].any()
    for row, mask, pairs in zip(tokens, is_answer, num_pairs.tolist(), strict=True):
        items = row[1:].reshape(20, recall.ITEM_TOKENS)
        known = dict(items[:pairs].tolist())
        assert len(known) == pairs
        assert all(known[name] == number for name, number in items[pairs:].tolist())
        np.testing.assert_array_equal(mask[1:].reshape(20, 2)[:, 1], np.arange(20) >= pairs)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--steps", "0"], "--steps: expected an integer of at least 1, got '0'"),
        (["--seconds", "0"], "--seconds: expected a number above 0, got '0'"),
        (["--config", "[1]"], "--config: expected a JSON object, got '[1]'"),
        (["--config", "{"], "--config: expected a JSON object, got '{'"),
        (
            ["--config", '{"num_attention_heads": 0}'],
            "--config: config.json: num_attention_heads: expected an integer of at least 1, got 0",
        ),
        (
            ["--config", '{"q_lora_rank": null}'],
            "--config: config.json: q_lora_rank: expected an integer of at least 1, got None",
        ),
        (
            ["--config", '{"n_routed_experts": null}'],
            "--config: config.json: n_routed_experts: expected a model with experts, got none",
        ),
        (
            ["--config", '{"first_k_dense_replace": 3}'],
            "--config: config.json: first_k_dense_replace: expected less than num_hidden_layers "
            "(3), got 3",
        ),
        (
            ["--tokens", "3", "--items", "2", "--pairs", "1"],
            "--tokens: expected at least 4, the tokens of a text of 2 items, got 3",
        ),
        (
            ["--items", "20", "--pairs", "20"],
            "--pairs: expected at most 19, less than --items and not more than the names, got 20",
        ),
        (
            ["--pairs", "1000", "--items", "1200"],
            f"--pairs: expected at most {len(recall.NAMES)}, less than --items and not more than "
            "the names, got 1000",
        ),
    ],
)
def test_wrong_options_are_one_line(
    wrong: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_recall.py", "--out", "x", *wrong])
    with pytest.raises(SystemExit) as ended:
        train_recall.main()
    expected = f"train_recall.py: argument {words}\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, expected)


@pytest.mark.full
def test_the_script_writes_a_checkpoint(tmp_path: Path) -> None:
    sizes = '{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}'
    options = [
        "--steps",
        "2",
        "--tokens",
        "64",
        "--items",
        "16",
        "--pairs",
        "8",
        "--log-every",
        "1",
    ]
    subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path, "--config", sizes, *options],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"},
        timeout=240,
    )
    load(tmp_path, load_config(tmp_path))
