"""Two processes with four CPU devices each, talking through gloo: JAX's own multi-host path."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "two_processes.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.full
def test_two_processes() -> None:
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    # -P: the source tree may have no extension, so it must not come before the package.
    command = [sys.executable, "-P", str(PROGRAM), str(free_port())]
    workers = [
        subprocess.Popen(
            [*command, str(i)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for process in workers:
            process.kill()
    for process, (printed, errors) in zip(workers, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
        done = [line for line in printed.splitlines() if line.startswith("ok ")]
        assert done == ["ok auto", "ok mesh=", "ok explicit"]
