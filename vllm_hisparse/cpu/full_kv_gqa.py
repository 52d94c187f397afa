"""vLLM's CPU attention for dense models under the connector. Every layer begins with it; full-KV layers keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_hisparse.cpu.gqa import HotGQACpuBackend

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout


class FullKVGQACpuBackend(CPUAttentionBackend):
    """The stock backend with the block layout that hot rows need."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return HotGQACpuBackend.supported_kv_cache_layouts()
