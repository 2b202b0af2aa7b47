"""Checkpoints for the tests of the serving engine, and servers that several tests share."""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with the checkpoints of make_checkpoints.py."""
    # Hugging Face's own program, in an environment with torch: tools/ci_serving.sh names it.
    python = os.environ.get("JAX_MLA_HF_PYTHON")
    if python is None:
        pytest.skip("JAX_MLA_HF_PYTHON names no Python with torch and transformers")
    root = tmp_path_factory.mktemp("checkpoints")
    script = pathlib.Path(__file__).with_name("make_checkpoints.py")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run([python, str(script), str(root)], check=True, env=env, timeout=400)
    return root


@pytest.fixture(scope="session")
def start(checkpoints: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that starts a server, or returns the one that runs if it is the same."""
    from server import Server  # needs the engine's packages

    running: dict[tuple[str, ...], Server] = {}

    def stop() -> None:
        for server in running.values():
            server.__exit__()
        running.clear()

    def get(checkpoint: str, *arguments: str) -> Server:
        key = (checkpoint, *arguments)
        if key not in running:
            stop()
            log = tmp_path_factory.mktemp("server") / "log.txt"
            model = f"--model-path={checkpoints / checkpoint}"
            running[key] = Server(log, model, *arguments)
            running[key].__enter__()
        return running[key]

    yield get
    stop()


@pytest.fixture
def answers(checkpoints: pathlib.Path) -> Any:
    """Return a function that loads what Hugging Face answers with a checkpoint."""
    return lambda name: json.loads((checkpoints / name / "answers.json").read_text())
