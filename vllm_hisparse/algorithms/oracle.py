"""Oracle: the tokens with the largest true attention weights, for evaluation."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm, State, StateField


class Oracle(SparseAlgorithm):
    """Exact top-k: no other selection of equally many tokens has more attention weight.

    The oracle keeps every key on the device, so it saves no memory. It is the upper bound for the other algorithms. A
    token's score is its softmax weight, summed over the query heads that share a KV head.
    """

    graph_capturable = True
    forgets_drafts = True

    def state_fields(self) -> dict[str, StateField]:
        return {"keys": StateField((self.shape.num_kv_heads, self.shape.head_size), self.shape.dtype, 1)}

    def construct_representations(self, state: State, request_index: int, keys: torch.Tensor, first: int) -> None:
        state["keys"][request_index, torch.arange(first, first + len(keys), device=keys.device)] = keys

    def update_representations(
        self, state: State, request_indices: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> None:
        state["keys"][request_indices, positions] = keys

    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        keys = state["keys"][request_indices].float().permute(0, 2, 3, 1)
        scores = self.group_queries(query) @ keys * self.shape.head_size**-0.5
        beyond = torch.arange(self.max_tokens, device=query.device) >= num_tokens[:, None]
        weights = scores.masked_fill(beyond[:, None, None], -float("inf")).softmax(-1)
        return self.select(weights.sum(2), num_tokens)
