"""Selection of units by score: what is never selected, and that valid units come first."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.ops.select_units import select_units

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("hole", [NAN, -INFINITY])
@pytest.mark.parametrize(
    ("num_selected", "expected"),
    [(4, [0, 2, 3, 5]), (3, [2, 3, 5]), (6, [0, 2, 3, 4, 5, -1])],
)
def test_a_unit_without_a_score_is_not_selected(hole: float, num_selected: int, expected: list[int]) -> None:
    """Nor does it cost a valid unit its place, or stand before one."""
    scores = torch.tensor([[[1.0, hole, 3.0, 2.0, 0.0, NAN]]])  # of units 0 to 5, the newest last
    selected = select_units(scores, torch.tensor([6]), 1, num_selected)[0, 0].tolist()
    count = sum(unit >= 0 for unit in expected)
    assert sorted(selected[:count]) == expected[:count] and selected[count:] == expected[count:]
    assert selected[count - 1] == 5


def test_no_unit_has_a_score() -> None:
    scores = torch.full((1, 2, 5), NAN)
    assert select_units(scores, torch.tensor([5]), 1, 3).tolist() == [[[4, -1, -1]] * 2]
