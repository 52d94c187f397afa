"""MLA over all rows of a request on the CPU, for layers of a DSA model that do not select.

vLLM's own CPU backends are not used, because they need other block sizes than the layers that select.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_hisparse.attention.base import CpuMetadataBuilder
from vllm_hisparse.cpu.full_kv_mla import SparseMLACpuBackend, SparseMLACpuImpl
from vllm_hisparse.cpu.sparse_mla import masked_mla
from vllm_hisparse.cpu.take_rows import PagedRows, take_rows


@dataclass
class FullAttentionMLACpuMetadata(AttentionMetadata):
    """One step's batch.

    Attributes:
        num_actual_tokens: tokens of the step.
        block_table: [num_requests, blocks] int32.
        requests: tokens of each request in the step, and the position of the first one.
        num_decodes, num_decode_tokens, num_prefills, decode: read by `MLAAttention`; every token takes `forward_mqa`.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    requests: tuple[tuple[slice, int], ...]
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    decode: bool = True


class FullAttentionMLACpuMetadataBuilder(CpuMetadataBuilder[FullAttentionMLACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FullAttentionMLACpuMetadata:
        common = common_attn_metadata
        spans = pairwise(common.query_start_loc_cpu[: common.num_reqs + 1].tolist())
        lengths = common.seq_lens[: common.num_reqs].tolist()
        return FullAttentionMLACpuMetadata(
            common.num_actual_tokens,
            common.block_table_tensor,
            tuple((slice(*span), length - (span[1] - span[0])) for span, length in zip(spans, lengths, strict=True)),
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class FullAttentionMLACpuBackend(SparseMLACpuBackend):
    @staticmethod
    def get_name() -> str:
        return "HISPARSE_FULL_ATTENTION_MLA_CPU"

    @staticmethod
    def get_impl_cls() -> type[FullAttentionMLACpuImpl]:
        return FullAttentionMLACpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return FullAttentionMLACpuMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return False


class FullAttentionMLACpuImpl(SparseMLACpuImpl):
    is_sparse = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: FullAttentionMLACpuMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        query, cache = torch.cat(q, -1) if isinstance(q, tuple) else q, PagedRows(kv_c_and_k_pe_cache)
        out = query.new_zeros(len(query), self.num_heads, self.kv_lora_rank)
        for request, (tokens, first) in enumerate(attn_metadata.requests):
            positions = torch.arange(first + tokens.stop - tokens.start)
            rows = take_rows(cache.rows, cache.ids(attn_metadata.block_table[request], positions))
            seen = positions.where(positions <= positions[first:, None], -1)
            masked_mla(query[tokens], rows, seen, self.scale, self.kv_lora_rank, out[tokens], self.sinks)
        return out, None
