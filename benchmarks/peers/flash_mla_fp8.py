"""FlashMLA's dense decode over FP8 caches (torch), which sgl-flash-mla keeps for Hopper.

It takes queries in e4m3 and a page table of 64-token pages, and rounds its weights to e4m3 too.
"""

import importlib

import numpy as np
from grid import Case
from workload import Workload

from peers.torch_graph import GraphOfCalls, Operands, why_not_torch

NAME = "flash_mla_fp8"
TAKES_QUERY_CODES = True


def why_not(case: Case, kv_format: str | None = None) -> str:
    """Why this peer cannot time the case; empty when it can."""
    if reason := why_not_torch("flash_mla"):
        return reason
    if not hasattr(importlib.import_module("flash_mla"), "get_mla_decoding_metadata"):
        return "this flash_mla has no dense decode of FP8 caches; sgl-flash-mla has"
    if kv_format != "fp8_e4m3":
        return "it reads caches in fp8_e4m3 only"
    if case.page_size != 64:
        return "it takes pages of 64 tokens only"
    if case.layout != "packed" or (case.d_ckv, case.d_kpe) != (512, 64):
        return "it takes packed caches of 512 + 64 only"
    return ""


class Adapter:
    """One workload in this kernel's terms.

    Attributes:
      max_relative_error: what passes as right: weights in e4m3 have 4 significant bits.
    """

    max_relative_error = 0.06

    def __init__(self, work: Workload) -> None:
        """Share the operands, store the queries in e4m3 and make the schedule once."""
        import torch

        flash_mla = importlib.import_module("flash_mla")
        self._ops = ops = Operands(work)
        case = work.case
        self._q = torch.cat([ops.q_nope, ops.q_pe], dim=-1).to(torch.float8_e4m3fn)
        self._pools = ops.pools.view(torch.float8_e4m3fn)
        self._descale_q = torch.ones(1, device="cuda")
        self._descale_k = torch.full((1,), work.options["kv_scale"], device="cuda")
        rows = case.q_len * case.num_heads
        made = flash_mla.get_mla_decoding_metadata(
            ops.seq_lens, rows, 1, is_fp8_kvcache=True, use_legacy=True
        )
        self._schedule = flash_mla.get_mla_metadata()[0]
        self._schedule.tile_scheduler_metadata, self._schedule.num_splits = made

    @property
    def description(self) -> str:
        """Release."""
        return getattr(importlib.import_module("flash_mla"), "__version__", "of unknown release")

    def _call(self, cache: int) -> tuple:
        case = self._ops.work.case
        return importlib.import_module("flash_mla").flash_mla_with_kvcache(
            self._q,
            self._pools[cache].unsqueeze(2),
            self._ops.page_table,
            self._ops.seq_lens,
            case.d_ckv,
            self._schedule,
            softmax_scale=self._ops.work.sm_scale,
            causal=case.q_len > 1,
            is_fp8_kvcache=True,
            descale_q=self._descale_q,
            descale_k=self._descale_k,
            use_legacy=True,
        )

    def outputs(self, cache: int) -> np.ndarray:
        """[batch, q_len, num_heads, d_ckv] float32 of one call."""
        return self._call(cache)[0].float().cpu().numpy()

    def contender(self, calls: int) -> GraphOfCalls:
        """Attention and merge, with the schedule made before."""
        work = self._ops.work
        return GraphOfCalls(work.named(NAME), self._call, work.num_caches, calls)
