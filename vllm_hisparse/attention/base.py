"""What the backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

Metadata = TypeVar("Metadata")


class CpuMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Metadata builder without CUDA graphs; vLLM leaves the constructor to each backend."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


def with_class(impl: Any, cls: type) -> Any:
    """An object of class `cls` with the attributes of `impl`, an object of one of its bases."""
    changed = object.__new__(cls)
    changed.__dict__ = impl.__dict__
    return changed
