"""How a dense model on CUDA gets attention layers whose KV cache is a hot buffer."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from vllm_hisparse.attention.base import with_class
from vllm_hisparse.attention.gqa.base import HotAttention, check_layer, is_dense_layer
from vllm_hisparse.attention.gqa.cuda import PagedGqaBackend, PagedGqaImpl, check_flash_attention
from vllm_hisparse.config import HiSparseConfigError


def attach_hot_buffers(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Give every attention layer but `dense_layers` a hot buffer in place of its KV cache.

    NOTE: vLLM builds the layers deep inside its model classes; giving the built objects our classes needs no patched
    function.

    Raises:
        HiSparseConfigError: the attention backend has no version for hot buffers, or a layer attends in another way
            than plain causal attention.
    """
    for layer in model.modules():
        if not isinstance(layer, Attention) or is_dense_layer(layer, vllm_config):
            continue
        name, impl = layer.attn_backend.get_name(), layer.impl
        if name != FlashAttentionBackend.get_name():
            raise HiSparseConfigError("--attention-backend", name, FlashAttentionBackend.get_name(), "Set this one.")
        window = None if impl.sliding_window == (-1, -1) else impl.sliding_window[0] + 1
        shared = impl.kv_sharing_target_layer_name
        check_layer(impl.alibi_slopes, window, impl.logits_soft_cap or None, layer.attn_type, shared, impl.sinks)
        check_flash_attention(impl.vllm_flash_attn_version)
        layer.__class__, layer.attn_backend = HotAttention, PagedGqaBackend
        layer.impl = with_class(impl, PagedGqaImpl)
