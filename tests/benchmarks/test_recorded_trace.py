"""Recorded selections for the swap-in benchmark; the benchmark itself needs a GPU (`tests/gpu`)."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import typer

from vllm_hisparse.trace import Trace

TOP_K, STEPS, PROMPT = 4, 20, 40


@pytest.fixture
def swap_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    module = importlib.import_module("benchmarks.swap_in")
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    return module


@pytest.fixture
def trace() -> Trace:
    random, ranked = np.random.default_rng(0), []
    for first_position in (PROMPT, PROMPT + 7):
        steps = [random.permutation(first_position + step + 1)[:8] for step in range(STEPS)]
        ranked.append((first_position, np.stack([steps, steps[::-1]]) % (first_position + 1)))
    for _, positions in ranked:  # distinct again
        for selection in positions.reshape(-1, 8):
            selection[:] = random.permutation(PROMPT)[:8]
    return Trace.from_ranked("random", TOP_K, 16, ("0", "draft"), (TOP_K, 8), ranked)


def test_selections_are_those_of_the_trace(swap_in: ModuleType, trace: Trace) -> None:
    """Five requests: two recorded ones in turns, which start 0, 5 and 10 steps late; 10 of 20 steps are used."""
    recorded = swap_in.RecordedTrace(trace, "draft", 5, 10, 4, 6)
    assert (len(recorded.warmup), len(recorded.timed)) == (3 + 4, 6)
    selections = torch.stack(recorded.warmup + recorded.timed)
    assert selections.dtype == torch.int32 and selections.shape == (13, 5, TOP_K)
    for number, first in enumerate((0, 0, 5, 5, 10)):
        request = trace.requests[number % 2]
        start = request.first_position + first
        assert selections[:3, number].flatten().tolist() == list(range(start - 12, start))
        expected = request.positions[1, first : first + 10, :TOP_K]
        assert selections[3:, number].tolist() == expected.tolist()
    case = recorded.case
    assert (case.batch, case.row_bytes, case.device_buffer_size, case.top_k) == (5, 16, 10, TOP_K)
    assert case.context - 1 > int(selections.max())


def test_hot_rows_of_recorded_selections_are_right(swap_in: ModuleType, trace: Trace) -> None:
    """The plugin's reference op swaps them in; misses are counted from buffers that hold the prompts' last rows."""
    recorded = swap_in.RecordedTrace(trace, "0", 3, 10, 4, 6)
    case = recorded.case
    num_blocks = case.batch * case.num_host_blocks
    host_rows = torch.randint(0, 255, ((num_blocks + 1) * swap_in.BLOCK_SIZE, case.row_bytes), dtype=torch.uint8)
    tables = (torch.randperm(num_blocks) + 1).view(case.batch, -1).int()
    system = swap_in.Ours(case, host_rows, tables, 6)
    for selected in recorded.warmup:
        system.swap_in(selected, 0)
    for step, selected in enumerate(recorded.timed):
        system.swap_in(selected, step)
        swap_in.check_rows(system, selected, step, host_rows)
    assert 0 < sum(map(system.num_misses, range(6))) < 6 * 3 * TOP_K


def test_overlap(swap_in: ModuleType) -> None:
    steps = torch.tensor([[[1, 2], [5, 6]], [[2, 3], [5, 6]], [[4, 5], [6, 5]]])
    assert swap_in.mean_overlap(steps) == (0.5 + 1 + 0 + 1) / 4


def test_too_many_requests_are_refused(swap_in: ModuleType, trace: Trace) -> None:
    swap_in.RecordedTrace(trace, "0", 22, 8, 4, 6)
    with pytest.raises(typer.BadParameter, match="the trace has 20 steps"):
        swap_in.RecordedTrace(trace, "0", 23, 8, 4, 6)
