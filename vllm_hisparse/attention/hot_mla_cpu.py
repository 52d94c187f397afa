"""Sparse MLA on the CPU over hot buffers; the full KV is in the host pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.attention.base import CpuMetadataBuilder
from vllm_hisparse.attention.sparse_mla_cpu import SparseMLACpuBackend, SparseMLACpuImpl, SparseMLACpuMetadata
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.kv_manager.hot_buffer import DecodeBatch, HotBuffer
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout, indexer_row_bytes
from vllm_hisparse.ops import swap_in

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class PrefillChunk:
    """A request with several query tokens in this step.

    Attributes:
        tokens: its tokens in the step's batch.
        request: row of the hot buffer's state.
        first: position of its first token.
        hot_table: [hot blocks per request] int32. host_table: [blocks] int32.
    """

    tokens: slice
    request: int
    first: int
    hot_table: torch.Tensor
    host_table: torch.Tensor


@dataclass
class HotMLACpuMetadata(SparseMLACpuMetadata):
    """One step's batch, split into requests that decode and requests that prefill."""

    decode: DecodeBatch | None = None
    prefill_chunks: tuple[PrefillChunk, ...] = ()
    step: int = 0


class HotMLACpuMetadataBuilder(CpuMetadataBuilder[HotMLACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotMLACpuMetadata:
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        hot_buffer = self._hot_buffer()
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        lengths = common.seq_lens[:num_reqs].tolist()
        hot_tables = common.block_table_tensor[:num_reqs, : self.kv_cache_spec.blocks_per_request]
        rows = hot_buffer.rows_of(hot_tables[:, 0].tolist())
        known = [i for i, row in enumerate(rows) if row >= 0 and starts[i + 1] > starts[i]]
        decodes = [i for i in known if starts[i + 1] - starts[i] == 1]
        step = hot_buffer.next_step()
        hot_buffer.decode_batch = self._decode_batch(decodes, starts, lengths, rows, hot_tables, step)
        chunks = tuple(
            PrefillChunk(
                slice(starts[i], starts[i + 1]),
                rows[i],
                lengths[i] - (starts[i + 1] - starts[i]),
                hot_tables[i],
                hot_buffer.host_tables[rows[i]],
            )
            for i in known
            if starts[i + 1] - starts[i] > 1
        )
        return HotMLACpuMetadata(
            common.num_actual_tokens,
            common.block_table_tensor,
            request_of_token=torch.empty(0),
            num_decodes=num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            decode=hot_buffer.decode_batch,
            prefill_chunks=chunks,
            step=step,
        )

    def _hot_buffer(self) -> HotBuffer:
        layer = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]
        return layer.impl.hot_buffer

    def _decode_batch(
        self,
        decodes: list[int],
        starts: list[int],
        lengths: list[int],
        rows: list[int],
        hot_tables: torch.Tensor,
        step: int,
    ) -> DecodeBatch | None:
        if not decodes:
            return None
        requests = torch.tensor([rows[i] for i in decodes])
        return DecodeBatch(
            torch.tensor([starts[i] for i in decodes]),
            requests,
            torch.tensor([lengths[i] - 1 for i in decodes]),
            hot_tables[decodes].clone(),
            self._hot_buffer().host_tables[requests],
            step,
        )


class HotMLACpuBackend(SparseMLACpuBackend):
    @staticmethod
    def get_impl_cls() -> type[HotMLACpuImpl]:
        return HotMLACpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotMLACpuMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # NOTE: hot rows and indexer keys share vLLM's blocks, which only block-outermost layouts allow.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


class HotMLAAttention(MLAAttention):
    """`MLAAttention` whose KV cache is a hot buffer."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        config = HiSparseConfig.from_vllm_config(vllm_config)
        index_head_dim = vllm_config.model_config.hf_text_config.index_head_dim
        layout = KVLayout(spec.state_content_size_bytes, indexer_row_bytes(index_head_dim), 1, 1, spec.block_size)
        return HotBufferSpec.from_mla_spec(spec, layout.rows_per_hot_block, layout.num_hot_blocks(config.rows))


class HotMLACpuImpl(SparseMLACpuImpl):
    """Attends over hot rows when a request decodes, over host rows when it prefills.

    `bind` is called once, when the connector has allocated the host pool.
    """

    def bind(self, hot_buffer: HotBuffer, layer_index: int, host_rows: torch.Tensor) -> None:
        """Attach storage.

        Args:
            hot_buffer: state shared by all layers.
            layer_index: this layer's index in it.
            host_rows: [num_host_blocks, block_size, row elements].
        """
        self.hot_buffer, self.layer_index, self.host_rows = hot_buffer, layer_index, host_rows

    def do_kv_cache_update(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *args: Any
    ) -> None:
        """Keep the step's rows for `forward_mqa`, which knows whose they are."""
        self._new_rows = self.concat_rows(kv_c, k_pe)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HotMLACpuMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        hot_rows = kv_c_and_k_pe_cache
        out = query.new_zeros(len(query), self.num_heads, self.kv_lora_rank)
        for chunk in attn_metadata.prefill_chunks:
            out[chunk.tokens] = self._prefill(query[chunk.tokens], hot_rows, chunk, attn_metadata.step)
        if attn_metadata.decode is not None:
            out[attn_metadata.decode.tokens] = self._decode(query, hot_rows, attn_metadata.decode)
        return out, None

    def _decode(self, query: torch.Tensor, hot_rows: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """Write the newest rows, swap in what is missing, attend over hot rows only."""
        rows_per_block = hot_rows.shape[1]
        newest_slots = self.hot_buffer.admit(self.layer_index, batch)
        blocks = batch.hot_tables.gather(1, (newest_slots // rows_per_block)[:, None])[:, 0].long()
        hot_rows[blocks, newest_slots % rows_per_block] = self._new_rows[batch.tokens].to(hot_rows.dtype)

        resolved = self.hot_buffer.resolve(self.layer_index, batch, self.topk_indices_buffer[batch.tokens])
        swap_in.gather(hot_rows, batch.hot_tables, self.host_rows, batch.host_tables, resolved)

        def rows_of(tokens: slice) -> torch.Tensor:
            slots = resolved.slots[tokens].clamp_min(0)
            blocks = batch.hot_tables[tokens].gather(1, slots // rows_per_block).long()
            return hot_rows[blocks, slots % rows_per_block]

        return self.attend(query[batch.tokens], resolved.slots >= 0, rows_of)

    def _prefill(self, query: torch.Tensor, hot_rows: torch.Tensor, chunk: PrefillChunk, step: int) -> torch.Tensor:
        """Write the chunk's rows to the host, seed the hot buffer, attend over host rows."""
        rows = self._new_rows[chunk.tokens].to(hot_rows.dtype)
        self._write_host_rows(rows, chunk)
        self._seed_hot_rows(rows, hot_rows, chunk, step)
        positions = self.topk_indices_buffer[chunk.tokens].long()
        block_size = self.host_rows.shape[1]

        def rows_of(tokens: slice) -> torch.Tensor:
            selected = positions[tokens].clamp_min(0)
            return self.host_rows[chunk.host_table[selected // block_size].long(), selected % block_size]

        return self.attend(query, positions >= 0, rows_of)

    def _write_host_rows(self, rows: torch.Tensor, chunk: PrefillChunk) -> None:
        positions = torch.arange(chunk.first, chunk.first + len(rows))
        block_size = self.host_rows.shape[1]
        self.host_rows[chunk.host_table[positions // block_size].long(), positions % block_size] = rows

    def _seed_hot_rows(self, rows: torch.Tensor, hot_rows: torch.Tensor, chunk: PrefillChunk, step: int) -> None:
        last = chunk.first + len(rows)
        num_rows = self.hot_buffer.admit_prefill(self.layer_index, chunk.request, chunk.first, last, step)
        slots = torch.arange(chunk.first, chunk.first + num_rows)
        rows_per_block = hot_rows.shape[1]
        hot_rows[chunk.hot_table[slots // rows_per_block].long(), slots % rows_per_block] = rows[:num_rows]
