"""What the backends share."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from vllm_hisparse.compat import uses_host_connector

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


class HotBufferModel:
    """Mixin of a model class on CUDA, whose attention layers get hot buffers under the connector.

    Attributes:
        layers_module: module whose `attach_hot_buffers(model, vllm_config)` does that. Imported only then: without the
            connector a model needs no kernels but its own.
    """

    layers_module: ClassVar[str]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if uses_host_connector(vllm_config):
            import_module(self.layers_module).attach_hot_buffers(self, vllm_config)


def with_class(impl: Any, cls: type) -> Any:
    """An object of class `cls` with the attributes of `impl`, an object of one of its bases."""
    changed = object.__new__(cls)
    changed.__dict__ = impl.__dict__
    return changed
