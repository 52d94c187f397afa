"""Attention layers of a dense model whose KV cache is a hot buffer, and which layers can be that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError, max_query_len
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 256  # FlashAttention's smallest; a larger one wastes the end of every request


class HotGQAAttention(Attention):
    """`Attention` whose KV cache is a hot buffer."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> HotBufferSpec:
        spec: FullAttentionSpec = super().get_kv_cache_spec(vllm_config)
        config = HiSparseConfig.from_vllm_config(vllm_config)
        num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        if spec.block_size % config.tokens_per_unit:
            raise HiSparseConfigError(
                "algorithm_options.page_size",
                config.tokens_per_unit,
                f"a divisor of --block-size ({spec.block_size})",
                "Choose another page_size, or a multiple of it for --block-size.",
            )
        row_bytes = spec.page_size_bytes // spec.block_size
        num_full_kv = len(config.full_kv_layers)
        layout = KVLayout(
            row_bytes,
            row_bytes,
            num_layers - num_full_kv,
            num_full_kv,
            spec.block_size,
            config.tokens_per_unit,
            spec.num_kv_heads,
            max_query_len(vllm_config),
        )
        if num_full_kv and num_full_kv != layout.num_layers and layout.rows_per_hot_block == spec.block_size:
            raise HiSparseConfigError(
                "--block-size",
                spec.block_size,
                f"at least {preferred_block_size(vllm_config)}: a block of full-KV layers has to hold several pages",
                "Remove it or raise it; a P/D deployment wants the same on both sides.",
            )
        return HotBufferSpec.from_full_spec(spec, layout, config.rows, config.elastic)


def preferred_block_size(vllm_config: VllmConfig) -> int:
    """Tokens of a block, a power of two: full-KV layers share vLLM's blocks with hot pages, and blocks are as wide as
    one page of all hot layers."""
    config = HiSparseConfig.from_vllm_config(vllm_config)
    num_layers, num_full_kv = vllm_config.model_config.hf_text_config.num_hidden_layers, len(config.full_kv_layers)
    size = MIN_BLOCK_SIZE
    while size < MAX_BLOCK_SIZE and size * num_full_kv < config.tokens_per_unit * (num_layers - num_full_kv):
        size *= 2
    return size if num_full_kv else MIN_BLOCK_SIZE


def check_layer(
    alibi_slopes: Any, sliding_window: Any, logits_soft_cap: Any, attn_type: str, shares_kv_of: Any, sinks: Any
) -> None:
    """Refuse a layer that attends in a way that hot units do not.

    Raises:
        HiSparseConfigError: the first reason.
    """
    got = {
        "sliding_window": sliding_window,
        "alibi_slopes": alibi_slopes,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "kv_sharing_target_layer_name": shares_kv_of,
    }
    for name, value in got.items():
        if value is not None:
            raise _unsupported(name, value, "none")
    if attn_type != "decoder":
        raise _unsupported("attn_type", attn_type, "decoder")


def _unsupported(name: str, got: object, expected: str) -> HiSparseConfigError:
    return HiSparseConfigError(
        f"{name} of an attention layer",
        got,
        f"{expected}: sparse algorithms run causal full attention only",
        "Serve another model, or remove the connector.",
    )


def is_full_kv_layer(layer: Attention, vllm_config: VllmConfig) -> bool:
    """Whether a layer is one of `full_kv_layers`."""
    config = HiSparseConfig.from_vllm_config(vllm_config)
    return extract_layer_index(layer.layer_name) in config.full_kv_layers
