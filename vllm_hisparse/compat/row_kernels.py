"""Kernels of vLLM's sparse MLA implementations over selected rows.

vLLM 0.33 has `_forward_mqa_kernel`, with the same arguments in every class. vLLM 0.32 has `_run_mqa_kernel`: in
`FlashAttnMLASparseImpl`, it takes flat rows; in `FlashInferMLASparseImpl`, a joined query and pages of 32 or 64 rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch

RELEASES = ">=0.32,<0.33"
DELETE = "`FlashAttnKernel` and `FlashInferKernel`: `RowKernel` takes their place"
VLLM = (
    "vllm.v1.attention.backends.mla.flashattn_mla_sparse.FlashAttnMLASparseImpl._run_mqa_kernel",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse.FlashInferMLASparseImpl._run_mqa_kernel",
    "vllm.v1.attention.backends.mla.flashinfer_mla_sparse.FlashInferMLASparseImpl._prepare_mqa_kernel",
)

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RowKernel:
    """Mixin of a subclass of vLLM's implementation; it calls that class's `_forward_mqa_kernel`.

    NOTE: this mixin must come after vLLM's class among the bases. Its subclasses below define `_forward_mqa_kernel` for
    releases whose classes lack the method, and must not hide the method of a class that has it.
    """

    def attend_to_rows(
        self,
        query: Query,
        cache: torch.Tensor,
        selection: tuple[torch.Tensor, torch.Tensor],
        layer: torch.nn.Module,
        *,
        is_decode: bool,
    ) -> torch.Tensor:
        """Attend over selected rows.

        Args:
            query: [tokens, num_heads, kv_lora_rank] and [tokens, num_heads, qk_rope_head_dim]; or both joined, in the
                dtype of the rows.
            cache: [blocks, rows of a block, row elements], contiguous.
            selection: [tokens, k] int32 flat row ids, and [tokens] int32 number of leading valid ones; -1 behind them.
            layer: the attention layer.
            is_decode: True for requests that decode. vLLM may have another kernel for others.

        Returns:
            [tokens, num_heads, kv_lora_rank].
        """
        options = {"layer": layer, "block_size": cache.shape[1], "is_decode": is_decode}
        return self._forward_mqa_kernel(query, cache, *selection, **options)[0]


class FlashAttnKernel(RowKernel):
    """Mixin of a subclass of `FlashAttnMLASparseImpl`; its last base."""

    def _forward_mqa_kernel(
        self, query: Any, cache: torch.Tensor, *selection: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        return self._run_mqa_kernel(*query, cache.flatten(0, 1), *selection, 1, cache_is_flat=True), None


class FlashInferKernel(RowKernel):
    """Mixin of a subclass of `FlashInferMLASparseImpl`; its last base."""

    def _forward_mqa_kernel(
        self, query: Query, cache: torch.Tensor, *selection: torch.Tensor, layer: torch.nn.Module, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._prepare_mqa_kernel(layer, cache.device)
        query = torch.cat(query, -1) if isinstance(query, tuple) else query
        pages = cache.view(-1, math.gcd(cache.shape[1], 64), cache.shape[2])
        return self._run_mqa_kernel(query, pages, *selection)
