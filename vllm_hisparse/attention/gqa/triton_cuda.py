"""Dense models on CUDA over hot units with vLLM's Triton kernels (`TRITON_ATTN`): any GPU from SM80, any algorithm."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

from vllm_hisparse.attention.gqa.cuda import FP8, HotGQABackend, HotGQAImpl, HotGQAMetadata, HotGQAMetadataBuilder
from vllm_hisparse.compat.attention import quant_scales

MAX_SPLIT_ROWS = 128  # so many rows fill the device; with fewer, each row is divided among thread blocks
NUM_SPLITS = 16  # vLLM's number


class HotTritonMetadataBuilder(HotGQAMetadataBuilder, TritonAttentionMetadataBuilder):
    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> HotGQAMetadata | None:
        return self.build(0, common_attn_metadata)  # NOTE: vLLM's method needs lengths of its own metadata


class TritonUnitsImpl(HotGQAImpl):
    """Mixin of an implementation of vLLM: attends over hot units with the Triton kernel."""

    def run_kernel(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        units: torch.Tensor,
        num_tokens: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        scales: dict[str, Any] = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
        if self.stores_fp8:
            given, by_row = quant_scales(layer), (len(query), 1)
            scales = {
                "q_descale": given.query if query.dtype == FP8 else None,
                "k_descale": given.key.expand(by_row),
                "v_descale": given.value.expand(by_row),
                "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
            }
        num_rows, splits = len(query), len(query) <= MAX_SPLIT_ROWS
        unified_attention(
            q=query,
            k=self.hot_keys,
            v=self.hot_values,
            out=output,
            cu_seqlens_q=self.query_starts[: num_rows + 1],
            max_seqlen_q=1,
            seqused_k=num_tokens,
            max_seqlen_k=units.shape[1] * self.algorithm.tokens_per_unit,
            softmax_scale=self.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=units,
            softcap=0,
            **scales,
            **(_split_memory(query) if splits else {}),
        )
        if splits:  # the kernel divides 0 by 0 for padding, and a NaN may spread where a whole batch is scaled
            output.masked_fill_(num_tokens.eq(0)[:, None, None], 0)


def _split_memory(query: torch.Tensor) -> dict[str, int | torch.Tensor]:
    """Return the arguments with which the kernel divides a row among thread blocks.

    Args:
        query: [rows, heads, head_size].
    """
    shape = (*query.shape[:2], NUM_SPLITS)
    output = query.new_empty(*shape, next_power_of_2(query.shape[2]), dtype=torch.float32)
    return {
        "seq_threshold_3D": MAX_SPLIT_ROWS,
        "num_par_softmax_segments": NUM_SPLITS,
        "softmax_segm_output": output,
        "softmax_segm_max": output.new_empty(shape),
        "softmax_segm_expsum": output.new_empty(shape),
    }


class HotTritonImpl(TritonUnitsImpl, TritonAttentionImpl):
    vllm_class = TritonAttentionImpl

    def unsupported(self, tokens_per_unit: int) -> str | None:
        return "its tensor descriptors (VLLM_TRITON_USE_TD) read tiles within one page" if self.use_td else None


class HotTritonBackend(HotGQABackend, TritonAttentionBackend):
    vllm_class = TritonAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[HotTritonImpl]:
        return HotTritonImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotTritonMetadataBuilder
