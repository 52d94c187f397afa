"""Quest: pages are scored by an upper bound from the elementwise minima and maxima of their keys."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_hisparse.algorithms.base import AlgorithmOptions, SparseAlgorithm, State, StateField
from vllm_hisparse.ops import page_bounds


class QuestOptions(AlgorithmOptions):
    """Options, with the paper's defaults."""

    page_size: int = Field(default=16, ge=1, le=128)
    """Tokens per page."""


class Quest(SparseAlgorithm):
    """Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024, arXiv:2406.10774.

    Algorithm 1: for each page and channel i, m_i and M_i are the minimum and maximum of the keys. The score of a page
    is the largest dot product with the query that any key between them could have:

        U_i = max(q_i * m_i, q_i * M_i),   score = sum_i U_i >= q . k  for every k of the page.

    The query attends to the pages with the largest scores, and always to the newest page. The first two layers keep
    full KV. Query heads that share a KV head share a selection, by the largest of their scores.
    """

    graph_capturable = True
    forgets_drafts = True
    num_full_kv_layers = 2
    Options = QuestOptions

    @classmethod
    def unit_tokens(cls, options: QuestOptions) -> int:
        return options.page_size

    def state_fields(self) -> dict[str, StateField]:
        """Return fields for the minima and maxima of each page.

        With drafts, a second field keeps the bounds of its page after each of the latest tokens, at the token's
        position modulo their number, because bounds that a rejected key has widened cannot be narrowed.
        """
        bounds, dtype = (2, self.shape.num_kv_heads, self.shape.head_size), self.shape.dtype
        num_latest = self.max_query_len + 1 if self.max_query_len > 1 else 0
        return {
            "bounds": StateField(bounds, dtype, self.tokens_per_unit),
            "latest": StateField((num_latest, *bounds), dtype),
        }

    def construct_representations(self, state: State, request_index: int, keys: torch.Tensor, first: int) -> None:
        page_size, last = self.tokens_per_unit, first + len(keys)
        first_page, first_new = first // page_size, -(-first // page_size)
        pages = torch.arange(first_page, -(-last // page_size), device=keys.device)
        page_of_key = torch.arange(first, last, device=keys.device) // page_size - first_page
        bounds, latest = state["bounds"][request_index, pages], state["latest"][request_index]
        for kind, reduce, start in ((0, "amin", float("inf")), (1, "amax", -float("inf"))):
            bounds[first_new - first_page :, kind] = start
            by_page = page_of_key[:, None, None].expand_as(keys)
            bounds[:, kind].scatter_reduce_(0, by_page, keys.to(bounds.dtype), reduce)
        state["bounds"][request_index, pages] = bounds
        if len(keys) and len(latest):
            latest[(last - 1) % len(latest)] = bounds[-1]

    def update_representations(
        self, state: State, request_indices: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> None:
        table, blocks = state["bounds"].table, state["bounds"].blocks
        page_bounds.update(table, blocks, state["latest"], request_indices, keys, positions, self.tokens_per_unit)

    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        return self.select(self.upper_bounds(state, request_indices, query, num_tokens), num_tokens)

    def upper_bounds(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Score all pages for each KV head.

        Args:
            state, request_indices, query, num_tokens: as in `retrieve_topk`.

        Returns:
            [batch, num_kv_heads, max_units] float32; undefined beyond a request's tokens.
        """
        table, blocks = state["bounds"].table, state["bounds"].blocks
        sizes = self.tokens_per_unit, self.max_units
        return page_bounds.scores(table, blocks, request_indices, query, num_tokens, *sizes)
