"""Misses of buffers of other sizes, from the ages of the rows of one: beside LRU buffers that are run."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_hisparse.kv_manager.usage import SIZES, MeanCurve, miss_curves

TOP_K, NUM_POSITIONS = 64, 640


def selections(num_steps: int, kept: float) -> list[np.ndarray]:
    """A share of each selection stays; the others are drawn from all positions."""
    rng = np.random.default_rng(1)
    found = [rng.permutation(NUM_POSITIONS)[:TOP_K]]
    for _ in range(num_steps - 1):
        stays = found[-1][rng.random(TOP_K) < kept]
        others = np.setdiff1d(np.arange(NUM_POSITIONS), stays)
        found.append(np.concatenate((stays, rng.permutation(others)[: TOP_K - len(stays)])))
    return found


def last_uses(steps: list[np.ndarray]) -> np.ndarray:
    """[NUM_POSITIONS] step of each position's last use, -1 without any."""
    found = np.full(NUM_POSITIONS, -1)
    for step, selected in enumerate(steps):
        found[selected] = step
    return found


def lru_misses(steps: list[np.ndarray], num_rows: int, warm_up: int) -> float:
    """Share of a selection that an LRU buffer misses."""
    missed, uses = 0, np.full(NUM_POSITIONS, -1)
    for step, selected in enumerate(steps):
        used = np.flatnonzero(uses >= 0)
        held = used[np.argsort(-uses[used], kind="stable")][:num_rows]
        missed += TOP_K - len(np.intersect1d(selected, held)) if step >= warm_up else 0
        uses[selected] = step
    return missed / TOP_K / (len(steps) - warm_up)


def ages_of(uses: np.ndarray, num_steps: int, num_held: int) -> np.ndarray:
    """Rows by age in a buffer that holds the most recently used ones."""
    recent = np.sort(uses[uses >= 0])[::-1][:num_held]
    return np.bincount(num_steps - 1 - recent, minlength=num_steps)


@pytest.mark.long
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.95])
def test_ages_tell_what_smaller_buffers_miss(kept: float) -> None:
    steps = selections(400, kept)
    counts = np.stack([ages_of(last_uses(steps[: 200 + 5 * index]), 400, 512) for index in range(40)])
    counts = np.stack([np.roll(each, -(200 - 5 * index)) for index, each in enumerate(counts)])  # from age 0 on
    curve = miss_curves(counts).mean(0)
    for size in (1, 1.5, 2, 3, 4, 6):
        expected = lru_misses(steps, int(size * TOP_K), warm_up=100)
        assert curve[SIZES.index(size)] == pytest.approx(expected, abs=0.03), size
    assert np.isnan(curve[SIZES.index(12)]), "the buffer holds 8 selections"


def test_steps_with_several_tokens_are_told_apart_from_ages_without_a_step() -> None:
    by_step = np.array([[64, 32, 16, 8, 4]])
    with_gaps = np.zeros((1, 15), int)
    with_gaps[:, ::3] = by_step
    assert miss_curves(with_gaps) == pytest.approx(miss_curves(by_step), nan_ok=True)


@pytest.mark.parametrize("counts", [[[0, 0, 0]], [[64, 3]], [[64, 30, 10], [0, 3, 3]]])
def test_too_few_ages_tell_nothing(counts: list[list[int]]) -> None:
    assert miss_curves(np.array(counts)) is None


def test_a_mean_knows_what_any_curve_tells() -> None:
    mean = MeanCurve()
    assert not mean.is_known
    short, long = np.full(len(SIZES), np.nan), np.linspace(0.5, 0.0, len(SIZES))
    short[:3] = 0.6
    mean.add(short)
    mean.add(long)
    assert mean.is_known and mean.shares[0] == pytest.approx(0.6 + 0.2 * (0.5 - 0.6))
    assert mean.shares[5:].tolist() == long[5:].tolist()
    mean.add(short)
    assert mean.shares[5:].tolist() == long[5:].tolist()


def test_misses_fall_to_none_where_the_sequence_fits() -> None:
    mean, curve = MeanCurve(), np.full(len(SIZES), np.nan)
    curve[:10] = np.linspace(0.5, 0.4, 10)  # up to 4 selections
    mean.add(curve)
    sizes, wholes = np.array([0.5, 1.0, 4.0, 7.0, 9.9, 10.0, 12.0]), np.full(7, 10.0)
    assert mean.missed(sizes, wholes) == pytest.approx([0.5, 0.5, 0.4, 0.2, 0.4 * 0.1 / 6, 0.0, 0.0])
    assert np.all(np.diff(mean.missed(np.linspace(1, 10, 50), np.full(50, 10.0))) <= 0)
