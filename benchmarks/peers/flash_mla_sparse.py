"""FlashMLA's sparse kernels for Hopper (torch): decode over FP8 rows, prefill over bf16 rows.

SGLang's wheel keeps them behind `use_legacy`. Upstream has dropped them.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from sparse_grid import SparseCase
from sparse_work import SparseWorkload

from peers.torch_graph import GraphOfCalls, Operands, why_not_torch

NAME = "flash_mla"


def kv_format_of(case: SparseCase) -> str | None:
    """The one format that it reads for such a call."""
    return None if case.is_prefill else "fp8_ds_mla"


def padded_heads(num_heads: int) -> int:
    """The heads that its kernels compute: 64 or 128."""
    return 64 if num_heads <= 64 else 128


def why_not(case: SparseCase, kv_format: str | None = None) -> str:
    """Why this peer cannot time the case; empty when it can."""
    if reason := why_not_torch("flash_mla"):
        return reason
    if kv_format != kv_format_of(case):
        kind = "sparse prefill" if case.is_prefill else "sparse decode"
        return f"flash_mla's {kind} reads {kv_format_of(case) or 'bfloat16'} rows only"
    if case.num_heads > 128 or (case.d_ckv, case.d_kpe, case.dtype) != (512, 64, "bfloat16"):
        return "flash_mla takes at most 128 heads of 512 + 64 in bfloat16"
    if case.topk % (entries := 128 if case.is_prefill else 64):
        return f"flash_mla takes lists of a multiple of {entries} entries only"
    if case.mixed and case.q_len > 1 and not case.is_prefill:
        return "flash_mla's sparse decode takes one length a sequence only"
    flash_mla = importlib.import_module("flash_mla")
    if "use_legacy" not in inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters:
        return "this release of flash_mla has no use_legacy, so no kernels for Hopper"
    return "" if flash_mla.has_legacy() else "this build of flash_mla has no kernels for Hopper"


class Adapter:
    """One call in FlashMLA's terms."""

    def __init__(self, work: SparseWorkload) -> None:
        """Share the operands; repeat the heads until there are as many as it computes."""
        import torch

        self._work, case = work, work.case
        self._pools = Operands(work).pools
        num_heads = padded_heads(case.num_heads)
        rows = (case.num_tokens,) if case.is_prefill else (case.batch, case.q_len)

        def queries(x: Any) -> Any:
            given = torch.from_dlpack(x).reshape(*rows, case.num_heads, x.shape[-1])
            return given[..., torch.arange(num_heads, device=given.device) % case.num_heads, :]

        self._q = torch.cat([queries(work.q_nope), queries(work.q_pe)], dim=-1).contiguous()
        list_rows = (case.num_tokens, 1) if case.is_prefill else rows
        self._indices = (
            torch.from_numpy(np.array(work.indices)).cuda().reshape(*list_rows, case.topk)
        )
        self._lens = (
            torch.from_numpy(np.array(work.topk_lens)).cuda().reshape(-1) if case.mixed else None
        )
        self._call = self._prefill() if case.is_prefill else self._decode()
        if not case.is_prefill:
            self._call(0)  # Makes the schedule, which all later calls use.
        torch.cuda.synchronize()

    @property
    def description(self) -> str:
        """Release and what is timed."""
        version = getattr(importlib.import_module("flash_mla"), "__version__", "of unknown release")
        return f"{version}; decode reads fp8_ds_mla and has its schedule beforehand"

    def _decode(self) -> Callable[[int], Any]:
        import torch

        flash_mla = importlib.import_module("flash_mla")
        schedule = flash_mla.get_mla_metadata()[0]

        def call(cache: int) -> Any:
            out, _ = flash_mla.flash_mla_with_kvcache(
                self._q,
                self._pools[cache].unsqueeze(2).view(torch.float8_e4m3fn),
                None,
                None,
                self._work.case.d_ckv,
                schedule,
                None,
                self._work.sm_scale,
                False,
                True,
                self._indices,
                topk_length=self._lens,
                use_legacy=True,
            )
            return out

        return call

    def _prefill(self) -> Callable[[int], Any]:
        flash_mla = importlib.import_module("flash_mla")

        def call(cache: int) -> Any:
            pool = self._pools[cache]
            return flash_mla.flash_mla_sparse_fwd(
                self._q,
                pool.reshape(-1, 1, pool.shape[-1]),
                self._indices,
                self._work.sm_scale,
                self._work.case.d_ckv,
                topk_length=self._lens,
                use_legacy=True,
            )[0]

        return call

    def outputs(self, cache: int) -> np.ndarray:
        """Like q_nope, in float32: the output of one call."""
        shape = self._work.q_nope.shape
        out = self._call(cache)[..., : shape[-2], :]
        return out.float().cpu().numpy().reshape(shape)

    def contender(self, calls: int) -> GraphOfCalls:
        """Attention and merge."""
        return GraphOfCalls(NAME, self._call, self._work.num_caches, calls)
