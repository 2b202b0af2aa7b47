"""For the torch peers: our operands without a copy, and a CUDA graph of many calls."""

import time
from collections.abc import Callable

import numpy as np
from workload import Workload


def why_not_torch(package: str) -> str:
    """Why a torch package cannot run here; empty when it can."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no GPU"


class Operands:
    """A workload's arrays as torch tensors that share their memory."""

    def __init__(self, work: Workload) -> None:
        """Wrap the arrays. The pool must be packed."""
        import torch

        self.work = work
        self.pools = torch.from_dlpack(work.pools)
        self.q_nope = torch.from_dlpack(work.q_nope)
        self.q_pe = torch.from_dlpack(work.q_pe)
        self.page_table = torch.from_numpy(np.array(work.page_table)).cuda()
        self.seq_lens = torch.from_numpy(np.array(work.seq_lens)).cuda()


class GraphOfCalls:
    """A captured CUDA graph of `calls` calls over the rotating caches."""

    def __init__(self, name: str, call: Callable[[int], object], caches: int, calls: int) -> None:
        """Warm up and capture.

        Args:
          name: For the report.
          call: Enqueues one call over the cache of the given index; its result is dropped.
          caches: Caches to rotate over.
          calls: Calls in the graph.
        """
        import torch

        self._torch = torch
        self.name = name
        self.calls = calls
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            for i in range(min(3, calls)):
                call(i % caches)
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # Calls by JAX's threads must not end the capture.
            with torch.cuda.graph(
                self._graph, stream=self._stream, capture_error_mode="thread_local"
            ):
                for i in range(calls):
                    call(i % caches)

    def run(self, dispatches: int) -> float:
        """Replay the graph that many times and wait; return the host's share in seconds."""
        start = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            for _ in range(dispatches):
                self._graph.replay()
        host = time.perf_counter() - start
        self._stream.synchronize()
        return host
