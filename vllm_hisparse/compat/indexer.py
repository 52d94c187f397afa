"""vLLM's DSA indexer on CUDA over caches of keys in 4 bits.

vLLM's own 4-bit keys need Blackwell. The indexer calls a few functions by name with the cache: those that write keys,
gather them for a prompt and score them. They are replaced here by functions that look at the width of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_hisparse.ops import indexer_keys
from vllm_hisparse.ops.select_positions import can_select, select_positions

RELEASES = ">=0.32"
VLLM = (
    "vllm._custom_ops.indexer_k_quant_and_cache",
    "vllm._custom_ops.cp_gather_indexer_k_quant_cache",
    "vllm.model_executor.layers.sparse_attn_indexer.fp8_fp4_paged_mqa_logits",
    "vllm.model_executor.layers.sparse_attn_indexer.get_indexer_topk",
    "vllm.models.deepseek_v32.attention.fused_norm_rope",
)
Select = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor, int, int], None]  # vLLM's `SparseIndexerTopk.forward`


def select_with_own_kernel() -> None:
    """Let vLLM's indexer select the positions of decoding requests with the plugin's kernel; once in a process."""
    from vllm.model_executor.layers import sparse_attn_indexer

    stock = sparse_attn_indexer.get_indexer_topk
    if not hasattr(stock, "has_own_kernel"):
        made = wrap_get_indexer_topk(stock)
        made.has_own_kernel = True
        sparse_attn_indexer.get_indexer_topk = made


def support_narrow_keys() -> None:
    """Let vLLM's indexer read and write caches of keys in 4 bits as well; once in a process."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.models.deepseek_v32 import attention

    for module, name, make in (
        (_custom_ops, "indexer_k_quant_and_cache", wrap_insert),
        (_custom_ops, "cp_gather_indexer_k_quant_cache", wrap_gather),
        (sparse_attn_indexer, "fp8_fp4_paged_mqa_logits", wrap_paged_logits),
        (attention, "fused_norm_rope", wrap_fused_norm_rope),
    ):
        stock = getattr(module, name)
        if not hasattr(stock, "supports_narrow_keys"):
            made = make(stock)
            made.supports_narrow_keys = True
            setattr(module, name, made)


def _is_narrow(cache: torch.Tensor) -> bool:
    return cache.shape[-1] == indexer_keys.KEY_BYTES


def wrap_insert(stock: Callable[..., None]) -> Callable[..., None]:
    """Return `stock`, which quantises and writes keys in 8 bits, extended to caches of keys in 4 bits."""

    def indexer_k_quant_and_cache(
        k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if _is_narrow(kv_cache):
            indexer_keys.insert(kv_cache, k, slot_mapping)
        else:
            stock(k, kv_cache, slot_mapping, *args, **kwargs)

    return indexer_k_quant_and_cache


def wrap_gather(stock: Callable[..., None]) -> Callable[..., None]:
    """Return `stock`, which gathers the keys of prompts in 8 bits, extended to caches of keys in 4 bits."""

    def cp_gather_indexer_k_quant_cache(
        kv_cache: torch.Tensor,
        dst_k: torch.Tensor,
        dst_scale: torch.Tensor,
        block_table: torch.Tensor,
        cu_seq_lens: torch.Tensor,
    ) -> None:
        if _is_narrow(kv_cache):
            indexer_keys.gather(kv_cache, block_table, cu_seq_lens, dst_k, dst_scale)
        else:
            stock(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)

    return cp_gather_indexer_k_quant_cache


def wrap_paged_logits(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `stock`, which scores decoding requests' keys in 8 bits, extended to caches of keys in 4 bits."""

    def fp8_fp4_paged_mqa_logits(
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        schedule_metadata: torch.Tensor,
        max_model_len: int,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not _is_narrow(kv_cache):
            args = (q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len)
            return stock(*args, **kwargs)
        return indexer_keys.paged_logits(kv_cache.squeeze(2), q[0], weights, context_lens, block_tables, max_model_len)

    return fp8_fp4_paged_mqa_logits


def wrap_get_indexer_topk(stock: Callable[[str], Select]) -> Callable[[str], Select]:
    """Return `stock`, extended so that backend "auto" selects with the plugin's kernel where it can."""

    def get_indexer_topk(backend: str) -> Select:
        select_stock = stock(backend)
        if backend != "auto":
            return select_stock

        def select(
            logits: torch.Tensor,
            seq_lens: torch.Tensor,
            next_n: int,
            topk_indices: torch.Tensor,
            topk_tokens: int,
            max_seq_len: int,
        ) -> None:
            if can_select(logits, seq_lens):
                select_positions(logits, seq_lens.reshape(-1), topk_indices)
            else:
                select_stock(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)

        return select

    return get_indexer_topk


def wrap_fused_norm_rope(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `stock`, which norms and rotates a layer's inputs and writes keys in 8 bits, extended to keys in 4 bits.

    NOTE: for a cache of keys in 4 bits, `stock` gets no cache for keys and writes them to `index_k_out` instead; they
    are quantised and written to the cache afterwards.
    """

    def fused_norm_rope(
        *args: Any, indexer_k_cache: torch.Tensor | None = None, index_k_out: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if indexer_k_cache is None or not _is_narrow(indexer_k_cache):
            return stock(*args, indexer_k_cache=indexer_k_cache, index_k_out=index_k_out, **kwargs)
        index_k, slots = args[9], kwargs["indexer_slot_mapping"]
        keys = torch.empty_like(index_k, memory_format=torch.contiguous_format)
        out = stock(*args, indexer_k_cache=None, index_k_out=keys, **kwargs)
        indexer_keys.insert(indexer_k_cache, keys[: len(slots)], slots[: len(keys)])
        return out

    return fused_norm_rope
