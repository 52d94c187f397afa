"""Grouped-query attention on the CPU over hot units; the full KV is on the host, as vLLM's CPU kernels write it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_hisparse.attention.base import CpuMetadataBuilder, HotMetadataBuilder
from vllm_hisparse.compat import cpu_attention_isa, cpu_kernels
from vllm_hisparse.kv_manager.worker.gqa_hot_buffer import GQAHotBuffer, Represent, view_units
from vllm_hisparse.kv_manager.worker.hot_buffer import Seeds
from vllm_hisparse.ops.base import Resolved
from vllm_hisparse.ops.paged_gqa import CpuBlocks, attend

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout

kernels = cpu_kernels()


@dataclass(frozen=True)
class PrefillBatch:
    """The requests with several query tokens in this step, as vLLM's kernel wants them.

    Attributes:
        tokens: [tokens] int64 rows of the step's token batch.
        starts: [requests + 1] int32 where each request's tokens start in `tokens`.
        seq_lens: [requests] int32.
        host_tables: [requests, blocks] int32.
        schedule: the kernel's own metadata.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    host_tables: torch.Tensor
    schedule: torch.Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """The requests that decode one token in this step.

    Attributes:
        tokens: [batch] int64 row of each request's token in the step's token batch.
        rows: [batch] int64 rows of the algorithm's state.
        positions: [batch] int64 position of each request's token.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor


@dataclass
class HotGQACpuMetadata(AttentionMetadata):
    """One step's batch.

    Attributes:
        tokens: [tokens] int64 rows of the step's token batch that belong to a request.
        host_slots: [tokens] int64 where their KV goes in the host pool.
        represent: keys of prompts that the algorithm has yet to see, once the step's are on the host.
        seeds: what becomes hot of the prompts then.
        prefill, decode: None where there is none.
    """

    tokens: torch.Tensor
    host_slots: torch.Tensor
    represent: list[Represent]
    seeds: list[Seeds]
    prefill: PrefillBatch | None
    decode: DecodeBatch | None


class HotGQACpuMetadataBuilder(HotMetadataBuilder, CpuMetadataBuilder[HotGQACpuMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotGQACpuMetadata:
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        lengths = common.seq_lens[:num_reqs].tolist()
        hot_tables = common.block_table_tensor[:num_reqs, : self.kv_cache_spec.blocks_per_request]
        buffer, represent, seeds = self.hot_buffer, [], []
        rows = buffer.request_rows(hot_tables).tolist()
        spans = [(row, slice(a, b), n) for row, (a, b), n in zip(rows, pairwise(starts), lengths, strict=True)]
        known = [i for i, (row, span, _) in enumerate(spans) if row < buffer.num_requests and span.stop > span.start]
        decodes = [i for i in known if spans[i][1].stop - spans[i][1].start == 1]
        prefills = [i for i in known if spans[i][1].stop - spans[i][1].start > 1]
        for i in prefills:
            row, span, length = spans[i]
            missing = buffer.represent_prefill(row, length - (span.stop - span.start), length)
            represent += [missing] if missing else []
            seeds.append(buffer.seeds(hot_tables[i, None], length, self.impl.hot))
        tokens, slots = self._host_slots([spans[i] for i in known])
        return HotGQACpuMetadata(
            tokens,
            slots,
            represent,
            seeds,
            self._prefill_batch([spans[i] for i in prefills]) if prefills else None,
            self._decode_batch([spans[i] for i in decodes], hot_tables[decodes]) if decodes else None,
        )

    @property
    def hot_buffer(self) -> GQAHotBuffer:
        return self.impl.hot_buffer

    def _host_slots(self, spans: list[tuple[int, slice, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        block_size, tokens, slots = self.kv_cache_spec.block_size, [torch.empty(0).long()], [torch.empty(0).long()]
        for row, span, length in spans:
            positions = torch.arange(length - (span.stop - span.start), length)
            blocks = self.hot_buffer.host_table(row)[positions // block_size].long()
            tokens.append(torch.arange(span.start, span.stop))
            slots.append(blocks * block_size + positions % block_size)
        return torch.cat(tokens), torch.cat(slots)

    def _prefill_batch(self, spans: list[tuple[int, slice, int]]) -> PrefillBatch:
        spec = self.kv_cache_spec
        query_lens = torch.tensor([0, *(span.stop - span.start for _, span, _ in spans)])
        starts = query_lens.cumsum(0).int()
        seq_lens = torch.tensor([length for _, _, length in spans], dtype=torch.int32)
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
        tables = torch.stack([self.hot_buffer.host_table(row)[:num_blocks] for row, _, _ in spans])
        tokens = torch.cat([torch.arange(span.start, span.stop) for _, span, _ in spans])
        return PrefillBatch(tokens, starts, seq_lens, tables.clamp_min(0), schedule)

    def _decode_batch(self, spans: list[tuple[int, slice, int]], hot_tables: torch.Tensor) -> DecodeBatch:
        rows, tokens, positions = zip(*((row, span.start, length - 1) for row, span, length in spans), strict=True)
        batch, buffer = DecodeBatch(*map(torch.tensor, (tokens, rows, positions))), self.hot_buffer
        buffer.begin_units(hot_tables, (batch.positions + 1).int())
        buffer.find_newest_rows(self.impl.hot)
        return batch


class HotGQACpuBackend(CPUAttentionBackend):
    """NOTE: the stock backend's name: NIXL's handshake compares it between the two sides."""

    forward_includes_kv_cache_update = True  # into the host pool, whose slots only our metadata knows

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

        # NOTE: hot rows and the KV of dense layers share vLLM's blocks, which only a block-outermost layout allows.
        return (KVCacheLayout.BLHNC,)


class HotGQACpuImpl(CPUAttentionBackendImpl):
    """Attends over hot units when a request decodes, with vLLM's kernel over host blocks when it prefills.

    `bind` is called once, when the connector has allocated the host pool.
    """

    def bind(self, hot_buffer: GQAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        """Attach storage.

        Args:
            hot_buffer: state shared by all layers.
            layer_index: this layer's index in it.
            host_rows: [num_host_blocks, block_size, row elements].
            cache: [num_device_blocks, num_kv_heads, rows per hot block, 2 * head_size].
        """
        self.hot_buffer, self.algorithm = hot_buffer, hot_buffer.algorithm
        self.layer_index, self.state, self.host_rows = layer_index, hot_buffer.states[layer_index], host_rows
        self.hot = view_units(cache, self.algorithm.tokens_per_unit, hot_buffer.head_stride)
        num_blocks, self.block_size, _ = host_rows.shape
        blocks = host_rows.view(num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size)
        self.isa = cpu_attention_isa(host_rows.dtype, self.block_size, self.head_size)
        self.host_blocks = CpuBlocks.view(blocks, self.isa)
        halves = blocks.view(num_blocks, self.num_kv_heads, 2 * self.block_size, self.head_size).chunk(2, 2)
        self.host_keys, self.host_values = halves  # as the kernels take them

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
        for missing in metadata.represent:
            self.represent(missing)
        for seeds in metadata.seeds:
            homes = self._host_units(seeds.rows[:, None], seeds.units)
            self.hot.rows[seeds.hot_rows.flatten()] = self._load_units(homes.flatten())
            self.hot_buffer.seed(self.layer_index, seeds)
        if metadata.prefill is not None:
            output[metadata.prefill.tokens] = self._prefill(query[metadata.prefill.tokens], metadata.prefill)
        if metadata.decode is not None:
            batch = metadata.decode
            rows = query[batch.tokens], key[batch.tokens], value[batch.tokens]
            output[batch.tokens] = self._decode(*rows, batch).to(output.dtype)
        return output

    def represent(self, missing: Represent) -> None:
        """Let the algorithm see keys that are on the host."""
        keys = self._load_host_keys(missing)
        self.algorithm.construct_representations(self.state, missing.row, keys, missing.first)

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
            block_table=batch.host_tables,
            softcap=0,
            scheduler_metadata=batch.schedule,
            s_aux=None,
        )
        return out

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """Represent the new tokens, select, swap in what is missing, attend over hot rows only.

        Args:
            query: [batch, num_heads, head_size]. key, value: [batch, num_kv_heads, head_size].
            batch: the requests.
        """
        per_unit, num_heads = self.algorithm.tokens_per_unit, self.num_kv_heads
        self.algorithm.update_representations(self.state, batch.rows, key, batch.positions)
        units = self.algorithm.retrieve_topk(self.state, batch.rows, query, batch.positions + 1).flatten(0, 1)
        self._write_newest(key, value, batch)
        resolved = self.hot_buffer.resolve(self.layer_index, units, self.hot)
        self._load_missed(resolved, len(units))

        hot_units = resolved.hot_row_ids[: len(units)]
        positions = (units[..., None] * per_unit + torch.arange(per_unit)).flatten(1)
        last = batch.positions.repeat_interleave(num_heads)[:, None]
        valid = (hot_units >= 0).repeat_interleave(per_unit, 1) & (positions <= last)
        rows = self.hot.rows[hot_units.clamp_min(0)].view(len(units), -1, 2 * self.head_size)
        return attend(query.unflatten(1, (num_heads, -1)).flatten(0, 1), rows, valid, self.scale).view_as(query)

    def _write_newest(self, key: torch.Tensor, value: torch.Tensor, batch: DecodeBatch) -> None:
        """Put the newest tokens into their units, which first get their earlier tokens if they lack them."""
        num_heads = self.num_kv_heads
        newest = self.hot_buffer.newest_rows[: len(key) * num_heads]
        by_head = (batch.rows[:, None] * num_heads + torch.arange(num_heads)).flatten()
        reload = self.hot_buffer.reload[self.layer_index]
        stale = reload[by_head] != 0
        if stale.any():
            units = batch.positions.repeat_interleave(num_heads)[stale] // self.algorithm.tokens_per_unit
            self.hot.rows[newest[stale]] = self._load_units(self._host_units(by_head[stale], units))
            reload[by_head] = 0
        tokens = self.hot.rows.unflatten(1, (self.algorithm.tokens_per_unit, -1))
        offsets = (batch.positions % self.algorithm.tokens_per_unit).repeat_interleave(num_heads)
        tokens[newest, offsets] = torch.cat((key, value), -1).flatten(0, 1).to(tokens.dtype)

    def _host_units(self, rows: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """Flat host unit of units of rows by KV head; int64, the two broadcast."""
        per_block = self.hot_buffer.shape.block_size
        return self.hot_buffer.host_tables[rows, units // per_block].long() * per_block + units % per_block

    def _load_missed(self, resolved: Resolved, batch: int) -> None:
        columns = torch.arange(resolved.miss_hot_row_ids.shape[1])
        missed = columns < resolved.num_misses[:batch, None]
        if missed.any():
            self.hot.rows[resolved.miss_hot_row_ids[:batch][missed].long()] = self._load_units(
                resolved.miss_host_row_ids[:batch][missed]
            )

    def _load_units(self, host_units: torch.Tensor) -> torch.Tensor:
        """Units from the host pool: [n, unit elements], tokens one after the other, key and value side by side.

        Args:
            host_units: [n] int64 flat host units.
        """
        per_unit = self.algorithm.tokens_per_unit
        parts, units = host_units // self.hot_buffer.shape.block_size, host_units % self.hot_buffer.shape.block_size
        offsets = (units[:, None] * per_unit + torch.arange(per_unit)).flatten()
        blocks, heads = parts // self.num_kv_heads, parts % self.num_kv_heads
        where = blocks.repeat_interleave(per_unit), heads.repeat_interleave(per_unit), offsets
        rows = torch.cat((self.host_blocks.load_keys(*where), self.host_blocks.load_values(*where)), -1)
        return rows.view(-1, self.hot.rows.shape[1])

    def _load_host_keys(self, missing: Represent) -> torch.Tensor:
        """[last - first, num_kv_heads, head_size]."""
        positions = torch.arange(missing.first, missing.last)
        blocks = self.hot_buffer.host_table(missing.row)[positions // self.block_size].long()
        heads = torch.arange(self.num_kv_heads)
        where = torch.broadcast_tensors(blocks[:, None], heads, (positions % self.block_size)[:, None])
        keys = self.host_blocks.load_keys(*(index.flatten() for index in where))
        return keys.view(len(positions), self.num_kv_heads, self.head_size)
