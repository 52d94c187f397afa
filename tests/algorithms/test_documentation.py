"""Statements of docs/algorithms.md are true: its example works, its options and bytes are the code's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from vllm_hisparse.algorithms.base import AttentionShape
from vllm_hisparse.algorithms.registry import ALGORITHMS, find_algorithm
from vllm_hisparse.algorithms.testing import (
    REQUEST,
    SHAPE,
    check,
    chosen,
    random_keys,
    random_query,
    represent,
    retrieve,
)

from .testing import best, group_of, make, state_bytes

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
EXAMPLE, OPTIONS_EXAMPLE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
DENSE = [name for name in ALGORITHMS if find_algorithm(name).model_family == "gqa"]


@pytest.fixture
def mean_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The example's class, found as users would name it."""
    (tmp_path / "example_algorithm.py").write_text(EXAMPLE + OPTIONS_EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    yield find_algorithm("example_algorithm.MeanPage")
    sys.modules.pop("example_algorithm")


def test_the_example_selects_pages_by_their_mean(mean_page) -> None:
    keys, query, algorithm = random_keys(150), random_query(), make(mean_page, budget=48)
    selected = chosen(retrieve(algorithm, represent(algorithm, keys, 70, (20, 33)), query, 150))
    for kv_head in range(SHAPE.num_kv_heads):
        means = [page.mean(0) for page in keys[:, kv_head].split(16)]
        scores = {page: float((group_of(query, kv_head) @ mean).max()) for page, mean in enumerate(means)}
        scores[9] = float("inf")
        assert selected[kv_head] == best(scores, 3)


def test_the_example_does_not_depend_on_chunks(mean_page) -> None:
    keys, algorithm = random_keys(90), make(mean_page)
    pieces, whole = represent(algorithm, keys, 70, (5, 33)), represent(algorithm, keys, 90)
    torch.testing.assert_close(pieces["sums"][REQUEST][:6], whole["sums"][REQUEST][:6])


@pytest.mark.parametrize("name", ["MeanPage", "SinkPage"])
def test_the_examples_pass_all_checks(mean_page, name: str) -> None:
    check(f"example_algorithm.{name}")


def test_the_example_with_options_always_selects_its_sinks(mean_page) -> None:
    algorithm = make(find_algorithm("example_algorithm.SinkPage"), budget=48, sink_tokens=20)
    assert algorithm.min_budget(algorithm.options) == 48
    state = represent(algorithm, random_keys(150), 70)
    for seed in range(5):
        assert chosen(retrieve(algorithm, state, random_query(seed), 150)) == [{0, 1, 9}] * SHAPE.num_kv_heads


def test_the_example_is_short() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 40


@pytest.mark.parametrize("name", DENSE)
def test_documented_bytes_are_the_declared_ones(name: str) -> None:
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    algorithm = make_documented(name, shape)
    documented = re.search(rf"^\| `{name}` \| [^|]* \| (\d+) \|$", TEXT, re.MULTILINE).group(1)
    assert int(documented) == round(state_bytes(algorithm, algorithm.max_tokens) / algorithm.max_tokens)


def make_documented(name: str, shape: AttentionShape):
    algorithm = find_algorithm(name)
    return algorithm(algorithm.Options(), shape, 2048, 32768)


@pytest.mark.parametrize("name", DENSE)
def test_documented_options_are_all_there_are(name: str) -> None:
    section = TEXT[TEXT.index("## Options") : TEXT.index("## Memory")]
    block = re.search(rf"^\| `{name}` \|.*?(?=^\| `|\n\n)", section, re.MULTILINE | re.DOTALL)
    options = find_algorithm(name).Options()
    for option, value in options.model_dump().items():
        assert block and f"`{option}`" in block.group(0) and str(value) in block.group(0)
    assert bool(block) == bool(options.model_dump())
