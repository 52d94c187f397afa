"""Sparse MLA on CUDA over hot buffers, with vLLM's own kernels: FlashMLA and FlashAttention.

A decoding request attends over hot rows: `swap_in` replaces the step in which vLLM turns selected positions into cache
rows. A prefilling request, which has more query tokens than a decoding request can have, attends over a staged copy of
its history, through vLLM's unchanged backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseImpl,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.attention.base import HotMetadataBuilder, QueryLens
from vllm_hisparse.attention.mla.base import HotMLAImpl, NewRows
from vllm_hisparse.attention.mla.microbatches_cuda import DecodeMicrobatch, make_microbatches
from vllm_hisparse.compat.attention import SelectionHook, ShortDecodes, join_query, key_scale, replace_batch
from vllm_hisparse.compat.row_kernels import FlashAttnKernel
from vllm_hisparse.config import max_query_len
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.prefill_staging import PrefillGroup, PrefillStaging, slice_requests
from vllm_hisparse.layout import BLOCK_SIZE


@dataclass
class HotMLAMetadata(AttentionMetadata):
    """One step's batch: decoding requests first, then groups of prefilling ones.

    Attributes:
        num_actual_tokens, num_decodes, num_prefills: as in vLLM's sparse MLA metadata.
        num_decode_tokens: tokens of the decoding requests, graph padding included.
        prefill: always None, so that no prefill takes vLLM's dense path, which reads the full KV cache.
        decode: vLLM's metadata of the decoding requests, with each token as a request; None if no request decodes.
        prefill_groups: the prefilling requests.
        microbatches: microbatches of the decoding requests; empty if layers run the step as a whole.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: Any = None
    prefill_groups: list[PrefillGroup] = field(default_factory=list)
    microbatches: Sequence[DecodeMicrobatch] = ()
    prefill: None = None


