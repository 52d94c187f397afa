"""The KV cache as vLLM's NIXL pull connector sees it: main KV lives in host memory.

The prefill side is stock vLLM with one KV group. On the decode side the connector gets a `KVCacheConfig` of two groups,
main KV (`host_resident`) and device-resident KV, maps the remote group onto both and reads main KV into the host pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.rows.host_memory import shares_host_pool

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def host_resident_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
) -> KVCacheConfig:
    """Describe the KV cache to the NIXL connector: main KV on the host, device-resident KV on the device."""
    hot = groups.hot_spec
    main = MLAAttentionSpec(
        block_size=hot.block_size,
        num_kv_heads=1,
        head_size=hot.head_size,
        dtype=hot.dtype,
        kv_quant_mode=hot.kv_quant_mode,
        state_content_bytes=hot.row_bytes,
    )
    device_groups = [groups.resident_group] if groups.resident_group else []
    return replace(
        kv_cache_config,
        kv_cache_groups=[KVCacheGroupSpec(groups.hot_group.layer_names, main, host_resident=True), *device_groups],
        hisparse_host_num_blocks=num_host_blocks,
        hisparse_shared_host_pool=shares_host_pool(vllm_config),
    )
