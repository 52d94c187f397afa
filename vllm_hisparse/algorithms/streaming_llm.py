"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_hisparse.algorithms.base import AlgorithmOptions, SparseAlgorithm, State


class StreamingLLMOptions(AlgorithmOptions):
    """Options, with the paper's defaults; pages are not in the paper."""

    sink_tokens: int = Field(default=4, ge=0, le=1024)
    """First tokens that are always attended; rounded up to whole pages."""
    page_size: int = Field(default=16, ge=1, le=128)
    """Tokens per page."""


class StreamingLLM(SparseAlgorithm):
    """Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv:2309.17453.

    Section 3.2: a query attends to the first `sink_tokens` and to the latest tokens, as many as the budget holds. The
    algorithm reads no keys, and selects whole pages. Keys keep the rotary position of their token. The paper renumbers
    positions inside the cache, which matters only beyond the context length that the model was trained for.
    """

    graph_capturable = True
    forgets_drafts = True
    Options = StreamingLLMOptions

    @classmethod
    def unit_tokens(cls, options: StreamingLLMOptions) -> int:
        return options.page_size

    @classmethod
    def min_budget(cls, options: StreamingLLMOptions) -> int:
        num_sink_pages = -(-options.sink_tokens // options.page_size)
        return (num_sink_pages + 1) * options.page_size

    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        pages = torch.arange(self.max_units, device=query.device)
        sinks = pages * self.tokens_per_unit < self.options.sink_tokens
        recency = pages.float().expand(len(query), self.shape.num_kv_heads, -1)
        return self.select(recency, num_tokens, sinks.expand(len(query), -1))
