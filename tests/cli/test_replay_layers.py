"""Rows by layer: misses of all sizes beside replayed buffers, and divisions beside those that a search finds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from test_replay import random_trace
from typer.testing import CliRunner

from vllm_hisparse.cli.main import app
from vllm_hisparse.cli.replay_buffers import Replay, sequences
from vllm_hisparse.cli.replay_layers import STEP, LayerMisses, by_layer, from_others
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.trace import Trace

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"


@pytest.mark.parametrize("size", [1, 1.5, 3, 8])
def test_misses_of_every_size_are_those_of_replayed_buffers(size: float) -> None:
    trace = random_trace(1, top_k=32, num_steps=60, first_position=500, num_layers=3, num_requests=2, sticky=0.8)
    misses = LayerMisses.of(trace)
    replay = Replay.run(trace, sequences(trace), "lru", "buffers", round(size * 32))
    place = round((size - 1) / STEP)
    found = misses.missed[..., place]
    assert np.abs(found - replay.missed).mean() <= 0.1 * replay.missed.mean(), (
        "more than ties that are broken otherwise"
    )
    assert found.sum() == pytest.approx(replay.missed.sum(), rel=0.03)
    assert (np.diff(misses.missed, axis=-1) <= 1e-9).all(), "a larger buffer misses more"


def layered(*curves: list[float], num_steps: int = 400) -> LayerMisses:
    """Layers that miss the same in every step."""
    missed = np.broadcast_to(np.array(curves)[None, :, None], (1, len(curves), num_steps, len(curves[0])))
    sizes = 1 + STEP * np.arange(len(curves[0]))
    return LayerMisses(tuple(map(str, range(len(curves)))), 100, sizes, missed)


def test_the_best_division_is_that_of_a_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        curves = [(50 * np.sort(rng.random(7))[::-1] ** 2).tolist() for _ in range(3)]
        curves = [np.minimum.accumulate(np.sort(curve)[::-1]).tolist() for curve in curves]
        convex = [np.sort(-np.diff(curve))[::-1] for curve in curves]  # greedy choices are best for such curves alone
        curves = [[60.0, *(60 - drops.cumsum())] for drops in convex]
        misses = layered(*curves, num_steps=2)
        found, sizes = misses.best(1.5, 0)
        budget = 6
        best = min(
            sum(curve[at] for curve, at in zip(curves, places, strict=True))
            for places in product(range(7), repeat=3)
            if sum(places) <= budget
        )
        assert found * 3 == pytest.approx(best) and sizes.sum() <= 3 * 1.5


def test_a_cliff_is_seen_from_afar() -> None:
    flat, cliff = [50.0] * 9, [50.0] * 6 + [0.0] * 3
    found, sizes = layered(flat, cliff).best(2.0, 0)
    assert sizes.tolist() == [1.0, 2.5] and found == 25.0


def test_each_layer_keeps_its_least_share() -> None:
    falls, flat = [50.0 - index for index in range(41)], [50.0] * 41
    misses = layered(falls, flat)
    assert misses.best(4.0, 0)[1].tolist() == [7.0, 1.0]
    found, sizes = misses.best(4.0, 0, least_share=0.5)
    assert sizes.tolist() == [6.0, 2.0] and found == misses.divided(sizes, 0) == 40.0
    assert misses.rows_by_layer(4.0, 0, least_share=0.5) == [1.5, 0.5]
    assert misses.shared([3.0, 1.0], 4.0, 0) == found, "shares are relative to each other"
    assert misses.best(1.5, 0, least_share=0.5)[1].tolist() == [2.0, 1.0], "a layer without room for a selection"


@pytest.mark.parametrize("size", [1, 1.75, 2, 3.5, 16])
def test_shares_leave_room_for_a_selection_in_two(size: float) -> None:
    """A layer needs room for one selection and new tokens if `device_buffer_size` is two selections."""
    convex = [100 * 0.7**index for index in range(61)]
    for curves in ([convex, [5.0] * 61, [1.0] * 61], [convex] * 5, [[0.0] * 61] * 2):
        shares = np.array(layered(*curves, num_steps=2).rows_by_layer(size, 0))
        assert shares.min() * 2 >= 1.0625 and shares.mean() == pytest.approx(1, abs=0.005)
        assert (shares == np.round(shares, 2)).all()


def test_blocks_of_few_rows_need_a_larger_least_share() -> None:
    """A block has 405 rows of 61 layers: rounded down, 0.54 of a mean layer's rows are 3, and 0.61 are 4."""
    falls, flat = [50.0 - index for index in range(41)], [50.0] * 41
    misses = layered(falls, flat).of_layers([min(layer % 4, 1) for layer in range(61)])

    def check(shares: list[float]) -> None:
        config = HiSparseConfig(host_pool_gib=1, device_buffer_size=4096, top_k=2048, rows_by_layer=shares)
        row_shares = config.row_shares([True] * 61)
        config.check_rows_by_layer(KVLayout(656, 132, 61, 61, narrow_key_bytes=68, row_shares=row_shares))

    with pytest.raises(HiSparseConfigError, match="the layer with the smallest share has"):
        check(misses.rows_by_layer(4.0, 0))
    check(misses.rows_by_layer(4.0, 0, least_share=0.61))


