"""DSA: the model's own indexer selects."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from vllm_hisparse.algorithms.base import Selection, SparseAlgorithm, State


class DSA(SparseAlgorithm):
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, eq. 1 and 2).

    The indexer I(t, s) = sum_j w(t, j) * ReLU(q(t, j) . k(s)) is a layer of the model with a KV cache group of its own,
    so there is nothing to represent here: its keys are written by the layer, and saved, restored and transferred like
    KV. All heads share one selection.
    """

    name = "dsa"
    granularity = "token"
    graph_capturable = True
    model_family: ClassVar[Literal["dense", "dsa"]] = "dsa"

    def retrieve_topk(
        self, state: State, rows: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> Selection:
        """Hand on what the indexer left.

        Args:
            state: "top_k": the model's top-k buffer, [step tokens, index_topk] int32, -1 padded.
            rows: [batch] int64 tokens of the step.
            query, num_tokens: unused.
        """
        units = state["top_k"][rows][:, None]
        return Selection(units, (units >= 0).sum(-1, dtype=torch.int32))
