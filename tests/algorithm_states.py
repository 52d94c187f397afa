"""An algorithm's state without vLLM's blocks: what grows lies in small blocks in any order."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm, State
from vllm_hisparse.ops.paged_field import PagedField

ENTRIES_PER_BLOCK = 3


def poisoned_state(algorithm: SparseAlgorithm, num_requests: int) -> State:
    """State of one layer as former requests may have left it: NaN, numbers that are too large. Block 0 is nobody's."""
    state: State = {}
    for name, field in algorithm.fixed_fields.items():
        state[name] = poison((num_requests, *field.shape), field.dtype)
    for name, field in algorithm.growing_fields.items():
        num_entries = field.num_entries(algorithm.max_tokens)
        max_blocks = -(-num_entries // ENTRIES_PER_BLOCK)
        order = torch.randperm(num_requests * max_blocks, generator=torch.Generator().manual_seed(len(name)))
        blocks = poison((1 + len(order), ENTRIES_PER_BLOCK, *field.shape), field.dtype)
        state[name] = PagedField((order + 1).view(num_requests, max_blocks).int(), blocks, num_entries)
    return state


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 250, dtype=dtype)
