"""Attention layers of DSA models on CUDA whose KV cache is a hot buffer, and how a model gets them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.models.deepseek_v32.attention import DeepseekV32Attention

from vllm_hisparse.attention.base import with_class
from vllm_hisparse.attention.mla.base import HotBufferLayer, HotMLAAttention
from vllm_hisparse.attention.mla.cuda import HOT_BACKENDS
from vllm_hisparse.config import HiSparseConfigError


class HotDeepseekV32Attention(HotBufferLayer, DeepseekV32Attention):
    """The fused attention layer of vLLM's CUDA model class over a hot buffer.

    Where every token of a step decodes, the fused norm and rotary kernel writes the newest rows to the hot buffer;
    otherwise, and in piecewise graphs, `forward_mqa` writes them, which knows what becomes of each request's rows.
    """

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = None

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        slot_mapping = get_forward_context().slot_mapping
        if self._kernel_writes_rows(len(positions)):
            self.kv_cache, slot_mapping[self.layer_name] = self.impl.newest_slots(len(positions))
            return super().forward(positions, hidden_states)
        # NOTE: without a cache the fused kernel writes no rows. It takes a token without a slot for padding and skips
        # its indexer key, too, so it gets the indexer's slots.
        self.kv_cache = None
        if self.indexer is not None and self.indexer.k_cache.prefix in slot_mapping:
            slot_mapping[self.layer_name] = slot_mapping[self.indexer.k_cache.prefix]
        return super().forward(positions, hidden_states)

    @eager_break_during_capture
    def _sparse_indexer_and_attn(
        self,
        positions: torch.Tensor,
        q_c: torch.Tensor,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        index_q_fp8: torch.Tensor | None,
        index_k: torch.Tensor | None,
        index_weights_out: torch.Tensor | None,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        *args: Any,
    ) -> None:
        self.impl.new_rows = None if self._kernel_writes_rows(len(positions)) else (kv_c, k_pe)
        super()._sparse_indexer_and_attn(
            positions, q_c, q_nope, q_pe, index_q_fp8, index_k, index_weights_out, kv_c, k_pe, *args
        )
        self.impl.new_rows = None

    def _kernel_writes_rows(self, num_tokens: int) -> bool:
        """Whether the fused kernel writes the rows of a step of so many tokens: each is the only one of its request.

        NOTE: never in a piecewise graph, which replays the kernel as it was captured for any batch of its size.
        """
        metadata, *_ = get_attention_context(self.layer_name)
        is_piecewise = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        return metadata is not None and metadata.num_decodes == num_tokens and not is_piecewise


HOT_LAYERS = {DeepseekV32Attention: HotDeepseekV32Attention, MLAAttention: HotMLAAttention}


def attach_hot_buffers(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Give every sparse MLA layer of a model a hot buffer in place of its KV cache.

    NOTE: vLLM builds the layers deep inside its model classes; giving the built objects our classes needs no patched
    function.

    Raises:
        HiSparseConfigError: the attention backend has no version for hot buffers.
    """
    for layer in model.modules():
        if not isinstance(layer, MLAAttention) or not layer.use_sparse:
            continue
        name = layer.attn_backend.get_name()
        if name not in HOT_BACKENDS:
            known = " or ".join(HOT_BACKENDS)
            raise HiSparseConfigError("--attention-backend", name, known, "Set one of these.")
        layer.__class__ = HOT_LAYERS[type(layer)]
        layer.attn_backend = HOT_BACKENDS[name]
        layer.impl = with_class(layer.impl, layer.attn_backend.get_impl_cls())
        layer.prefill_backend = None
        layer._dense_mha_metadata_layer_name = ""
