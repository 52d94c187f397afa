"""The device KV cache groups of a model with hot buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, iter_layer_specs

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class DeviceGroups:
    """The KV cache groups in which vLLM put hot rows and device-resident KV.

    The device keeps device-resident KV for every token: the indexer keys of a DSA model or of MiniMax-M3, the KV of
    their layers with full attention, of a dense model's full-KV layers, and of draft layers. A dense model without
    full-KV layers and draft layers has none.

    Attributes:
        hot_group_id, resident_group_id: positions in `KVCacheConfig.kv_cache_groups`; the second is None if the model
            has no device-resident KV.
        hot_group, resident_group: the groups; the second may be None in the same way. Their layers run in model order.
        hot_spec: KV cache spec of one layer with hot rows.
        device_kv_bytes: bytes of the device KV cache.
    """

    hot_group_id: int
    resident_group_id: int | None
    hot_group: KVCacheGroupSpec
    resident_group: KVCacheGroupSpec | None
    hot_spec: HotBufferSpec
    device_kv_bytes: int

    @classmethod
    def from_config(cls, kv_cache_config: KVCacheConfig) -> DeviceGroups:
        """Find the groups.

        Args:
            kv_cache_config: the KV cache as vLLM planned it.

        Raises:
            ValueError: there is not exactly one group of hot rows, or there is more than one other group, or vLLM
                planned layers or blocks that differ from the layout.
        """
        groups = kv_cache_config.kv_cache_groups
        specs = _first_specs(kv_cache_config)
        hot_ids = [i for i, spec in enumerate(specs) if isinstance(spec, HotBufferSpec)]
        if len(groups) > 2 or len(hot_ids) != 1:
            kinds = [type(spec).__name__ for spec in specs]
            raise ValueError(f"expected one KV cache group of hot rows and at most one other, got {kinds}")
        hot_id = hot_ids[0]
        resident_id = 1 - hot_id if len(groups) == 2 else None
        found = cls(
            hot_id,
            resident_id,
            groups[hot_id],
            None if resident_id is None else groups[resident_id],
            specs[hot_id],
            max(tensor.size for tensor in kv_cache_config.kv_cache_tensors),
        )
        found._check_layout()
        return found

    @property
    def resident_layers(self) -> list[str]:
        """Names of the layers with device-resident KV."""
        return self.resident_group.layer_names if self.resident_group else []

    @property
    def layout(self) -> KVLayout:
        return self.hot_spec.layout

    def _check_layout(self) -> None:
        layout = self.layout
        planned = {
            "num_layers": len(self.hot_group.layer_names),
            "block_size": self.hot_spec.block_size,
        }
        specs = _layer_specs(self.resident_group)
        # NOTE: in the scheduler's process, vLLM gives the spec of only one layer.
        if len(specs) == len(self.resident_layers) or not layout.wider_row_bytes:
            num_layers_each = len(self.resident_layers) // max(len(specs), 1)
            token_bytes = sum(spec.unpadded_page_size_bytes // spec.block_size for spec in specs)
            planned["resident_token_bytes"] = num_layers_each * token_bytes
        for name, value in planned.items():
            if value != getattr(layout, name):
                raise ValueError(f"{name} of the KV cache: vLLM planned {value}, the layers {getattr(layout, name)}")


def check_hot_layers(kv_cache_config: KVCacheConfig, load_format: str) -> None:
    """Refuse a model that has no layer with hot rows, because its loader built it by itself.

    Args:
        kv_cache_config: the KV cache as vLLM planned it.
        load_format: `--load-format`.

    Raises:
        HiSparseConfigError: no layer has hot rows.
    """
    specs = _first_specs(kv_cache_config)
    if not any(isinstance(spec, HotBufferSpec) for spec in specs):
        raise HiSparseConfigError(
            "--load-format",
            load_format,
            "a loader that builds the model with vLLM's `BaseModelLoader.create_model`, where layers get hot buffers; "
            f"no layer has one, because all are of {', '.join(sorted({type(spec).__name__ for spec in specs}))}",
            "Remove it, or let the loader's `load_model` call `create_model`.",
        )


def _first_specs(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """The spec of the first layer of each group."""
    return [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in kv_cache_config.kv_cache_groups]


def _layer_specs(group: KVCacheGroupSpec | None) -> list[AttentionSpec]:
    """The spec of each layer of a group, or one spec if all layers have the same."""
    return list(iter_layer_specs(group.kv_cache_spec)) if group else []
