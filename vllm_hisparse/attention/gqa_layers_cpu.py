"""Attention layers of a dense model under the connector: stock where dense, over hot units elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_hisparse.attention.gqa.base import HotAttention, check_layer, is_dense_layer
from vllm_hisparse.attention.gqa.cpu import PagedGqaCpuBackend

if TYPE_CHECKING:
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
        if is_dense_layer(layer, self.vllm_config):
            return
        layer.__class__, layer.attn_backend = HotAttention, PagedGqaCpuBackend
        self.__class__ = PagedGqaCpuBackend.get_impl_cls()
