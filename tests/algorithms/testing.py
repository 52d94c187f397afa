"""Sizes and helpers of the tests of algorithms, beside `vllm_hisparse.algorithms.testing`."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm
from vllm_hisparse.algorithms.testing import SHAPE

MAX_TOKENS = 200


def state_bytes(algorithm: SparseAlgorithm, num_tokens: int) -> int:
    """Device bytes of a request's state in a layer."""
    growing = sum(-(-num_tokens // tokens) * num_bytes for tokens, num_bytes in algorithm.state_entries)
    return growing + sum(field.num_bytes for field in algorithm.fixed_fields.values())


def make(
    algorithm: type[SparseAlgorithm],
    budget: int = 64,
    max_tokens: int = MAX_TOKENS,
    max_query_len: int = 1,
    **options,
) -> SparseAlgorithm:
    return algorithm(algorithm.Options(**options), SHAPE, budget, max_tokens, max_query_len)


def group_of(query: torch.Tensor, kv_head: int) -> torch.Tensor:
    """Query heads of a KV head: [heads, head_size]."""
    per_group = SHAPE.num_heads // SHAPE.num_kv_heads
    return query[0, kv_head * per_group : (kv_head + 1) * per_group]


def best(scores: dict[int, float], num: int) -> set[int]:
    """The keys of the largest values."""
    return set(sorted(scores, key=scores.get, reverse=True)[:num])
