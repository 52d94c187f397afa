"""Recorded selections of decoding requests equal the given ones, and are written in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.selection_recorder import RecordingHotBuffer, SelectionRecorder
from vllm_hisparse.ops.base import HotRows
from vllm_hisparse.trace import RequestTrace, Trace

NUM_SLOTS, TOP_K, BLOCK_SIZE, NUM_DEVICE_BLOCKS = 6, 4, 4, 20
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.12.self_attn.attn"]
SHAPE = HotBufferShape(4, 5, len(LAYERS), TOP_K, 9, BLOCK_SIZE, NUM_DEVICE_BLOCKS, 1, NUM_SLOTS + 1)
CPU = torch.device("cpu")
NOBODY = 19  # first hot block of no request


def make_recorder(directory: Path, rank: int = 0) -> SelectionRecorder:
    return SelectionRecorder(directory, rank, "tiny", TOP_K, 64, LAYERS)


@pytest.fixture
def make_buffer(tmp_path: Path) -> Callable[[], RecordingHotBuffer]:
    def make() -> RecordingHotBuffer:
        buffer = RecordingHotBuffer(SHAPE, CPU, make_recorder(tmp_path))
        add_layers(buffer)
        return buffer

    return make


def add_layers(buffer: MLAHotBuffer) -> None:
    rows = HotRows(torch.zeros(NUM_DEVICE_BLOCKS * (NUM_SLOTS + 1), 1), NUM_SLOTS + 1, NUM_SLOTS + 1)
    for _ in LAYERS:
        buffer.add_layer(rows, torch.zeros(200, 1))


def start(buffer: MLAHotBuffer, first_hot_block_id: int, host_ids: list[int]) -> None:
    buffer.extend_host_block_tables({first_hot_block_id: (0, host_ids)})
    buffer.change_hot_block_tables({first_hot_block_id: (0, [first_hot_block_id])})


def step(buffer: MLAHotBuffer, newest: dict[int, int], selections: torch.Tensor) -> torch.Tensor:
    """Run all layers of one step; return each layer's misses.

    Args:
        newest: first hot block -> newest position.
        selections: [layers, requests, TOP_K].
    """
    buffer.step.plan(torch.tensor([*newest]).int(), torch.tensor([*newest.values()]).int() + 1)
    return torch.stack([buffer.swap_in_of(i)(part.clone()).num_misses.clone() for i, part in enumerate(selections)])


def draw(generator: torch.Generator, newest: dict[int, int]) -> torch.Tensor:
    """Random selections among the known positions, in random order; the first is of fewer than TOP_K."""
    drawn = [
        [torch.randperm(position + 1, generator=generator)[:TOP_K].int() for position in newest.values()]
        for _ in LAYERS
    ]
    drawn[0][0] = torch.cat((drawn[0][0][:-1], torch.tensor([-1], dtype=torch.int32)))
    return torch.stack([torch.stack(part) for part in drawn])


def expected_positions(steps: list[torch.Tensor]) -> np.ndarray:
    """[layers, steps, TOP_K] of [layers, TOP_K] each: ascending, -1 last."""
    rows = [[sorted(layer.tolist(), key=lambda p: (p < 0, p)) for layer in part] for part in steps]
    return np.array(rows).swapaxes(0, 1)


def read_all(directory: Path) -> list[RequestTrace]:
    traces = [Trace.read(path) for path in sorted(directory.iterdir())]
    assert {(t.model, t.top_k, t.row_bytes, t.layers, t.group_ends) for t in traces} == {
        ("tiny", TOP_K, 64, ("0", "12"), (TOP_K,))
    }
    return [request for trace in traces for request in trace.requests]


def test_requests_that_come_and_go_are_recorded_apart(make_buffer, tmp_path: Path) -> None:
    """Two requests side by side; one ends, another takes its first hot block and its index and begins where it ended.
    Padding is nobody's."""
    buffer, generator = make_buffer(), torch.Generator().manual_seed(0)
    plain = MLAHotBuffer(SHAPE, CPU)
    add_layers(plain)
    for each in (buffer, plain):
        start(each, 3, [1, 2, 3, 4])
        start(each, 5, [5, 6, 7, 8])
    given: dict[str, list[torch.Tensor]] = {"first": [], "second": [], "third": []}
    for number in range(5):
        newest = {3: 8 + number, 5: 11 + number, NOBODY: 6}
        selections = draw(generator, newest)
        assert torch.equal(step(buffer, newest, selections), step(plain, newest, selections)), "recording changes it"
        given["first"].append(selections[:, 0])
        given["second"].append(selections[:, 1])
    buffer.release(3)
    start(buffer, 3, [9, 10, 11, 12])
    for number in range(3):
        newest = {3: 13 + number, 5: 16 + number}
        selections = draw(generator, newest)
        step(buffer, newest, selections)
        given["third"].append(selections[:, 0])
        given["second"].append(selections[:, 1])
    buffer.release(5)
    buffer.recorder.close()
    first, second, third = read_all(tmp_path)
    assert [part.first_position for part in (first, second, third)] == [8, 11, 13]
    for part, name in ((first, "first"), (second, "second"), (third, "third")):
        assert np.array_equal(part.positions, expected_positions(given[name])), name


def test_a_gap_begins_another_trace(make_buffer, tmp_path: Path) -> None:
    """A session's next turn skips its prompt, or goes back by a token."""
    buffer = make_buffer()
    start(buffer, 3, [1, 2, 3, 4])
    for newest in (4, 5, 9, 10, 10, 11):
        step(buffer, {3: newest}, torch.tensor([0, 1, 2, 3]).int().expand(len(LAYERS), 1, -1))
    buffer.recorder.close()
    assert [(part.first_position, part.num_steps) for part in read_all(tmp_path)] == [(4, 2), (9, 2), (10, 2)]


def test_a_request_that_never_decoded_leaves_nothing(make_buffer, tmp_path: Path) -> None:
    buffer = make_buffer()
    start(buffer, 3, [1])
    buffer.release(3)
    buffer.recorder.close()
    assert not list(tmp_path.iterdir())


def test_traces_of_earlier_runs_and_of_other_ranks_stay(tmp_path: Path) -> None:
    selected = np.arange(TOP_K, dtype=np.int32)[None, None].repeat(len(LAYERS), 0)
    for rank, first in ((0, 10), (1, 20), (0, 30)):
        recorder = make_recorder(tmp_path / "new", rank)
        recorder.add_step([0], [first], selected)
        recorder.close()
    found = {path.name: Trace.read(path).requests[0].first_position for path in (tmp_path / "new").iterdir()}
    assert found == {"0-000001.trace": 10, "1-000001.trace": 20, "0-000002.trace": 30}


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HiSparseConfigError, match=r"selection_trace_dir: got .*file/traces.*Choose another"):
        make_recorder(tmp_path / "file" / "traces")


def test_a_trace_that_cannot_be_written_does_not_end_the_engine(make_buffer, tmp_path: Path) -> None:
    buffer = make_buffer()
    buffer.recorder.directory = tmp_path / "file"
    (tmp_path / "file").write_text("")
    start(buffer, 3, [1, 2])
    step(buffer, {3: 5}, torch.tensor([0, 1, 2, 3]).int().expand(len(LAYERS), 1, -1))
    buffer.release(3)
    buffer.recorder.close()
