"""Grouped-query attention on the CPU over hot units. The full KV is on the host, as vLLM's CPU kernels write it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_hisparse.attention.base import CpuMetadataBuilder, HotMetadataBuilder, decode_tokens
from vllm_hisparse.compat.cpu_attention import cpu_attention_isa, cpu_kernels
from vllm_hisparse.cpu.paged_gqa import attend
from vllm_hisparse.cpu.take_rows import take_rows
from vllm_hisparse.kv_manager.rows.algorithm_state import KeySpan
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer, view_units
from vllm_hisparse.kv_manager.rows.hot_buffer import Seeds
from vllm_hisparse.ops.base import Resolved

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout

kernels = cpu_kernels()


@dataclass(frozen=True)
class PrefillBatch:
    """The requests that prefill in this step, in the form that vLLM's kernel takes.

    Attributes:
        tokens: [tokens] int64 indices of the tokens in the step's batch.
        starts: [requests + 1] int32 index in `tokens` of each request's first token; the last entry is the end.
        seq_lens: [requests] int32 tokens of each request.
        host_block_tables: [requests, blocks] int32 host blocks of each request.
        schedule: metadata of the kernel.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    host_block_tables: torch.Tensor
    schedule: torch.Tensor


@dataclass
class HotGQACpuMetadata(AttentionMetadata):
    """One step's batch.

    Attributes:
        tokens: [tokens] int64 indices of the tokens in the step's batch that belong to a request.
        host_slots: [tokens] int64 slot in the host pool for the KV of each of them.
        key_spans: keys of prompts for the algorithm to represent, when the step's KV is on the host.
        seeds: units of prompts that become hot then.
        prefill: the requests with more query tokens than a decoding request can have; None if there are none.
        decode_tokens: [tokens] int64 indices of the decoding requests' tokens in the step's batch.
    """

    tokens: torch.Tensor
    host_slots: torch.Tensor
    key_spans: list[KeySpan]
    seeds: list[Seeds]
    prefill: PrefillBatch | None
    decode_tokens: torch.Tensor


@dataclass(frozen=True)
class _QuerySpan:
    """The query tokens of one request.

    Attributes:
        batch_index: index of the request in the step's batch.
        request_index: index of the request in the `RequestTable`.
        tokens: range of its tokens in the step's batch.
        seq_len: tokens of the request, including these.
    """

    batch_index: int
    request_index: int
    tokens: slice
    seq_len: int

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    @property
    def first(self) -> int:
        """Position of the first query token."""
        return self.seq_len - self.num_tokens


