"""FlashInfer's BatchMLAPagedAttentionWrapper (torch); its host-side plan is not timed."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from grid import Case
from workload import Workload

from peers.torch_graph import GraphOfCalls, Operands, why_not_torch

NAME = "flashinfer"
_WORKSPACE_BYTES = 128 * 2**20


def why_not(case: Case, kv_format: str | None = None) -> str:
    """Why this peer cannot time the case; empty when it can."""
    if reason := why_not_torch("flashinfer"):
        return reason
    if kv_format not in (None, "fp8_e4m3"):
        return f"flashinfer does not read {kv_format}"
    if case.layout != "packed" or (case.d_ckv, case.d_kpe) != (512, 64) or case.item_bytes != 2:
        return "this adapter shares packed 16-bit caches of 512 + 64 only"
    return ""


class Adapter:
    """One workload in FlashInfer's terms."""

    def __init__(self, work: Workload) -> None:
        """Share the operands and plan on the host."""
        import torch

        flashinfer = importlib.import_module("flashinfer")

        self._ops = Operands(work)
        case, scale = work.case, work.options.get("kv_scale")
        self._scales = {} if scale is None else {"ckv_scale": scale, "kpe_scale": scale}
        rows = (case.num_tokens, case.num_heads)
        self._q_nope = self._ops.q_nope.reshape(*rows, case.d_ckv)
        self._q_pe = self._ops.q_pe.reshape(*rows, case.d_kpe)
        self._out = torch.empty_like(self._q_nope)
        pages = case.pages_per_seq
        table = np.asarray(work.page_table)
        indices = np.concatenate([table[b, :count] for b, count in enumerate(pages)])

        def on_gpu(values: np.ndarray) -> Any:
            return torch.from_numpy(values.astype(np.int32)).cuda()

        # It chooses the kernel: fa3 on Hopper. All releases know these arguments.
        self._wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), backend="auto"
        )
        self._wrapper.plan(
            qo_indptr=on_gpu(case.cu_q_lens),
            kv_indptr=on_gpu(np.concatenate([[0], np.cumsum(pages)])),
            kv_indices=on_gpu(indices),
            kv_len_arr=self._ops.seq_lens,
            num_heads=case.num_heads,
            head_dim_ckv=case.d_ckv,
            head_dim_kpe=case.d_kpe,
            page_size=case.page_size,
            causal=int(case.q_lens.max()) > 1,
            sm_scale=work.sm_scale,
            q_data_type=self._q_nope.dtype,
            kv_data_type=self._ops.pools.dtype,
        )

    @property
    def description(self) -> str:
        """Release and kernel."""
        version = importlib.import_module("flashinfer").__version__
        return f"{version}, backend {getattr(self._wrapper, '_backend', 'unknown')}"

    @property
    def _call(self) -> Callable[[int], object]:
        def call(cache: int) -> object:
            pool = self._ops.pools[cache]
            d_ckv = self._ops.work.case.d_ckv
            return self._wrapper.run(
                q_nope=self._q_nope,
                q_pe=self._q_pe,
                ckv_cache=pool[..., :d_ckv],
                kpe_cache=pool[..., d_ckv:],
                out=self._out,
                **self._scales,
            )

        return call

    def outputs(self, cache: int) -> np.ndarray:
        """Like q_nope, in float32: the output of one call."""
        self._call(cache)
        return self._out.float().cpu().numpy().reshape(self._ops.work.q_nope.shape)

    def contender(self, calls: int) -> GraphOfCalls:
        """Attention and merge."""
        work = self._ops.work
        return GraphOfCalls(work.named(NAME), self._call, work.num_caches, calls)
