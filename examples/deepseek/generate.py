"""Generate text with a DeepSeek-architecture checkpoint and jax_mla's paged cache.

python examples/deepseek/generate.py

runs the recall checkpoint of this repository. Its prompts list names and numbers and have different
lengths. The model is then asked for some of the numbers, and the right answers are counted.

python examples/deepseek/generate.py --checkpoint DIR --prompt TEXT

continues a text with any checkpoint that README.md lists.
"""

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the relative imports below need the package
    folder = Path(__file__).resolve().parent
    sys.path = [str(folder.parent), *(path for path in sys.path if path != str(folder))]
    sys.exit(importlib.import_module("deepseek.generate").main())

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla

from . import plan, recall
from .checkpoint import load
from .config import load_config
from .engine import Engine, require_backend
from .mesh import Placement, parse_mesh
from .options import generate_parser, parse_args
from .scheduler import Request
from .screen import Screen
from .tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Task:
    """What to generate.

    Attributes:
      prompts: token ids of each prompt.
      script: [len(prompts), steps] int32. A token of a question, or -1 where the model's own token
        stands.
      answers: for each prompt, the right answer to each of its questions. Empty for free text.
      farthest: the most tokens between a question and the pair that answers it.
    """

    prompts: list[list[int]]
    script: np.ndarray
    answers: list[list[int]]
    farthest: int = 0


def dialogue_task(dialogues: Sequence[recall.Dialogue]) -> Task:
    """Ask each dialogue's questions after its prompt."""
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
    """Make recall prompts of 24 to 160 pairs (160 for a single prompt), with questions.

    Args:
      num_prompts: number of prompts.
      num_questions: questions after each prompt, about different pairs.
      seed: seed of names, numbers and questions.

    Returns:
      The task.

    Raises:
      ValueError: the shortest prompt has fewer pairs than questions.
    """
    rng = np.random.default_rng(seed)
    num_pairs = np.linspace(24, 160, num_prompts).astype(int) if num_prompts > 1 else [160]
    if num_questions > num_pairs[0]:
        raise ValueError(
            f"--questions: expected at most {num_pairs[0]}, the pairs of the shortest prompt, "
            f"got {num_questions}"
        )
    return dialogue_task([recall.sample_dialogue(rng, int(n), num_questions) for n in num_pairs])


def text_task(
    tokenizer: Tokenizer, texts: Sequence[str], max_new_tokens: int, max_positions: int
) -> Task:
    """Continue each text.

    Args:
      tokenizer: of the checkpoint.
      texts: the prompts.
      max_new_tokens: tokens to generate for each text.
      max_positions: longest sequence that the model was made for.

    Returns:
      The task.

    Raises:
      ValueError: a text has no tokens, is too long, or cannot be encoded.
    """
    prompts = [tokenizer.encode(text) for text in texts]
    for text, prompt in zip(texts, prompts, strict=True):
        if not text.strip() or not prompt:
            raise ValueError(f"--prompt: expected a text that is not empty, got {text!r}")
        if len(prompt) + max_new_tokens > max_positions:
            raise ValueError(
                f"--prompt: expected at most {max_positions} tokens with the new ones "
                f"(max_position_embeddings), got {len(prompt)} + {max_new_tokens}; shorten the "
                f"text that begins with {text[:20]!r}, or lower --max-new-tokens"
            )
    return Task(prompts, np.full((len(texts), max_new_tokens), -1, np.int32), [])


def count_right(task: Task, ids: list[list[int]]) -> tuple[int, int]:
    """Count the questions that were answered right, and all questions.

    A text may have ended before its last question. An answer that is missing is wrong.
    """
    right = sum(
        given == answer
        for text, answers in zip(ids, task.answers, strict=False)
        for given, answer in zip(text[1 :: recall.ITEM_TOKENS], answers, strict=False)
    )
    return right, sum(map(len, task.answers))


def run(engine: Engine, tokenizer: Tokenizer, task: Task, *, quiet: bool) -> Screen:
    """Continue the prompts, and show each token when it comes.

    Args:
      engine: made for this task.
      tokenizer: of the checkpoint.
      task: what to generate.
      quiet: print nothing.

    Returns:
      The screen. Its `ids` are the generated tokens and the questions between them.
    """
    requests = [
        Request(prompt, len(script), script.tolist())
        for prompt, script in zip(task.prompts, task.script, strict=True)
    ]
    for request in requests:
        engine.add(request)
    screen = Screen(tokenizer.decode, task.prompts, quiet=quiet)
    text_of = {id(request): n for n, request in enumerate(requests)}
    for news in engine.run():
        screen.show({text_of[id(request)]: token for request, token in news})
    screen.finish()
    return screen


