"""Sparse MLA on SM100 (B200) over hot buffers: `FLASHINFER_MLA_SPARSE`, with kernels of TensorRT-LLM, and
`FLASH_ATTN_MLA_SPARSE_FA4` (vLLM 0.33), which prefills with the same kernels and decodes with FlashAttention 4. Neither
has run on a GPU.

TensorRT-LLM's kernels address rows by flat number, but their launcher wants pages of 32 or 64 rows. FlashAttention 4
wants every row in the shape, because it ignores ids beyond the last row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_hisparse.attention.mla import flashinfer_cuda
from vllm_hisparse.attention.mla.cuda import HotMLABackend, HotMLACudaImpl, HotMLAMetadata, HotMLAMetadataBuilder
from vllm_hisparse.compat.row_kernels import FlashInferKernel
from vllm_hisparse.kv_manager.rows.prefill_staging import PrefillGroup
from vllm_hisparse.layout import BLOCK_SIZE

# Backend -> rows of a page in which its kernel for decoding reads hot rows.
PAGE_SIZES = {"FLASHINFER_MLA_SPARSE": BLOCK_SIZE, "FLASH_ATTN_MLA_SPARSE_FA4": 1}


class HotSM100Impl(HotMLACudaImpl):
    """Mixin of `FlashInferMLASparseImpl` or of a subclass."""

    divides_steps: ClassVar[bool] = False  # microbatches would share the kernel's workspace

    def _decode(self, q: Any, metadata: HotMLAMetadata, layer: torch.nn.Module) -> torch.Tensor:
        row_ids, num_valid = self.locate_leading(q)
        out = self.attend_to_rows(q, self.decode_cache, (row_ids, num_valid), layer, is_decode=True)
        # NOTE: a token without rows, such as the padding of a graph, has no defined output, which may be NaN.
        return out.masked_fill_(num_valid.eq(0)[:, None, None], 0)

    def _attend_to_staged(self, q: Any, group: PrefillGroup, layer: torch.nn.Module) -> torch.Tensor:
        # NOTE: vLLM's `forward_mqa` would convert positions once for all layers that share an indexer, although a step
        # may have several groups. It would do so on a stream that waits for an event, which this class's
        # `record_logical_topk_ready` does not record.
        positions, metadata = self.topk_indices_buffer[group.tokens], group.metadata
        selection = triton_convert_req_index_to_global_index(
            metadata.req_id_per_token[: len(positions)],
            metadata.block_table,
            positions,
            BLOCK_SIZE=self.staging.block_size,
            NUM_TOPK_TOKENS=positions.shape[1],
            return_valid_counts=True,
        )
        return self.attend_to_rows(q, self.staging.cache, selection, layer, is_decode=False)


class HotSM100MetadataBuilder(HotMLAMetadataBuilder):
    """Mixin of `FlashInferMLASparseTRTLLMMetadataBuilder` or of a subclass."""

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, *args: Any) -> None:
        """Return None, as other builders do: graphs are for decoding requests with equally many tokens."""


def _hot_backend(backend: type, page_size: int) -> type[HotMLABackend]:
    """Return the hot-buffer version of a backend of vLLM.

    Args:
        backend: the backend, whose implementation is `FlashInferMLASparseImpl` or a subclass.
        page_size: as in `PAGE_SIZES`.
    """
    impl_class, builder_class = backend.get_impl_cls(), backend.get_builder_cls()
    own: dict[str, Any] = {"__module__": __name__}
    bases = HotSM100Impl, impl_class, FlashInferKernel
    impl = type(f"Hot{impl_class.__name__}", bases, own | {"vllm_class": impl_class, "decode_block_size": page_size})
    builder = type(f"Hot{builder_class.__name__}", (HotSM100MetadataBuilder, builder_class), own)
    own |= {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type(f"Hot{backend.__name__}", (HotMLABackend, backend), own | {"vllm_class": backend})


HOT_BACKENDS = flashinfer_cuda.HOT_BACKENDS | {
    name: _hot_backend(AttentionBackendEnum[name].get_class(), page_size)
    for name, page_size in PAGE_SIZES.items()
    if name in AttentionBackendEnum.__members__
}
