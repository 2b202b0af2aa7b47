"""Command lines of the scripts: every default is shown, and a mistake is one line, exit code 2."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

RECALL = Path(__file__).parent / "checkpoints" / "recall"
DTYPES = ("bfloat16", "float16", "float32")
KV_FORMATS = ("fp8_e4m3", "fp8_ds_mla")
INDEX_FORMATS = ("fp8",)
LARGEST = 2**31 - 1  # token positions, page numbers and seeds are 32-bit integers


class Parser(argparse.ArgumentParser):
    """An argument parser whose `error` prints one line."""

    def option(self, usage: str, default: object, help: str, **kwargs: Any) -> None:
        """Add an option with one value.

        Args:
          usage: the option and a word for its value, such as "--seed N".
          default: value without the option; None if `help` says what happens then.
          help: one line. The default is added to it.
          **kwargs: passed to `add_argument`.
        """
        name, _, metavar = usage.partition(" ")
        shown = "" if default is None else " (default: %(default)s)"
        self.add_argument(
            name, default=default, help=help + shown, metavar=metavar or None, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit with code 2."""
        lines = (line.strip() for line in message.splitlines())
        self.exit(2, f"{self.prog}: {'; '.join(filter(None, lines))}\n")


def integer(least: int) -> Callable[[str], int]:
    """A type for `add_argument`: an integer of at least `least` and at most `LARGEST`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= LARGEST:
            bound = f"at least {least}" if value < least else f"at most {LARGEST}"
            raise argparse.ArgumentTypeError(f"expected an integer of {bound}, got {text!r}")
        return value

    return parse


def number(text: str) -> float:
    """A type for `add_argument`: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def positive(text: str) -> float:
    """A type for `add_argument`: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def probability(text: str) -> float:
    """A type for `add_argument`: a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text!r}")
    return value


def address(text: str) -> str:
    """A type for `add_argument`: HOST:PORT."""
    if not re.fullmatch(r".+:\d+", text):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def generate_parser() -> Parser:
    """Make the parser of generate.py."""
    parser = Parser(
        description="Generate text with a DeepSeek-architecture checkpoint. Without --prompt and "
        "--checkpoint, the recall checkpoint of this repository answers questions, and the right "
        "answers are counted."
    )
    option = parser.option
    option("--checkpoint DIR", RECALL, "directory in Hugging Face format", type=Path)
    option("--prompt TEXT", None, "text to continue; repeat it for a batch", action="append")
    option("--max-new-tokens N", 64, "tokens to generate for each --prompt", type=integer(1))
    option("--prompts N", 8, "recall prompts to make if there is no --prompt", type=integer(1))
    option("--questions N", 20, "questions after each recall prompt", type=integer(1))
    option("--temperature X", 0.0, "divides the logits; 0 takes the likeliest token", type=number)
    option("--top-p X", 1.0, "draw from the likeliest tokens of this total", type=probability)
    option("--seed N", 0, "seed of the sampling and of the recall prompts", type=integer(0))
    option("--dtype", DTYPES[0], "of weights and cache; GPUs do not serve float32", choices=DTYPES)
    option("--kv-format", None, "FP8 cache; on GPUs with bfloat16", choices=KV_FORMATS)
    option("--kv-scale X", None, "scale of a cache in fp8_e4m3 (default: 1)", type=positive)
    option("--index-format", None, "index keys of a sparse model in FP8", choices=INDEX_FORMATS)
    option("--page-size N", 16, "tokens in a page of the cache", type=integer(1))
    option("--slots N", 32, "texts at a time; the others wait", type=integer(1))
    option("--step-tokens N", 512, "tokens of a step that has prompts, about", type=integer(1))
    option("--cache-tokens N", None, "size of the cache (default: for all slots)", type=integer(1))
    option("--backend NAME", None, "jax_mla backend (default: the first that can run)")
    option(
        "--mesh AXIS=SIZE,...",
        "dp=1,tp=1,cp=1,experts=number",
        "devices for the texts, the heads and the pages; what of the experts they share out",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what each device of the mesh would hold, and end"
    )
    parser.add_argument(
        "--distributed", action="store_true", help="run as one process of the cluster JAX finds"
    )
    option("--coordinator HOST:PORT", None, "address of process 0 without a cluster", type=address)
    option("--num-processes N", None, "processes in all, with --coordinator", type=integer(1))
    option("--process-id I", None, "0 to N - 1, with --coordinator", type=integer(0))
    return parser


def parse_args(parser: Parser) -> argparse.Namespace:
    """Read the command line of generate.py.

    Args:
      parser: from `generate_parser`. It exits with code 2 if an option is wrong or if two options
        contradict each other.

    Returns:
      The options.
    """
    args = parser.parse_args()
    if args.kv_scale is not None and args.kv_format != "fp8_e4m3":
        parser.error("argument --kv-scale: expected --kv-format fp8_e4m3 with it")
    processes = (args.coordinator, args.num_processes, args.process_id)
    if any(x is not None for x in processes):
        if any(x is None for x in processes):
            parser.error("give --coordinator, --num-processes and --process-id together")
        if args.process_id >= args.num_processes:
            parser.error(
                f"argument --process-id: expected 0 to {args.num_processes - 1} with "
                f"--num-processes {args.num_processes}, got {args.process_id}"
            )
    return args
