"""Misses of buffers of other sizes, from the ages of the rows of one: beside buffers that are run."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_hisparse.kv_manager.usage import SIZES, MeanCurve, miss_curves
from vllm_hisparse.ops.limits import MAX_BONUS, USE_BONUS

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


class Buffer:
    """A hot buffer that evicts the rows that expire first."""

    def __init__(self, num_rows: int):
        self.num_rows, self.hot = num_rows, np.zeros(NUM_POSITIONS, bool)
        self.expiries = np.full(NUM_POSITIONS, -1)

    def select(self, selected: np.ndarray, now: int) -> int:
        """Number of selected rows that are missed."""
        is_hit, num_missed = self.hot[selected], int((~self.hot[selected]).sum())
        hits, missed = selected[is_hit], selected[~is_hit]
        self.expiries[hits] = np.minimum(np.maximum(self.expiries[hits], now) + USE_BONUS, now + MAX_BONUS)
        self.expiries[missed] = now + USE_BONUS
        self.hot[selected] = True
        others = np.setdiff1d(np.flatnonzero(self.hot), selected)
        by_expiry = others[np.argsort(self.expiries[others], kind="stable")]
        self.hot[by_expiry[: max(self.hot.sum() - self.num_rows, 0)]] = False
        return num_missed


def counts_by_age(buffer: Buffer, before: np.ndarray, selected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows by age, and selected rows by age; 0 is the age of those that were selected before."""
    ages = 1 + buffer.expiries.max() - buffer.expiries
    ages[before] = 0
    found = ages[selected[buffer.hot[selected]]]
    used = np.bincount(found, minlength=501)
    used[500] = len(selected) - len(found)
    return np.bincount(ages[buffer.hot], minlength=500), used


@pytest.mark.long
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.95])
def test_ages_tell_what_smaller_buffers_miss(kept: float) -> None:
    steps, sizes = selections(400, kept), (1, 1.5, 2, 3, 4, 6)
    buffers, largest = {size: Buffer(int(size * TOP_K)) for size in sizes}, Buffer(8 * TOP_K)
    missed, counts = {size: [] for size in sizes}, []
    for now, selected in enumerate(steps):
        if now >= 200:
            counts.append(counts_by_age(largest, steps[now - 1], selected))
        largest.select(selected, now)
        for size, buffer in buffers.items():
            missed[size].append(buffer.select(selected, now) / TOP_K)
    curve = miss_curves(*map(np.stack, zip(*counts, strict=True))).mean(0)
    for size in sizes:
        assert curve[SIZES.index(size)] == pytest.approx(np.mean(missed[size][200:]), abs=0.03), size
    assert np.isnan(curve[SIZES.index(12)]), "the buffer holds 8 selections"


def test_a_curve_is_over_the_rows_of_the_lowest_ages() -> None:
    """A selection of 8, 5 of which are in the 20 rows; a buffer of half the size counts as one of the same size."""
    held, used = np.array([[8, 4, 8]]), np.array([[2, 2, 1, 3]])
    expected = {1: 6 / 8, 1.25: 5 / 8, 1.5: 4 / 8, 2: 3.5 / 8, 2.5: 3 / 8}
    curves = miss_curves(held.repeat(2, 0), used.repeat(2, 0), [1.0, 2.0])
    for size, share in expected.items():
        assert curves[0, SIZES.index(size)] == pytest.approx(share)
        assert curves[1, SIZES.index(2 * size)] == pytest.approx(share)
    assert np.isnan(curves[0, SIZES.index(3) :]).all()


@pytest.mark.parametrize(("held", "used"), [([8, 4], [0, 0, 0]), ([4, 3], [1, 1, 6]), ([0, 0], [0, 0, 0])])
def test_a_step_that_tells_nothing(held: list[int], used: list[int]) -> None:
    """It selects nothing, or more rows than were held."""
    assert miss_curves(np.array([held]), np.array([used])) is None


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
