"""Starts sglang-jax's server with jax_mla: `python -m jax_mla.integrations.sglang ARGUMENTS`.

The arguments are the engine's (`--help`), with two other defaults: `--page-size 64`, and `--device`
`cuda` where this machine has an NVIDIA GPU, else `cpu`. `--demo` stands for a small checkpoint on a
CPU, and prints a request to try.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import signal
import sys

from sgl_jax import launch_server

from jax_mla.integrations.sglang import demo, devices, install, refusals, shutdown

PAGE_SIZE = 64


def arguments(argv: list[str]) -> list[str]:
    """Return the command line with this module's defaults in front, where the user's win."""
    given = [argument for argument in argv if argument != demo.FLAG]
    of_demo = demo.arguments() if demo.FLAG in argv else []
    return ["--page-size", str(PAGE_SIZE), "--device", devices.default(), *of_demo, *given]


def main() -> None:
    """Start the server; end with one line and status 2 if it cannot be."""
    install()
    is_demo = demo.FLAG in sys.argv
    try:
        sys.argv[1:] = arguments(sys.argv[1:])
        args = refusals.read_arguments()
        refusals.check(args)
        devices.show_to_engine(args)
    except (OSError, ValueError, AssertionError) as error:
        print(f"jax_mla.integrations.sglang: error: {error}", file=sys.stderr)
        sys.exit(2)
    if is_demo:
        demo.announce(args)
    if args.enable_metrics:
        from jax_mla.integrations.sglang import metrics  # it needs prometheus_client

        metrics.install()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, shutdown.stop)  # until the server has its own handlers
    launch_server.main()


if __name__ == "__main__":
    main()
