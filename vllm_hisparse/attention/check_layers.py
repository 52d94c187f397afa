"""Checks the layers of a model, before vLLM loads weights, and refuses models that hot buffers cannot serve."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from vllm_hisparse.config import CONNECTOR_NAME, HiSparseConfig, HiSparseConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

PLAIN = "causal attention over all earlier tokens in every layer, with KV of one size"
SPARSE = "multi-head latent attention in every layer, over selected rows in some, the first of which has an indexer"
BLOCKS = "MiniMax-M3's layers: some select blocks, by an indexer of their own, and the others attend to everything"
NEAREST_MSA = f"Serve MiniMax-M3 on a GPU before SM100, or remove {CONNECTOR_NAME}."
NEAREST_DSA = f"Serve DeepSeek-V3.2, GLM-5 or HY-V4, or remove {CONNECTOR_NAME}."
NEAREST = f"Serve a model with such layers (Llama, Qwen3, Qwen3-MoE, Mixtral), or remove {CONNECTOR_NAME}."
NEAREST_OF = {
    "sliding_window": "Add --disable-sliding-window, which limits sequences to the window, or serve another model.",
    "k_scale": "Set --kv-cache-dtype bfloat16.",
    "kv_cache_dtype": "Set --kv-cache-dtype bfloat16 or fp8: the checkpoint asks for KV of another kind.",
}


def kv_layers(model: torch.nn.Module) -> dict[str, AttentionLayerBase]:
    """Return the layers of a model that keep KV or another state of a request, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AttentionLayerBase)}


def check_dense_layers(layers: Mapping[str, AttentionLayerBase], vllm_config: VllmConfig) -> None:
    """Refuse a dense model unless each of its layers has one plain `Attention`.

    Args:
        layers: all layers that keep KV or another state, by name.
        vllm_config: configuration of the engine.

    Raises:
        HiSparseConfigError: the model is refused; the message has the first reason.
    """
    for name, layer in layers.items():
        if type(layer) is not Attention:
            raise _refusal(name, layer, "its own way to attend or to keep state")
        for what, value in _additions(layer, vllm_config).items():
            raise _refusal(name, layer, f"{what}={value!r}", NEAREST_OF.get(what, NEAREST))
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    by_index = Counter(_index(name, layer) for name, layer in layers.items())
    if by_index != Counter(range(num_layers)):
        name, layer = next(iter(layers.items()), ("no layer", None))
        raise _refusal(name, layer, f"{len(layers)} attention layers, of num_hidden_layers {num_layers}")
    first, *others = layers.items()
    for name, layer in others:
        if _kv_size(layer) != _kv_size(first[1]):
            raise _refusal(
                name, layer, f"(KV heads, head size, dtype) {_kv_size(layer)}; {first[0]} has {_kv_size(first[1])}"
            )


def check_mla_layers(
    layers: Mapping[str, AttentionLayerBase], hot_layers: Mapping[type, type], key_cache: type
) -> None:
    """Refuse a DSA model with layers that are neither sparse MLA, full MLA nor indexer keys, or in which none selects.

    Args:
        layers: all layers that keep KV or another state, by name, in the model's order.
        hot_layers: classes of sparse layers that get hot buffers.
        key_cache: class of the layers that keep indexer keys.

    Raises:
        HiSparseConfigError: a layer is of another kind, no layer is sparse, the first sparse layer has no indexer and
            no selection to share, or `check_resident_layers` refuses the numbers of layers.
    """
    for name, layer in layers.items():
        if type(layer) not in (hot_layers if _is_sparse(layer) else (MLAAttention, key_cache)):
            raise _refusal(name, layer, "its own way to attend or to keep state", NEAREST_DSA, SPARSE)
    sparse = {name: layer for name, layer in layers.items() if _is_sparse(layer)}
    name, layer = next(iter((sparse or layers).items()), ("no layer", None))
    if not sparse:
        raise _refusal(name, layer, "full attention, as all others (layer_types of config.json)", NEAREST_DSA, SPARSE)
    if layer.indexer is None:
        raise _refusal(name, layer, "no indexer, and none before it", NEAREST_DSA, SPARSE)
    full = {  # NOTE: the sizes of their rows in bytes follow from these, but vLLM knows them only later
        name: (layer.head_size, layer.kv_cache_dtype)
        for name, layer in layers.items()
        if isinstance(layer, MLAAttention) and not layer.use_sparse
    }
    # NOTE: layers that draft are not built yet; each adds an indexer and a layer that keeps its KV on the device.
    check_resident_layers(len(sparse), sum(layer.indexer is not None for layer in sparse.values()), full)


