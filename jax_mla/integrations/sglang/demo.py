"""`--demo`: the server with a small checkpoint, sizes for a laptop, and a request to try.

Only a folder and arguments: what serves is what serves every checkpoint. The model is the one that
examples/deepseek trained to remember numbers, so that its answers are right or wrong.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import functools
import json
import pathlib
import shlex

from sgl_jax.srt.entrypoints import http_server
from sgl_jax.srt.server_args import ServerArgs

FLAG = "--demo"
NAME = "recall"
PROMPT, ANSWER = "kale=41 fig=07 oak=93 fig=", "07"
# In a wheel, and in a clone.
FOLDERS = (
    pathlib.Path(__file__).with_name(NAME),
    pathlib.Path(__file__).parents[3] / "examples" / "deepseek" / "checkpoints" / NAME,
)
# Few requests, because the engine pads a step with prompts to as many tokens as requests may run at
# once. By default those are thousands, and a short prompt takes half a second. One size of batches,
# so that a second request at the same time compiles nothing.
SIZES = (
    "--chunked-prefill-size=256",
    "--max-running-requests=8",
    "--max-total-tokens=8192",
    "--disable-precompile",
    "--precompile-bs-paddings=8",
)


def arguments() -> list[str]:
    """Return what `--demo` stands for.

    Raises:
      ValueError: this installation has no checkpoint.
    """
    folder = next((folder for folder in FOLDERS if (folder / "config.json").exists()), None)
    if folder is None:
        raise ValueError(f"{FLAG}: expected a checkpoint in {FOLDERS[0]}, found none")
    return [
        f"--model-path={folder}", f"--served-model-name={NAME}", "--device=cpu",
        "--log-level=warning", *SIZES,
    ]  # fmt: skip


def command(args: ServerArgs) -> str:
    """Return a line for a shell that asks the server."""
    body = {"model": args.served_model_name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    headers = ["Content-Type: application/json"]
    if args.api_key:
        headers.append(f"Authorization: Bearer {args.api_key}")
    options = [word for header in headers for word in ("-H", header)]
    return shlex.join(
        ["curl", "-s", f"{args.url()}/v1/completions", *options, "-d", json.dumps(body)]
    )


def announce(args: ServerArgs) -> None:
    """Have the engine print the command when its server is ready; say that it starts."""
    ready = (
        "",
        f"The server is ready. It remembers numbers: the answer to this has the text {ANSWER}.",
        "",
        command(args),
        "",
        "Ctrl-C ends it.",
    )
    say = functools.partial(print, *ready, sep="\n", flush=True)
    http_server.launch = functools.partial(http_server.launch, launch_callback=say)
    print(f"Starting a server with {args.model_path}: about a minute.", flush=True)
