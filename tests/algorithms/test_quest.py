from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.algorithms.base import State
from vllm_hisparse.algorithms.quest import Quest
from vllm_hisparse.algorithms.testing import REQUEST, SHAPE, chosen, random_keys, random_query, represent, retrieve

from .testing import best, group_of, make, state_bytes


def check_bounds(algorithm: Quest, keys: torch.Tensor, query: torch.Tensor, state: State) -> None:
    """Every page's score is at least the dot product of every query head with every key of the page."""
    scores = algorithm.upper_bounds(state, torch.tensor([REQUEST]), query, torch.tensor([len(keys)]))[0]
    for kv_head in range(SHAPE.num_kv_heads):
        products = keys[:, kv_head] @ group_of(query, kv_head).T
        for position, product in enumerate(products.amax(1)):
            bound = scores[kv_head, position // algorithm.tokens_per_unit]
            assert bound >= product - 1e-4, f"the bound of position {position} does not bound"


@pytest.mark.long
@given(num_tokens=st.integers(1, 90), page_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 1000))
def test_bounds_bound_the_scores(num_tokens: int, page_size: int, seed: int) -> None:
    keys, query, algorithm = random_keys(num_tokens, seed), random_query(seed), make(Quest, page_size=page_size)
    check_bounds(algorithm, keys, query, represent(algorithm, keys, num_tokens // 2))


class WrongSign(Quest):
    """Takes the other end of each interval: a lower bound."""

    def upper_bounds(self, state, rows, query, num_tokens) -> torch.Tensor:
        return -super().upper_bounds(state, rows, -query, num_tokens)


class WrongPage(Quest):
    """Forgets the first key of a page that generated tokens begin."""

    def update_representations(self, state, rows, keys, positions) -> None:
        if positions % self.tokens_per_unit:
            super().update_representations(state, rows, keys, positions)


class MeansOnly(Quest):
    """Scores a page by the middle of its bounds."""

    def upper_bounds(self, state, rows, query, num_tokens) -> torch.Tensor:
        high, low = (super(MeansOnly, self).upper_bounds(state, rows, q, num_tokens) for q in (query, -query))
        return (high - low) / 2


@pytest.mark.parametrize("wrong", [WrongSign, WrongPage, MeansOnly])
def test_a_wrong_bound_is_noticed(wrong: type[Quest]) -> None:
    keys, query, algorithm = random_keys(90), random_query(), make(wrong)
    with pytest.raises(AssertionError, match="does not bound"):
        check_bounds(algorithm, keys, query, represent(algorithm, keys, 40))


@pytest.mark.long
@given(num_tokens=st.integers(1, 150), budget=st.sampled_from([16, 32, 64]), seed=st.integers(0, 1000))
def test_selects_as_algorithm_1(num_tokens: int, budget: int, seed: int) -> None:
    keys, query, algorithm = random_keys(num_tokens, seed), random_query(seed), make(Quest, budget)
    state = represent(algorithm, keys, num_tokens // 2)
    selected = chosen(retrieve(algorithm, state, query, num_tokens))
    for kv_head in range(SHAPE.num_kv_heads):
        scores = {}
        for page in range(-(-num_tokens // 16)):
            block = keys[page * 16 : (page + 1) * 16, kv_head]
            m, big_m = block.min(0).values, block.max(0).values
            scores[page] = max(float(torch.maximum(q * m, q * big_m).sum()) for q in group_of(query, kv_head))
        scores[(num_tokens - 1) // 16] = float("inf")
        assert selected[kv_head] == best(scores, budget // 16)


def test_defaults_are_the_papers() -> None:
    assert Quest.Options().page_size == 16 and Quest.num_full_kv_layers == 2 and Quest.graph_capturable
    algorithm = make(Quest, max_tokens=160)
    assert state_bytes(algorithm, 160) / 160 == 2 * SHAPE.num_kv_heads * SHAPE.head_size * 4 / 16
