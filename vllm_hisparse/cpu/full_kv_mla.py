"""Sparse MLA on the CPU over vLLM's paged cache: the full-KV reference, and the attention of prefill instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from vllm_hisparse.cpu.sparse_mla import masked_mla, num_masked, sparse_mla, tokens_per_chunk
from vllm_hisparse.cpu.take_rows import PagedRows, take_rows, without_gaps
from vllm_hisparse.layout import BLOCK_SIZE

BACKEND_NAME = "HISPARSE_MLA_CPU"


@dataclass
class SparseMLACpuMetadata(AttentionMetadata):
    """One step's batch.

    Attributes:
        num_actual_tokens: tokens of the step.
        block_table: [num_requests, blocks] int32 blocks of each request.
        single_requests: [n] int64 index of each request with one token in the step.
        single_tokens: [n] int64 index of this token.
        prompts: for each request with more tokens: its index, the range of its tokens in the step, and the position of
            the first of them.
        num_decodes, num_decode_tokens, num_prefills: for `MLAAttention`; every token takes `forward_mqa`.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    single_requests: torch.Tensor
    single_tokens: torch.Tensor
    prompts: tuple[tuple[int, slice, int], ...]
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class SparseMLACpuMetadataBuilder(CpuMetadataBuilder[SparseMLACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMLACpuMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        query_lens, lengths = torch.diff(starts), common.seq_lens[: common.num_reqs]
        single = (query_lens == 1).nonzero()[:, 0]
        spans = zip(pairwise(starts.tolist()), lengths.tolist(), strict=True)
        prompts = [
            (i, slice(start, end), length - (end - start))
            for i, ((start, end), length) in enumerate(spans)
            if end - start > 1
        ]
        return SparseMLACpuMetadata(
            common.num_actual_tokens,
            common.block_table_tensor,
            single,
            starts[single].long(),
            tuple(prompts),
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class SparseMLACpuBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", "float32"]

    @staticmethod
    def get_name() -> str:
        # NOTE: the name is the same with and without hot buffers, because NIXL's handshake compares it on both sides.
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

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return None


class SparseMLACpuImpl(MLAAttentionImpl[SparseMLACpuMetadata], SharedTopkIndicesBuffer):
    """Gathers each token's selected rows and attends over them.

    Attributes:
        sinks: [num_heads] float32 attention sinks, a parameter of the layer; None: it has none.
    """

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
        sinks: torch.Tensor | None = None,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        qk_head_dim: int | None = None,
        v_head_dim: int | None = None,
        kv_b_proj: torch.nn.Module | None = None,
    ):
        # NOTE: every argument has a name, so that what a model adds to its attention is never dropped in silence.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank, self.sinks = kv_lora_rank, sinks
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Do nothing: the indexer has run on the same thread."""

    def do_kv_cache_update(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *args: Any
    ) -> None:
        """Write the step's rows into the paged cache.

        Args:
            kv_c: [tokens, kv_lora_rank].
            k_pe: [tokens, 1, qk_rope_head_dim].
            kv_cache: [num_blocks, block_size, row elements].
            slot_mapping: [tokens] slot of each token; -1 for padding.
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
        query, tables = torch.cat(q, -1) if isinstance(q, tuple) else q, attn_metadata.block_table
        cache, selected = PagedRows(kv_c_and_k_pe_cache), self.topk_indices_buffer[: len(query)].long()
        out = query.new_zeros(len(query), self.num_heads, self.kv_lora_rank)
        for request, tokens, first in attn_metadata.prompts:
            row_ids = partial(cache.ids, tables[request])
            out[tokens] = self.attend_prompt(query[tokens], selected[tokens], first, cache.rows, row_ids)
        if len(tokens := attn_metadata.single_tokens):
            row_ids = cache.ids(tables[attn_metadata.single_requests], selected[tokens])
            out[tokens] = self.attend(query[tokens], cache.rows, row_ids)
        return out, None

    def attend_prompt(
        self,
        query: torch.Tensor,
        selected: torch.Tensor,
        first: int,
        rows: torch.Tensor,
        row_ids: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Attend for consecutive tokens of a request: the first ones over all rows, later ones over selected rows.

        Args:
            query: [tokens, heads, row elements].
            selected: [tokens, k] int64 positions, -1 for none.
            first: position of the first token.
            rows: [rows, row elements] rows that `row_ids` refers to.
            row_ids: function that turns positions of the request into row ids, and -1 into -1.

        Returns:
            [tokens, heads, kv_lora_rank].
        """
        out = query.new_empty(len(query), self.num_heads, self.kv_lora_rank)
        near = num_masked(selected.shape[1], first, len(query))
        if near:
            history = take_rows(rows, row_ids(torch.arange(first + near)))
            shared = self.scale, self.kv_lora_rank, out[:near], self.sinks
            masked_mla(query[:near], history, selected[:near], *shared)
        if near < len(query):
            out[near:] = self.attend(query[near:], rows, row_ids(selected[near:]))
        return out

    def attend(self, query: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
        """Attend in chunks of tokens, so that the gathered rows take little memory; return [tokens, heads,
        kv_lora_rank].

        Args:
            query: [tokens, heads, row elements].
            rows: [rows, row elements].
            row_ids: [tokens, k] int64 or int32 row ids of each token, -1 for none.
        """
        out = query.new_empty(len(query), self.num_heads, self.kv_lora_rank)
        valid, row_ids = row_ids >= 0, without_gaps(row_ids)
        chunk = tokens_per_chunk(valid.shape[1], self.head_size)
        for start in range(0, len(query), chunk):
            part = slice(start, start + chunk)
            gathered = take_rows(rows, row_ids[part])
            sparse_mla(query[part], gathered, valid[part], self.scale, self.kv_lora_rank, out[part], self.sinks)
        return out

    @staticmethod
    def concat_rows(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """Join the parts of the KV rows of a step's tokens: [tokens, row elements]."""
        return torch.cat((kv_c, k_pe.reshape(len(kv_c), -1)), -1)
