"""What `--enable-metrics` shows at /metrics, beside what the engine shows there.

Its own metrics are those of servers that split prefill and decode, so other servers have an empty
page. The names here are those of sglang, which dashboards know.
"""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import bisect
import collections
import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from sgl_jax.srt.entrypoints import http_server
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from starlette.routing import Mount

_engine_handle = TokenizerManager._handle_batch_output
COUNTERS = {
    "num_requests": "Requests that were answered to their end.",
    "prompt_tokens": "Tokens of their prompts.",
    "cached_tokens": "Tokens of their prompts that the prefix cache had.",
    "generation_tokens": "Tokens that were made for them.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request to its first token, of streams.",
    "e2e_request_latency_seconds": "From a request to the end of its answer.",
}
BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds


class Seconds:
    """A histogram: how many times were up to each bound, and their sum."""

    def __init__(self) -> None:
        """Start with none."""
        self.counts, self.sum = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def metric(self, name: str, help_text: str) -> Metric:
        """Return what the page shows."""
        bounds = [*map(str, BOUNDS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self.counts), strict=True))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self.sum)


_totals: collections.Counter[str] = collections.Counter()
_times = {name: Seconds() for name in HISTOGRAMS}


def count(manager: Any, outputs: Any) -> None:
    """Stand for `TokenizerManager._handle_batch_output`: count what comes, then hand it on."""
    now = time.time()
    for i, rid in enumerate(outputs.rids):
        state = manager.rid_to_state.get(rid)
        if state is None or rid.startswith("HEALTH_CHECK"):
            continue
        if state.obj.stream and not state.first_token_time:
            state.first_token_time = now
            _times["time_to_first_token_seconds"].add(now - state.created_time)
        if outputs.finished_reasons[i] is not None:
            _times["e2e_request_latency_seconds"].add(now - state.created_time)
            _totals["num_requests"] += 1
            _totals["prompt_tokens"] += outputs.prompt_tokens[i]
            _totals["cached_tokens"] += outputs.cached_tokens[i]
            _totals["generation_tokens"] += outputs.completion_tokens[i]
    _engine_handle(manager, outputs)


class Collector:
    """What prometheus_client asks whenever somebody reads the page."""

    def collect(self) -> Iterator[Metric]:
        """Return all metrics."""
        for name, help_text in COUNTERS.items():
            yield CounterMetricFamily(f"sglang:{name}", help_text, _totals[name])
        for name, help_text in HISTOGRAMS.items():
            yield _times[name].metric(f"sglang:{name}", help_text)
        unfinished = len(http_server._global_state.tokenizer_manager.rid_to_state)
        yield GaugeMetricFamily(
            "sglang:num_unfinished_reqs", "Requests that run or wait.", unfinished
        )


def add_page(app: Any) -> None:
    """Stand for `http_server.add_prometheus_middleware`."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # the engine's own
    registry.register(Collector())
    page = Mount("/metrics", make_asgi_app(registry=registry))
    page.path_regex = re.compile("^/metrics(?P<path>.*)$")  # without a redirect to /metrics/
    app.routes.append(page)


def install() -> None:
    """Put this into the server of this process."""
    TokenizerManager._handle_batch_output = count
    http_server.add_prometheus_middleware = add_page
