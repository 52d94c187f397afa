"""DSA: the model's own indexer selects."""

from __future__ import annotations

from vllm_hisparse.algorithms.base import Selector


class DSA(Selector):
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, eq. 1 and 2).

    The indexer I(t, s) = sum_j w(t, j) * ReLU(q(t, j) . k(s)) is a layer of the model with a KV cache group of its own.
    The layer writes its keys and makes one selection per token for all heads, so nothing is represented or selected
    here. Its keys are saved, restored and transferred like KV.
    """

    model_family = "mla"
    forgets_drafts = True  # the indexer keys of a rejected position are overwritten
