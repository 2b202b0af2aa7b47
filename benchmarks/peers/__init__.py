"""Other implementations, which are timed beside ours if they are installed."""

from types import ModuleType
from typing import Any

from workload import Workload


def adapt(peer: ModuleType, work: Workload) -> tuple[Any, str]:
    """Return the peer's adapter and "", or None and why the peer cannot run the workload."""
    try:
        reason = peer.why_not(work.case, work.kv_format)
        return (None, reason) if reason else (peer.Adapter(work), "")
    except (ImportError, AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        # Another release of the peer, or a broken installation of it.
        return None, f"{type(error).__name__}: {error}"
