"""Model classes on CUDA: vLLM's own, whose attention layers get hot buffers under the connector.

vLLM's registry asks this module for a class by name (`CUDA_MODELS`), and the class is made then: vLLM's module of a DSA
model brings kernels that a dense model does not need. Options are checked before the layers are built.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from vllm.config import VllmConfig

from vllm_hisparse.attention.attach import attach_hot_buffers
from vllm_hisparse.compat.engine import uses_host_connector
from vllm_hisparse.config import CUDA_MODELS, REFUSED_MODELS, HiSparseConfig


class HotBufferModel:
    """Mixin of a model class: attaches hot buffers to the layers that vLLM has built."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        if uses_host_connector(vllm_config):
            HiSparseConfig.from_vllm_config(vllm_config)  # raises what the configuration alone can tell
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if uses_host_connector(vllm_config):
            attach_hot_buffers(self, vllm_config)


@cache
def __getattr__(name: str) -> Any:
    modules = CUDA_MODELS | {refused: module for refused, (module, _) in REFUSED_MODELS.items()}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(import_module(modules[name]), name)
    return type(name, (HotBufferModel, base), {"__module__": __name__})
