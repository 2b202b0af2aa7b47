"""DeepGEMM's scores of an indexer (torch), alone and with `torch.topk` behind them.

`sgl-deep-gemm` 0.1.2 compiles its kernels at first use. Its decode reads pages as ours does, its
prefill one array of keys.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
from index_grid import DIM, PAGE_SIZE, IndexCase
from index_work import IndexWorkload

from peers.torch_graph import GraphOfCalls, why_not_torch

NAME = "deep_gemm"
SCORES, WITH_TOPK = "deep_gemm scores", "deep_gemm, torch.topk"


def why_not(case: IndexCase, kv_format: str | None = None) -> str:
    """Why this peer cannot time the case; empty when it can."""
    del kv_format
    if reason := why_not_torch("deep_gemm"):
        return reason
    if not case.num_pairs:
        return "deep_gemm has no choice, and this call has no scores"
    if case.num_heads not in (32, 64):
        return "deep_gemm takes 32 or 64 index heads only"
    if case.is_prefill and case.batch > 1:
        return "deep_gemm's prefill is timed for one prompt only"
    return ""


class Adapter:
    """One call in DeepGEMM's terms."""

    def __init__(self, work: IndexWorkload) -> None:
        """Share the operands; compile the kernels."""
        import torch

        self._work = work
        self._q = torch.from_dlpack(work.q.view(np.uint8)).view(torch.float8_e4m3fn)
        self._weights = torch.from_dlpack(work.weights)
        self._call = self._prefill() if work.case.is_prefill else self._decode()
        self._call(0)
        torch.cuda.synchronize()

    @property
    def description(self) -> str:
        """Release and what is timed."""
        version = importlib.metadata.version("sgl-deep-gemm")
        return f"{version}; has its schedule beforehand, prefill reads keys that are not in pages"

    def _decode(self) -> Callable[[int], Any]:
        import torch

        deep_gemm = importlib.import_module("deep_gemm")
        case = self._work.case
        pools = torch.from_dlpack(self._work.pools).unsqueeze(3)
        table = torch.from_numpy(np.array(self._work.page_table)).cuda()
        lens = torch.full((case.batch, 1), case.seq, dtype=torch.int32, device="cuda")
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, num_sms)
        q = self._q.unsqueeze(1)

        def call(cache: int) -> Any:
            return deep_gemm.fp8_paged_mqa_logits(
                q, pools[cache], self._weights, lens, table, schedule, case.seq, False
            )

        return call

    def _prefill(self) -> Callable[[int], Any]:
        import torch

        deep_gemm = importlib.import_module("deep_gemm")
        case = self._work.case
        pools = torch.from_dlpack(self._work.pools)
        pages = torch.from_numpy(np.array(self._work.page_table[0])).cuda().long()
        arrays = []
        for pool in pools:
            page = pool[pages].reshape(len(pages), -1)
            codes = page[:, : PAGE_SIZE * DIM].reshape(-1, DIM)[: case.seq].contiguous()
            scales = page[:, PAGE_SIZE * DIM :].contiguous().view(torch.float32).reshape(-1)
            arrays.append((codes.view(torch.float8_e4m3fn), scales[: case.seq].contiguous()))
        begin = torch.zeros(case.q_len, dtype=torch.int32, device="cuda")
        end = torch.from_numpy(case.visible.astype(np.int32)).cuda()

        def call(cache: int) -> Any:
            return deep_gemm.fp8_mqa_logits(
                self._q, arrays[cache], self._weights, begin, end, False
            )

        return call

    def scores(self, cache: int, queries: np.ndarray) -> np.ndarray:
        """[len(queries), seq] float32: scores of queries that see all tokens."""
        import torch

        rows = self._call(cache)[torch.from_numpy(queries).cuda()]
        return rows[:, : self._work.case.seq].float().cpu().numpy()

    def contenders(self, calls: int) -> list[GraphOfCalls]:
        """The scores alone, and with the choice."""
        import torch

        case, caches = self._work.case, self._work.num_caches

        def both(cache: int) -> Any:
            return torch.topk(self._call(cache), case.topk, dim=-1, sorted=False)

        return [
            GraphOfCalls(SCORES, self._call, caches, calls),
            GraphOfCalls(WITH_TOPK, both, caches, calls),
        ]
