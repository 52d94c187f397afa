"""Sparse MLA on the CPU over vLLM's paged cache: the full-KV reference, and what prefill instances run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.attention.base import CpuMetadataBuilder
from vllm_hisparse.layout import BLOCK_SIZE
from vllm_hisparse.ops.sparse_mla import sparse_mla, tokens_per_chunk
from vllm_hisparse.ops.take_rows import take_paged_rows, without_gaps

BACKEND_NAME = "HISPARSE_MLA_CPU"


@dataclass
class SparseMLACpuMetadata(AttentionMetadata):
    """One step's batch.

    Attributes:
        num_actual_tokens: tokens of the step.
        block_table: [num_requests, blocks] int32.
        request_of_token: [num_actual_tokens] int64.
        num_decodes, num_decode_tokens, num_prefills: read by `MLAAttention`; every token takes `forward_mqa`.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    request_of_token: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class SparseMLACpuMetadataBuilder(CpuMetadataBuilder[SparseMLACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMLACpuMetadata:
        common = common_attn_metadata
        query_lens = torch.diff(common.query_start_loc_cpu[: common.num_reqs + 1])
        return SparseMLACpuMetadata(
            common.num_actual_tokens,
            common.block_table_tensor,
            torch.repeat_interleave(torch.arange(common.num_reqs), query_lens),
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class SparseMLACpuBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", "float16", "float32"]

    @staticmethod
    def get_name() -> str:
        # NOTE: with and without hot buffers the same name: NIXL's handshake compares it between the two sides.
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[SparseMLACpuImpl]:
        return SparseMLACpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return SparseMLACpuMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return None


class SparseMLACpuImpl(MLAAttentionImpl[SparseMLACpuMetadata], SharedTopkIndicesBuffer):
    """Gathers each token's selected rows and attends over them."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: torch.nn.Module | None = None,
        index_group_builder: Any = None,
        **mla_args: Any,
    ):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = mla_args["kv_lora_rank"]
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Nothing to signal: the indexer ran on the same thread."""

    def do_kv_cache_update(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *args: Any
    ) -> None:
        """Write the step's rows into the paged cache.

        Args:
            kv_c: [tokens, kv_lora_rank]. k_pe: [tokens, 1, qk_rope_head_dim].
            kv_cache: [num_blocks, block_size, row elements].
            slot_mapping: [tokens]; -1 is padding.
        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        written = slots >= 0
        rows = self.concat_rows(kv_c, k_pe)[: len(slots)]
        block_size = kv_cache.shape[1]
        kv_cache[slots[written] // block_size, slots[written] % block_size] = rows[written].to(kv_cache.dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACpuMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        cache, block_size = kv_c_and_k_pe_cache, kv_c_and_k_pe_cache.shape[1]
        positions = self.topk_indices_buffer[: len(query)].long()
        tables = attn_metadata.block_table[attn_metadata.request_of_token]

        def rows_of(tokens: slice) -> torch.Tensor:
            selected = without_gaps(positions[tokens])
            blocks = tables[tokens].gather(1, selected // block_size).long()
            return take_paged_rows(cache, blocks, selected % block_size)

        return self.attend(query, positions >= 0, rows_of), None

    def attend(
        self, query: torch.Tensor, valid: torch.Tensor, rows_of: Callable[[slice], torch.Tensor]
    ) -> torch.Tensor:
        """Attend in chunks of tokens that keep the gathered rows small; returns [tokens, heads, kv_lora_rank].

        Args:
            query: [tokens, heads, row elements].
            valid: [tokens, k] bool.
            rows_of: tokens -> their rows, [tokens, k, row elements].
        """
        out = query.new_empty(len(query), self.num_heads, self.kv_lora_rank)
        chunk = tokens_per_chunk(valid.shape[1], self.head_size)
        for start in range(0, len(query), chunk):
            tokens = slice(start, min(start + chunk, len(query)))
            sparse_mla(query[tokens], rows_of(tokens), valid[tokens], self.scale, self.kv_lora_rank, out[tokens])
        return out

    @staticmethod
    def concat_rows(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """KV rows of the step's tokens: [tokens, row elements]."""
        return torch.cat((kv_c, k_pe.reshape(len(kv_c), -1)), -1)
