"""The kernel of vLLM's `FlashAttnMLASparseImpl` over selected rows.

vLLM 0.32 has `_run_mqa_kernel`, which takes flat rows; 0.33 has `_forward_mqa_kernel`, which takes a paged cache.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseImpl

RELEASES = ">=0.32,<0.33"
DELETE = "`_attend_to_rows`: `attend_to_flat_rows` calls `_forward_mqa_kernel`"
VLLM = ("vllm.v1.attention.backends.mla.flashattn_mla_sparse.FlashAttnMLASparseImpl._run_mqa_kernel",)

Pair = tuple[torch.Tensor, torch.Tensor]


def _attend_to_rows(
    impl: Any, query: Pair, rows: torch.Tensor, selection: Pair, layer: torch.nn.Module
) -> torch.Tensor:
    return impl._run_mqa_kernel(*query, rows, *selection, 1, cache_is_flat=True)


def _attend_to_blocks(
    impl: Any, query: Pair, rows: torch.Tensor, selection: Pair, layer: torch.nn.Module
) -> torch.Tensor:
    return impl._forward_mqa_kernel(query, rows.unsqueeze(1), *selection, layer=layer, block_size=1, is_decode=True)[0]


_attend = _attend_to_rows if hasattr(FlashAttnMLASparseImpl, "_run_mqa_kernel") else _attend_to_blocks


def attend_to_flat_rows(
    impl: Any, query: Pair, rows: torch.Tensor, selection: Pair, layer: torch.nn.Module
) -> torch.Tensor:
    """Attend over selected rows.

    Args:
        impl: implementation of the layer.
        query: [tokens, num_heads, kv_lora_rank] and [tokens, num_heads, qk_rope_head_dim].
        rows: [num_rows, row elements], contiguous.
        selection: [tokens, k] int32 row ids, and [tokens] int32 number of leading valid ones.
        layer: the attention layer.

    Returns:
        [tokens, num_heads, kv_lora_rank].
    """
    return _attend(impl, query, rows, selection, layer)
