"""What the backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.attention.backend import AttentionMetadataBuilder

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

Metadata = TypeVar("Metadata")


class CpuMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Metadata builder without CUDA graphs; vLLM leaves the constructor to each backend."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


class HotMetadataBuilder:
    """Mixin of a metadata builder over hot buffers."""

    @property
    def impl(self) -> Any:
        """The first layer's implementation, which has what all layers share: hot buffer, staging memory."""
        return self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].impl
