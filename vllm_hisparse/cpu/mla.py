"""Sparse MLA on the CPU over hot buffers; the full KV is in the host pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.attention.base import CpuMetadataBuilder, HotMetadataBuilder, decode_tokens
from vllm_hisparse.attention.mla.base import HotMLAAttention, HotMLAImpl
from vllm_hisparse.cpu.full_kv_mla import SparseMLACpuBackend, SparseMLACpuImpl, SparseMLACpuMetadata
from vllm_hisparse.cpu.take_rows import PagedRows, take_rows


@dataclass(frozen=True)
class PrefillChunk:
    """A request that prefills: it has more query tokens in this step than a decoding request can have.

    Attributes:
        tokens: range of its tokens in the step's batch.
        first: position of the first of these tokens.
        first_hot_block_id: [1] int32.
        host_block_table: [blocks] int32 host block ids.
    """

    tokens: slice
    first: int
    first_hot_block_id: torch.Tensor
    host_block_table: torch.Tensor


@dataclass
class HotMLACpuMetadata(SparseMLACpuMetadata):
    """One step's batch, split into requests that decode and requests that prefill.

    Attributes:
        decode_tokens: [tokens] int64 indices of the decoding requests' tokens in the step's batch.
    """

    decode_tokens: torch.Tensor | None = None
    prefill_chunks: tuple[PrefillChunk, ...] = ()


class HotMLACpuMetadataBuilder(HotMetadataBuilder, CpuMetadataBuilder[HotMLACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotMLACpuMetadata:
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1]
        first_hot_block_ids = common.block_table_tensor[:num_reqs, 0]
        buffer = self.impl.hot_buffer
        request_indices = buffer.requests.find(first_hot_block_ids)
        known, query_lens = request_indices < buffer.requests.num_requests, torch.diff(starts)
        max_query_len = buffer.shape.max_query_len
        decodes = (known & (query_lens <= max_query_len)).nonzero()[:, 0]
        tokens, query_indices = decode_tokens(starts[:-1][decodes], query_lens[decodes], max_query_len)
        lengths = common.seq_lens[:num_reqs][decodes], query_lens[decodes]
        buffer.step.plan(first_hot_block_ids[decodes], *lengths, query_indices)
        chunks = [
            self._chunk(i, starts, common.seq_lens, first_hot_block_ids, request_indices)
            for i in (known & (query_lens > max_query_len)).nonzero()[:, 0].tolist()
        ]
        return HotMLACpuMetadata(
            common.num_actual_tokens,
            common.block_table_tensor,
            single_requests=torch.empty(0),
            single_tokens=torch.empty(0),
            prompts=(),
            num_decodes=num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            decode_tokens=tokens,
            prefill_chunks=tuple(chunks),
        )

    def _chunk(
        self,
        batch_index: int,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        first_hot_block_ids: torch.Tensor,
        request_indices: torch.Tensor,
    ) -> PrefillChunk:
        tokens = slice(int(starts[batch_index]), int(starts[batch_index + 1]))
        first = int(seq_lens[batch_index]) - (tokens.stop - tokens.start)
        host_block_table = self.impl.hot_buffer.requests.host_block_table(int(request_indices[batch_index]))
        return PrefillChunk(tokens, first, first_hot_block_ids[batch_index, None], host_block_table)


class HotMLACpuBackend(SparseMLACpuBackend):
    vllm_class: ClassVar[type] = SparseMLACpuBackend
    runs_own_class: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[HotMLACpuImpl]:
        return HotMLACpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotMLACpuMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # NOTE: hot rows and indexer keys share vLLM's blocks; only layouts with the block outermost allow that.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


HOT_LAYERS = {MLAAttention: HotMLAAttention}
HOT_BACKENDS = {SparseMLACpuBackend.get_name(): HotMLACpuBackend}


class HotMLACpuImpl(HotMLAImpl, SparseMLACpuImpl):
    """Attends over hot rows for a request that decodes, and over host rows for one that prefills.

    Attributes:
        vllm_class, runs_own_class: as in `derive_hot_class`.
    """

    vllm_class: ClassVar[type] = SparseMLACpuImpl
    runs_own_class: ClassVar[bool] = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HotMLACpuMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        new_rows = self.concat_rows(self.new_rows.kv_c, self.new_rows.k_pe).to(self.hot.rows.dtype)
        out = query.new_zeros(len(query), self.num_heads, self.kv_lora_rank)
        for chunk in attn_metadata.prefill_chunks:
            out[chunk.tokens] = self._prefill(query[chunk.tokens], new_rows[chunk.tokens], chunk)
        tokens = attn_metadata.decode_tokens
        if len(tokens):
            out[tokens] = self._decode(query[tokens], new_rows[tokens], self.topk_indices_buffer[tokens])
        return out, None

    def _decode(self, query: torch.Tensor, new_rows: torch.Tensor, selected_positions: torch.Tensor) -> torch.Tensor:
        """Write the new rows, swap in the missing rows, and attend over hot rows only.

        Args:
            query: [tokens, heads, row elements] queries of the decoding requests.
            new_rows: [tokens, row elements] rows of these tokens.
            selected_positions: [tokens, top_k] int32 selections of these tokens.

        Returns:
            [tokens, heads, kv_lora_rank].
        """
        step = self.hot_buffer.step
        step.begin(self.layer_index)
        self.hot.rows[step.unpad_queries(step.newest_rows_of(self.layer_index), len(new_rows))] = new_rows
        hot_row_ids, _ = self.locate_selection(selected_positions)
        out = self.attend(query, self.hot.rows, hot_row_ids)
        step.finish(self.layer_index)
        return out

    def _prefill(self, query: torch.Tensor, new_rows: torch.Tensor, chunk: PrefillChunk) -> torch.Tensor:
        """Write the chunk's rows to the host, make the latest ones hot, and attend over host rows."""
        block_size = self.hot_buffer.shape.block_size
        self.hot_buffer.ops.save_rows(new_rows, chunk.first, self.host_rows, chunk.host_block_table, block_size)
        self._seed(chunk, chunk.first + len(new_rows))
        selected = self.topk_indices_buffer[chunk.tokens].long()
        return self.attend_prompt(query, selected, chunk.first, self.host_rows, partial(self._host_row_ids, chunk))

    def _seed(self, chunk: PrefillChunk, num_tokens: int) -> None:
        row_class = self.hot_buffer.classes.of_layer[self.layer_index]
        seeds = self.hot_buffer.seeds(chunk.first_hot_block_id, num_tokens, row_class)
        row_ids = self.hot_buffer.seeded_rows(self.layer_index, seeds)[0]
        self.hot.rows[row_ids] = take_rows(self.host_rows, self._host_row_ids(chunk, seeds.units))
        self.hot_buffer.seed(self.layer_index, seeds)

    def _host_row_ids(self, chunk: PrefillChunk, positions: torch.Tensor) -> torch.Tensor:
        """Return the ids of a request's rows in the host pool: int64, in the shape of `positions`.

        Args:
            chunk: the request.
            positions: int64 positions, in any shape; -1 gives -1.
        """
        blocks = self.host_rows.unflatten(0, (-1, self.hot_buffer.shape.block_size))
        return PagedRows(blocks).ids(chunk.host_block_table, positions)
