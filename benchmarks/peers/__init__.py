"""Other implementations, which are timed beside ours if they are installed."""

from types import ModuleType
from typing import Any

from grid import Case
from workload import Workload

# Another release of a peer raises these, or a broken installation of it.
_ERRORS = (ImportError, AttributeError, BufferError, OSError, RuntimeError, TypeError, ValueError)


def why_not(peer: ModuleType, case: Case, kv_format: str | None) -> str:
    """Why the peer cannot run a case; empty when it can."""
    try:
        return peer.why_not(case, kv_format)
    except _ERRORS as error:
        return f"{type(error).__name__}: {error}"


def adapt(peer: ModuleType, work: Workload) -> tuple[Any, str]:
    """Return the peer's adapter and "", or None and why the peer cannot run the workload."""
    if reason := why_not(peer, work.case, work.kv_format):
        return None, reason
    try:
        return peer.Adapter(work), ""
    except _ERRORS as error:
        return None, f"{type(error).__name__}: {error}"
