"""Costs of a step, learned from steps."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from vllm_hisparse.kv_manager.blocks.decode_model import DecodeModel, StepCosts, bounded_least_squares

COSTS = StepCosts(0.0195, 0.0003, 2e-8)


def measured(model: DecodeModel, costs: StepCosts, *points: tuple[float, float], tokens: float = 32_768) -> StepCosts:
    for requests, rows in points:
        model.add(requests, rows, float(costs.seconds(np.array(requests), np.array(rows))), tokens)
    return model.fit()


def test_costs_are_found() -> None:
    found = measured(DecodeModel(1e-8), COSTS, (4, 1e5), (16, 0), (30, 2e5), (56, 9e5), (56, 4e5))
    assert found.fixed == pytest.approx(COSTS.fixed, rel=0.03)
    assert found.per_request == pytest.approx(COSTS.per_request, rel=0.05)
    assert found.per_row == pytest.approx(COSTS.per_row, rel=0.05)


def test_one_measurement_leaves_the_first_guesses() -> None:
    found = measured(DecodeModel(1.6e-8), COSTS, (16, 0))
    assert found.per_row == pytest.approx(1.6e-8, rel=0.1)
    assert found.per_request == pytest.approx(0.4 * 0.0243 / 16, rel=0.1)
    assert found.seconds(np.array(16), np.array(0)) == pytest.approx(0.0243, rel=0.01)


def test_no_cost_is_below_nothing() -> None:
    model = DecodeModel(1e-8)
    for requests, seconds in ((10, 0.05), (20, 0.04), (40, 0.02)):
        model.add(requests, 0, seconds, 1000)
    found = model.fit()
    assert found.per_request >= 0 and found.fixed > 0 and found.per_row >= 0


def test_the_latest_of_the_same_kind_count_most() -> None:
    model = DecodeModel(1e-8)
    measured(model, COSTS, *[(16, 0), (56, 4e5)] * 3)
    slower = StepCosts(0.03, 0.0006, 2e-8)
    found = measured(model, slower, *[(16, 0), (56, 4e5)] * 60)
    assert found.seconds(np.array(56), np.array(4e5)) == pytest.approx(
        slower.seconds(np.array(56), np.array(4e5)), rel=0.05
    )


def test_requests_of_other_lengths_count_less() -> None:
    model = DecodeModel(1e-8)
    measured(model, StepCosts(0.02, 0.002, 0), (10, 0), (20, 0), (40, 0), tokens=131_072)
    found = measured(model, StepCosts(0.02, 0.0002, 0), (10, 0), (20, 0), (39, 0), tokens=4096)
    assert found.per_request < 0.0006


def test_many_kinds_cost_no_memory() -> None:
    model, sizes = DecodeModel(1e-8), []
    for requests in range(1, 400):
        for rows in (0, 1e6, 1e7):
            model.add(requests, rows, 0.02, 1000)
        sizes.append(len(pickle.dumps(model)))
    assert sizes[10] < sizes[30] and max(sizes[30:]) < 1.2 * sizes[30], "it grows with the kinds"
    assert model.most_requests > 390 and model.fit().fixed > 0


def test_bounded_least_squares() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        a, b = rng.normal(size=(7, 3)), rng.normal(size=7)
        found = bounded_least_squares(a, b)
        assert (found >= 0).all()
        error = np.square(a @ found - b).sum()
        for other in np.abs(rng.normal(size=(200, 3))) * rng.random((200, 3)).round():
            assert error <= np.square(a @ other - b).sum() + 1e-9
