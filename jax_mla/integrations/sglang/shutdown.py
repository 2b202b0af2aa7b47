"""How a server ends: with status 0, and on SIGTERM after what it has, for a minute at most."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, NoReturn

from sgl_jax.srt.utils import kill_process_tree

DRAIN_SECONDS = 60
POLL_SECONDS = 0.5


def stop(*_: object) -> NoReturn:
    """End the engine's processes and this one; also a handler of signals."""
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(0)


def leave_interrupts_to_parent() -> None:
    """Ignore Ctrl-C in this process: a terminal sends it to all, and the parent ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def stop_when_asked(manager: Any) -> None:
    """Stand for `TokenizerManager.sigterm_watchdog`: wait for SIGTERM, drain, end."""
    while not manager.gracefully_exit:
        await asyncio.sleep(POLL_SECONDS)
    deadline = time.monotonic() + DRAIN_SECONDS
    # The engine forgets a request before its answer is sent, and one with n > 1 comes back after
    # its prompt is cached. So only a second look tells that there are none.
    was_idle = False
    while not (was_idle and not manager.rid_to_state) and time.monotonic() < deadline:
        was_idle = not manager.rid_to_state
        await asyncio.sleep(POLL_SECONDS)
    manager.shutdown()
    stop()
