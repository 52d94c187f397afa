"""MiniMax-M3 on CUDA: the model's indexer selects blocks for each KV head, and the layer attends over hot units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache
from vllm.models.minimax_m3.common.ops.sparse_attn import minimax_m3_sparse_attn
from vllm.models.minimax_m3.common.sparse_attention import (
    MiniMaxM3SparseBackend,
    MiniMaxM3SparseMetadataBuilder,
    MiniMaxM3SparseTritonImpl,
)
from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_hisparse.attention.gqa.base import row_bytes
from vllm_hisparse.attention.gqa.cuda import HotGQABackend, HotGQAMetadataBuilder
from vllm_hisparse.attention.gqa.triton_cuda import TritonUnitsImpl
from vllm_hisparse.compat.minimax_m3 import normalise_and_rotate
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError, max_query_len
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.rows.prefill_staging import PrefillGroup
from vllm_hisparse.kv_manager.rows.reserved_memory import reserve_memory
from vllm_hisparse.layout import MSA_BLOCK_SIZE, KVLayout


class HotMSAAttention(MiniMaxM3SparseAttention):
    """`MiniMaxM3SparseAttention` whose KV cache is a hot buffer. Its index keys stay in vLLM's own cache."""

    impl: HotMSAImpl

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> HotBufferSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        if spec.block_size != MSA_BLOCK_SIZE:
            raise HiSparseConfigError(
                "--block-size", spec.block_size, f"{MSA_BLOCK_SIZE}, the block that the indexer selects", "Remove it."
            )
        config = HiSparseConfig.from_vllm_config(vllm_config)
        layout = msa_layout(spec, config, vllm_config)
        reserve_memory(layout, vllm_config, config.import_buffer_bytes)
        return HotBufferSpec.from_full_spec(spec, layout, config.rows, config.elastic)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        index_cache, slots = self.indexer.index_cache, get_forward_context().slot_mapping
        if not isinstance(slots, dict) or index_cache.prefix not in slots:
            return qkv.new_zeros((len(qkv), self.hidden_size))  # vLLM measures memory, and there is no cache
        query, index_query, index_keys = normalise_and_rotate(self, qkv, positions)
        write_index_keys(index_cache.kv_cache, index_keys, slots[index_cache.prefix][: len(qkv)])
        output = torch.empty_like(query)
        self.select_and_attend(query, qkv, index_query, output)
        output, _ = self.o_proj(output)
        return output

    @eager_break_during_capture
    def select_and_attend(
        self, query: torch.Tensor, qkv: torch.Tensor, index_query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Run the indexer, and attend.

        Args:
            query, output: [tokens, num_heads * head_size].
            qkv: [tokens, elements] output of the layer's projection, with normalised keys.
            index_query: [tokens, index heads * index size].
        """
        self.indexer(index_query)  # writes to `topk_indices_buffer`
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return  # vLLM measures memory
        key, value = qkv[:, self.q_size : self.q_size + 2 * self.kv_size].split(self.kv_size, -1)
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)) for each in (query, key, value))
        by_head = output.view(-1, self.num_heads, self.head_dim)
        self.impl.forward(self, query, key, value, self.kv_cache, metadata[self.layer_name], by_head)


def msa_layout(spec: FullAttentionSpec, config: HiSparseConfig, vllm_config: VllmConfig) -> KVLayout:
    """Return the sizes of the model's KV on a rank.

    Args:
        spec: KV cache spec of a layer that selects, without a hot buffer.
        config: checked options with all defaults filled in.
        vllm_config: configuration of the engine, with all layers.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    keys = [
        row_bytes(each.get_kv_cache_spec(vllm_config)) for each in layers if isinstance(each, MiniMaxM3IndexerCache)
    ]
    return KVLayout(
        row_bytes(spec),
        keys[0],
        sum(isinstance(each, HotMSAAttention) for each in layers),
        len(keys),
        spec.block_size,
        config.tokens_per_unit,
        spec.num_kv_heads,
        max_query_len(vllm_config),
        full_kv_row_bytes=sum(
            row_bytes(each.get_kv_cache_spec(vllm_config)) for each in layers if isinstance(each, Attention)
        ),
    )


def write_index_keys(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    """Write index keys of new tokens to the cache.

    Args:
        cache: [num_blocks, block_size, index size] index keys; blocks may lie apart.
        keys: [tokens, index size] in the cache's dtype.
        slots: [tokens] int64; -1 for padding, which is written to the null block.
    """
    used = slots.clamp_min(0)
    block_size = cache.shape[1]
    # NOTE: torch has no indexed write of fp8.
    cache.view(torch.uint8)[used // block_size, used % block_size] = keys.view(torch.uint8)


@dataclass
class StagedBatch:
    """Prefilling requests whose histories are staged, as the model's kernel takes them.

    Attributes:
        query_starts: [requests + 1] int32 first query token of each request; the last entry is the end.
        seq_lens: [requests] int32 tokens of each request, the new ones included.
        context_lens: [requests] int32 tokens before the new ones.
        block_table: [requests, blocks] int32 staged blocks.
        max_query_len: most new tokens of a request.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int


class HotMSAMetadataBuilder(HotGQAMetadataBuilder, MiniMaxM3SparseMetadataBuilder):
    def _build_staged(self, common: CommonAttentionMetadata) -> StagedBatch:
        query_starts, seq_lens = common.query_start_loc.int(), common.seq_lens
        context_lens = seq_lens - torch.diff(query_starts)
        return StagedBatch(query_starts, seq_lens, context_lens, common.block_table_tensor, common.max_query_len)


class HotMSAImpl(TritonUnitsImpl, MiniMaxM3SparseTritonImpl):
    """Implementation of MiniMax-M3's layers over hot units.

    The last unit of a selection contains the new token, because the indexer always selects the newest block.
    """

    vllm_class = MiniMaxM3SparseTritonImpl

    def _query_of_selection(self, layer: torch.nn.Module, query: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the blocks that the indexer has selected, in place of queries.

        Returns:
            [batch * max_query_len, num_kv_heads, blocks] int32, -1 for none.
        """
        return self.hot_buffer.step.pad_queries(layer.topk_indices_buffer[:num_tokens], -1)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write keys and values to staged blocks.

        Args:
            layer: vLLM's layer.
            key, value: [tokens, num_kv_heads, head_size].
            cache: [blocks, num_kv_heads, block_size, 2 * head_size].
            slots: [tokens] int64.
        """
        block_size = cache.shape[2]
        cache[slots // block_size, :, slots % block_size] = torch.cat((key, value), -1)

    def _attend_staged(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        group: PrefillGroup,
        output: torch.Tensor,
    ) -> None:
        """Attend over the blocks that the indexer has selected, with the model's kernel."""
        staged: StagedBatch = group.metadata
        minimax_m3_sparse_attn(
            query,
            cache,
            layer.topk_indices_buffer[group.tokens].transpose(0, 1),
            staged.block_table,
            staged.query_starts,
            staged.seq_lens,
            staged.context_lens,
            staged.max_query_len,
            self.num_kv_heads,
            self.scale,
            output,
        )


class HotMSABackend(HotGQABackend, MiniMaxM3SparseBackend):
    vllm_class = MiniMaxM3SparseBackend

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int]:
        return [MSA_BLOCK_SIZE]

    @staticmethod
    def get_impl_cls() -> type[HotMSAImpl]:
        return HotMSAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotMSAMetadataBuilder
