"""Kernels of the sparse MLA backends for SM100, computed from the arguments that vLLM gives them.

Each function has the parameters of the vendor's function that vLLM passes, and reads what the kernel reads: rows by
flat number, as many leading ids as counted, scales. A token without rows gets NaN from TensorRT-LLM's kernel, because
nothing says what it gets.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def trtllm_decode(
    *,
    query: torch.Tensor,  # [tokens, 1, num_heads, width]
    kv_cache: torch.Tensor,  # [pages, 1, page, width], in the dtype of the query
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,  # [tokens, 1, k] int32 flat rows
    seq_lens: torch.Tensor,  # [tokens] int32
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    sparse_mla_top_k: int,
    return_lse: bool,
) -> torch.Tensor:
    """`flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla`, which returns [tokens, 1, num_heads, kv_lora_rank]."""
    num_tokens, _, num_heads, width = query.shape
    assert query.dtype == kv_cache.dtype and workspace_buffer is not None and not return_lse
    assert block_tables.dtype == seq_lens.dtype == torch.int32 and seq_lens.shape == (num_tokens,)
    assert block_tables.shape == (num_tokens, 1, sparse_mla_top_k) and max_seq_len == sparse_mla_top_k
    assert kv_cache.shape[1] == 1 and kv_cache.shape[3] == width == kv_lora_rank + qk_rope_head_dim
    assert kv_cache.shape[2] in (32, 64, STAGED_BLOCK_SIZE) and kv_cache.is_contiguous()
    rows = rows_from_start(kv_cache)
    out = torch.full((num_tokens, 1, num_heads, kv_lora_rank), float("nan"))
    for i, (ids, count) in enumerate(zip(block_tables[:, 0].long(), seq_lens.tolist(), strict=True)):
        assert (ids[:count] >= 0).all(), "row -1 is read"
        if count:
            keys = rows[ids[:count]].float()
            weights = (query[i, 0].float() @ keys.T * bmm1_scale).softmax(-1)
            out[i, 0] = weights @ keys[:, :kv_lora_rank] * bmm2_scale
    return out


STAGED_BLOCK_SIZE = 4  # of the tests; a page that the launcher would refuse


def rows_from_start(cache: torch.Tensor) -> torch.Tensor:
    """All rows from a cache's first one to the end of its memory: the kernel does not look at the cache's shape."""
    width, start = cache.shape[-1], cache.storage_offset()
    num_elements = cache.untyped_storage().nbytes() // cache.element_size() - start
    return cache.as_strided((num_elements // width, width), (width, 1))


def flash_attn_4(
    *,
    q: torch.Tensor,  # [tokens, num_heads, qk_rope_head_dim]
    k: torch.Tensor,  # [rows, 1, qk_rope_head_dim]
    v: torch.Tensor,  # [rows, 1, kv_lora_rank]
    q_v: torch.Tensor,  # [tokens, num_heads, kv_lora_rank]
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor,  # [tokens] int32
    gather_kv_indices: torch.Tensor,  # [tokens, k] int32
    gather_kv_valid_length: torch.Tensor,  # [tokens] int32
    softmax_scale: float,
    causal: bool,
    fa_version: int,
    return_softmax_lse: bool,
) -> torch.Tensor:
    """`flash_attn_varlen_func` with `gather_kv_indices`: an id that is not below `seqused_k` is none."""
    num_tokens = len(q)
    assert fa_version == 4 and max_seqlen_q == 1 and not causal and not return_softmax_lse
    assert cu_seqlens_q.tolist() == list(range(num_tokens + 1)) and not cu_seqlens_k.any()
    assert gather_kv_indices.dtype == gather_kv_valid_length.dtype == torch.int32
    out = torch.zeros_like(q_v)
    for i, (ids, count) in enumerate(zip(gather_kv_indices.long(), gather_kv_valid_length.tolist(), strict=True)):
        is_row = (ids >= 0) & (ids < int(seqused_k[i]))
        assert not is_row[count:].any(), "an id behind the valid ones is a row"
        if is_row.any():
            latent, rope = v[ids[is_row], 0], k[ids[is_row], 0]
            scores = (q_v[i] @ latent.T + q[i] @ rope.T) * softmax_scale
            out[i] = scores.softmax(-1) @ latent
    return out


def convert_positions(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    *,
    BLOCK_SIZE: int,
    NUM_TOPK_TOKENS: int,
    return_valid_counts: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`triton_convert_req_index_to_global_index`: flat rows of positions, the valid ones first, and their number."""
    assert req_id.dtype == block_table.dtype == token_indices.dtype == torch.int32 and return_valid_counts
    assert len(req_id) == len(token_indices) and token_indices.shape[1] == NUM_TOPK_TOKENS
    ids = torch.full_like(token_indices, -1)
    for i, positions in enumerate(token_indices.long()):
        positions = positions[positions >= 0]
        blocks = block_table[req_id[i]].long()[positions // BLOCK_SIZE]
        ids[i, : len(positions)] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return ids, (token_indices >= 0).sum(1, dtype=torch.int32)


def build_metadata(_builder: Any, _common_prefix_len: int, common: CommonAttentionMetadata) -> SimpleNamespace:
    """Metadata of vLLM's builder, as far as hot buffers read it."""
    counts = torch.diff(common.query_start_loc)
    requests = torch.arange(common.num_reqs, dtype=torch.int32).repeat_interleave(counts)
    return SimpleNamespace(block_table=common.block_table_tensor, req_id_per_token=requests)


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the functions in the places of the vendors'; return the module of the hot backends."""
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache_mla = trtllm_decode
    flash_attn = import_module("vllm.v1.attention.backends.mla.flashattn_mla_sparse")
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_4)
    module = import_module("vllm_hisparse.attention.mla.sm100_cuda")
    monkeypatch.setattr(module, "triton_convert_req_index_to_global_index", convert_positions)
    return module
