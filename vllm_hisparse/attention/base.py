"""Parts that the attention backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

Metadata = TypeVar("Metadata")


class CpuMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Metadata builder without CUDA graphs. It has a constructor, because vLLM's base class has none."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


class HotMetadataBuilder:
    """Mixin of a metadata builder over hot buffers."""

    @property
    def impl(self) -> Any:
        """The first layer's implementation; through it, the builder finds the hot buffer and the staging memory."""
        return self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].impl


class QueryLens:
    """Number of new tokens of each decoding request of a step, in a tensor that a CUDA graph may read.

    Args:
        max_query_len: tokens that a decoding request computes in a step, at most.
        max_batch: requests of a step, graph padding included.
        device: device of the tensor.
    """

    def __init__(self, max_query_len: int, max_batch: int, device: torch.device):
        self.max_query_len, self.device = max_query_len, device
        self._lens = torch.zeros(max_batch, dtype=torch.int32, device=device)

    def find(
        self, common: CommonAttentionMetadata, num_decodes: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `query_lens` and `query_indices` of the first `num_decodes` requests for `DecodeStep.plan`."""
        if self.max_query_len == 1:
            return None, None
        query_lens, starts = self._lens[:num_decodes], common.query_start_loc
        torch.sub(starts[1 : num_decodes + 1], starts[:num_decodes], out=query_lens)  # a graph reads it
        starts = common.query_start_loc_cpu[: num_decodes + 1]
        lens = torch.diff(starts)
        if ((lens == self.max_query_len) | (lens == 0)).all():
            return query_lens, None
        moved = torch.arange(num_decodes) * self.max_query_len - starts[:-1]
        query_indices = torch.arange(int(starts[-1])) + moved.repeat_interleave(lens)
        return query_lens, query_indices.to(self.device, non_blocking=True)


def decode_tokens(
    starts: torch.Tensor, query_lens: torch.Tensor, max_query_len: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Find the tokens of decoding requests, which may lie anywhere in a step's batch.

    Args:
        starts: [requests] index in the batch of each request's first token.
        query_lens: [requests] tokens of each request, at most `max_query_len`.
        max_query_len: tokens that a decoding request computes in a step, at most.

    Returns:
        [tokens] int64 indices in the batch, request by request, and the `query_indices` of `DecodeStep.plan`.
    """
    offsets = torch.arange(max_query_len)
    exists = offsets < query_lens[:, None]
    tokens = (starts.long()[:, None] + offsets)[exists]
    return tokens, None if exists.all() else exists.flatten().nonzero()[:, 0]
