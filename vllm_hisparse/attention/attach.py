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
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_hisparse.attention.backends import (
    NARROW_KEYS_CAPABILITY,
    REFUSED_MLA_BACKENDS,
    untried_gpu,
    untried_mla_backend,
)
from vllm_hisparse.attention.check_layers import (
    check_dense_layers,
    check_mla_layers,
    check_msa_layers,
    kv_layers,
)
from vllm_hisparse.compat.attention import disable_dense_prefill, pass_no_cache
from vllm_hisparse.compat.engine import uses_host_connector
from vllm_hisparse.compat.indexer import select_with_own_kernel, support_narrow_keys
from vllm_hisparse.config import CONNECTOR_NAME, HiSparseConfig, HiSparseConfigError, takes_images
from vllm_hisparse.ops.indexer_keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

# Backend of a dense model on CUDA -> its hot-buffer version. NOTE: names, because not every machine has FlashInfer.
HOT_GQA_BACKENDS = {
    "FLASH_ATTN": "vllm_hisparse.attention.gqa.flash_attn_cuda.HotFlashAttnBackend",
    "TRITON_ATTN": "vllm_hisparse.attention.gqa.triton_cuda.HotTritonBackend",
    "FLASHINFER": "vllm_hisparse.attention.gqa.flashinfer_cuda.HotFlashInferBackend",
}
# Methods that the layer's own class may change without loss: a hot `forward_mqa` calls the own one, and `_attach`
# derives the hot implementation from the class of the layer's own implementation.
DERIVED = {"forward_mqa", "get_impl_cls"}

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
        warn_of_untried_prompts(vllm_config)
    family = config.algorithm_class.model_family
    if family == "mla":
        _attach_mla(model, config.has_narrow_keys)
    elif family == "msa":
        _attach_msa(model, vllm_config)
    else:
        _attach_gqa(model, vllm_config)


def warn_of_untried_device() -> None:
    """Log a warning if hot buffers have never run on GPUs like this one."""
    capability = current_platform.get_device_capability()
    name = current_platform.get_device_name()
    if warning := untried_gpu(name, None if capability is None else tuple(capability)):
        logger.warning_once("%s", warning)


def warn_of_untried_backend(name: str) -> None:
    """Log a warning if a backend of a DSA model has never run with hot buffers on a GPU."""
    if warning := untried_mla_backend(name):
        logger.warning_once("%s", warning)


def warn_of_untried_prompts(vllm_config: VllmConfig) -> None:
    """Log a warning if prompts may have images, audio or video: few models have run with these on a GPU."""
    if takes_images(vllm_config):
        logger.warning_once(
            "HiSparse was tried on a GPU with images of Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE and GLM-4.1V, and never "
            "with images of other models, audio or video. Compare its answers with those of full KV before you rely "
            "on them, or add --language-model-only."
        )


def _attach_mla(model: torch.nn.Module, has_narrow_keys: bool) -> None:
    if current_platform.is_cpu():
        from vllm_hisparse.cpu.indexer import IndexerCpuCache as KeyCache
        from vllm_hisparse.cpu.indexer import NarrowIndexerCpuCache as NarrowKeyCache
        from vllm_hisparse.cpu.mla import HOT_BACKENDS, HOT_LAYERS
    else:
        from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache as KeyCache

        from vllm_hisparse.attention.mla.fused_cuda import HOT_LAYERS
        from vllm_hisparse.attention.mla.sm100_cuda import HOT_BACKENDS
        from vllm_hisparse.attention.mla.step_forms import MicrobatchForms
        from vllm_hisparse.compat.step_graphs import capture_both_forms

        capture_both_forms(MicrobatchForms.find)
        select_with_own_kernel()
        NarrowKeyCache = KeyCache  # its readers tell keys in 4 bits by the width of the cache (`compat/indexer.py`)
        if has_narrow_keys:
            check_narrow_keys_device()
            support_narrow_keys()

    layers = kv_layers(model)
    check_mla_layers(layers, HOT_LAYERS, KeyCache)
    for layer in layers.values():
        if not isinstance(layer, MLAAttention) or not layer.use_sparse:
            continue
        name = _backend_name(layer, HOT_BACKENDS)
        warn_of_untried_backend(name)
        _attach(layer, HOT_LAYERS[type(layer)], derive_hot_class(HOT_BACKENDS[name], layer.attn_backend))
        disable_dense_prefill(layer)
        pass_no_cache(layer)
        if has_narrow_keys and layer.indexer is not None:
            layer.indexer.k_cache.__class__, layer.indexer.k_cache.head_dim = NarrowKeyCache, KEY_BYTES


