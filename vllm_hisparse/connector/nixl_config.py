"""The KV cache as vLLM's NIXL pull connector sees it: main KV lives in host memory.

The prefill side is stock vLLM with one KV group. On the decode side the connector gets a `KVCacheConfig` of two groups,
main KV (`host_resident`) and device-resident KV, maps the remote group onto both and reads main KV into the host pool.
Device-resident KV is read into the device or, if the device keeps other bytes of it, into its copy in the host pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from vllm_hisparse.config import shares_host_pool
from vllm_hisparse.kv_manager.groups import DeviceGroups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


def host_resident_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
) -> KVCacheConfig:
    """Describe the KV cache to the NIXL connector: main KV on the host, device-resident KV where it is received."""
    hot = groups.hot_spec
    main = MLAAttentionSpec(
        block_size=hot.block_size,
        num_kv_heads=1,
        head_size=hot.head_size,
        dtype=hot.dtype,
        kv_quant_mode=hot.kv_quant_mode,
        state_content_bytes=groups.layout.row_bytes,
    )
    others, num_blocks = [groups.resident_group] if groups.resident_group else [], kv_cache_config.num_blocks
    if groups.layout.receives_on_host:
        # NOTE: this group is not `host_resident`, because vLLM takes each layer of such a group to have memory of its
        # own. These layers lie side by side in every host block, as they do in a device block. vLLM sees by their
        # tensors that they are on the host.
        others, num_blocks = [KVCacheGroupSpec(groups.resident_layers, _saved_spec(groups))], num_host_blocks
    return replace(
        kv_cache_config,
        num_blocks=num_blocks,
        kv_cache_groups=[KVCacheGroupSpec(groups.hot_group.layer_names, main, host_resident=True), *others],
        hisparse_host_num_blocks=num_host_blocks,
        hisparse_shared_host_pool=shares_host_pool(vllm_config),
    )


def leaves_pulls_to_rank_0(vllm_config: VllmConfig, groups: DeviceGroups) -> bool:
    """Return True if rank 0 pulls for all ranks, because they share a host pool and all KV is received there.

    NOTE: if some KV is received on the device, vLLM itself leaves only the host's part to rank 0.
    """
    return shares_host_pool(vllm_config) and groups.layout.receives_on_host


def _saved_spec(groups: DeviceGroups) -> KVCacheSpec:
    """Return the spec of the copies of device-resident KV, whose keys are as wide as received, not as on the device."""
    layout, spec = groups.layout, groups.resident_group.kv_cache_spec
    narrow_page_bytes = (layout.narrow_key_bytes or 0) * layout.block_size

    def saved(layer: MLAAttentionSpec) -> MLAAttentionSpec:
        is_narrow = layer.unpadded_page_size_bytes == narrow_page_bytes
        return replace(layer, head_size=layout.resident_row_bytes) if is_narrow else layer

    if isinstance(spec, UniformTypeKVCacheSpecs):
        return replace(spec, kv_cache_specs={name: saved(layer) for name, layer in spec.kv_cache_specs.items()})
    return saved(spec)
