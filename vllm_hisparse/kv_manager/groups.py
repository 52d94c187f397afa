"""The two device KV cache groups of a DSA model with hot buffers: hot rows and indexer keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, iter_layer_specs

from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig


@dataclass(frozen=True)
class DeviceGroups:
    """Where vLLM put hot rows and indexer keys.

    Attributes:
        hot_group_id, indexer_group_id: positions in `KVCacheConfig.kv_cache_groups`.
        hot_group, indexer_group: the groups; their layers run in model order.
        hot_spec, indexer_spec: the spec of one layer.
        device_kv_bytes: bytes of the device KV cache.
    """

    hot_group_id: int
    indexer_group_id: int
    hot_group: KVCacheGroupSpec
    indexer_group: KVCacheGroupSpec
    hot_spec: HotBufferSpec
    indexer_spec: AttentionSpec
    device_kv_bytes: int

    @classmethod
    def from_config(cls, kv_cache_config: KVCacheConfig) -> DeviceGroups:
        """Find the groups.

        Raises:
            ValueError: the model's groups are not one of hot rows and one of indexer keys.
        """
        groups = kv_cache_config.kv_cache_groups
        specs = [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in groups]
        hot_ids = [i for i, spec in enumerate(specs) if isinstance(spec, HotBufferSpec)]
        if len(groups) != 2 or len(hot_ids) != 1:
            kinds = [type(spec).__name__ for spec in specs]
            raise ValueError(f"expected one KV cache group of hot rows and one of indexer keys, got {kinds}")
        hot_id = hot_ids[0]
        indexer_id = 1 - hot_id
        return cls(
            hot_id,
            indexer_id,
            groups[hot_id],
            groups[indexer_id],
            specs[hot_id],
            specs[indexer_id],
            max(tensor.size for tensor in kv_cache_config.kv_cache_tensors),
        )

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            row_bytes=self.hot_spec.state_content_size_bytes,
            indexer_row_bytes=self.indexer_spec.head_size * get_dtype_size(self.indexer_spec.dtype),
            num_layers=len(self.hot_group.layer_names),
            num_indexer_layers=len(self.indexer_group.layer_names),
            block_size=self.indexer_spec.block_size,
        )
