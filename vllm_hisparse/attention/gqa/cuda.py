"""Grouped-query attention on CUDA over hot units: the parts that the backends share.

A decoding request attends over hot units: the kernel gets every KV head of every new token as a request of its own,
whose block table names the selected units. A prefilling request, which has more query tokens than a decoding request
can have, attends over a staged copy of its history, through vLLM's unchanged backend.

KV in fp8 is stored as in vLLM: divided by the layer's scale for keys or values. The algorithm's state holds keys
without their scale; instead, the query that the algorithm gets is multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.attention.base import HotMetadataBuilder, QueryLens
from vllm_hisparse.attention.gqa.base import preferred_block_size
from vllm_hisparse.compat.attention import quant_scales
from vllm_hisparse.compat.engine import uses_host_connector
from vllm_hisparse.config import HiSparseConfig, max_query_len
from vllm_hisparse.kv_manager.rows.algorithm_state import KeySpan
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer, view_units
from vllm_hisparse.kv_manager.rows.prefill_staging import PrefillGroup, WholeBlockStaging
from vllm_hisparse.layout import MIN_BLOCK_SIZE
from vllm_hisparse.ops.base import Resolved

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


FP8_DTYPES = ("fp8", "fp8_e4m3")  # values of `--kv-cache-dtype` with one scale per layer for keys, and one for values
FP8 = torch.float8_e4m3fn


@dataclass
class HotGQAMetadata(AttentionMetadata):
    """One step's batch: decoding requests first, then groups of prefilling ones.

    Attributes:
        num_decode_tokens: tokens of the decoding requests, graph padding included.
        prefill_groups: the prefilling requests.
    """

    num_decode_tokens: int
    prefill_groups: list[PrefillGroup] = field(default_factory=list)


class HotGQAMetadataBuilder(HotMetadataBuilder):
    """Mixin of a metadata builder of vLLM."""

    supports_update_block_table = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **kwargs: Any,
    ):
        # NOTE: vLLM's builder reads the mode to learn the dtype of KV, but with an algorithm's state, that of a
        # `HotBufferSpec` has another purpose.
        dtype = vllm_config.compilation_config.static_forward_context[layer_names[0]].kv_cache_dtype
        spec = replace(kv_cache_spec, kv_quant_mode=get_kv_quant_mode(dtype))
        super().__init__(spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
        self.allocate(max_query_len(self.vllm_config), self.vllm_config.scheduler_config.max_num_batched_tokens)

    def allocate(self, max_query_len: int, max_batch: int) -> None:
        """Allocate the tensors that a CUDA graph reads.

        Args:
            max_query_len: tokens that a decoding request computes in a step, at most.
            max_batch: requests of a step, at most.
        """
        self.reorder_batch_threshold = max_query_len
        self._query_lens = QueryLens(max_query_len, max_batch, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        config = HiSparseConfig.from_vllm_config(vllm_config)
        return AttentionCGSupport.UNIFORM_BATCH if config.algorithm_class.graph_capturable else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotGQAMetadata | None:
        if self.impl.hot_buffer is None:
            return None  # NOTE: vLLM captures graphs before there is a connector, to measure the memory they take.
        common = common_attn_metadata
        threshold = self._query_lens.max_query_len
        num_decodes, num_prefills, num_tokens, _ = split_decodes_and_prefills(common, decode_threshold=threshold)
        first_hot_block_ids, drafts = (
            common.block_table_tensor[:num_decodes, 0],
            self._query_lens.find(common, num_decodes),
        )
        self.impl.hot_buffer.step.plan(first_hot_block_ids, common.seq_lens[:num_decodes], *drafts)
        metadata = HotGQAMetadata(num_tokens)
        if num_prefills:
            metadata.prefill_groups = self.impl.staging.groups(common, num_decodes, self._build_staged)
        return metadata

    def _build_staged(self, common: CommonAttentionMetadata) -> Any:
        """Build vLLM's metadata of prefilling requests, whose block tables name staging blocks."""
        return super().build(0, common)


class HotGQABackend:
    """Mixin of a backend of vLLM.

    NOTE: it keeps the stock backend's name, because NIXL's handshake compares the names of the two sides.

    Attributes:
        vllm_class, runs_own_class: as in `derive_hot_class`.
        max_block_size: tokens of the largest block that vLLM's backend reads; None: any block.
    """

    vllm_class: ClassVar[type]
    runs_own_class: ClassVar[bool] = False
    max_block_size: ClassVar[int | None] = None
    forward_includes_kv_cache_update = True  # `forward` writes new rows to the host pool and the hot buffer

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        # NOTE: hot rows have no scales, which Triton's backend adds for the `kv_quant_mode` of a `HotBufferSpec`.
        return spec

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        # NOTE: only one size is supported, so that vLLM chooses it. vLLM would take a preferred size only if there were
        # no other backend.
        vllm_config = get_current_vllm_config_or_none()
        uses_hot_units = vllm_config is not None and uses_host_connector(vllm_config)
        return [MultipleOf(preferred_block_size(vllm_config) if uses_hot_units else MIN_BLOCK_SIZE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # NOTE: a unit must be contiguous, and hot rows share vLLM's blocks with the KV of full-KV layers.
        return (KVCacheLayout.BLHNC,)


class HotGQAImpl:
    """Mixin of an implementation of vLLM. It attends over hot units for decoding requests, else over staged blocks.

    `bind` is called once, when the connector has allocated the host pool.

    Attributes:
        hot_buffer: state shared by all layers; None before `bind`.
        stores_fp8: True if KV is in fp8.
        vllm_class, runs_own_class: as in `derive_hot_class`.
    """

    hot_buffer: GQAHotBuffer | None = None
    vllm_class: ClassVar[type]
    runs_own_class: ClassVar[bool] = False

    def unsupported(self, tokens_per_unit: int) -> str | None:
        """Return why the backend's kernel cannot attend over units of so many tokens on this GPU; None if it can."""
        raise NotImplementedError

    def bind(self, hot_buffer: GQAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        """Attach storage.

        Args:
            hot_buffer: hot buffer shared by all layers.
            layer_index: index of this layer in the hot buffer.
            host_rows: [num_host_blocks, block_size, row elements], mapped by the device; a block is
                [num_kv_heads, block_size, 2 * head_size].
            cache: [num_device_blocks, num_kv_heads, rows per hot block, 2 * head_size].
        """
        self.hot_buffer, self.algorithm = hot_buffer, hot_buffer.algorithm
        self.max_query_len = hot_buffer.shape.max_query_len
        self.layer_index, self.state = layer_index, hot_buffer.state.layers[layer_index]
        per_unit, width = self.algorithm.tokens_per_unit, 2 * self.head_size
        self.hot, self.host_rows = view_units(cache, hot_buffer.heads), host_rows.flatten(0, 1)
        hot_buffer.add_layer(self.hot, host_rows.view(-1, per_unit * width))
        self.swap_in = hot_buffer.swap_in_of(layer_index)
        self.staging = WholeBlockStaging(hot_buffer)
        # Units are pages with one KV head: keys and values are [num_units, tokens per unit, 1, head_size].
        self.stores_fp8 = self.kv_cache_dtype in FP8_DTYPES
        pages = self.hot.rows.view(-1, per_unit, 1, width)
        pages = pages.view(FP8) if self.stores_fp8 else pages
        self.hot_keys, self.hot_values = pages.split(self.head_size, -1)
        max_queries = hot_buffer.step.units.tails.numel()
        self.query_starts = torch.arange(max_queries + 1, dtype=torch.int32, device=cache.device)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HotGQAMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()
        if attn_metadata.num_decode_tokens:
            tokens = slice(0, attn_metadata.num_decode_tokens)
            self._decode(layer, query[tokens], key[tokens], value[tokens], output[tokens])
        for group in attn_metadata.prefill_groups:
            tokens = group.tokens
            self._prefill(layer, query[tokens], key[tokens], value[tokens], group, output[tokens])
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False  # `forward` has no use for the output's scale

    def represent(self, span: KeySpan) -> None:
        """Add keys that are on the host to the algorithm's state."""
        block_size = self.staging.block_size
        self._represent(self.staging.load_span(span, self.host_rows), span, span.first // block_size * block_size)

    def _decode(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Represent the new tokens, select, swap in the missing units, and attend over hot units only.

        Args:
            layer: vLLM's layer, which has the scales of KV in fp8.
            query, output: [tokens, num_heads, head_size]; if KV is in fp8, vLLM has quantised the query.
            key, value: [tokens, num_kv_heads, head_size].
        """
        step = self.hot_buffer.step
        step.begin(self.layer_index)
        # NOTE: torch has no `index_copy` of fp8.
        bytes_of_query = query.view(torch.uint8) if query.dtype == FP8 else query
        padded, key, value = (step.pad_queries(rows) for rows in (bytes_of_query, key, value))
        query = padded.view(query.dtype)
        if self.stores_fp8:
            scales = quant_scales(layer)
            key, value = to_fp8(key, scales.key), to_fp8(value, scales.value)
        query_of_selection = self._query_of_selection(layer, query, len(output))
        selected_unit_ids = self.hot_buffer.select(self.layer_index, self._keys(key), query_of_selection)
        step.write_tokens(self.layer_index, key, value)
        resolved = self.swap_in(selected_unit_ids)
        if self.max_query_len == 1:
            self._attend(layer, self._by_head(query), resolved, self._by_head(output))  # a view: the order is the same
        else:
            by_head = self._by_head(query)
            out = output.new_empty(by_head.shape)
            self._attend(layer, by_head, resolved, out)
            out = out.view(-1, self.num_kv_heads, self.max_query_len, *out.shape[1:]).transpose(1, 2)
            output.copy_(step.unpad_queries(out.reshape(query.shape), len(output)))
        step.finish(self.layer_index)

    def _keys(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored keys in the dtype of the algorithm's state, without their scale."""
        return stored.view(FP8).to(self.algorithm.shape.dtype) if self.stores_fp8 else stored

    def _query_of_selection(self, layer: torch.nn.Module, query: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the queries by which the algorithm selects.

        Args:
            layer: vLLM's layer.
            query: [batch * max_query_len, num_heads, head_size], padded.
            num_tokens: number of tokens without padding, which are the first of the step's batch.

        Returns:
            Queries in the shape of `query`. Their product with stored keys, which lack the scale of KV in fp8, is the
            product of the layer's queries and keys.
        """
        if not self.stores_fp8:
            return query
        scales = quant_scales(layer)
        scale = scales.key * scales.query if query.dtype == FP8 else scales.key
        return (query.float() * scale).to(self.algorithm.shape.dtype)

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Order queries or outputs by KV head, as the kernel takes them.

        Args:
            rows: [batch * max_query_len, num_heads, head_size], padded.

        Returns:
            [batch * num_kv_heads * max_query_len, heads per KV head, head_size].
        """
        by_request = rows.unflatten(0, (-1, self.max_query_len)).unflatten(2, (self.num_kv_heads, -1))
        return by_request.transpose(1, 2).flatten(0, 2)

    def _attend(self, layer: torch.nn.Module, query: torch.Tensor, resolved: Resolved, output: torch.Tensor) -> None:
        """Attend over hot units. The last unit of a selection contains the new token, and only it may be partial.

        Args:
            layer: vLLM's layer.
            query, output: [batch * num_kv_heads * max_query_len, heads per KV head, head_size].
            resolved: hot rows of the selections.
        """
        algorithm, num_rows = self.algorithm, len(query)
        tails = self.hot_buffer.step.units.tails.view(-1)[:num_rows]
        num_tokens = torch.add(tails, resolved.num_valid[:num_rows], alpha=algorithm.tokens_per_unit)
        units = resolved.hot_row_ids.view(-1, algorithm.num_selected)[:num_rows]
        self.run_kernel(layer, query, units, num_tokens, output)

    def run_kernel(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        units: torch.Tensor,
        num_tokens: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend with the backend's kernel, to which each row is a request of one token with one KV head.

        Args:
            layer: vLLM's layer.
            query, output: [rows, heads per KV head, head_size].
            units: [rows, num_selected] int32 pages of `hot_keys` and `hot_values`.
            num_tokens: [rows] int32 number of tokens that each row attends to, in its leading units; 0 for padding.
        """
        raise NotImplementedError

    def _prefill(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: PrefillGroup,
        output: torch.Tensor,
    ) -> None:
        """Add the new tokens to the staged history, copy them to the host, and attend over the staged blocks."""
        if self.layer_index == 0:
            self.staging.plan(group)
        self.staging.load(group, self.host_rows)
        cache = self._staged_blocks(self.staging.cache)
        self.do_kv_cache_update(layer, key, value, cache, group.slots)
        self.staging.store(group, self.layer_index, self.host_rows)
        self._attend_staged(layer, query, key, value, cache, group, output)
        for plan in group.plans:
            for span in plan.key_spans:
                self._represent(self.staging.cache[plan.request.first_block :], span, 0)

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
        """Attend over the staged blocks of a group, which contain the new tokens, with vLLM's implementation."""
        super().forward(layer, query, key, value, cache, group.metadata, output)

    def _represent(self, blocks: torch.Tensor, span: KeySpan, first_position: int) -> None:
        """Add keys of staged blocks to the algorithm's state.

        Args:
            blocks: [blocks, block_size, row elements] staged blocks of one request, from `first_position` on.
            span: the keys.
            first_position: position at the start of the first block.
        """
        block_size = self.staging.block_size
        first, last = span.first - first_position, span.last - first_position
        staged = self._staged_blocks(blocks[: -(-last // block_size)])[..., : self.head_size]
        keys = self._keys(staged.transpose(1, 2).flatten(0, 1)[first:last])
        self.algorithm.construct_representations(self.state, span.request_index, keys, span.first)

    def _staged_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """View staged blocks as the backend's cache: [blocks, num_kv_heads, block_size, 2 * head_size]."""
        return blocks.view(len(blocks), self.num_kv_heads, self.staging.block_size, 2 * self.head_size)


def to_fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantise keys or values, as the vLLM kernel that writes them to a KV cache does.

    Args:
        rows: [..., head_size] keys or values of any float dtype.
        scale: divisor of the rows.

    Returns:
        The bytes of the quantised rows: [..., head_size] uint8.
    """
    most = torch.finfo(FP8).max
    return (rows.float() / scale).clamp(-most, most).to(FP8).view(torch.uint8)