def check_narrow_keys_device() -> None:
    """Refuse keys in 4 bits on a GPU that has no kernel for them.

    Raises:
        HiSparseConfigError: the GPU is of another architecture.
    """
    capability = current_platform.get_device_capability()
    if capability is None or tuple(capability) != NARROW_KEYS_CAPABILITY:
        raise HiSparseConfigError(
            "indexer_key_dtype",
            "fp4",
            f"auto on {current_platform.get_device_name()}: keys in 4 bits need compute capability 9.0 (H100, H200)",
            "Remove it.",
        )


def _attach_msa(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache, MiniMaxM3IndexerTritonImpl
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

    from vllm_hisparse.attention.gqa.msa_cuda import HotMSAAttention, HotMSABackend, HotMSAImpl

    layers, impls = kv_layers(model), (HotMSAImpl.vllm_class, MiniMaxM3IndexerTritonImpl)
    check_msa_layers(layers, vllm_config, MiniMaxM3SparseAttention, MiniMaxM3IndexerCache, impls)
    for layer in layers.values():
        if isinstance(layer, MiniMaxM3SparseAttention):
            _attach(layer, HotMSAAttention, derive_hot_class(HotMSABackend, layer.attn_backend))


def _attach_gqa(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    from vllm_hisparse.attention.gqa.base import HotGQAAttention, is_full_kv_layer

    layers = kv_layers(model)
    check_dense_layers(layers, vllm_config)
    for layer in layers.values():
        if not is_full_kv_layer(layer, vllm_config):
            _attach(layer, HotGQAAttention, _hot_gqa_backend(layer, vllm_config))


def _hot_gqa_backend(layer: Attention, vllm_config: VllmConfig) -> type:
    """Return the hot-buffer version of the backend of a dense model's layer.

    Args:
        layer: the layer as vLLM has built it.
        vllm_config: configuration of the engine.

    Raises:
        HiSparseConfigError: the backend has no such version, its kernel cannot read the algorithm's units on this GPU,
            or blocks are larger than it can read.
    """
    if current_platform.is_cpu():
        from vllm_hisparse.cpu.gqa import HotGQACpuBackend

        return HotGQACpuBackend
    qualified_name = HOT_GQA_BACKENDS[_backend_name(layer, HOT_GQA_BACKENDS)]
    backend = derive_hot_class(resolve_obj_by_qualname(qualified_name), layer.attn_backend)
    # A unit is a page to the kernel.
    tokens_per_unit = HiSparseConfig.from_vllm_config(vllm_config).tokens_per_unit
    reason = backend.get_impl_cls().unsupported(layer.impl, tokens_per_unit)
    if reason is not None:
        raise HiSparseConfigError(
            "--attention-backend",
            layer.attn_backend.get_name(),
            f"one that reads units of {tokens_per_unit} tokens: {reason}",
            "Set it to TRITON_ATTN, which reads units of any size on every GPU from SM80 (KV in fp8 "
            "from SM89), or choose an algorithm with other units.",
        )
    _check_block_size(backend, vllm_config)
    return backend


def _check_block_size(backend: type, vllm_config: VllmConfig) -> None:
    """Refuse blocks that are larger than vLLM's backend can read while a request prefills."""
    from vllm_hisparse.attention.gqa.base import preferred_block_size

    if backend.max_block_size is None:
        return
    cache = vllm_config.cache_config
    block_size = cache.block_size if cache.user_specified_block_size else preferred_block_size(vllm_config)
    if block_size > backend.max_block_size:
        raise HiSparseConfigError(
            "--block-size",
            block_size,
            f"at most {backend.max_block_size} with {backend.get_name()}; unless it is set, it follows from "
            "full_kv_layers",
            "Set full_kv_layers to [] and remove --block-size, or set --attention-backend to FLASH_ATTN.",
        )


def _attach(layer: AttentionLayerBase, layer_class: type, backend: type) -> None:
    # NOTE: the layer's own implementation may be of a subclass of the class that the backend's version is made for.
    layer.impl = _with_class(layer.impl, derive_hot_class(backend.get_impl_cls(), type(layer.impl)))
    layer.__class__, layer.attn_backend = layer_class, backend


def _backend_name(layer: AttentionLayerBase, hot_backends: Collection[str]) -> str:
    """Return the name of a layer's own backend.

    Args:
        layer: a layer as vLLM has built it.
        hot_backends: names of vLLM's backends that have a hot-buffer version.

    Raises:
        HiSparseConfigError: the backend has no such version.
    """
    name = layer.attn_backend.get_name()
    if name not in hot_backends:
        fitting = " or ".join(hot_backends)
        fix = f"Set --attention-backend to {fitting}: if it is not set, vLLM takes its own first choice for the GPU."
        if name in REFUSED_MLA_BACKENDS:
            reason, fix = REFUSED_MLA_BACKENDS[name]
            raise HiSparseConfigError("--attention-backend", name, f"{fitting}: {reason}", fix)
        raise HiSparseConfigError("--attention-backend", name, fitting, fix)
    return name


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
