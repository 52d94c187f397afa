"""Figures of locality against plain sets, on small random traces."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_hisparse.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
TOP_K, RANKS, STEPS, PROMPT, LAYERS = 6, 12, 30, 50, ("0", "1", "draft")


@pytest.fixture
def locality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.locality")


def random_ranks(seed: int) -> np.ndarray:
    """[layers, steps, ranks] of scores that drift."""
    random = np.random.default_rng(seed)
    scores, positions = random.random((len(LAYERS), PROMPT + STEPS)), []
    for step in range(STEPS):
        scores = 0.8 * scores + 0.2 * random.random(scores.shape)
        positions.append((-scores[:, : PROMPT + step + 1]).argsort(1)[:, :RANKS])
    return np.stack(positions, 1)


@pytest.fixture
def trace() -> Trace:
    ranked = [(PROMPT, random_ranks(seed)) for seed in range(2)]
    return Trace.from_ranked("random", TOP_K, 16, LAYERS, (TOP_K, 9, RANKS), ranked)


def sets(trace: Trace, request: int, layer: int, step: int, first: int, last: int) -> set[int]:
    """Positions of the ranks first to last, except the newest and what came after it."""
    return set(trace.requests[request].positions[layer, step, first:last].tolist()) - {-1}


def test_next_ranks(locality: ModuleType, trace: Trace) -> None:
    warm_up, new_share, in_next = 3, [], []
    for layer in range(len(LAYERS)):
        counts = np.zeros(4)
        for request in range(2):
            for step in range(warm_up, STEPS):
                newest = PROMPT + step
                before = [sets(trace, request, layer, step - 1, 0, end) for end in (TOP_K, 9, RANKS)]
                # The newest row of the step before is in no ranks: it was hot then without being selected from host.
                before = [ranks - {newest - 1} for ranks in before]
                selected = sets(trace, request, layer, step, 0, TOP_K) - {newest}
                new = selected - before[0]
                counts += [len(selected), len(new), len(new & before[1]), len(new & before[2])]
        new_share.append(counts[1] / counts[0])
        in_next.append(counts[2:] / counts[1])
    found_new, found_next = locality.next_ranks(trace, warm_up)
    assert found_new[:-1] == pytest.approx(new_share)
    assert found_next[:-1] == pytest.approx(np.array(in_next))
    assert min(new_share) < found_new[-1] < max(new_share)


def plain_coverage(trace: Trace, layer: int, predicted_of, warm_up: int) -> dict[str, float]:
    """Compute the coverage directly, over the selections of the step before."""
    needed, fetched, covered, steps, recent, random = 0, 0, 0, 0, 0, 0.0
    for request in range(2):
        for step in range(warm_up, STEPS):
            newest = PROMPT + step
            hot = sets(trace, request, layer, step - 1, 0, TOP_K) - {newest - 1}
            target = sets(trace, request, layer, step, 0, TOP_K) - {newest} - hot
            predicted = predicted_of(request, step) - hot - {newest}
            cold = [position for position in range(newest) if position not in hot]
            latest = set(cold[len(cold) - len(predicted) :])
            steps, needed, fetched = steps + 1, needed + len(target), fetched + len(predicted)
            covered, recent = covered + len(target & predicted), recent + len(target & latest)
            random += len(predicted) * len(target) / len(cold)
    shares = {"coverage": covered, "coverage_random": random, "coverage_recent": recent}
    means = {"needed_rows": round(needed / steps, 1), "fetched_rows": round(fetched / steps, 1)}
    return means | {name: round(found / needed, 4) for name, found in shares.items()}


def test_predictors(locality: ModuleType, trace: Trace) -> None:
    found = {(row["predictor"], row["layer"]): row for row in locality.predictor_rows(trace, [0], 2)}
    expected = {
        ("runners-up of the step before", "1"): lambda request, step: sets(trace, request, 1, step - 1, TOP_K, RANKS),
        ("draft layer in the step before", "1"): lambda request, step: sets(trace, request, 2, step - 1, 0, TOP_K),
        ("previous layer in the step before", "1"): lambda request, step: sets(trace, request, 0, step - 1, 0, TOP_K),
        ("previous layer in the same step", "1"): lambda request, step: sets(trace, request, 0, step, 0, TOP_K),
        ("newest row of the step before", "1"): lambda request, step: {PROMPT + step - 1},
    }
    for key, predicted_of in expected.items():
        figures = plain_coverage(trace, 1, predicted_of, 2)
        assert {name: found[key][name] for name in figures} == figures, key
    assert ("previous layer in the same step", "0") not in found
    assert ("draft layer in the step before", "draft") not in found


def test_a_buffer_that_holds_everything_needs_nothing(locality: ModuleType, trace: Trace) -> None:
    rows = list(locality.predictor_rows(trace, [PROMPT + STEPS], 2))
    assert {row["needed_rows"] for row in rows} == {row["fetched_rows"] for row in rows} == {0.0}


def is_private_lru(row: dict) -> bool:
    return (row["policy"], row["scope"], row["layer"], row["buffer_rows"]) == ("lru", "buffers", "all", 3 * TOP_K)


@pytest.mark.slow
def test_the_command_writes_rows_and_a_picture(locality: ModuleType, trace: Trace, tmp_path: Path) -> None:
    trace.write(tmp_path / "small.trace")
    for name, prompt in (("short", PROMPT), ("long", 2 * PROMPT)):
        selected = random_ranks(5)[:2, :, :TOP_K]
        Trace.from_ranked("random", TOP_K, 16, LAYERS[:2], (TOP_K,), [(prompt, selected)]).write(tmp_path / name)
    options = {"trace": "small.trace", "output": "locality.json", "picture": "locality.png"}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(tmp_path / value))]
    arguments += [part for name in ("short", "long") for part in ("--engine-trace", str(tmp_path / name))]
    arguments += ["--size", "1", "--size", "3", "--warm-up", "2"]
    CliRunner().invoke(locality.app, arguments, catch_exceptions=False)
    rows = json.loads((tmp_path / "locality.json").read_text())["rows"]
    engine = [row for row in rows if row["source"] == "engine"]
    hits = [row for row in rows if "policy" in row and row["source"] == "text"]
    names = {"model", "layer", "context", "policy", "buffer_rows", "hit_rate", "new_rows_in_next_ranks"}
    assert all(names <= set(row) and row["context"] == PROMPT + STEPS for row in hits)
    assert {row["buffer_rows"] for row in hits} == {TOP_K, 3 * TOP_K}
    assert {row["layer"] for row in hits} == {*LAYERS, "all"}
    assert set(hits[0]["new_rows_in_next_ranks"]) == {"1.5", "2"}
    short, long = PROMPT + STEPS, 2 * PROMPT + STEPS
    cases = {(row["shortest_context"], row["context"], row["requests"]) for row in engine}
    assert cases == {(short, short, 1), (long, long, 1), (short, long, 2)}
    assert {row["policy"] for row in engine} == {"lru", "lrfu", "belady"}
    rates = {(row["context"], row["requests"]): row["hit_rate"] for row in engine if is_private_lru(row)}
    apart = rates[short, 1] + rates[long, 1]
    assert rates[long, 2] == pytest.approx(apart / 2, abs=0.02)  # buffers of their own: the mean, but for the newest
    assert (tmp_path / "locality.png").stat().st_size > 0


def test_a_trace_is_made_of_recorded_selections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT)
    app = importlib.import_module("benchmarks.traces").app
    positions = np.stack([random_ranks(seed) for seed in range(2)]).astype(np.uint16)
    tokens = np.zeros((2, PROMPT + STEPS + 1), np.uint16)
    np.savez_compressed(tmp_path / "selections.npz", positions=positions, tokens=tokens, top_k=TOP_K)
    shape = importlib.import_module("benchmarks.dsa_model").Shape(num_hidden_layers=positions.shape[1] - 1)
    (tmp_path / "config.json").write_text(json.dumps(shape.hf_config(1024)))
    options = {"selections": tmp_path / "selections.npz", "model": tmp_path, "output": tmp_path / "made.trace"}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    CliRunner().invoke(app, [*arguments, "--num-steps", "10"], catch_exceptions=False)
    made = Trace.read(tmp_path / "made.trace")
    assert (made.top_k, made.row_bytes, made.group_ends) == (TOP_K, 1152, (6, 8, 9, 12))
    for request, expected in zip(made.requests, positions[:, :, -10:], strict=True):
        assert request.first_position == PROMPT + STEPS - 10
        assert np.array_equal(np.sort(expected[..., :TOP_K], -1), request.positions[..., :TOP_K])