def check_resident_layers(num_hot_layers: int, num_indexers: int, sizes: Mapping[str, object]) -> None:
    """Refuse layers that vLLM would not put into one group of hot rows and one group of device-resident KV.

    Args:
        num_hot_layers: layers with hot rows.
        num_indexers: layers with indexer keys, draft layers included.
        sizes: size of one token's KV, in bytes or in another form, in each layer that keeps its KV on the device.

    Raises:
        HiSparseConfigError: there are equally many layers with each size of device-resident KV, which vLLM takes for a
            pattern by which it also splits the hot layers.
    """
    if sizes and {num_indexers, *Counter(sizes.values()).values()} == {num_indexers} and num_indexers < num_hot_layers:
        raise HiSparseConfigError(
            "--model",
            f"{num_indexers} layers with an indexer, and as many with full attention (such as {next(iter(sizes))})",
            f"more or fewer layers with an indexer than others with full attention: vLLM takes equal numbers for a "
            f"pattern, by which it would split the {num_hot_layers} layers with hot rows, too",
            f"Serve another model, or remove {CONNECTOR_NAME}.",
        )


def check_msa_layers(
    layers: Mapping[str, AttentionLayerBase],
    vllm_config: VllmConfig,
    sparse_layer: type,
    key_cache: type,
    impls: tuple[type, type],
) -> None:
    """Refuse a model whose indexers select blocks unless all its layers are known, and Triton kernels run them.

    Args:
        layers: all layers that keep KV or another state, by name.
        vllm_config: configuration of the engine.
        sparse_layer: class of the layers that select blocks.
        key_cache: class of the layers that keep index keys.
        impls: classes of the implementations of a layer that selects, and of its indexer.

    Raises:
        HiSparseConfigError: a layer is of another kind, or no layer selects.
    """
    for name, layer in layers.items():
        if type(layer) not in (sparse_layer, key_cache, Attention):
            raise _refusal(name, layer, "its own way to attend or to keep state", NEAREST_MSA, BLOCKS)
        if type(layer) is sparse_layer:
            for impl, known in zip((layer.impl, layer.indexer.impl), impls, strict=True):
                if type(impl) is not known:
                    raise _refusal(name, layer, f"{type(impl).__name__}, vLLM's choice here", NEAREST_MSA, BLOCKS)
        if type(layer) is Attention:
            for what, value in _additions(layer, vllm_config).items():
                raise _refusal(name, layer, f"{what}={value!r}", NEAREST_OF.get(what, NEAREST_MSA), BLOCKS)
    if not any(type(layer) is sparse_layer for layer in layers.values()):
        name, layer = next(iter(layers.items()), ("no layer", None))
        raise _refusal(
            name, layer, "full attention, as all others (sparse_attention_freq of config.json)", NEAREST_MSA, BLOCKS
        )


def _is_sparse(layer: AttentionLayerBase) -> bool:
    return isinstance(layer, MLAAttention) and layer.use_sparse


def _additions(layer: Attention, vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the properties of an attention layer that plain causal attention does not have: vLLM's name -> value."""
    impl, device = layer.impl, vllm_config.device_config.device_type
    dtypes = HiSparseConfig.from_vllm_config(vllm_config).kv_cache_dtypes(device)
    found = {
        "attn_type": None if layer.attn_type == "decoder" else layer.attn_type,
        "sliding_window": layer.sliding_window,
        "alibi_slopes": getattr(impl, "alibi_slopes", None),
        "logits_soft_cap": getattr(impl, "logits_soft_cap", None) or None,
        "sinks": "a tensor" if layer.has_sink else None,
        "kv_sharing_target_layer_name": layer.kv_sharing_target_layer_name,
        "use_mm_prefix": layer.use_mm_prefix or None,
        "head_size_v": None if layer.head_size_v == layer.head_size else layer.head_size_v,
        "chunk_lookback": None if getattr(impl, "chunk_lookback", -1) == -1 else impl.chunk_lookback,
        "k_scale": None if _num_scales(layer) <= 1 else "one for each KV head",
        "kv_cache_dtype": None if layer.kv_cache_dtype in dtypes else layer.kv_cache_dtype,
    }
    return {name: value for name, value in found.items() if value is not None}


def _num_scales(layer: Attention) -> int:
    """Number of scales that the checkpoint has for a layer's keys."""
    scale = getattr(layer, "k_scale", None)
    return scale.numel() if isinstance(scale, torch.Tensor) else 0


def _kv_size(layer: Attention) -> tuple[int, int, str]:
    return layer.num_kv_heads, layer.head_size, layer.kv_cache_dtype


def _index(name: str, layer: AttentionLayerBase) -> int:
    try:
        return extract_layer_index(name)
    except AssertionError:
        raise _refusal(name, layer, "a name without one layer number") from None


def _refusal(
    name: str, layer: AttentionLayerBase | None, what: str, fix: str = NEAREST, expected: str = PLAIN
) -> HiSparseConfigError:
    return HiSparseConfigError("--model", f"{type(layer).__name__} ({name}) with {what}", expected, fix)
