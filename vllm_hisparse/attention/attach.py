"""Gives attention layers that vLLM has built the classes of the plugin, on CUDA and on the CPU.

NOTE: the objects get another class after vLLM has built them. In this way, no function of vLLM is patched, although
vLLM builds attention layers deep inside its model classes and wrappers. Modules for one device are imported only by
the functions for that device.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.platforms import current_platform

from vllm_hisparse.attention.check_layers import check_dense_layers, check_mla_layers, kv_layers
from vllm_hisparse.compat.attention import disable_dense_prefill
from vllm_hisparse.compat.engine import uses_host_connector
from vllm_hisparse.config import CONNECTOR_NAME, HiSparseConfig, HiSparseConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.models.deepseek_v2 import Indexer

TRIED_CAPABILITIES = ((9, 0),)
DERIVED = {"forward_mqa", "get_impl_cls"}  # methods of versions for hot buffers that run the layer's own

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


def attach_hot_buffers(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Give the layers of a model hot buffers in place of their KV caches, if the engine runs the connector.

    Args:
        model: the model as vLLM has built it, without weights.
        vllm_config: configuration of the engine.

    Raises:
        HiSparseConfigError: an option is refused, or a layer or its attention backend has no version for hot buffers.
    """
    if not uses_host_connector(vllm_config):
        return
    config = HiSparseConfig.from_vllm_config(vllm_config)
    if not current_platform.is_cpu():
        warn_of_untried_device()
    if config.algorithm_class.model_family == "mla":
        _attach_mla(model)
    else:
        _attach_gqa(model, vllm_config)


def warn_of_untried_device() -> None:
    """Log a warning if hot buffers have never run on GPUs like this one."""
    capability = current_platform.get_device_capability()
    if capability is None or tuple(capability) not in TRIED_CAPABILITIES:
        logger.warning_once(
            "HiSparse was never tried on this GPU (%s, compute capability %s); it was on Hopper (H100, H200). "
            "Compare its answers with those of full KV before you rely on them.",
            current_platform.get_device_name(),
            "unknown" if capability is None else capability.as_version_str(),
        )


def _attach_mla(model: torch.nn.Module) -> None:
    if current_platform.is_cpu():
        from vllm_hisparse.cpu.indexer import IndexerCpuCache as KeyCache
        from vllm_hisparse.cpu.mla import HOT_BACKENDS, HOT_LAYERS
    else:
        from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache as KeyCache

        from vllm_hisparse.attention.mla.cuda import HOT_BACKENDS
        from vllm_hisparse.attention.mla.fused_cuda import HOT_LAYERS

    layers = kv_layers(model)
    check_mla_layers(layers, HOT_LAYERS, KeyCache)
    for layer in layers.values():
        if not isinstance(layer, MLAAttention) or not layer.use_sparse:
            continue
        _attach(layer, HOT_LAYERS[type(layer)], _hot_backend(layer, HOT_BACKENDS))
        disable_dense_prefill(layer)


