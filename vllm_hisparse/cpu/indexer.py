"""The DSA indexer on the CPU: backend, cache layer, op and module, registered with vLLM as out-of-tree classes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from vllm_hisparse.attention.base import CpuMetadataBuilder
from vllm_hisparse.cpu import indexer_scores as ops
from vllm_hisparse.layout import BLOCK_SIZE
from vllm_hisparse.ops import indexer_keys


@dataclass
class IndexerCpuMetadata:
    """One step's batch: requests with one query token together, requests with more tokens one by one.

    Attributes:
        num_actual_tokens: tokens of the step.
        slot_mapping: [num_actual_tokens] int64 slot of each token; -1 for padding.
        decode_tokens: [decodes] int64 index in the step's batch of each request's only token.
        decode_positions: [decodes, 1] int64 position of this token.
        decode_blocks: [decodes, blocks] int64 blocks of the request, padded with block 0.
        prefills: for each other request: its tokens in the batch, their positions [1, queries], and its blocks
            [1, blocks].
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    decode_tokens: torch.Tensor
    decode_positions: torch.Tensor
    decode_blocks: torch.Tensor
    prefills: list[tuple[slice, torch.Tensor, torch.Tensor]]


class IndexerCpuMetadataBuilder(CpuMetadataBuilder[IndexerCpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IndexerCpuMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        lengths = common.seq_lens[: common.num_reqs].tolist()
        tables, block_size = common.block_table_tensor, self.kv_cache_spec.block_size
        query_lens = [end - start for start, end in pairwise(starts)]
        decodes = [i for i, query_len in enumerate(query_lens) if query_len == 1]
        num_blocks = max((-(-lengths[i] // block_size) for i in decodes), default=0)
        prefills = []
        for i, query_len in enumerate(query_lens):
            if query_len > 1:
                positions = torch.arange(lengths[i] - query_len, lengths[i])[None]
                blocks = tables[i : i + 1, : -(-lengths[i] // block_size)].long()
                prefills.append((slice(starts[i], starts[i + 1]), positions, blocks))
        return IndexerCpuMetadata(
            common.num_actual_tokens,
            common.slot_mapping[: common.num_actual_tokens].flatten().long(),
            torch.tensor([starts[i] for i in decodes], dtype=torch.int64),
            torch.tensor([lengths[i] - 1 for i in decodes], dtype=torch.int64)[:, None],
            tables[decodes, :num_blocks].long().clamp_min(0),
            prefills,
        )


class IndexerCpuBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "HISPARSE_INDEXER_CPU"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("the indexer has no attention implementation")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return IndexerCpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        return None


class IndexerCpuCache(DeepseekV32IndexerCache):
    """Indexer cache with keys in 8 bits."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return IndexerCpuBackend

    def insert(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise keys, [tokens, head_dim], and write them to their slots, [tokens] int64; -1 is skipped."""
        ops.insert_keys(self.kv_cache, keys, slots)

    def load(self, blocks: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Return the keys of whole blocks.

        Args:
            blocks: [..., blocks] int64.
            head_dim: elements of a key.

        Returns:
            [..., blocks * block_size, head_dim] float32.
        """
        return ops.load_keys(self.kv_cache, head_dim, blocks)


class NarrowIndexerCpuCache(IndexerCpuCache):
    """Indexer cache with keys in 4 bits."""

    def insert(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        indexer_keys.insert(self.kv_cache, keys, slots)

    def load(self, blocks: torch.Tensor, head_dim: int) -> torch.Tensor:
        values, scales = indexer_keys.dequantize(*(part[blocks] for part in indexer_keys.key_views(self.kv_cache)))
        return (values.float() * scales[..., None]).flatten(-3, -2)


@CustomOp.register_oot(name="SparseAttnIndexer")
class SparseAttnIndexerCpu(SparseAttnIndexer):
    """Writes the step's keys into the indexer cache and fills the top-k buffer."""

    def __init__(self, k_cache: DeepseekV32IndexerCache, *args: Any, **kwargs: Any):
        super().__init__(k_cache, *args, **kwargs)
        k_cache.__class__ = IndexerCpuCache  # vLLM has built it with another backend

    def forward_cpu(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Select positions.

        Args:
            hidden_states: unused.
            q_quant: [tokens, heads, head_dim] fp8.
            k: [tokens, head_dim] keys.
            weights: [tokens, heads] float32, query scales included.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return self.topk_indices_buffer
        self._select(metadata[self.k_cache.prefix], q_quant, k, weights)
        return self.topk_indices_buffer

    def _select(
        self, metadata: IndexerCpuMetadata, query: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
    ) -> None:
        cache, head_dim = self.k_cache, k.shape[-1]
        num_tokens = metadata.num_actual_tokens
        cache.insert(k[:num_tokens], metadata.slot_mapping)
        top_k = self.topk_indices_buffer
        top_k[:num_tokens] = -1
        if len(tokens := metadata.decode_tokens):
            keys = cache.load(metadata.decode_blocks, head_dim)
            positions = metadata.decode_positions
            selected = ops.select_top_k(query[tokens, None], keys, weights[tokens, None], positions, self.topk_tokens)
            top_k[tokens] = selected[:, 0]
        for tokens, positions, blocks in metadata.prefills:
            keys = cache.load(blocks, head_dim)
            selected = ops.select_top_k(query[None, tokens], keys, weights[None, tokens], positions, self.topk_tokens)
            top_k[tokens] = selected[0]


class IndexerCpu(Indexer):
    """vLLM's `Indexer` without its Triton quantisation."""

    def forward(
        self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: torch.nn.Module
    ) -> torch.Tensor:
        query = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        projected = self.wk_weights_proj(hidden_states)[0]
        key, weights = self.k_norm(projected[:, : self.head_dim]), projected[:, self.head_dim :]
        rope = self.rope_dim
        query_pe, key_pe = rotary_emb(positions, query[..., :rope].contiguous(), key[:, None, :rope].contiguous())
        query = torch.cat([query_pe.reshape(-1, self.n_head, rope), query[..., rope:]], -1).float()
        key = torch.cat([key_pe.reshape(-1, rope), key[:, rope:]], -1)
        scale = ops.ue8m0_scale(query.abs().amax(-1), 1e-10)
        weights = weights.float() * scale * self.softmax_scale * self.n_head_scale
        return self.indexer_op(hidden_states, ops.quantize(query, scale[..., None]), key, weights)
