"""The comparison of completions by other batches finds damage, and lets ties pass."""

from __future__ import annotations

import pytest
from conftest import BATCHING_TOLERANCE, TIE_MARGIN, assert_same_but_rounding

FULL = {"tokens": [5, 6, 7], "logprobs": [-0.5, -0.6, -0.7], "margins": [2.0, TIE_MARGIN, 2 * BATCHING_TOLERANCE]}
WIDE_TIE = {**FULL, "tokens": [5, 9, 8]}
CLOSE_TIE = {**FULL, "tokens": [5, 6, 9]}


def test_ties_pass():
    assert_same_but_rounding([WIDE_TIE, FULL], [FULL] * 2)
    assert_same_but_rounding([WIDE_TIE, CLOSE_TIE, CLOSE_TIE], [FULL] * 3)
    assert_same_but_rounding([WIDE_TIE] * 2 + [FULL] * 3, [FULL] * 5)


@pytest.mark.parametrize(
    "damaged",
    [
        [{**FULL, "tokens": [9, 6, 7]}],
        [{**FULL, "logprobs": [-0.5, -0.6, -0.7 - 3.1 * BATCHING_TOLERANCE]}],
        [WIDE_TIE] * 2,
        [WIDE_TIE] * 3 + [FULL] * 3,
    ],
    ids=["no tie", "logprobs", "two ties of two", "three ties of six"],
)
def test_damage_is_found(damaged: list[dict]):
    with pytest.raises(AssertionError):
        assert_same_but_rounding(damaged, [FULL] * len(damaged))


def test_as_many_completions_are_expected():
    with pytest.raises(AssertionError):
        assert_same_but_rounding([FULL], [FULL] * 2)
