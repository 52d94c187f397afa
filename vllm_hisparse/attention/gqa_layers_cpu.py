"""Attention layers of a dense model under the connector: stock where dense, over hot units elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_hisparse.attention.paged_gqa_cpu import PagedGqaCpuBackend, PagedGqaCpuImpl
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout


class GqaCpuBackend(CPUAttentionBackend):
    """The stock backend, in the block layout that hot rows need; decides after loading which layers are sparse."""

    @staticmethod
    def get_impl_cls() -> type[GqaCpuImpl]:
        return GqaCpuImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return PagedGqaCpuBackend.supported_kv_cache_layouts()


class GqaCpuImpl(CPUAttentionBackendImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ):
        check_layer(alibi_slopes, sliding_window, logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks)
        super().__init__(num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, attn_type=attn_type)
        self.vllm_config = get_current_vllm_config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Make a sparse layer out of this one, unless it is one of `dense_layers`.

        NOTE: the first hook in which the layer is known by name and has no spec yet; giving the built objects our
        classes needs no patched function.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        layer = next(layer for layer in layers.values() if getattr(layer, "impl", None) is self)
        config = HiSparseConfig.from_vllm_config(self.vllm_config)
        if extract_layer_index(layer.layer_name) in config.dense_layers:
            return
        layer.__class__, layer.attn_backend, self.__class__ = HotAttention, PagedGqaCpuBackend, PagedGqaCpuImpl


class HotAttention(Attention):
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
        num_dense = len(config.dense_layers)
        layout = KVLayout(
            row_bytes,
            row_bytes,
            num_layers - num_dense,
            num_dense,
            spec.block_size,
            config.tokens_per_unit,
            spec.num_kv_heads,
        )
        return HotBufferSpec.from_full_spec(spec, layout, layout.num_hot_blocks(config.rows))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedGqaCpuBackend


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
