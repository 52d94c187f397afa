"""vLLM's CPU attention for dense models under the connector: what every layer starts with, and full-KV layers keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_hisparse.attention.attach import attach_gqa_cpu
from vllm_hisparse.attention.gqa.base import check_layer
from vllm_hisparse.cpu.gqa import HotGQACpuBackend

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout


class FullKVGQACpuBackend(CPUAttentionBackend):
    """The stock backend, in the block layout that hot rows need."""

    @staticmethod
    def get_impl_cls() -> type[FullKVGQACpuImpl]:
        return FullKVGQACpuImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return HotGQACpuBackend.supported_kv_cache_layouts()


class FullKVGQACpuImpl(CPUAttentionBackendImpl):
    """The stock implementation, until vLLM has loaded the weights.

    Raises:
        HiSparseConfigError: the layer attends in another way than plain causal attention.
    """

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
        # NOTE: the first hook in which the layer is known by name and has no KV cache spec yet.
        attach_gqa_cpu(self, self.vllm_config)