def test_layers_that_come_several_times() -> None:
    misses = layered([4.0, 2.0], [8.0, 0.0], num_steps=2).of_layers([0, 1, 0])
    assert misses.layers == ("0", "1", "0") and misses.missed[0, :, 0].tolist() == [[4.0, 2.0], [8.0, 0.0], [4.0, 2.0]]


def test_the_controller_moves_rows_where_they_are_missed_and_stays() -> None:
    convex = [100 * 0.7**index for index in range(30)]
    misses = layered([90.0 - index for index in range(30)], convex, [5.0] * 30)
    found, sizes = misses.controlled(3.0, 200)
    assert sizes.sum() == pytest.approx(9.0), "the memory is the same"
    assert found < misses.equal(3.0, 200) and found <= 1.1 * misses.best(3.0, 200)[0]
    assert sizes[2] < 2 < sizes[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("code-dsa", {2.25: 0.98, 4: 0.91, 4.75: 0.85, 8: 0.68, 16: 0.33}),
        ("code-dsa-8192", {2.25: 0.93, 4: 0.72, 4.75: 0.62, 8: 0.29, 16: 0.05}),
    ],
)
def test_committed_traces(name: str, expected: dict[float, float]) -> None:
    misses = LayerMisses.of(Trace.read(TRACES / f"{name}.trace"))
    for size, share in expected.items():
        row = by_layer(misses, size, 32)
        assert row["best"] == pytest.approx(share, abs=0.011)
        assert row["best"] <= row["controller"] <= 1.03 and row["best"] <= row["fixed"] <= 1
        assert sum(row["best_sizes"]) <= size * len(misses.layers) + 1e-6


def test_a_division_is_tried_on_files_from_which_it_was_not_learned() -> None:
    falls, flat = [50.0 - index for index in range(41)], [50.0] * 41
    first, other = layered(falls, flat, num_steps=2), layered(flat, falls, num_steps=2)
    misses = replace(first, missed=np.concatenate([first.missed, other.missed, other.missed]))
    found = from_others(misses, [1, 2], 4.0, 0, least_share=0.5)
    own, others = misses.of_requests(np.array([0])), misses.of_requests(np.array([1, 2]))
    assert found == [
        round(one.shared(other.rows_by_layer(4.0, 0, 0.5), 4.0, 0) / one.equal(4.0, 0), 3)
        for one, other in ((own, others), (others, own))
    ]
    assert min(found) > 1, "the files need opposite divisions"


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Files of two traces."""
    found = [tmp_path / f"{index}.trace" for index in range(2)]
    for index, path in enumerate(found):
        random_trace(index, top_k=16, num_steps=50, first_position=300, num_layers=2).write(path)
    return [str(path) for path in found]


def shown_lists(output: str) -> dict[str, list[float]]:
    """Return the lists of the command's output, as a configuration has them, by the size before them."""
    lines = [line.partition(" top-k: ") for line in output.splitlines() if "rows_by_layer" in line]
    return {size: json.loads("{" + entry + "}")["rows_by_layer"] for size, _, entry in lines}


def test_the_command_shows_lists_for_the_configuration(paths: list[str]) -> None:
    result = CliRunner().invoke(app, ["replay", paths[0], "--by-layer", "--size", "2", "--size", "4"])
    assert result.exit_code == 0, result.output
    assert "rows by layer: " in result.output
    misses = LayerMisses.of(Trace.read(Path(paths[0])))
    assert shown_lists(result.output) == {f"{size:g}": misses.rows_by_layer(size, 32) for size in (2.0, 4.0)}


def test_the_command_learns_one_list_from_several_files(paths: list[str]) -> None:
    command = ["replay", *paths, "--by-layer", "--size", "4", "--least-share", "0.9"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    misses = LayerMisses.of(Trace.join([Trace.read(Path(path)) for path in paths]))
    assert shown_lists(result.output) == {"4": misses.rows_by_layer(4.0, 32, 0.9)}
    for share in from_others(misses, [1, 1], 4.0, 32, 0.9):
        assert f"{share:.2f}" in result.output


@pytest.mark.parametrize("sticky", [0.8, 0.95])
def test_misses_differ_from_those_of_replayed_buffers_by_one_row_at_most(paths: list[str], sticky: float) -> None:
    """The caption says so, and why."""
    trace = random_trace(2, top_k=32, num_steps=60, first_position=500, num_layers=2, sticky=sticky)
    misses = LayerMisses.of(trace)
    for size in (1.0, 2.0, 4.0, 8.0):
        replay = Replay.run(trace, sequences(trace), "lru", "buffers", round(size * 32))
        assert abs(replay.missed_per_step(0) - misses.equal(size, 0)) < 1
    result = CliRunner().invoke(app, ["replay", paths[0], "--by-layer", "--size", "4"])
    shown = " ".join(result.output.split())
    assert "differs by about one row at most from the table without --by-layer: here the newest row keeps" in shown
