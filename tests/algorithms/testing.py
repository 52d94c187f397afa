"""A layer of random keys and queries, and an algorithm over it, for the tests of algorithms."""

from __future__ import annotations

from itertools import pairwise

import torch
from algorithm_states import poisoned_state

from vllm_hisparse.algorithms.base import AttentionShape, SparseAlgorithm, State

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_size=16, dtype=torch.float32)
MAX_TOKENS = 200
ROW = 2  # of the state; the others hold NaN, or invalid numbers


def random_keys(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_size], with directions that attract and channels that stand out."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(7, SHAPE.num_kv_heads, SHAPE.head_size, generator=generator) * 2
    keys = centers[torch.randint(7, (num_tokens,), generator=generator)]
    return keys + torch.randn(keys.shape, generator=generator)


def random_query(seed: int = 1) -> torch.Tensor:
    """[1, num_heads, head_size]."""
    return torch.randn(1, SHAPE.num_heads, SHAPE.head_size, generator=torch.Generator().manual_seed(seed))


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


def represent(
    algorithm: SparseAlgorithm,
    keys: torch.Tensor,
    num_prompt: int,
    cuts: tuple[int, ...] = (),
    state: State | None = None,
) -> State:
    """Construct the first `num_prompt` keys in chunks cut at `cuts`, then add the others one by one."""
    state = poisoned_state(algorithm, 4) if state is None else state
    bounds = [0, *cuts, num_prompt]
    for first, last in pairwise(bounds):
        algorithm.construct_representations(state, ROW, keys[first:last], first)
    for position in range(num_prompt, len(keys)):
        algorithm.update_representations(
            state, torch.tensor([ROW]), keys[position : position + 1], torch.tensor([position])
        )
    return state


def retrieve(algorithm: SparseAlgorithm, state: State, query: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return algorithm.retrieve_topk(state, torch.tensor([ROW]), query, torch.tensor([num_tokens]))


def chosen(selection: torch.Tensor) -> list[set[int]]:
    """Selected units of each KV head; checks that none repeats and that the newest comes last, then padding."""
    result = []
    for units in selection[0].tolist():
        valid = [unit for unit in units if unit >= 0]
        assert units == valid + [-1] * (len(units) - len(valid))
        assert len(set(valid)) == len(valid) and valid[-1] == max(valid)
        result.append(set(valid))
    return result


def group_of(query: torch.Tensor, kv_head: int) -> torch.Tensor:
    """Query heads of a KV head: [heads, head_size]."""
    per_group = SHAPE.num_heads // SHAPE.num_kv_heads
    return query[0, kv_head * per_group : (kv_head + 1) * per_group]


def best(scores: dict[int, float], num: int) -> set[int]:
    """The keys of the largest values."""
    return set(sorted(scores, key=scores.get, reverse=True)[:num])