def report(engine: Engine, task: Task, screen: Screen) -> None:
    """Print which backend ran, how fast it was, and how many answers were right."""
    seconds, steps = engine.seconds, engine.steps
    num_prefill = sum(map(len, task.prompts))
    num_decode = sum(map(len, screen.ids))
    shape = {axis: size for axis, size in engine.placement.mesh.shape.items() if size > 1}
    device = engine.placement.device
    decode_ms = 1e3 * seconds["decode"] / max(steps["decode"], 1)
    print(
        f"\nbackend   {engine.backend} "
        f"({device.platform}: {device.device_kind}; mesh {shape or 'of one device'})\n"
        f"steps     {steps['prefill']} with prompts, {num_prefill:,} prompt tokens, in "
        f"{seconds['prefill']:.2f} s; {steps['decode']} without, {decode_ms:.1f} ms each\n"
        f"texts     {num_decode:,} tokens in {seconds['prefill'] + seconds['decode']:.2f} s "
        f"(compiling took {seconds['compile']:.1f} s)"
    )
    if task.answers:
        right, total = count_right(task, screen.ids)
        pages = -(-task.farthest // engine.page_size)
        print(
            f"answers   {right} of {total} right; the farthest looked back {task.farthest} tokens, "
            f"{pages} pages"
        )


def prepare(args: argparse.Namespace) -> tuple[Engine, Tokenizer, Task]:
    """Load the checkpoint, make the task, compile.

    Args:
      args: the command line.

    Returns:
      Engine, tokenizer and task.

    Raises:
      ValueError: an option or the checkpoint is wrong. The message names it.
      OSError: a file cannot be read.
      jax.errors.JaxRuntimeError: the devices have too little memory.
    """
    require_backend(args.backend, jax_mla.backends())
    placement = Placement.over(parse_mesh(args.mesh))
    config, tokenizer = load_config(args.checkpoint), load_tokenizer(args.checkpoint)
    placement.check(config)
    if args.prompt:
        task = text_task(tokenizer, args.prompt, args.max_new_tokens, config.max_positions)
    elif isinstance(tokenizer, recall.Vocabulary):
        task = recall_task(args.prompts, args.questions, args.seed)
    else:
        raise ValueError(
            "give a text to continue with --prompt; only the recall checkpoint has its own"
        )
    longest = max(map(len, task.prompts)) + task.script.shape[1]
    least, groups = longest * placement.num_groups, placement.num_groups
    if args.cache_tokens is not None and args.cache_tokens < least:
        raise ValueError(
            f"--cache-tokens: expected at least {least}, room for the longest prompt and its new "
            f"tokens in each of {groups} groups of devices, got {args.cache_tokens}"
        )
    start = time.perf_counter()
    params = load(args.checkpoint, config, jnp.dtype(args.dtype), placement.build)
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    if jax.process_index() == 0:
        seconds = time.perf_counter() - start
        print(f"{args.checkpoint.name}: {num_parameters:,} parameters loaded in {seconds:.1f} s\n")
    engine = Engine(
        config,
        params,
        placement,
        slots=min(args.slots, len(task.prompts)),
        max_tokens=longest,
        cache_tokens=args.cache_tokens,
        page_size=args.page_size,
        step_tokens=args.step_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        backend=args.backend,
        kv_format=args.kv_format,
        kv_scale=1.0 if args.kv_scale is None else args.kv_scale,
        index_format=args.index_format,
    )
    engine.warm_up()
    return engine, tokenizer, task


def join_processes(args: argparse.Namespace) -> None:
    """Connect this process to the others, before JAX starts its devices.

    Args:
      args: the command line.

    Raises:
      ValueError: JAX finds no cluster.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "--distributed: JAX could not join a cluster such as Slurm, Kubernetes or Cloud TPU "
            f"({error}); without one, give --coordinator HOST:PORT --num-processes N "
            "--process-id I instead"
        ) from error


def main() -> None:
    """Load, generate and report."""
    parser = generate_parser()
    args = parse_args(parser)
    try:
        if args.plan:
            config = load_config(args.checkpoint)
            placement = Placement.planned(parse_mesh(args.mesh))
            placement.check(config)
            plan.show(config, placement, args.dtype, args.kv_format, args.index_format)
            return
        if args.distributed or args.coordinator:
            join_processes(args)
        engine, tokenizer, task = prepare(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        parser.error(
            "out of memory; lower --cache-tokens, --page-size or --step-tokens, or use more "
            f"devices (--plan says what a device holds): {str(error).splitlines()[0]}"
        )
    quiet = jax.process_index() > 0
    screen = run(engine, tokenizer, task, quiet=quiet)
    if not quiet:
        report(engine, task, screen)


if __name__ == "__main__":
    main()
