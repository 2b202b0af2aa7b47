"""The recall checkpoint: its answers are right, and they come from the paged cache."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek import recall, recall_tokenizer
from examples.deepseek.checkpoint import load
from examples.deepseek.config import load_config
from examples.deepseek.engine import Engine
from examples.deepseek.generate import Task, count_right, dialogue_task, recall_task
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.model import PagedAttention, Place, logits, paged_forward
from examples.deepseek.options import RECALL
from examples.deepseek.pages import row_layout
from examples.deepseek.scheduler import Request, Step
from examples.deepseek.tokenizer import load_tokenizer
from jax_mla._runtime import _ffi

NUM_PAIRS = 160
PAGE_SIZE = 16
CONFIG = load_config(RECALL)


def make_engine(prompts: list[list[int]], steps: int, mesh: str = "", **options) -> Engine:
    options = {"dtype": jnp.bfloat16, "page_size": PAGE_SIZE, "slots": len(prompts)} | options
    dtype, devices = options.pop("dtype"), options.pop("devices", None)
    placement = Placement.over(parse_mesh(mesh), devices)
    params = load(RECALL, CONFIG, dtype, placement.build)
    max_tokens = max(map(len, prompts)) + steps
    return Engine(CONFIG, params, placement, max_tokens=max_tokens, **options)


def generate(engine: Engine, task: Task) -> np.ndarray:
    """Tokens [prompts, steps]."""
    requests = [
        Request(prompt, len(script), script.tolist())
        for prompt, script in zip(task.prompts, task.script, strict=True)
    ]
    for request in requests:
        engine.add(request)
    for _ in engine.run():
        pass
    return np.array([request.ids for request in requests])


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


@pytest.mark.full
def test_recall_is_right_over_hundreds_of_tokens() -> None:
    task = long_task(num_prompts=16, num_questions=32, seed=7)
    engine = make_engine(task.prompts, task.script.shape[1])
    assert next(b for b in engine.backends() if b.chosen).name != "reference"
    right, total = count_right(task, generate(engine, task).tolist())
    assert total == 512
    assert right >= 0.99 * total, f"{right} of {total}"


@pytest.mark.full
def test_requests_join_while_others_decode_and_pages_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eleven prompts of different lengths share eight slots, and a cache for fewer than eight."""
    task = recall_task(num_prompts=11, num_questions=6, seed=3)
    longest = max(map(len, task.prompts))
    engine = make_engine(
        task.prompts, task.script.shape[1], slots=8, cache_tokens=2 * longest, step_tokens=96
    )
    scheduler, launch, mixed = engine.scheduler, engine.launch, []

    def recording(plan: Step) -> jax.Array:
        mixed.extend([] if plan.cu_q_lens is None else [np.diff(plan.cu_q_lens)])
        return launch(plan)

    monkeypatch.setattr(engine, "launch", recording)
    right, total = count_right(task, generate(engine, task).tolist())
    assert right >= 0.99 * total, f"{right} of {total}"
    assert not scheduler.waiting and not scheduler.running
    assert scheduler.pools[0].num_free == scheduler.pools[0].num_pages
    # There are steps with both: some sequences have one token, and some a chunk.
    assert any((counts == 1).any() and (counts > 1).any() for counts in mixed)
    assert max((counts > 0).sum() for counts in mixed) < 8  # the cache had no room for more


