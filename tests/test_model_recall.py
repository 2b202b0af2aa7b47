"""The recall checkpoint: its answers are right, and they come from the paged cache."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek import recall
from examples.deepseek.checkpoint import load
from examples.deepseek.config import load_config
from examples.deepseek.engine import Engine
from examples.deepseek.generate import Task, count_right, dialogue_task, recall_task
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.model import logits, paged_forward
from examples.deepseek.options import RECALL
from examples.deepseek.pages import UNUSED_PAGE, PageAllocator, row_layout
from examples.deepseek.tokenizer import load_tokenizer

NUM_PAIRS = 160
PAGE_SIZE = 16
CONFIG = load_config(RECALL)


def make_engine(prompts: list[list[int]], steps: int, mesh: str = "", **options) -> Engine:
    options = {"dtype": jnp.bfloat16, "page_size": PAGE_SIZE} | options
    dtype, devices = options.pop("dtype"), options.pop("devices", None)
    placement = Placement.over(parse_mesh(mesh), devices)
    params = load(RECALL, CONFIG, dtype, placement.put_parameter)
    max_tokens = max(map(len, prompts)) + steps
    return Engine(CONFIG, params, placement, batch=len(prompts), max_tokens=max_tokens, **options)


def generate(engine: Engine, task: Task) -> np.ndarray:
    """Tokens [prompts, steps] that follow what `engine` has in its cache."""
    return np.stack(list(engine.decode(task.prompts, task.script)), axis=1)


def long_task(num_prompts: int, num_questions: int, seed: int) -> Task:
    rng = np.random.default_rng(seed)
    return dialogue_task(
        [recall.sample_dialogue(rng, NUM_PAIRS, num_questions) for _ in range(num_prompts)]
    )


def test_the_checkpoint_is_small_v3_shaped_and_has_experts() -> None:
    size = sum(file.stat().st_size for file in RECALL.iterdir())
    assert size < 4_000_000
    assert (CONFIG.model_type, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim) == (
        "deepseek_v3",
        512,
        64,
    )
    assert CONFIG.moe is not None
    assert CONFIG.moe.scoring == "sigmoid" and CONFIG.moe.num_shared_experts == 1


def test_recall_is_right_over_hundreds_of_tokens() -> None:
    task = long_task(num_prompts=16, num_questions=32, seed=7)
    engine = make_engine(task.prompts, task.script.shape[1])
    assert next(b for b in engine.backends() if b.chosen).name != "reference"
    engine.prefill(task.prompts)
    right, total = count_right(task, generate(engine, task).tolist())
    assert total == 512
    assert right >= 0.99 * total, f"{right} of {total}"


def test_prompts_of_different_lengths_share_a_batch() -> None:
    task = recall_task(num_prompts=5, num_questions=6, seed=3)
    assert len(set(map(len, task.prompts))) == 5
    engine = make_engine(task.prompts, task.script.shape[1], prefill_chunk=48)
    engine.prefill(task.prompts)
    right, total = count_right(task, generate(engine, task).tolist())
    assert right >= 0.99 * total, f"{right} of {total}"


def first_questions(engine: Engine, task: Task) -> np.ndarray:
    """Answer the first question of each prompt. The engine keeps its cache."""
    kept = engine.cache
    engine.cache = jnp.copy(kept)  # decode donates what it is given
    first = Task(task.prompts, task.script[:, : recall.ITEM_TOKENS], [])
    answers = generate(engine, first)[:, 1]
    engine.cache = kept
    return answers


def test_answers_depend_on_one_cache_row_and_one_page_table_entry() -> None:
    task = long_task(num_prompts=8, num_questions=2, seed=11)
    engine = make_engine(task.prompts, task.script.shape[1])
    engine.prefill(task.prompts)
    right = np.array([answers[0] for answers in task.answers])
    intact = first_questions(engine, task)
    np.testing.assert_array_equal(intact, right)

    def with_rows_replaced(position: int) -> np.ndarray:
        """Replace the cached token at `position` of every prompt by the next pair's."""
        kept, other = engine.cache, position + recall.ITEM_TOKENS
        table = engine.pages.page_table
        to, source = (table[:, p // PAGE_SIZE] for p in (position, other))
        rows = kept[:, source, other % PAGE_SIZE]
        engine.cache = kept.at[:, to, position % PAGE_SIZE].set(rows)
        answers = first_questions(engine, task)
        engine.cache = kept
        return answers

    # The first question asks for the first pair: its number is token 2, hundreds of tokens back.
    assert (with_rows_replaced(2) != right).all()
    unrelated = 2 + recall.ITEM_TOKENS * 40
    np.testing.assert_array_equal(with_rows_replaced(unrelated), right)

    def with_page_replaced(page: int) -> np.ndarray:
        """Point one page-table entry of every prompt to the page that follows it."""
        kept = engine.pages.page_table.copy()
        engine.pages.page_table[:, page] = kept[:, page + 1]
        answers = first_questions(engine, task)
        engine.pages.page_table[:] = kept
        return answers

    assert (with_page_replaced(0) != right).all()
    np.testing.assert_array_equal(with_page_replaced(10), right)
    np.testing.assert_array_equal(first_questions(engine, task), right)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "cp=2", "tp=8", "cp=8", "dp=2,tp=2,cp=2", "dp=8"])
