from __future__ import annotations

import pytest

from vllm_hisparse.algorithms.streaming_llm import StreamingLLM
from vllm_hisparse.algorithms.testing import chosen, random_query, retrieve

from .testing import make


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, {0}), (16, {0}), (17, {0, 1}), (64, {0, 1, 2, 3}), (65, {0, 2, 3, 4}), (200, {0, 10, 11, 12})],
)
def test_selects_sinks_and_the_latest_pages(num_tokens: int, expected: set[int]) -> None:
    algorithm = make(StreamingLLM, budget=64)
    assert chosen(retrieve(algorithm, {}, random_query(), num_tokens)) == [expected, expected]


def test_token_by_token_it_is_the_paper() -> None:
    algorithm = make(StreamingLLM, budget=20, page_size=1)
    window = {0, 1, 2, 3, *range(84, 100)}
    assert chosen(retrieve(algorithm, {}, random_query(), 100)) == [window, window]


def test_without_sinks_it_is_a_window() -> None:
    algorithm = make(StreamingLLM, budget=5, page_size=1, sink_tokens=0)
    assert chosen(retrieve(algorithm, {}, random_query(), 100))[0] == {95, 96, 97, 98, 99}


@pytest.mark.parametrize(("options", "least"), [({}, 32), ({"sink_tokens": 17}, 48), ({"sink_tokens": 0}, 16)])
def test_least_budget_is_sinks_and_a_page(options: dict, least: int) -> None:
    assert StreamingLLM.min_budget(StreamingLLM.Options(**options)) == least


def test_keeps_no_state() -> None:
    assert make(StreamingLLM).state_fields() == {} and StreamingLLM.graph_capturable
