"""MLA layers whose KV cache is a hot buffer; the full KV is in the host pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import AttentionMetadata

from vllm_hisparse.attention.check_layers import check_resident_layers
from vllm_hisparse.compat.engine import is_draft_layer
from vllm_hisparse.config import HiSparseConfig, max_query_len
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.reserved_memory import reserve_memory
from vllm_hisparse.layout import KVLayout, indexer_row_bytes
from vllm_hisparse.ops.base import HotRows
from vllm_hisparse.ops.indexer_keys import KEY_BYTES

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class NewRows:
    """New rows of a step's tokens, as the layer computes them.

    Attributes:
        kv_c: [tokens, kv_lora_rank].
        k_pe: [tokens, 1, qk_rope_head_dim] or [tokens, qk_rope_head_dim].
    """

    kv_c: torch.Tensor
    k_pe: torch.Tensor

    def __getitem__(self, tokens: slice) -> NewRows:
        return NewRows(self.kv_c[tokens], self.k_pe[tokens])


class HotBufferLayer:
    """Mixin of an `MLAAttention`; it asks vLLM for hot blocks instead of full-KV blocks."""

    def update_kv_cache(self, *args: Any) -> None:
        """Do nothing: `forward_mqa` writes the rows."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        config = HiSparseConfig.from_vllm_config(vllm_config)
        key_bytes = indexer_row_bytes(vllm_config.model_config.hf_text_config.index_head_dim)
        # NOTE: layers may share an indexer, so there may be fewer layers with indexer keys than layers.
        forward_context = vllm_config.compilation_config.static_forward_context
        layers = {name: layer for name, layer in forward_context.items() if isinstance(layer, MLAAttention)}
        has_indexer = [layer.indexer is not None for layer in layers.values() if isinstance(layer, HotBufferLayer)]
        row_bytes = {  # bytes of a token's KV in each layer that keeps its KV on the device
            name: layer.get_kv_cache_spec(vllm_config).state_content_size_bytes
            for name, layer in layers.items()
            if not isinstance(layer, HotBufferLayer)
        }
        drafting = {name for name in row_bytes if is_draft_layer(name, vllm_config)}
        num_draft_indexers = sum(layers[name].indexer is not None for name in drafting)
        layout = KVLayout(
            spec.state_content_size_bytes,
            key_bytes,
            len(has_indexer),
            sum(has_indexer),
            spec.block_size,
            max_query_len=max_query_len(vllm_config),
            draft_row_bytes=sum(row_bytes[name] for name in drafting) + key_bytes * num_draft_indexers,
            full_kv_row_bytes=sum(row_bytes[name] for name in row_bytes.keys() - drafting),
            narrow_key_bytes=KEY_BYTES if config.has_narrow_keys else None,
            row_shares=config.row_shares(has_indexer),
        )
        config.check_rows_by_layer(layout)
        check_resident_layers(layout.num_layers, sum(has_indexer) + num_draft_indexers, row_bytes)
        reserve_memory(layout, vllm_config, config.import_buffer_bytes)
        return HotBufferSpec.from_mla_spec(spec, layout, config.rows, config.elastic)


class HotMLAAttention(HotBufferLayer, MLAAttention):
    """`MLAAttention` of vLLM's generic model classes over a hot buffer."""

    def forward_impl(
        self,
        q: torch.Tensor,
        k_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            # NOTE: vLLM would allocate memory for its dense prefill here, which hot buffers never use.
            return output.fill_(0)
        # NOTE: `update_kv_cache` cannot do this, because a piecewise CUDA graph does not replay its Python code.
        with self.impl.writing(NewRows(k_c_normed, k_pe)):
            return super().forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *args, **kwargs)


class HotMLAImpl:
    """Mixin of an MLA implementation, with the storage of one layer.

    `bind` is called once, when vLLM has allocated the layer's cache.

    Attributes:
        hot_buffer: hot buffer shared by all layers; None before `bind`.
        requests: range of the step's requests that this copy of the implementation serves; None: all requests.
        new_rows: rows that the running `forward_mqa` has to write; None if the layer has written them itself.
        divides_steps: True if a large step may be divided into microbatches.
    """

    divides_steps: ClassVar[bool] = False
    hot_buffer: MLAHotBuffer | None = None
    new_rows: NewRows | None = None
    requests: slice | None = None

    def bind(self, hot_buffer: MLAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        """Attach storage.

        Args:
            hot_buffer: hot buffer shared by all layers.
            layer_index: index of this layer in the hot buffer.
            host_rows: [num_host_blocks, block_size, row elements].
            cache: [num_device_blocks, 1, rows of the layer in a hot block, row elements]; strides are whole numbers of
                rows, as in `HotRows.from_cache`.
        """
        self.hot_buffer, self.layer_index = hot_buffer, layer_index
        classes = hot_buffer.classes
        equal_rows = (classes.equal_rows, classes.equal_offsets[layer_index]) if classes.equal_rows else ()
        self.host_rows, self.hot = host_rows.flatten(0, 1), HotRows.from_cache(cache.squeeze(1), *equal_rows)
        hot_buffer.add_layer(self.hot, self.host_rows)
        self.swap_in = hot_buffer.swap_in_of(layer_index)

    def locate_selection(self, selected_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the selections of the decoding requests' tokens hot; if `requests` is set, of these requests only.

        Args:
            selected_positions: [tokens, top_k] int32, -1 for none.

        Returns:
            Flat hot rows, [tokens, top_k] int32, and the number of leading valid ones, [tokens] int32.
        """
        step, (num_tokens, top_k) = self.hot_buffer.step, selected_positions.shape
        resolved = self.swap_in(step.join_selections(selected_positions), self.requests)
        hot_row_ids = resolved.hot_row_ids.view(-1, top_k)
        return step.unpad_queries(hot_row_ids, num_tokens), step.unpad_queries(resolved.num_valid, num_tokens)

    @contextmanager
    def writing(self, new_rows: NewRows | None) -> Iterator[None]:
        """Let `forward_mqa`, called inside this context, write these rows, because it knows the requests they belong
        to.

        NOTE: vLLM's layers call `forward_mqa` with arguments that have no place for the rows.
        """
        self.new_rows = new_rows
        try:
            yield
        finally:
            self.new_rows = None