class HotGQACpuMetadataBuilder(HotMetadataBuilder, CpuMetadataBuilder[HotGQACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotGQACpuMetadata:
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        first_hot_block_ids = common.block_table_tensor[:num_reqs, 0]
        buffer, key_spans, seeds = self.hot_buffer, list[KeySpan](), list[Seeds]()
        known = self._known_spans(common, first_hot_block_ids)
        max_query_len = buffer.shape.max_query_len
        prefills = [span for span in known if span.num_tokens > max_query_len]
        for span in prefills:
            key_spans += buffer.begin_prefill(span.request_index, span.first, span.seq_len)
            seeds.append(buffer.seeds(first_hot_block_ids[span.batch_index, None], span.seq_len))
        decodes = [span for span in known if span.num_tokens <= max_query_len]
        batch_indices = [span.batch_index for span in decodes]
        query_lens = torch.tensor([span.num_tokens for span in decodes], dtype=torch.int32)
        starts = torch.tensor([span.tokens.start for span in decodes])
        tokens, query_indices = decode_tokens(starts, query_lens, max_query_len)
        buffer.step.plan(
            first_hot_block_ids[batch_indices], common.seq_lens[batch_indices].int(), query_lens, query_indices
        )
        return HotGQACpuMetadata(
            *self._host_slots(known),
            key_spans,
            seeds,
            self._prefill_batch(prefills) if prefills else None,
            tokens,
        )

    @property
    def hot_buffer(self) -> GQAHotBuffer:
        return self.impl.hot_buffer

    def _known_spans(self, common: CommonAttentionMetadata, first_hot_block_ids: torch.Tensor) -> list[_QuerySpan]:
        """Return the spans of the requests that the worker knows and that have query tokens."""
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        seq_lens = common.seq_lens[: common.num_reqs].tolist()
        indices = self.hot_buffer.requests.find(first_hot_block_ids).tolist()
        tokens = [slice(start, stop) for start, stop in pairwise(starts)]
        spans = map(_QuerySpan, range(common.num_reqs), indices, tokens, seq_lens)
        num_requests = self.hot_buffer.requests.num_requests
        return [span for span in spans if span.request_index < num_requests and span.num_tokens > 0]

    def _host_slots(self, spans: list[_QuerySpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the spans' tokens in the batch, and the slots in the host pool for their KV: [tokens] int64 each."""
        block_size, tokens, slots = self.kv_cache_spec.block_size, [torch.empty(0).long()], [torch.empty(0).long()]
        for span in spans:
            positions = torch.arange(span.first, span.seq_len)
            blocks = self.hot_buffer.requests.host_block_table(span.request_index)[positions // block_size].long()
            tokens.append(torch.arange(span.tokens.start, span.tokens.stop))
            slots.append(blocks * block_size + positions % block_size)
        return torch.cat(tokens), torch.cat(slots)

    def _prefill_batch(self, spans: list[_QuerySpan]) -> PrefillBatch:
        spec = self.kv_cache_spec
        starts = torch.tensor([0, *(span.num_tokens for span in spans)]).cumsum(0).int()
        seq_lens = torch.tensor([span.seq_len for span in spans], dtype=torch.int32)
        num_blocks = -(-int(seq_lens.max()) // spec.block_size)
        model = self.vllm_config.model_config
        schedule = kernels.cpu_attn_get_scheduler_metadata(
            num_reqs=len(spans),
            num_heads=model.get_num_attention_heads(self.vllm_config.parallel_config),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            seq_lens=seq_lens,
            dtype=model.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=cpu_attention_isa(spec.dtype, spec.block_size, spec.head_size),
            enable_kv_split=True,
        )
        tables = torch.stack(
            [self.hot_buffer.requests.host_block_table(span.request_index)[:num_blocks] for span in spans]
        )
        tokens = torch.cat([torch.arange(span.tokens.start, span.tokens.stop) for span in spans])
        return PrefillBatch(tokens, starts, seq_lens, tables.clamp_min(0), schedule)


class HotGQACpuBackend(CPUAttentionBackend):
    """Backend of a dense model's layers with hot buffers.

    NOTE: it keeps the stock backend's name, because NIXL's handshake compares the names of the two sides.
    """

    forward_includes_kv_cache_update = True  # `forward` writes KV to the host pool

    @staticmethod
    def get_impl_cls() -> type[HotGQACpuImpl]:
        return HotGQACpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotGQACpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(32)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        # NOTE: hot rows and the KV of full-KV layers share vLLM's blocks; only a layout with the block outermost allows
        # that.
        return (KVCacheLayout.BLHNC,)


class HotGQACpuImpl(CPUAttentionBackendImpl):
    """Attends over hot units for a request that decodes, and with vLLM's kernel over host blocks for one that prefills.

    `bind` is called once, when the connector has allocated the host pool.

    Attributes:
        vllm_class, runs_own_class: as in `derive_hot_class`.
    """

    vllm_class: ClassVar[type] = CPUAttentionBackendImpl
    runs_own_class: ClassVar[bool] = False

    def bind(self, hot_buffer: GQAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        """Attach storage.

        Args:
            hot_buffer: hot buffer shared by all layers; its `ops` are `CpuUnitOps`.
            layer_index: index of this layer in the hot buffer.
            host_rows: [num_host_blocks, block_size, row elements].
            cache: [num_device_blocks, num_kv_heads, rows per hot block, 2 * head_size].
        """
        self.hot_buffer, self.algorithm = hot_buffer, hot_buffer.algorithm
        self.layer_index, self.state, self.host_rows = layer_index, hot_buffer.state.layers[layer_index], host_rows
        self.hot, self.ops = view_units(cache, hot_buffer.heads), hot_buffer.ops
        self.host_units = host_rows.view(-1, self.algorithm.tokens_per_unit * 2 * self.head_size)
        hot_buffer.add_layer(self.hot, self.host_units)
        self.swap_in = hot_buffer.swap_in_of(layer_index)
        num_blocks, self.block_size, _ = host_rows.shape
        blocks = host_rows.view(num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size)
        self.isa = cpu_attention_isa(host_rows.dtype, self.block_size, self.head_size)
        self.host_blocks = self.ops.host_blocks(self.host_units)
        halves = blocks.view(num_blocks, self.num_kv_heads, 2 * self.block_size, self.head_size).chunk(2, 2)
        self.host_keys, self.host_values = halves  # in the form that vLLM's kernels take
        self._group_shape = self.algorithm.shape.num_heads // self.num_kv_heads, self.head_size

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HotGQACpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output.zero_()
        if attn_metadata is None or not len(attn_metadata.tokens):
            return output
        metadata, tokens = attn_metadata, attn_metadata.tokens
        kernels.cpu_attn_reshape_and_cache(
            key[tokens], value[tokens], self.host_keys, self.host_values, metadata.host_slots, self.isa
        )
        for span in metadata.key_spans:
            self.represent(span)
        for seeds in metadata.seeds:
            homes = self._host_units(seeds.seq_indices[:, None], seeds.units)
            self.hot.rows[seeds.hot_row_ids.flatten()] = self.ops.read_host_rows(self.host_units, homes.flatten())
            self.hot_buffer.seed(self.layer_index, seeds)
        if metadata.prefill is not None:
            output[metadata.prefill.tokens] = self._prefill(query[metadata.prefill.tokens], metadata.prefill)
        tokens, step = metadata.decode_tokens, self.hot_buffer.step
        if len(tokens):
            out = self._decode(*(step.pad_queries(rows[tokens]) for rows in (query, key, value)))
            output[tokens] = step.unpad_queries(out, len(tokens)).to(output.dtype)
        return output

    def represent(self, span: KeySpan) -> None:
        """Add keys that are on the host to the algorithm's state."""
        keys = self._load_host_keys(span)
        self.algorithm.construct_representations(self.state, span.request_index, keys, span.first)

    def _prefill(self, query: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        out = torch.empty_like(query)
        kernels.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.host_keys,
            value_cache=self.host_values,
            output=out,
            query_start_loc=batch.starts,
            seq_lens=batch.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=batch.host_block_tables,
            softcap=0,
            scheduler_metadata=batch.schedule,
            s_aux=None,
        )
        return out

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Represent the new tokens, select, swap in the missing units, and attend over hot units only.

        Args:
            query: [batch * max_query_len, num_heads, head_size], padded.
            key, value: [batch * max_query_len, num_kv_heads, head_size], padded.

        Returns:
            Output, in the shape of `query`.
        """
        step = self.hot_buffer.step
        step.begin(self.layer_index)
        selected_unit_ids = self.hot_buffer.select(self.layer_index, key, query)
        step.write_tokens(self.layer_index, key, value)
        resolved = self.swap_in(selected_unit_ids)
        out = self._attend(query, selected_unit_ids, resolved)
        step.finish(self.layer_index)
        return out

    def _attend(self, query: torch.Tensor, units: torch.Tensor, resolved: Resolved) -> torch.Tensor:
        """Attend over hot units, each new token up to its own position.

        Args:
            query: [batch * max_query_len, num_heads, head_size].
            units: [batch * num_kv_heads, max_query_len * num_selected] int32 selected units.
            resolved: places of these units on the device.
        """
        per_unit, (max_query_len, _) = self.algorithm.tokens_per_unit, self.hot_buffer.step.units.num_tokens.shape
        by_request = query.view(-1, max_query_len, self.num_kv_heads, *self._group_shape)
        batch, by_head = len(by_request), by_request.transpose(1, 2).flatten(0, 2)
        hot_row_ids, num_columns = resolved.hot_row_ids[: len(units)], int(resolved.num_valid[: len(by_head)].max())
        units, hot_row_ids = (ids.view(len(by_head), -1)[:, : max(num_columns, 1)] for ids in (units, hot_row_ids))
        num_tokens = self.hot_buffer.step.units.num_tokens[:, :batch].T[:, None].expand(-1, self.num_kv_heads, -1)
        token_positions = (units[..., None] * per_unit + torch.arange(per_unit)).flatten(1)
        valid = (hot_row_ids >= 0).repeat_interleave(per_unit, 1) & (token_positions < num_tokens.reshape(-1, 1))
        rows = take_rows(self.hot.rows, hot_row_ids.clamp_min(0)).view(len(by_head), -1, 2 * self.head_size)
        out = attend(by_head, rows, valid, self.scale)
        return (
            out.view(batch, self.num_kv_heads, max_query_len, *self._group_shape).transpose(1, 2).reshape(query.shape)
        )

    def _host_units(self, seq_indices: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """Return the flat host units of units of KV heads, int64; the arguments are broadcast."""
        per_block = self.hot_buffer.step.shape.block_size
        parts = self.hot_buffer.requests.host_block_tables[seq_indices, units // per_block].long()
        return parts * per_block + units % per_block

    def _load_host_keys(self, span: KeySpan) -> torch.Tensor:
        """Load keys from the host pool: [last - first, num_kv_heads, head_size]."""
        positions = torch.arange(span.first, span.last)
        host_block_table = self.hot_buffer.requests.host_block_table(span.request_index)
        blocks, heads = host_block_table[positions // self.block_size].long(), torch.arange(self.num_kv_heads)
        where = torch.broadcast_tensors(blocks[:, None], heads, (positions % self.block_size)[:, None])
        keys = self.host_blocks.load_keys(*(index.flatten() for index in where))
        return keys.view(len(positions), self.num_kv_heads, self.head_size)
