"""Attention layers of DSA models on CUDA whose KV cache is a hot buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.models.deepseek_v32.attention import DeepseekV32Attention

from vllm_hisparse.attention.mla.base import HotBufferLayer, HotMLAAttention, NewRows
from vllm_hisparse.attention.mla.microbatches_cuda import run_in_microbatches
from vllm_hisparse.compat.attention import wraps_indexer_and_attention


@wraps_indexer_and_attention
class HotDeepseekV32Attention(HotBufferLayer, DeepseekV32Attention):
    """The fused attention layer of vLLM's CUDA model class over a hot buffer.

    If every token of a step decodes, the fused norm and rotary kernel writes the newest rows to the hot buffer. If not,
    and in piecewise graphs, `forward_mqa` writes them, because it knows where each request's rows belong.
    """

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = None

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        slot_mapping = get_forward_context().slot_mapping
        if self._kernel_writes_rows(len(positions)):
            self.kv_cache, slot_mapping[self.layer_name] = self.impl.begin_decode(len(positions))
            return super().forward(positions, hidden_states)
        # NOTE: without a cache, the fused kernel writes no rows. It gets the indexer's slots, because it would take a
        # token without a slot for padding, and skip its indexer key, too.
        self.kv_cache = None
        if self.indexer is not None and self.indexer.k_cache.prefix in slot_mapping:
            slot_mapping[self.layer_name] = slot_mapping[self.indexer.k_cache.prefix]
        return super().forward(positions, hidden_states)

    def writing_rows(
        self, positions: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor
    ) -> AbstractContextManager[None]:
        """Let `forward_mqa` write the step's rows, unless the fused kernel has written them.

        Args:
            positions: [tokens] int64.
            kv_c, k_pe: as in `NewRows`.
        """
        return self.impl.writing(None if self._kernel_writes_rows(len(positions)) else NewRows(kv_c, k_pe))

    def select_and_attend(self, run: Callable[..., None], tensors: Sequence[torch.Tensor | None]) -> None:
        """Run indexer and attention, in microbatches if the step has them and does not run as a whole.

        Args:
            run: vLLM's function, which takes a layer and the tensors.
            tensors: [tokens, ...] each.
        """
        metadata, *_ = get_attention_context(self.layer_name)
        is_divided = self._kernel_writes_rows(len(tensors[0])) and metadata.microbatches
        if not is_divided or self.impl.hot_buffer.step.runs_whole:
            run(self, *tensors)
            return
        run_in_microbatches(self, run, tensors, metadata.microbatches)
        self.impl.hot_buffer.step.finish(self.impl.layer_index)

    def _kernel_writes_rows(self, num_tokens: int) -> bool:
        """Return True if the fused kernel writes the rows of a step, because all its `num_tokens` tokens decode.

        NOTE: it never writes them in a piecewise graph, which replays the kernel as captured for any batch of its size.
        """
        metadata, *_ = get_attention_context(self.layer_name)
        is_piecewise = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        return metadata is not None and metadata.num_decode_tokens == num_tokens and not is_piecewise


HOT_LAYERS = {DeepseekV32Attention: HotDeepseekV32Attention, MLAAttention: HotMLAAttention}
