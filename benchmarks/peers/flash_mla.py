"""DeepSeek's FlashMLA (torch), dense decode; its scheduling kernel is timed apart."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from grid import Case
from workload import Workload

from peers.torch_graph import GraphOfCalls, Operands, why_not_torch

NAME = "flash_mla"


def why_not(case: Case, kv_format: str | None = None) -> str:
    """Why this peer cannot time the case; empty when it can."""
    if reason := why_not_torch("flash_mla"):
        return reason
    if kv_format is not None:
        return "flash_mla reads FP8 caches in sparse attention only"
    if case.page_size != 64:
        return "flash_mla takes pages of 64 tokens only"
    if case.layout != "packed" or (case.d_ckv, case.d_kpe) != (512, 64) or case.item_bytes != 2:
        return "flash_mla takes packed 16-bit caches of 512 + 64 only"
    return ""


class Adapter:
    """One workload in FlashMLA's terms."""

    def __init__(self, work: Workload) -> None:
        """Share the operands and make the schedule once."""
        import torch

        self._ops = Operands(work)
        self._q = torch.cat([self._ops.q_nope, self._ops.q_pe], dim=-1)
        self._call = self._make_call(self._new_schedule())

    @property
    def description(self) -> str:
        """Release."""
        return getattr(importlib.import_module("flash_mla"), "__version__", "of unknown release")

    def _new_schedule(self) -> tuple:
        flash_mla = importlib.import_module("flash_mla")
        case = self._ops.work.case
        # Older releases compute the schedule here, newer ones in the first call that uses it.
        return flash_mla.get_mla_metadata(self._ops.seq_lens, case.q_len * case.num_heads, 1)

    def _make_call(self, schedule: tuple) -> Callable[[int], Any]:
        flash_mla = importlib.import_module("flash_mla")
        ops, case = self._ops, self._ops.work.case
        # SGLang's wheel keeps the dense Hopper kernel behind a switch. Upstream has dropped it.
        switch = "use_legacy"
        known = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
        options = {switch: True} if switch in known else {}

        def call(cache: int) -> object:
            return flash_mla.flash_mla_with_kvcache(
                self._q,
                ops.pools[cache].unsqueeze(2),
                ops.page_table,
                ops.seq_lens,
                case.d_ckv,
                *schedule,
                softmax_scale=ops.work.sm_scale,
                causal=case.q_len > 1,
                **options,
            )

        return call

    def outputs(self, cache: int) -> np.ndarray:
        """[batch, q_len, num_heads, d_ckv] float32 of one call."""
        out, _ = self._call(cache)
        return out.float().cpu().numpy()

    def contender(self, calls: int) -> GraphOfCalls:
        """Attention and merge with the schedule made beforehand."""
        return GraphOfCalls(NAME, self._call, self._ops.work.num_caches, calls)

    def with_schedule(self, calls: int) -> GraphOfCalls:
        """The same with a schedule made in each call. The difference is the schedule's time."""

        def call(cache: int) -> object:
            return self._make_call(self._new_schedule())(cache)

        return GraphOfCalls(f"{NAME} with schedule", call, self._ops.work.num_caches, calls)