class HotMLAMetadataBuilder(HotMetadataBuilder, ShortDecodes):
    """Mixin of a sparse MLA metadata builder."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.allocate(max_query_len(self.vllm_config), len(self.req_id_per_token_buffer))

    def allocate(self, max_query_len: int, max_tokens: int) -> None:
        """Allocate the tensors that are the same in every step, or that a CUDA graph reads.

        Args:
            max_query_len: tokens that a decoding request computes in a step, at most.
            max_tokens: tokens of a step, at most.
        """
        self._max_query_len = max_query_len
        self._counted_cpu = torch.arange(max_tokens + 1, dtype=torch.int32)
        self._counted = self._counted_cpu.to(self.device)
        self._query_lens = QueryLens(max_query_len, max_tokens, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotMLAMetadata | None:
        if self.impl.hot_buffer is None:
            return None  # NOTE: vLLM captures graphs before there is a connector, to measure the memory they take.
        common, threshold = common_attn_metadata, self._max_query_len
        num_decodes, num_prefills, num_tokens, _ = split_decodes_and_prefills(common, decode_threshold=threshold)
        metadata = HotMLAMetadata(common.num_actual_tokens, num_decodes, num_tokens, num_prefills)
        first_hot_block_ids = common.block_table_tensor[:num_decodes, 0]
        query_lens, query_indices = self._query_lens.find(common, num_decodes)
        self.impl.hot_buffer.step.plan(first_hot_block_ids, common.seq_lens[:num_decodes], query_lens, query_indices)
        if num_decodes:
            metadata.decode = self._build_decode(common, slice(0, num_decodes))
        if num_prefills:
            metadata.prefill_groups = self.impl.staging.groups(common, num_decodes, self._build_staged)
        elif query_indices is None and self.impl.divides_steps:
            metadata.microbatches = make_microbatches(
                self.impl.hot_buffer, num_decodes, partial(self._build_microbatch, common)
            )
        return metadata

    def _build_decode(self, common: CommonAttentionMetadata, requests: slice) -> Any:
        """Build vLLM's metadata of decoding requests."""
        part = slice_requests(common, requests.start, requests.stop)
        metadata = super().build(0, self._by_token(part))
        metadata.block_size = self.impl.decode_block_size
        return metadata

    def _build_microbatch(self, common: CommonAttentionMetadata, requests: slice) -> HotMLAMetadata:
        num_requests = requests.stop - requests.start
        num_tokens = num_requests * self._max_query_len
        return HotMLAMetadata(num_tokens, num_requests, num_tokens, 0, self._build_decode(common, requests))

    def request_of_token(self, common: CommonAttentionMetadata) -> torch.Tensor:
        if common.max_query_len == 1:
            return self._counted[: common.num_actual_tokens]
        return super().request_of_token(common)

    def _by_token(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Turn every token into a request. This works because the kernel gets a token's rows and reads nothing else."""
        num_tokens = common.num_actual_tokens
        if num_tokens == common.num_reqs:
            return common
        return replace_batch(
            common,
            query_start_loc=self._counted[: num_tokens + 1],
            query_start_loc_cpu=self._counted_cpu[: num_tokens + 1],
            num_reqs=num_tokens,
            max_query_len=1,
        )

    def _build_staged(self, common: CommonAttentionMetadata) -> Any:
        """Build vLLM's metadata of prefilling requests, whose block tables name staging blocks."""
        metadata = super().build(0, common)
        # NOTE: a copy is needed, because the builder reuses one buffer, and a step may have several groups.
        metadata.req_id_per_token = metadata.req_id_per_token.clone()
        return metadata


class HotMLACudaImpl(HotMLAImpl):
    """Mixin of a sparse MLA implementation.

    Attributes:
        decode_block_size: block size with which the implementation reads `decode_cache`.
        decode_cache: all hot rows of the layer, in the shape of a KV cache that the implementation expects.
        staging: staging of prefilling requests' histories; its memory is shared by all layers.
        vllm_class: vLLM's implementation, which attends for requests that prefill.
        runs_own_class: True if requests that decode attend by its `forward_mqa`, too (`derive_hot_class`).
        microbatch: microbatch that this copy of the implementation serves; None: all requests.
    """

    decode_block_size = 1
    microbatch: DecodeMicrobatch | None = None
    vllm_class: ClassVar[type]
    runs_own_class: ClassVar[bool] = False
    divides_steps: ClassVar[bool] = True

    def bind(self, hot_buffer: MLAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        super().bind(hot_buffer, layer_index, host_rows, cache)
        self.staging, self.decode_cache = PrefillStaging(hot_buffer), self._decode_cache()

    def record_logical_topk_ready(self) -> None:
        """Let the next microbatch select. Without microbatches nothing is recorded, because one stream selects and
        reads the selection.

        NOTE: this replaces vLLM's method, because the code that torch 2.13 compiles for the generic class does not find
        the event of that method at run time.
        """
        if self.microbatch is not None:
            self.microbatch.selected.record()

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor | None,
        attn_metadata: HotMLAMetadata,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, None]:
        if self.microbatch is not None:
            return self._decode(q, attn_metadata, layer), None
        if not attn_metadata.prefill_groups:
            return self._decode_step(q, attn_metadata, layer), None
        first_group, *other_groups = attn_metadata.prefill_groups
        if first_group.tokens == slice(0, attn_metadata.num_actual_tokens):
            return self._prefill(q, first_group, layer), None  # returned without a copy into `out`, which is large
        # NOTE: the output has the dtype of the model, while queries may be in fp8.
        out = self.new_rows.kv_c.new_empty(attn_metadata.num_actual_tokens, self.num_heads, self.kv_lora_rank)
        if attn_metadata.decode is not None:
            tokens = slice(0, attn_metadata.num_decode_tokens)
            out[tokens] = self._decode_step(_slice_query(q, tokens), attn_metadata, layer)
        for group in (first_group, *other_groups):
            out[group.tokens] = self._prefill(_slice_query(q, group.tokens), group, layer)
        out[attn_metadata.prefill_groups[-1].tokens.stop :].zero_()
        return out, None

    def begin_decode(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a layer's part of a decode step, before its new rows are written; called once per layer and step.

        Returns:
            Destination of the new rows: the hot rows as a cache with blocks of one row, [rows, 1, row elements], and
            the slots of the new rows in it, [num_tokens] int64, -1 for padding.
        """
        step = self.hot_buffer.step
        step.begin(self.layer_index)
        return self.hot.rows.unsqueeze(1), step.unpad_queries(step.newest_rows_of(self.layer_index), num_tokens)

    def locate_leading(self, q: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the selections of decoding tokens hot, as in `locate_selection`, for kernels that read every leading id.

        Args:
            q: query of the tokens, as in `forward_mqa`.

        Returns:
            Flat hot rows, [tokens, top_k] int32, -1 behind the last one, and their number, [tokens] int32.
        """
        num_tokens = len(q[0] if isinstance(q, tuple) else q)
        row_ids, num_valid = self.locate_selection(self.topk_indices_buffer[:num_tokens])
        self.hot_buffer.ops.compact(row_ids, num_valid)
        return row_ids, num_valid

    def of_microbatch(self, microbatch: DecodeMicrobatch) -> Any:
        """Return a copy of the implementation that serves one microbatch."""
        impl = self._for_tokens(type(self), microbatch.tokens.start)
        impl.microbatch, impl.requests = microbatch, microbatch.requests
        return impl

    def _decode_step(self, q: Any, metadata: HotMLAMetadata, layer: torch.nn.Module) -> torch.Tensor:
        """Write the new rows and attend; after the last layer, copy the new rows of all layers to the host."""
        if self.new_rows is not None:  # None: the layer has begun the step and written its rows itself
            cache, slots = self.begin_decode(metadata.num_decode_tokens)
            self._write(self.new_rows, cache, slots, layer)
        out = self._decode(q, metadata, layer)
        self.hot_buffer.step.finish(self.layer_index)
        return out

    def _decode(self, q: Any, metadata: HotMLAMetadata, layer: torch.nn.Module) -> torch.Tensor:
        """Attend over hot rows; `locate_selection` swaps them in on the way."""
        return super().forward_mqa(q, self.decode_cache, metadata.decode, layer)[0]

    def _prefill(self, q: Any, group: PrefillGroup, layer: torch.nn.Module) -> torch.Tensor:
        """Add the new rows to the staged history, copy them to the host, and attend over the staged rows."""
        if self.layer_index == 0:
            self.staging.plan(group)
        self.staging.load(group, self.host_rows)
        self._write(self.new_rows[group.tokens], self.staging.cache, group.slots, layer)
        self.staging.store(group, self.layer_index, self.host_rows)
        return self._attend_to_staged(q, group, layer)

    def _attend_to_staged(self, q: Any, group: PrefillGroup, layer: torch.nn.Module) -> torch.Tensor:
        impl = self._for_tokens(self.vllm_class, group.tokens.start)
        return impl.forward_mqa(q, self.staging.cache, group.metadata, layer)[0]

    def _for_tokens(self, impl_class: type, first_token: int) -> Any:
        """Return an implementation of this layer for the step's tokens from `first_token` on.

        NOTE: it has a shortened buffer of selections, because vLLM's code reads selections from the start of the
        buffer. vLLM's class does not need anything that this layer's subclass adds.
        """
        impl = object.__new__(impl_class)
        impl.__dict__.update(self.__dict__)
        impl.topk_indices_buffer = self.topk_indices_buffer[first_token:]
        return impl

    def _write(self, new_rows: NewRows, cache: torch.Tensor, slots: torch.Tensor, layer: torch.nn.Module) -> None:
        """Write rows to a paged cache, in its dtype."""
        self.do_kv_cache_update(new_rows.kv_c, new_rows.k_pe, cache, slots, self.kv_cache_dtype, key_scale(layer))

    def _decode_cache(self) -> torch.Tensor:
        rows, size = self.hot.rows, self.decode_block_size
        # NOTE: the shape may lack a partial last block, because kernels that want blocks of several rows read selected
        # rows only, by flat row number.
        num_blocks, width = len(rows) // size, rows.shape[1]
        return rows.as_strided((num_blocks, size, width), (size * width, width, 1))


class HotFlashMLAImpl(HotMLACudaImpl, SelectionHook, FlashMLASparseImpl):
    vllm_class, runs_own_class = FlashMLASparseImpl, True

    def bind(self, hot_buffer: MLAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        if self.kv_cache_dtype == "fp8_ds_mla":
            self.decode_block_size = BLOCK_SIZE
        super().bind(hot_buffer, layer_index, host_rows, cache)

    def _decode(self, q: Any, metadata: HotMLAMetadata, layer: torch.nn.Module) -> torch.Tensor:
        if self.microbatch is not None:  # vLLM would join the query's parts in memory that all microbatches share
            q = join_query(*q)
        return super()._decode(q, metadata, layer)


class HotFlashAttnMLAImpl(HotMLACudaImpl, FlashAttnMLASparseImpl, FlashAttnKernel):
    vllm_class = FlashAttnMLASparseImpl

    def _decode(self, q: Any, metadata: HotMLAMetadata, layer: torch.nn.Module) -> torch.Tensor:
        return self.attend_to_rows(q, self.decode_cache, self.locate_leading(q), layer, is_decode=True)


class HotFlashMLAMetadataBuilder(HotMLAMetadataBuilder, FlashMLASparseMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # NOTE: vLLM makes one entry per request, but here every token of a decoding request counts as a request.
        self.max_model_len_tensor = self.max_model_len_tensor.repeat(self._max_query_len)
        self.dummy_block_table = self.dummy_block_table.repeat(self._max_query_len, 1)


class HotFlashAttnMLAMetadataBuilder(HotMLAMetadataBuilder, FlashAttnMLASparseMetadataBuilder):
    pass


class HotMLABackend:
    """Mixin of a sparse MLA backend.

    NOTE: it keeps the stock backend's name, because NIXL's handshake compares the names of the two sides.

    Attributes:
        vllm_class, runs_own_class: as in `derive_hot_class`.
    """

    vllm_class: ClassVar[type]
    runs_own_class: ClassVar[bool] = False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # NOTE: hot rows and indexer keys share vLLM's blocks; only layouts with the block outermost allow that.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


class HotFlashMLABackend(HotMLABackend, FlashMLASparseBackend):
    vllm_class, runs_own_class = FlashMLASparseBackend, True

    @staticmethod
    def get_impl_cls() -> type[HotFlashMLAImpl]:
        return HotFlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotFlashMLAMetadataBuilder


class HotFlashAttnMLABackend(HotMLABackend, FlashAttnMLASparseBackend):
    vllm_class = FlashAttnMLASparseBackend

    @staticmethod
    def get_impl_cls() -> type[HotFlashAttnMLAImpl]:
        return HotFlashAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotFlashAttnMLAMetadataBuilder


HOT_BACKENDS = {
    FlashMLASparseBackend.get_name(): HotFlashMLABackend,
    FlashAttnMLASparseBackend.get_name(): HotFlashAttnMLABackend,
}


def _slice_query(q: torch.Tensor | tuple[torch.Tensor, ...], tokens: slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return tuple(part[tokens] for part in q) if isinstance(q, tuple) else q[tokens]
