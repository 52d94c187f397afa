"""Dense models on CUDA over hot units with FlashInfer (`FLASHINFER`): pages of 16 to 128 tokens, on SM90 or newer.

Requests that decode attend by XQA, which reads the unit table and the lengths on the device, so nothing is planned on
the host and a CUDA graph holds the call. FlashInfer compiles XQA at start-up, for one page size, head size and number
of heads per KV head. Requests that prefill attend by vLLM's unchanged backend, which plans on the host.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.flashinfer import flashinfer_xqa_batch_decode_with_kv_cache
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadataBuilder

from vllm_hisparse.attention.gqa.cuda import (
    FP8_DTYPES,
    HotGQABackend,
    HotGQAImpl,
    HotGQAMetadata,
    HotGQAMetadataBuilder,
)
from vllm_hisparse.compat.flashinfer import StepPlans
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer

UNITS = (16, 32, 64, 128)  # tokens of a page that XQA reads
GENERATIONS = (9, 10, 12)  # GPUs that XQA is for: major numbers of their compute capabilities
MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 256, 16
WORKSPACE_BYTES = 32 << 20  # 8 MiB of semaphores; parts of rows, of which there are as many as the GPU has SMs


class HotFlashInferMetadataBuilder(HotGQAMetadataBuilder, FlashInferMetadataBuilder):
    def allocate(self, max_query_len: int, max_batch: int) -> None:
        super().allocate(max_query_len, max_batch)
        self._prefill_plans = StepPlans.of_dense_prefill()

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, *args: Any) -> None:
        return None  # all requests of a graph have equally many new tokens

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HotGQAMetadata | None:
        self._prefill_plans.begin_step()
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_staged(self, common: CommonAttentionMetadata) -> Any:
        return self._prefill_plans.build(self, partial(super()._build_staged, common))


class HotFlashInferImpl(HotGQAImpl, FlashInferImpl):
    vllm_class = FlashInferImpl

    def unsupported(self, tokens_per_unit: int) -> str | None:
        capability = current_platform.get_device_capability()
        if capability is None or capability.major not in GENERATIONS:
            return "its kernel XQA is for GPUs of compute capability 9.0, 10.x and 12.x"
        if tokens_per_unit not in UNITS:
            return f"its kernel XQA reads pages of {', '.join(map(str, UNITS))} tokens"
        if self.head_size % HEAD_SIZE_MULTIPLE or self.head_size > MAX_HEAD_SIZE:
            return (
                f"its kernel XQA reads heads of a multiple of {HEAD_SIZE_MULTIPLE} elements up to {MAX_HEAD_SIZE}; the "
                f"model's have {self.head_size}"
            )
        if self.kv_cache_dtype in FP8_DTYPES:
            return "its kernel for KV in fp8 was never tried over hot buffers"
        return None

    def bind(self, hot_buffer: GQAHotBuffer, layer_index: int, host_rows: torch.Tensor, cache: torch.Tensor) -> None:
        super().bind(hot_buffer, layer_index, host_rows, cache)
        # NOTE: FlashInfer compiles and loads the kernel in its first call, which must not be in a CUDA graph.
        query = cache.new_zeros(1, self.num_queries_per_kv, self.head_size)
        units = torch.zeros(1, self.algorithm.num_selected, dtype=torch.int32, device=cache.device)
        self.run_kernel(None, query, units, torch.zeros_like(units[:, 0]), torch.empty_like(query))

    def run_kernel(
        self,
        layer: torch.nn.Module | None,
        query: torch.Tensor,
        units: torch.Tensor,
        num_tokens: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        flashinfer_xqa_batch_decode_with_kv_cache(
            query=query.contiguous(),  # NOTE: the kernel takes no strides of queries, outputs and tables
            kv_cache=(self.hot_keys, self.hot_values),
            workspace_buffer=_workspace(query.device),
            block_tables=units,
            seq_lens=num_tokens,
            max_seq_len=units.shape[1] * self.algorithm.tokens_per_unit,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            out=output,
            kv_layout="NHD",
        )
        output.masked_fill_(num_tokens.eq(0)[:, None, None], 0)  # the kernel may divide 0 by 0 for padding


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Return memory for the parts into which the kernel divides rows; all layers share it, one after the other.

    NOTE: it starts as zeros, and the kernel leaves its semaphores at zero.
    """
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class HotFlashInferBackend(HotGQABackend, FlashInferBackend):
    vllm_class = FlashInferBackend
    max_block_size = 64  # NOTE: vLLM's builder accepts larger blocks only where TensorRT-LLM's kernels run

    @staticmethod
    def get_impl_cls() -> type[HotFlashInferImpl]:
        return HotFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return HotFlashInferMetadataBuilder
