"""Attention layers of a dense model whose KV cache is a hot buffer, and the conditions for such layers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_hisparse.compat.engine import is_draft_layer
from vllm_hisparse.config import DENSE_DRAFT_METHODS, HiSparseConfig, HiSparseConfigError, max_query_len
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.rows.algorithm_state import make_algorithm
from vllm_hisparse.kv_manager.rows.reserved_memory import reserve_memory
from vllm_hisparse.layout import KVLayout, dense_block_size

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec


class HotGQAAttention(Attention):
    """`Attention` whose KV cache is a hot buffer."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> HotBufferSpec:
        spec: FullAttentionSpec = super().get_kv_cache_spec(vllm_config)
        config = HiSparseConfig.from_vllm_config(vllm_config)
        num_layers, num_full_kv = _num_layers(vllm_config)
        if spec.block_size % config.tokens_per_unit:
            has_option = "page_size" in config.algorithm_class.Options.model_fields
            raise HiSparseConfigError(
                "algorithm_options.page_size" if has_option else f"unit_tokens of '{config.algorithm}'",
                config.tokens_per_unit,
                f"a divisor of --block-size ({spec.block_size})",
                "Choose another size of units, or a multiple of it for --block-size.",
            )
        token_bytes, draft_rows = row_bytes(spec), _draft_rows(vllm_config)
        layout = KVLayout(
            token_bytes,
            token_bytes,
            num_layers - num_full_kv,
            num_full_kv,
            spec.block_size,
            config.tokens_per_unit,
            spec.num_kv_heads,
            max_query_len(vllm_config),
            sum(draft_rows),
            make_algorithm(config, spec, vllm_config).state_entries,
        )
        check_state_blocks(layout, config.algorithm)
        _check_groups(layout, Counter([token_bytes] * num_full_kv + draft_rows), vllm_config)
        reserve_memory(layout, vllm_config, config.import_buffer_bytes)
        return HotBufferSpec.from_full_spec(spec, layout, config.rows, config.elastic)


def preferred_block_size(vllm_config: VllmConfig) -> int:
    """Choose the tokens per block (`dense_block_size`)."""
    num_layers, num_full_kv = _num_layers(vllm_config)
    unit = HiSparseConfig.from_vllm_config(vllm_config).tokens_per_unit
    return dense_block_size(num_layers - num_full_kv, num_full_kv + _num_draft_rows(vllm_config), unit)


def _num_layers(vllm_config: VllmConfig) -> tuple[int, int]:
    """Number of layers of the model, and number of its layers that keep full KV."""
    config = HiSparseConfig.from_vllm_config(vllm_config)
    return vllm_config.model_config.hf_text_config.num_hidden_layers, len(config.full_kv_layers)


def _num_draft_rows(vllm_config: VllmConfig) -> Fraction:
    """One token's KV in all draft layers, in rows of the model's own layers; works before the layers are built."""
    drafts, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if drafts is None or drafts.method not in DENSE_DRAFT_METHODS:
        return Fraction(0)
    draft, model = drafts.draft_model_config, vllm_config.model_config
    width, own_width = (each.get_num_kv_heads(parallel) * each.get_head_size() for each in (draft, model))
    return Fraction(width * draft.hf_config.num_hidden_layers, own_width)


def _draft_rows(vllm_config: VllmConfig) -> list[int]:
    """Bytes of one token's KV in each draft layer."""
    layers = vllm_config.compilation_config.static_forward_context.items()
    drafting = [layer for name, layer in layers if isinstance(layer, Attention) and is_draft_layer(name, vllm_config)]
    return [row_bytes(layer.get_kv_cache_spec(vllm_config)) for layer in drafting]


def check_state_blocks(layout: KVLayout, algorithm: str) -> None:
    """Refuse a device block that is too small for one entry of an algorithm's state.

    Raises:
        HiSparseConfigError: the block is too small.
    """
    if not all(layout.state.entries_per_block):
        needed = max(num_bytes for _, num_bytes in layout.state_entries) * layout.num_layers
        raise HiSparseConfigError(
            "--block-size",
            layout.block_size,
            f"one with blocks of {needed} bytes, in which '{algorithm}' keeps its state; these have "
            f"{layout.device_block_bytes}",
            "Raise it.",
        )


def row_bytes(spec: AttentionSpec) -> int:
    """Bytes of one token's KV in a layer."""
    return spec.page_size_bytes // spec.block_size


def _check_groups(layout: KVLayout, num_resident: Counter[int], vllm_config: VllmConfig) -> None:
    """Refuse layers that vLLM would not put into one group of hot rows and one group of device-resident KV.

    Args:
        layout: sizes of the model.
        num_resident: bytes of one token's KV in a layer -> number of layers with device-resident KV of that size.
        vllm_config: configuration of the engine.

    Raises:
        HiSparseConfigError: pages of device-resident KV are as large as hot pages, but there are more or fewer such
            layers than hot layers; or there are equally many layers of each size of device-resident KV, which vLLM
            takes for a pattern by which it also splits the hot layers.
    """
    widths = list(num_resident)
    hot_page = layout.rows_per_hot_block * layout.row_bytes
    if [width * layout.block_size for width in widths] == [hot_page] and num_resident[widths[0]] != layout.num_layers:
        raise HiSparseConfigError(
            "--block-size",
            layout.block_size,
            f"at least {preferred_block_size(vllm_config)}: a block of full-KV layers has to hold several pages",
            "Remove it or raise it, or choose another page_size; a P/D deployment wants the same on both sides.",
        )
    counts = set(num_resident.values())
    if len(widths) > 1 and len(counts) == 1 and max(counts) < layout.num_layers:
        raise HiSparseConfigError(
            "full_kv_layers",
            HiSparseConfig.from_vllm_config(vllm_config).full_kv_layers,
            f"more or fewer than {max(counts)}: the draft model has as many layers, with KV of another size",
            "Add a layer or remove one.",
        )


def is_full_kv_layer(layer: Attention, vllm_config: VllmConfig) -> bool:
    """Return True if a layer keeps its KV on the device: a layer of `full_kv_layers`, or a draft layer.

    NOTE: a draft layer cannot have a hot buffer, because it attends several times after the step's forward.
    """
    config = HiSparseConfig.from_vllm_config(vllm_config)
    is_listed = extract_layer_index(layer.layer_name) in config.full_kv_layers
    return is_listed or is_draft_layer(layer.layer_name, vllm_config)
