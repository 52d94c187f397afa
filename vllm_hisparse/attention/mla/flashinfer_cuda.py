"""Sparse MLA on Hopper over hot buffers with FlashInfer (`FLASHINFER_MLA_SPARSE_SM90`): rows of bf16, or of 576 bytes
in fp8 with one scale per layer.

FlashInfer plans on the host. vLLM's builder plans from upper bounds of the lengths, and sets the lengths on the device
to what the indexer selects: all positions of a short request, `index_topk` of a longer one. Hot rows are as many, so
the plan holds for them, too; a CUDA graph reads it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 import (
    FlashInferMLASparseSM90Backend,
    FlashInferMLASparseSM90Builder,
    FlashInferMLASparseSM90Impl,
)

from vllm_hisparse.attention.mla import cuda
from vllm_hisparse.attention.mla.cuda import HotMLABackend, HotMLACudaImpl, HotMLAMetadata, HotMLAMetadataBuilder
from vllm_hisparse.compat.flashinfer import StepPlans, attend_to_planned_rows


class HotFlashInferMLAImpl(HotMLACudaImpl, FlashInferMLASparseSM90Impl):
    vllm_class = FlashInferMLASparseSM90Impl
    divides_steps: ClassVar[bool] = False  # each microbatch would need a plan, which takes 200 MB of device memory

    def _decode(self, q: Any, metadata: HotMLAMetadata, layer: torch.nn.Module) -> torch.Tensor:
        row_ids, num_valid = self.locate_leading(q)  # the plan knows how many ids there are, not where
        out = attend_to_planned_rows(self, metadata.decode.state, q, self.hot.rows, row_ids, layer)
        # NOTE: the plan has rows for requests that nobody knows, as in vLLM's warm-up.
        return out.masked_fill_(num_valid.eq(0)[:, None, None], 0)


class HotFlashInferMLAMetadataBuilder(HotMLAMetadataBuilder, FlashInferMLASparseSM90Builder):
    def allocate(self, max_query_len: int, max_tokens: int) -> None:
        super().allocate(max_query_len, max_tokens)
        self._prefill_plans = StepPlans.of_sparse_mla()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotMLAMetadata | None:
        self._prefill_plans.begin_step()
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _by_token(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common  # the plan computes the length of each token from those of the requests

    def _build_staged(self, common: CommonAttentionMetadata) -> Any:
        return self._prefill_plans.build(self, partial(super()._build_staged, common))


class HotFlashInferMLABackend(HotMLABackend, FlashInferMLASparseSM90Backend):
    vllm_class = FlashInferMLASparseSM90Backend

    @staticmethod
    def get_impl_cls() -> type[HotFlashInferMLAImpl]:
        return HotFlashInferMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotFlashInferMLAMetadataBuilder


HOT_BACKENDS = {**cuda.HOT_BACKENDS, FlashInferMLASparseSM90Backend.get_name(): HotFlashInferMLABackend}
