"""Private parts of MiniMax-M3's attention layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_hisparse.layout import MSA_BLOCK_SIZE

if TYPE_CHECKING:
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

RELEASES = ">=0.32"
VLLM = ("vllm._custom_ops.fused_minimax_m3_qknorm_rope_kv_insert",)


def normalise_and_rotate(
    layer: MiniMaxM3SparseAttention, qkv: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run vLLM's kernel before attention on CUDA, without its writes to the KV cache.

    NOTE: the kernel assumes that the cache of index keys is contiguous, and rounds them to fp8 from its registers.
    Therefore it writes index keys to new memory here.

    Args:
        layer: the layer.
        qkv: [tokens, elements] queries, keys, values, index queries and index key of each token; the keys are changed
            in place.
        positions: [tokens] int64.

    Returns:
        Queries, [tokens, num_heads * head_size], index queries, [tokens, index heads * index size], and index keys,
        [tokens, index size]; the index in the dtype of its cache.
    """
    from vllm import _custom_ops

    num_tokens, index_cache = len(qkv), layer.indexer.index_cache
    num_blocks = -(-num_tokens // MSA_BLOCK_SIZE)
    query = qkv.new_empty((num_tokens, layer.q_size))
    index_query = qkv.new_empty((num_tokens, layer.index_q_size), dtype=index_cache.dtype)
    index_keys = qkv.new_empty((num_blocks, MSA_BLOCK_SIZE, layer.idx_head_dim), dtype=index_cache.dtype)
    _custom_ops.fused_minimax_m3_qknorm_rope_kv_insert(
        qkv,
        layer.q_norm.weight,
        layer.k_norm.weight,
        layer.rotary_emb.cos_sin_cache,
        positions,
        layer.num_heads,
        layer.num_kv_heads,
        layer.rotary_emb.rotary_dim,
        layer.q_norm.variance_epsilon,
        layer.index_q_norm.weight,
        layer.index_k_norm.weight,
        layer.num_idx_heads,
        positions.new_full((num_tokens,), -1),  # no slot in the cache of keys and values
        torch.arange(num_tokens, device=qkv.device),
        qkv.new_empty((1, layer.num_kv_heads, MSA_BLOCK_SIZE, 2 * layer.head_dim)),
        index_keys,
        MSA_BLOCK_SIZE,
        query,
        index_query,
        layer.kv_cache_dtype,
    )
    return query, index_query, index_keys.flatten(0, 1)[:num_tokens]
