"""One server process, for tests: starts, answers, ends."""

# pyright: reportMissingImports=false
# The engine's packages are not where the linters run.

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Self

import psutil
import requests

START_SECONDS, STOP_SECONDS = 180, 60
# Small chunks and pages, so that short prompts are cut into chunks and share cached pages.
ARGUMENTS = (
    "--device=cpu", "--dtype=float32", "--page-size=16", "--chunked-prefill-size=64",
    "--max-total-tokens=4096", "--max-running-requests=8", "--mem-fraction-static=0.2",
    "--disable-precompile", "--log-level=warning",
)  # fmt: skip


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(*arguments: str, sizes: tuple[str, ...] = ARGUMENTS) -> list[str]:
    """Return the command line of a server; later arguments win."""
    # -P: the tests' folder must not come first on the path.
    module = "jax_mla.integrations.sglang"
    return [sys.executable, "-P", "-m", module, "--host=127.0.0.1", *sizes, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a server, without what conftest.py sets."""
    return os.environ | {
        "XLA_FLAGS": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


class Server:
    """A running server."""

    def __init__(
        self, log: pathlib.Path, *arguments: str, sizes: tuple[str, ...] = ARGUMENTS
    ) -> None:
        """Start it; `with` waits until it answers."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command(f"--port={self.port}", *arguments, sizes=sizes),
                env=environment(), stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.family: list[psutil.Process] = []

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log.read_text()[-4000:]}")
            try:
                # This makes a token, so that the server is warm as well.
                if requests.get(f"{self.url}/health_generate", timeout=60).status_code == 200:
                    break
            except requests.RequestException:
                time.sleep(0.5)
        else:
            self.__exit__()
            raise TimeoutError(f"no answer:\n{self.log.read_text()[-4000:]}")
        root = psutil.Process(self.process.pid)
        self.family = [root, *root.children(recursive=True)]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                for process in self.family:
                    if process.is_running():
                        process.kill()
                self.process.wait()

    def memory(self) -> float:
        """Return what the server's processes hold, in MB."""
        return sum(process.memory_info().rss for process in self.family) / 2**20

    def generate(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Return the engine's answer to token ids, greedily."""
        response = self.post("/generate", prompt, max_new_tokens)
        response.raise_for_status()
        return response.json()

    def post(self, path: str, prompt: list[int], max_new_tokens: int) -> requests.Response:
        """Send token ids and return whatever comes back."""
        sampling = dict(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
        body = dict(input_ids=prompt, sampling_params=sampling)
        return requests.post(self.url + path, json=body, timeout=300)
