"""Attention layers that vLLM has built get classes of the plugin here, on both devices.

NOTE: objects get another class after vLLM has built them, because vLLM builds attention layers deep inside its model
classes and wrappers, and no function has to be patched then. Modules of one device are imported only by the functions
for that device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.platforms import current_platform

from vllm_hisparse.compat.attention import disable_dense_prefill
from vllm_hisparse.compat.engine import is_draft_layer, is_dsa_model, uses_host_connector
from vllm_hisparse.config import HiSparseConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

TRIED_CAPABILITIES = ((9, 0),)

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


def attach_hot_buffers(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Give the sparse attention layers of a model on CUDA hot buffers in place of their KV caches.

    Raises:
        HiSparseConfigError: the attention backend has no version for hot buffers, or a layer of a dense model does not
            run plain causal attention.
    """
    warn_of_untried_device()
    if is_dsa_model(vllm_config):
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
    from vllm_hisparse.attention.mla.cuda import HOT_BACKENDS
    from vllm_hisparse.attention.mla.fused_cuda import HOT_LAYERS

    for layer in model.modules():
        if not isinstance(layer, MLAAttention) or not layer.use_sparse:
            continue
        if type(layer) not in HOT_LAYERS:
            raise _unknown_class(layer, " or ".join(cls.__name__ for cls in HOT_LAYERS))
        backend = _hot_backend(layer, HOT_BACKENDS)
        layer.impl = _with_class(layer.impl, _hot_class(layer.impl, backend.get_impl_cls()))
        layer.__class__, layer.attn_backend = HOT_LAYERS[type(layer)], backend
        disable_dense_prefill(layer)


def _attach_gqa(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    from vllm_hisparse.attention.gqa.base import HotGQAAttention, check_layer, is_full_kv_layer
    from vllm_hisparse.attention.gqa.cuda import HOT_BACKENDS, check_flash_attention

    for layer in model.modules():
        if not isinstance(layer, Attention) or is_full_kv_layer(layer, vllm_config):
            continue
        backend, impl = _hot_backend(layer, HOT_BACKENDS), layer.impl
        window = None if impl.sliding_window == (-1, -1) else impl.sliding_window[0] + 1
        shared = impl.kv_sharing_target_layer_name
        check_layer(impl.alibi_slopes, window, impl.logits_soft_cap or None, layer.attn_type, shared, impl.sinks)
        check_flash_attention(impl.vllm_flash_attn_version)
        if type(layer) is not Attention:
            raise _unknown_class(layer, "Attention, which has no behaviour of its own")
        layer.impl = _with_class(impl, _hot_class(impl, backend.get_impl_cls()))
        layer.__class__, layer.attn_backend = HotGQAAttention, backend


def _hot_class(impl: Any, hot_class: type) -> type:
    """Return the class for hot buffers of an implementation that vLLM has built.

    NOTE: a subclass of the implementation that `hot_class` is written for may attend differently, with sinks for
    example. It would run without an error, and give wrong tokens.

    Raises:
        HiSparseConfigError: the implementation is of another class than `hot_class` is written for.
    """
    stock = next(cls for cls in hot_class.__mro__ if cls.__module__.split(".")[0] == "vllm")
    if type(impl) is not stock:
        raise _unknown_class(impl, stock.__name__)
    return hot_class


def _unknown_class(built: Any, expected: str) -> HiSparseConfigError:
    return HiSparseConfigError(
        "attention layer",
        type(built).__name__,
        f"{expected}: a layer of another class may attend in a way that hot buffers do not",
        "Serve another model, or remove the connector.",
    )


def _hot_backend(layer: Attention | MLAAttention, hot_backends: dict[str, type]) -> type:
    """Return the version of a layer's backend that works on hot buffers.

    Args:
        layer: a layer as vLLM built it.
        hot_backends: name of vLLM's backend -> version for hot buffers.

    Raises:
        HiSparseConfigError: the backend has no such version.
    """
    name = layer.attn_backend.get_name()
    if name not in hot_backends:
        raise HiSparseConfigError("--attention-backend", name, " or ".join(hot_backends), "Choose a supported backend.")
    return hot_backends[name]


def _with_class(impl: Any, cls: type) -> Any:
    """Return an object of class `cls` with the attributes of `impl`, which is an object of a base of `cls`."""
    changed = object.__new__(cls)
    changed.__dict__ = impl.__dict__
    return changed


def attach_mla_cpu(wrapper: MultiHeadLatentAttentionWrapper, vllm_config: VllmConfig) -> None:
    """Give vLLM's outer MLA layer the plugin's indexer and, if the engine runs the connector, a hot buffer.

    NOTE: a draft layer keeps its KV on the device, because it attends several times after the step's forward.
    """
    from vllm_hisparse.attention.mla.base import HotMLAAttention
    from vllm_hisparse.cpu.indexer import IndexerCpu
    from vllm_hisparse.cpu.mla import HotMLACpuBackend

    if wrapper.indexer is not None:
        wrapper.indexer.__class__ = IndexerCpu
    layer = wrapper.mla_attn
    if wrapper.is_sparse and uses_host_connector(vllm_config) and not is_draft_layer(layer.layer_name, vllm_config):
        layer.__class__, layer.attn_backend = HotMLAAttention, HotMLACpuBackend
        layer.impl = _with_class(layer.impl, HotMLACpuBackend.get_impl_cls())


def attach_gqa_cpu(impl: CPUAttentionBackendImpl, vllm_config: VllmConfig) -> None:
    """Give a layer of a dense model a hot buffer, unless it keeps full KV.

    Args:
        impl: the layer's implementation.
        vllm_config: names the layer.
    """
    from vllm_hisparse.attention.gqa.base import HotGQAAttention, is_full_kv_layer
    from vllm_hisparse.cpu.gqa import HotGQACpuBackend

    layers = vllm_config.compilation_config.static_forward_context.values()
    layer = next(layer for layer in layers if getattr(layer, "impl", None) is impl)
    if is_full_kv_layer(layer, vllm_config):
        return
    layer.__class__, layer.attn_backend = HotGQAAttention, HotGQACpuBackend
    impl.__class__ = HotGQACpuBackend.get_impl_cls()