@pytest.mark.full
def test_answers_depend_on_one_cache_row_and_one_page_table_entry() -> None:
    task = long_task(num_prompts=8, num_questions=1, seed=11)
    engine = make_engine(task.prompts, task.script.shape[1], step_tokens=8 * len(task.prompts[0]))
    scheduler = engine.scheduler
    for prompt, script in zip(task.prompts, task.script, strict=True):
        engine.add(Request(prompt, len(script), script.tolist()))
    prompts, questions = scheduler.next_step(), scheduler.next_step()
    assert prompts is not None and questions is not None and len(questions.requests) == 8
    engine.launch(prompts)
    kept, right = engine.cache, np.array([answers[0] for answers in task.answers])

    def first_answers(cache: jax.Array = kept) -> np.ndarray:
        engine.cache = jnp.copy(cache)  # a step donates what it is given
        return np.asarray(engine.launch(questions))

    def with_rows_replaced(position: int) -> np.ndarray:
        """Replace the cached token at `position` of every prompt by the next pair's."""
        other, table = position + recall.ITEM_TOKENS, scheduler.page_table
        to, source = (table[:, p // PAGE_SIZE] for p in (position, other))
        rows = kept[:, source, other % PAGE_SIZE]
        return first_answers(kept.at[:, to, position % PAGE_SIZE].set(rows))

    def with_page_replaced(page: int) -> np.ndarray:
        """Point one page-table entry of every prompt to the page that follows it."""
        table = scheduler.page_table.copy()
        scheduler.page_table[:, page] = table[:, page + 1]
        scheduler.table_changes += 1
        answers = first_answers()
        scheduler.page_table[:] = table
        scheduler.table_changes += 1
        return answers

    np.testing.assert_array_equal(first_answers(), right)
    # The first question asks for the first pair: its number is token 2, hundreds of tokens back.
    assert (with_rows_replaced(2) != right).all()
    unrelated = 2 + recall.ITEM_TOKENS * 40
    np.testing.assert_array_equal(with_rows_replaced(unrelated), right)
    assert (with_page_replaced(0) != right).all()
    np.testing.assert_array_equal(with_page_replaced(10), right)
    np.testing.assert_array_equal(first_answers(), right)


QUICK_MESHES = ["tp=8,experts=width", "dp=2,tp=2,cp=2"]
MESHES = [
    "dp=2", "tp=2", "cp=2", "dp=8", "dp=2,tp=4", "dp=4,tp=2,experts=width", "cp=8",
]  # fmt: skip


@functools.cache
def tokens_of_one_device() -> np.ndarray:
    task = recall_task(num_prompts=3, num_questions=4, seed=5)
    options = {"dtype": jnp.float32, "devices": jax.devices("cpu"), "step_tokens": 128}
    tokens = generate(make_engine(task.prompts, task.script.shape[1], **options), task)
    right, total = count_right(task, tokens.tolist())
    assert right == total
    return tokens


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", [*QUICK_MESHES, *(pytest.param(mesh, marks=pytest.mark.full) for mesh in MESHES)]
)
def test_every_mesh_generates_the_same_tokens(mesh: str) -> None:
    task = recall_task(num_prompts=3, num_questions=4, seed=5)
    options = {"dtype": jnp.float32, "devices": jax.devices("cpu"), "step_tokens": 128}
    engine = make_engine(task.prompts, task.script.shape[1], mesh, **options)
    np.testing.assert_array_equal(generate(engine, task), tokens_of_one_device())
    sizes = parse_mesh(mesh)
    # With dp, each group of devices has its own part of the cache; with cp, the pages are split.
    parts = sizes["cp"] if sizes["cp"] > 1 else sizes["dp"]
    assert engine.cache.sharding.shard_shape(engine.cache.shape)[1] * parts == engine.cache.shape[1]
    experts = engine.params["layers"][1]["expert_down"]
    assert experts.addressable_shards[0].data.size * engine.placement.mesh.size == experts.size


@pytest.mark.full
def test_the_cache_stays_in_place_and_no_weight_is_copied() -> None:
    task = recall_task(num_prompts=2, num_questions=2, seed=1)
    options = {"dtype": jnp.float32, "devices": jax.devices("cpu"), "step_tokens": 104}
    engine = make_engine(task.prompts, 4, **options)
    pointer = engine.cache.unsafe_buffer_pointer()
    generate(engine, task)
    assert engine.cache.unsafe_buffer_pointer() == pointer
    assert_no_weight_is_copied(engine, (0, 104))


def assert_no_weight_is_copied(engine: Engine, sizes: tuple[int, ...]) -> None:
    """No operation makes as many values as a weight has.

    The small weights are left out: other things in a step of so few tokens are as large as they.
    """
    weights = {weight.size for weight in jax.tree.leaves(engine.params) if weight.size > 33_000}
    assert len(weights) >= 5
    free = "parameter|bitcast|get-tuple-element"
    made = re.compile(rf" = \w+\[([\d,]+)\](?:\{{([\d,]+)[^}}]*\}})? (?!{free})([\w-]+)\(")
    for size in sizes:
        for line in engine.compiled_text(size).splitlines():
            if found := made.search(line):
                shape, layout, op = found.groups()
                moves = op != "transpose" or not is_bitcast(line, layout)
                assert np.prod(numbers(shape)) not in weights or not moves, line


@pytest.mark.gpu
def test_a_gpu_replays_decode_steps_and_copies_no_weight() -> None:
    task = recall_task(num_prompts=8, num_questions=24, seed=2)
    engine = make_engine(task.prompts, task.script.shape[1], page_size=64, step_tokens=1024)
    for prompt, script in zip(task.prompts, task.script, strict=True):
        engine.add(Request(prompt, len(script), script.tolist()))
    calls = [sum(_ffi.extension().call_counts().values()) for _ in engine.run()]
    assert calls[-1] == calls[-16], calls
    assert_no_weight_is_copied(engine, (0,))


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def is_bitcast(transpose: str, layout: str) -> bool:
    """Whether a transpose only changes the layout: the values stay where they are."""
    dimensions = numbers(transpose.split("dimensions={")[1].split("}")[0])
    order = [dimensions[axis] for axis in numbers(layout)]
    return order == sorted(order, reverse=True)


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tp to divide 8 heads, got 3"):
        make_engine([[0]], 1, "tp=3", devices=jax.devices("cpu"))


def test_a_broken_vocabulary_is_named(tmp_path: Path) -> None:
    for content in ("[", "3", "[1]"):
        (tmp_path / "vocabulary.json").write_text(content)
        with pytest.raises(ValueError, match="vocabulary.json: expected a JSON list of tokens"):
            load_tokenizer(tmp_path)


def test_the_tokenizer_for_other_programs_is_the_same() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    for name, text in recall_tokenizer.files().items():
        assert (RECALL / name).read_text() == text, "write recall_tokenizer.files()"
    foreign, own = (
        tokenizers.Tokenizer.from_file(str(RECALL / "tokenizer.json")),
        load_tokenizer(RECALL),
    )
    for text in ("kale=41 fig=07 kale=", " kale=41fig=07\n oak=", "oak=00 99", ""):
        ids = own.encode(text)
        assert foreign.encode(text).ids == ids
        assert foreign.decode(ids) == own.decode(ids[1:])
    assert foreign.encode("fig=07 spam=4").ids == [*own.encode("fig=07"), recall.BOS, recall.BOS]


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
    params = load(RECALL, CONFIG, jnp.bfloat16)
    num_pages = -(-length // PAGE_SIZE)
    page_table = np.random.default_rng(0).permutation(batch * num_pages).astype(np.int32)
    width, dtype = row_layout(CONFIG, kv_format, jnp.dtype(jnp.bfloat16))
    cache = jnp.zeros((CONFIG.num_layers, batch * num_pages, PAGE_SIZE, width), dtype)
    bounds = np.arange(batch + 1, dtype=np.int32) * length
    lens = np.full(batch, length, np.int32)
    place = Place(page_table.reshape(batch, -1), lens, bounds)
    attend = PagedAttention(CONFIG.sm_scale, None, kv_format, kv_scale)

    @jax.jit
    def run(tokens, positions):
        hidden, _ = paged_forward(
            CONFIG, params, cache, tokens.reshape(-1), positions, place,
            max_positions=length, attend=attend,
        )  # fmt: skip
        return jax.nn.log_softmax(logits(CONFIG, params, hidden)).reshape(batch, length, -1)

    found = np.asarray(run(tokens, np.tile(np.arange(length, dtype=np.int32), batch)))
    asked = length - script.shape[1] + np.arange(0, script.shape[1], recall.ITEM_TOKENS)
    answer = tokens[:, asked + 1]
    likely = np.take_along_axis(found[:, asked], answer[..., None], axis=-1)
    right = found[:, asked].argmax(-1) == answer
    return float(likely.mean()), float(right.mean())


@pytest.mark.parametrize(("kv_format", "kv_scale"), [("fp8_e4m3", 1.0), ("fp8_ds_mla", None)])
@pytest.mark.full
def test_fp8_caches_answer_as_well(kv_format: str, kv_scale: float | None) -> None:
    """docs/performance.md states the figures."""
    plain, plain_right = log_likelihood(None, None)
    fp8, right = log_likelihood(kv_format, kv_scale)
    print(f"{kv_format}: {fp8:.3e} and {right:.4f}, bfloat16 {plain:.3e} and {plain_right:.4f}")
    assert fp8 != plain
    assert abs(fp8 - plain) < 1e-6 and right >= 0.99 and plain_right >= 0.99


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_ds_mla"])
def test_the_engine_serves_from_fp8_caches(kv_format: str) -> None:
    task = recall_task(num_prompts=4, num_questions=6, seed=3)
    options = {"kv_format": kv_format, "step_tokens": 48}
    engine = make_engine(task.prompts, task.script.shape[1], **options)
    right, total = count_right(task, generate(engine, task).tolist())
    assert right >= 0.99 * total, f"{right} of {total}"
    assert engine.cache.dtype.itemsize == 1