def test_every_mesh_generates_the_same_tokens(mesh: str) -> None:
    task = recall_task(num_prompts=3, num_questions=4, seed=5)
    options = {"dtype": jnp.float32, "devices": jax.devices("cpu"), "prefill_chunk": 128}
    steps = task.script.shape[1]
    one = make_engine(task.prompts, steps, **options)
    one.prefill(task.prompts)
    expected = generate(one, task)
    many = make_engine(task.prompts, steps, mesh, **options)
    many.prefill(task.prompts)
    np.testing.assert_array_equal(generate(many, task), expected)
    sizes = parse_mesh(mesh)
    assert many.cache.sharding.shard_shape(many.cache.shape)[1] * sizes["cp"] == many.cache.shape[1]
    right, total = count_right(task, expected.tolist())
    assert right == total


def test_the_cache_stays_in_place() -> None:
    task = recall_task(num_prompts=2, num_questions=2, seed=1)
    engine = make_engine(task.prompts, 4, devices=jax.devices("cpu"))
    pointer = engine.cache.unsafe_buffer_pointer()
    engine.prefill(task.prompts)
    generate(engine, task)
    assert engine.cache.unsafe_buffer_pointer() == pointer


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tp to divide 8 heads, got 3"):
        make_engine([[0]], 1, "tp=3", devices=jax.devices("cpu"))


def test_a_broken_vocabulary_is_named(tmp_path: Path) -> None:
    for content in ("[", "3", "[1]"):
        (tmp_path / "vocabulary.json").write_text(content)
        with pytest.raises(ValueError, match="vocabulary.json: expected a JSON list of tokens"):
            load_tokenizer(tmp_path)


def test_vocabulary() -> None:
    tokenizer = load_tokenizer(RECALL)
    ids = tokenizer.encode("kale=41 fig=07 kale=")
    assert ids[0] == recall.BOS and len(ids) == 6
    assert tokenizer.decode(ids[1:]) == " kale=41 fig=07 kale="
    with pytest.raises(ValueError, match="not in this checkpoint's vocabulary: ' spam=4'"):
        tokenizer.encode("kale=41 spam=4")


@functools.cache
def log_likelihood(kv_format: str | None, kv_scale: float | None) -> tuple[float, float]:
    """Return how likely the right answers are and how many are the likeliest, for 512 questions.

    Every token is computed from the cache, as the engine's steps do.
    """
    task = long_task(num_prompts=16, num_questions=32, seed=7)
    script = task.script.copy()
    script[script < 0] = np.concatenate(task.answers)
    tokens = np.concatenate([task.prompts, script], axis=1)
    batch, length = tokens.shape
    params = load(RECALL, CONFIG, jnp.bfloat16, lambda _, x: jnp.asarray(x))
    pages = PageAllocator(batch * (length // PAGE_SIZE + 1), PAGE_SIZE, batch, length)
    pages.grow(np.full(batch, length))
    width, dtype = row_layout(CONFIG, kv_format, jnp.dtype(jnp.bfloat16))
    num_pages = pages.page_table.max(where=pages.page_table != UNUSED_PAGE, initial=0) + 1
    cache = jnp.zeros((CONFIG.num_layers, num_pages, PAGE_SIZE, width), dtype)

    @jax.jit
    def run(tokens, positions):
        hidden, _ = paged_forward(
            CONFIG, params, cache, jnp.asarray(pages.page_table), tokens, positions,
            max_positions=length, kv_format=kv_format, kv_scale=kv_scale,
        )  # fmt: skip
        return jax.nn.log_softmax(logits(CONFIG, params, hidden))

    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    found = np.asarray(run(tokens, positions))
    asked = length - script.shape[1] + np.arange(0, script.shape[1], recall.ITEM_TOKENS)
    answer = tokens[:, asked + 1]
    likely = np.take_along_axis(found[:, asked], answer[..., None], axis=-1)
    right = found[:, asked].argmax(-1) == answer
    return float(likely.mean()), float(right.mean())


@pytest.mark.parametrize(("kv_format", "kv_scale"), [("fp8_e4m3", 1.0), ("fp8_ds_mla", None)])
def test_fp8_caches_answer_as_well(kv_format: str, kv_scale: float | None) -> None:
    """The README states the differences."""
    plain, plain_right = log_likelihood(None, None)
    fp8, right = log_likelihood(kv_format, kv_scale)
    print(f"{kv_format}: {fp8:.3e} and {right:.4f}, bfloat16 {plain:.3e} and {plain_right:.4f}")
    assert fp8 != plain
    assert abs(fp8 - plain) < 1e-6 and right >= 0.99 and plain_right >= 0.99


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_ds_mla"])
def test_the_engine_serves_from_fp8_caches(kv_format: str) -> None:
    task = recall_task(num_prompts=4, num_questions=6, seed=3)
    options = {"kv_format": kv_format, "prefill_chunk": 48}
    engine = make_engine(task.prompts, task.script.shape[1], **options)
    engine.prefill(task.prompts)
    right, total = count_right(task, generate(engine, task).tolist())
    assert right >= 0.99 * total, f"{right} of {total}"
    assert engine.cache.dtype.itemsize == 1