def _attach_gqa(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    from vllm_hisparse.attention.gqa.base import HotGQAAttention, is_full_kv_layer

    layers = kv_layers(model)
    check_dense_layers(layers, vllm_config)
    tokens_per_unit = HiSparseConfig.from_vllm_config(vllm_config).tokens_per_unit
    for layer in layers.values():
        if not is_full_kv_layer(layer, vllm_config):
            _attach(layer, HotGQAAttention, _hot_gqa_backend(layer, tokens_per_unit))


def _hot_gqa_backend(layer: Attention, tokens_per_unit: int) -> type:
    """Return the hot-buffer version of the backend of a dense model's layer.

    Args:
        layer: the layer as vLLM has built it.
        tokens_per_unit: tokens of the algorithm's units; a unit is a page to the kernel.

    Raises:
        HiSparseConfigError: the backend has no such version, or its kernel cannot read such units on this GPU.
    """
    if current_platform.is_cpu():
        from vllm_hisparse.cpu.gqa import HotGQACpuBackend

        return HotGQACpuBackend
    from vllm_hisparse.attention.gqa.flash_attn_cuda import HotFlashAttnBackend
    from vllm_hisparse.attention.gqa.triton_cuda import HotTritonBackend

    backend = _hot_backend(layer, {each.get_name(): each for each in (HotFlashAttnBackend, HotTritonBackend)})
    reason = backend.get_impl_cls().unsupported(layer.impl, tokens_per_unit)
    if reason is not None:
        raise HiSparseConfigError(
            "--attention-backend",
            layer.attn_backend.get_name(),
            f"one that reads units of {tokens_per_unit} tokens: {reason}",
            f"Set it to {HotTritonBackend.get_name()}, which reads units of any size on every GPU from SM80 (KV in fp8 "
            "from SM89), or choose an algorithm with other units.",
        )
    return backend


def _attach(layer: Attention | MLAAttention, layer_class: type, backend: type) -> None:
    # NOTE: the layer's own implementation may be of a subclass of the class that the backend's version is made for.
    layer.impl = _with_class(layer.impl, derive_hot_class(backend.get_impl_cls(), type(layer.impl)))
    layer.__class__, layer.attn_backend = layer_class, backend


def _hot_backend(layer: Attention | MLAAttention, hot_backends: dict[str, type]) -> type:
    """Return the hot-buffer version of a layer's own backend.

    Args:
        layer: a layer as vLLM has built it.
        hot_backends: name of vLLM's backend -> hot-buffer version.

    Raises:
        HiSparseConfigError: the backend has no such version, or it is a model's own one, whose changes would be lost.
    """
    name = layer.attn_backend.get_name()
    if name not in hot_backends:
        fitting = " or ".join(hot_backends)
        fix = f"Set --attention-backend to {fitting}: if it is not set, vLLM takes its own first choice for the GPU."
        raise HiSparseConfigError("--attention-backend", name, fitting, fix)
    return derive_hot_class(hot_backends[name], layer.attn_backend)


@cache
def derive_hot_class(hot_class: type, own_class: type) -> type:
    """Return a hot-buffer version of a layer's own backend or implementation, which keeps everything that it adds.

    Args:
        hot_class: hot-buffer version of vLLM's class `hot_class.vllm_class`. `hot_class.runs_own_class` is True if all
            tokens attend by methods of the layer's own class.
        own_class: class of the layer's backend or implementation.

    Raises:
        HiSparseConfigError: `own_class` differs from vLLM's class, and its changes would be lost.
    """
    vllm_class = hot_class.vllm_class
    if own_class is vllm_class:
        return hot_class
    lost = _added_names(own_class, vllm_class) & _added_names(hot_class, vllm_class) - DERIVED
    if not issubclass(own_class, vllm_class) or not hot_class.runs_own_class or lost:
        raise HiSparseConfigError(
            "--attention-backend",
            f"layers with {own_class.__name__}{''.join(f', which changes {name}' for name in sorted(lost))}",
            f"{vllm_class.__name__}: with hot buffers, what another class adds would be lost",
            f"Choose a backend whose layers have it, serve another model, or remove {CONNECTOR_NAME}.",
        )
    return type(f"Hot{own_class.__name__}", (hot_class, own_class), {"__module__": __name__, "vllm_class": own_class})


def _added_names(cls: type, base: type) -> set[str]:
    """Return the names that a class and its bases define, without those that `base` and its bases define."""
    names = (name for each in cls.__mro__ if each not in base.__mro__ for name in vars(each))
    return {name for name in names if not name.startswith(("__", "_abc_"))}


def _with_class(impl: Any, cls: type) -> Any:
    """Return an object of class `cls` with the attributes of `impl`, which is an object of a base of `cls`."""
    changed = object.__new__(cls)
    changed.__dict__ = impl.__dict__
    return changed


def attach_indexer_cpu(indexer: Indexer) -> None:
    """Give the indexer of vLLM's generic model classes the plugin's forward."""
    from vllm_hisparse.cpu.indexer import IndexerCpu

    indexer.__class__ = IndexerCpu
