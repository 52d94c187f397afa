from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.algorithms.oracle import Oracle
from vllm_hisparse.algorithms.testing import SHAPE, chosen, random_keys, random_query, represent, retrieve

from .testing import best, group_of, make


def weights_of(keys, query, kv_head: int) -> dict[int, float]:
    """Attention weight of each position, summed over the query heads."""
    total = dict.fromkeys(range(len(keys)), 0.0)
    for q in group_of(query, kv_head):
        exponentials = [math.exp(float(q @ k) / SHAPE.head_size**0.5) for k in keys[:, kv_head]]
        for position, value in enumerate(exponentials):
            total[position] += value / sum(exponentials)
    return total


@given(num_tokens=st.integers(1, 60), seed=st.integers(0, 1000))
def test_selects_the_largest_weights(num_tokens: int, seed: int) -> None:
    keys, query, algorithm = random_keys(num_tokens, seed), random_query(seed), make(Oracle, budget=12)
    selected = chosen(retrieve(algorithm, represent(algorithm, keys, num_tokens // 2), query, num_tokens))
    for kv_head in range(SHAPE.num_kv_heads):
        weights = weights_of(keys, query, kv_head)
        weights[num_tokens - 1] = float("inf")
        assert selected[kv_head] == best(weights, 12)


def test_no_other_selection_holds_more_weight() -> None:
    keys, query, algorithm = random_keys(10), random_query(), make(Oracle, budget=4)
    selected = chosen(retrieve(algorithm, represent(algorithm, keys, 5), query, 10))
    for kv_head in range(SHAPE.num_kv_heads):
        weights = weights_of(keys, query, kv_head)
        others = (sum(weights[p] for p in (*some, 9)) for some in itertools.combinations(range(9), 3))
        assert sum(weights[position] for position in selected[kv_head]) >= max(others) - 1e-6
