"""Dense models on CUDA over hot units with vLLM's FlashAttention 2, 3 and 4 (`FLASH_ATTN`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_hisparse.attention.gqa.cuda import FP8_DTYPES, HotGQABackend, HotGQAImpl, HotGQAMetadataBuilder
from vllm_hisparse.compat.attention import quant_scales

MAX_SPLITS = 32  # parts of a request's selection on different thread blocks; a CUDA graph needs a bound
MAX_SPLIT_REQUESTS = 992  # up to so many requests, the kernel chooses the number of splits
UNIT_MULTIPLES = {2: 16, 3: 1, 4: 1}  # FlashAttention's version -> tokens of a page are a multiple of this


class HotFlashAttnMetadataBuilder(HotGQAMetadataBuilder, FlashAttentionMetadataBuilder):
    def _build_staged(self, common: CommonAttentionMetadata) -> Any:
        metadata = super()._build_staged(common)
        if metadata.scheduler_metadata is None:
            return metadata
        # NOTE: the builder reuses one buffer, and a step has several groups.
        return replace(metadata, scheduler_metadata=metadata.scheduler_metadata.clone())


class HotFlashAttnImpl(HotGQAImpl, FlashAttentionImpl):
    vllm_class = FlashAttentionImpl

    def unsupported(self, tokens_per_unit: int) -> str | None:
        version = self.vllm_flash_attn_version
        multiple = UNIT_MULTIPLES.get(version)
        if multiple is None:
            return f"FlashAttention {version} is unknown"
        if self.kv_cache_dtype in FP8_DTYPES and version != 3:
            return f"FlashAttention {version} does not read KV in fp8 from such pages; version 3 does, on Hopper"
        if self.fa4_hd256:
            return f"FlashAttention {version} reads pages of 128 tokens for heads of 256 elements"
        if tokens_per_unit % multiple:
            return f"FlashAttention {version} reads pages of a multiple of {multiple} tokens"
        return None

    def run_kernel(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        units: torch.Tensor,
        num_tokens: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        scales, by_row = {}, (len(query), 1)
        if self.stores_fp8:
            names = "q_descale", "k_descale", "v_descale"
            scales = {name: scale.expand(by_row) for name, scale in zip(names, quant_scales(layer), strict=True)}
        num_splits = 0  # versions 2 and 4 choose by the batch's shapes, which a CUDA graph fixes
        if self.vllm_flash_attn_version == 3:  # version 3 would choose by lengths
            num_splits = MAX_SPLITS if len(query) <= MAX_SPLIT_REQUESTS else 1
        flash_attn_varlen_func(
            q=query,
            k=self.hot_keys,
            v=self.hot_values,
            out=output,
            cu_seqlens_q=self.query_starts[: len(query) + 1],
            max_seqlen_q=1,
            seqused_k=num_tokens,
            max_seqlen_k=units.shape[1] * self.algorithm.tokens_per_unit,
            softmax_scale=self.scale,
            causal=True,
            block_table=units,
            fa_version=self.vllm_flash_attn_version,
            num_splits=num_splits,
            **scales,
        )


class HotFlashAttnBackend(HotGQABackend, FlashAttentionBackend):
    vllm_class = FlashAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[HotFlashAttnImpl]:
        return HotFlashAttnImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotFlashAttnMetadataBuilder
