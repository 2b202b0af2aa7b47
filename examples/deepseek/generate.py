"""Generate text with a DeepSeek-architecture checkpoint over jax_mla's paged latent cache.

python examples/deepseek/generate.py

runs the recall checkpoint of this repository: prompts of different lengths list names and numbers,
then the model is asked for some of them, the first of each prompt among them. `--checkpoint DIR
--prompt TEXT` runs any DeepSeek-V2, V3, R1, Kimi-K2 or MiniCPM3 directory in Hugging Face format.
"""

import argparse
import dataclasses
import importlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

if not __package__:  # run as a script: the relative imports below need the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(importlib.import_module("deepseek.generate").main())

from . import recall
from .checkpoint import load
from .config import load_config
from .engine import Engine
from .mesh import Placement, parse_mesh
from .screen import Screen
from .tokenizer import Tokenizer, load_tokenizer

RECALL = Path(__file__).parent / "checkpoints" / "recall"


@dataclasses.dataclass(frozen=True)
class Task:
    """What to generate.

    Attributes:
      prompts: token ids of each.
      script: [len(prompts), steps] int32; tokens that are given (questions), -1 where the model
        speaks.
      answers: the token that answers each question of each prompt; none for free text.
      farthest: tokens between a question and the place that answers it, at most.
    """

    prompts: list[list[int]]
    script: np.ndarray
    answers: list[list[int]]
    farthest: int = 0


def dialogue_task(dialogues: list[recall.Dialogue]) -> Task:
    """Each dialogue's prompt, then its questions, which the model answers."""
    script = np.full(
        (len(dialogues), len(dialogues[0].questions), recall.ITEM_TOKENS), -1, np.int32
    )
    script[:, :, 0] = [d.questions for d in dialogues]
    return Task(
        prompts=[d.prompt for d in dialogues],
        script=script.reshape(len(dialogues), -1),
        answers=[d.answers for d in dialogues],
        farthest=max(max(d.distances) for d in dialogues),
    )


def recall_task(num_prompts: int, num_questions: int, seed: int) -> Task:
    """Prompts of 24 to 160 pairs, each followed by `num_questions` questions."""
    rng = np.random.default_rng(seed)
    num_pairs = np.linspace(24, 160, num_prompts).astype(int) if num_prompts > 1 else [160]
    return dialogue_task([recall.sample_dialogue(rng, int(n), num_questions) for n in num_pairs])


def text_task(tokenizer: Tokenizer, texts: list[str], max_new_tokens: int) -> Task:
    """Free continuation of `texts`."""
    script = np.full((len(texts), max_new_tokens), -1, np.int32)
    return Task([tokenizer.encode(text) for text in texts], script, [])


def count_right(task: Task, ids: list[list[int]]) -> tuple[int, int]:
    """How many questions were answered right, and how many there were."""
    if not task.answers:
        return 0, 0
    items = np.asarray(ids).reshape(len(ids), -1, recall.ITEM_TOKENS)
    is_right = items[:, :, 1] == np.asarray(task.answers)
    return int(is_right.sum()), is_right.size


def run(engine: Engine, tokenizer: Tokenizer, task: Task, *, quiet: bool) -> Screen:
    """Prefill, decode, stream.

    Args:
      engine: made for this task.
      tokenizer: of the checkpoint.
      task: what to generate.
      quiet: print nothing.

    Returns:
      The screen; its `ids` are the generated tokens, questions included.
    """
    engine.prefill(task.prompts)
    labels = [f"{len(prompt):5d} tokens | ..." for prompt in task.prompts]
    screen = Screen(tokenizer.decode, labels, quiet=quiet)
    is_live = [True] * len(task.prompts)
    eos = engine.config.eos_token_ids
    for step, tokens in enumerate(engine.decode(task.prompts, task.script)):
        ended = np.isin(tokens, eos) & (task.script[:, step] < 0)
        screen.show(tokens.tolist(), is_live)
        is_live = [live and not end for live, end in zip(is_live, ended, strict=True)]
        if not any(is_live):
            break
    screen.finish()
    return screen


def report(engine: Engine, task: Task, screen: Screen) -> None:
    """Say which backend ran, how fast, and how many answers were right."""
    seconds = engine.seconds
    num_prefill = sum(len(prompt) - 1 for prompt in task.prompts)
    num_decode = sum(map(len, screen.ids))
    num_steps = max(map(len, screen.ids))  # fewer than asked for where every text ended
    chosen = [next(b for b in engine.backends(n) if b.chosen) for n in (engine.chunk, 1)]
    shape = {axis: size for axis, size in engine.placement.mesh.shape.items() if size > 1}
    device = engine.placement.mesh.devices.flat[0].device_kind
    print(
        f"\nbackend   prefill {chosen[0].name}, decode {chosen[1].name} "
        f"({chosen[1].platform}: {device}; mesh {shape or 'of one device'})\n"
        f"prefill   {num_prefill:,} tokens in {seconds['prefill']:.2f} s: "
        f"{num_prefill / seconds['prefill']:,.0f} tokens/s\n"
        f"decode    {num_decode:,} tokens in {seconds['decode']:.2f} s: "
        f"{num_decode / seconds['decode']:,.0f} tokens/s "
        f"({1e3 * seconds['decode'] / num_steps:.1f} ms a step; compiling took "
        f"{seconds['compile']:.1f} s)"
    )
    if task.answers:
        right, total = count_right(task, screen.ids)
        pages = -(-task.farthest // engine.pages.page_size)
        print(
            f"answers   {right} of {total} right; the farthest looked back {task.farthest} tokens, "
            f"{pages} pages"
        )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--checkpoint", type=Path, default=RECALL, help="directory in Hugging Face format")
    add("--prompt", action="append", help="continue this text; may be repeated")
    add("--max-new-tokens", type=int, default=64, help="of each --prompt")
    add("--prompts", type=int, default=8, help="number of recall prompts, without --prompt")
    add("--questions", type=int, default=20, help="questions after each recall prompt")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16", help="bfloat16, float16, or float32 (CPU)")
    add("--page-size", type=int, default=16)
    add("--prefill-chunk", type=int, default=64, help="tokens of each prompt in a prefill step")
    add("--backend", help="jax_mla backend; default: the first that can run")
    add("--mesh", default="", help="such as dp=2,tp=2,cp=2: batch, heads, pages")
    add("--distributed", action="store_true", help="several processes, as the cluster says")
    add("--coordinator", help="HOST:PORT of process 0, where no cluster says it")
    add("--num-processes", type=int)
    add("--process-id", type=int)
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> tuple[Engine, Tokenizer, Task]:
    """Load the checkpoint and make the task.

    Args:
      args: the command line.

    Returns:
      Engine, tokenizer and task.

    Raises:
      ValueError: an option or the checkpoint is wrong; the message names what.
      OSError: a file cannot be read.
    """
    placement = Placement.over(parse_mesh(args.mesh))
    config, tokenizer = load_config(args.checkpoint), load_tokenizer(args.checkpoint)
    if args.prompt:
        task = text_task(tokenizer, args.prompt, args.max_new_tokens)
    elif isinstance(tokenizer, recall.Vocabulary):
        task = recall_task(args.prompts, args.questions, args.seed)
    else:
        raise ValueError("--prompt: expected a text to continue, got none")
    start = time.perf_counter()
    params = load(args.checkpoint, config, jnp.dtype(args.dtype), placement.put_parameter)
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    if jax.process_index() == 0:
        seconds = time.perf_counter() - start
        print(f"{args.checkpoint.name}: {num_parameters:,} parameters loaded in {seconds:.1f} s\n")
    engine = Engine(
        config,
        params,
        placement,
        batch=len(task.prompts),
        max_tokens=max(map(len, task.prompts)) + task.script.shape[1],
        page_size=args.page_size,
        prefill_chunk=args.prefill_chunk,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        backend=args.backend,
    )
    return engine, tokenizer, task


def main() -> None:
    """Load, generate, report."""
    args = parse_args()
    if args.distributed or args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    try:
        engine, tokenizer, task = prepare(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"generate.py: {error}") from error
    quiet = jax.process_index() > 0
    screen = run(engine, tokenizer, task, quiet=quiet)
    if not quiet:
        report(engine, task, screen)


if __name__ == "__main__":
    main()
