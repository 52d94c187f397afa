"""The torch reference of the kernel that selects positions, against `torch.topk`."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.ops.select_positions import can_select, select_positions

LENGTHS = [-1, 0, 1, 7, 8, 9, 10, 33, 64, 65]
SCORES = {
    "random": lambda shape: torch.randn(shape),
    "few values": lambda shape: torch.randint(-3, 4, shape).float(),
    "equal": lambda shape: torch.full(shape, 5.0),
    "infinite": lambda shape: torch.where(torch.rand(shape) < 0.2, torch.inf, -torch.inf),
}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_positions_are_the_best(kind: str, top_k: int) -> None:
    torch.manual_seed(top_k)
    scores, lengths = SCORES[kind]((len(LENGTHS), 67)), torch.tensor(LENGTHS, dtype=torch.int32)
    for row, length in zip(scores, LENGTHS, strict=True):
        row[max(length, 0) :] = torch.nan
    wide = torch.full((len(LENGTHS), top_k + 3), -7, dtype=torch.int32)
    select_positions(scores, lengths, wide[:, :top_k])
    assert (wide[:, top_k:] == -7).all()
    for row, length, found in zip(scores.tolist(), LENGTHS, wide[:, :top_k].tolist(), strict=True):
        if length <= top_k:
            expected = list(range(length))
            assert found == expected + [-1] * (top_k - len(expected))
            continue
        lowest = torch.tensor(row[:length]).topk(top_k).values[-1].item()
        better = [position for position in range(length) if row[position] > lowest]
        equal = [position for position in range(length) if row[position] == lowest]
        assert found == better + equal[: top_k - len(better)]


def test_no_query_selects_nothing() -> None:
    positions = torch.empty(0, 8, dtype=torch.int32)
    select_positions(torch.empty(0, 64), torch.empty(0, dtype=torch.int32), positions)
    assert positions.shape == (0, 8)


def test_rows_that_are_not_aligned_are_left_to_vllm() -> None:
    """vLLM cuts scores to the longest context, but their rows stay as far apart as they were."""
    scores, lengths = torch.rand(4, 256), torch.ones(2, 2, dtype=torch.int32)
    assert can_select(scores[:, :131], lengths) and can_select(scores[2:, :131], lengths[:1])
    assert not can_select(scores[:, 1:132], lengths), "the first score is not aligned"
    assert not can_select(scores[:, ::4], lengths), "scores are apart"
    assert not can_select(torch.rand(4, 131), lengths), "later rows are not aligned"
