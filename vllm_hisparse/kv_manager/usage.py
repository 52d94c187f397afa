"""Use of hot buffers: measurements of the workers for the scheduler's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Sizes of a hot buffer for which misses are estimated, in multiples of a selection.
SIZES = (1, 1.125, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64)


@dataclass(frozen=True)
class Usage:
    """Counts of the steps since the last report, of all requests and layers.

    Attributes:
        step: number of the last step that is counted.
        hits, misses: selected units that were hot, and that were copied.
        curves: for some of the layers that select, by their number among these: share of a selection that a hot buffer
            of each of `SIZES` would miss, from the last uses of the hot rows of one request, NaN for sizes that these
            do not determine. None: no request was sampled.
    """

    step: int
    hits: int
    misses: int
    curves: dict[int, tuple[float, ...]] | None = None

    @property
    def curve(self) -> tuple[float, ...] | None:
        """The mean of all curves."""
        return tuple(np.mean([*self.curves.values()], axis=0).tolist()) if self.curves else None


def miss_curves(counts_by_age: np.ndarray, scales: Sequence[float] | None = None) -> np.ndarray | None:
    """Estimate the share of a selection that LRU buffers of other sizes would miss, from the ages of hot rows.

    A row's age is the time since its last use. Some rows of age `a` are used in the next step; the others become rows
    of age `a + 1`. In a steady state, rows of age `a` therefore outnumber those of age `a + 1` by the hits of age `a`.
    So a buffer that keeps only the rows below an age misses as many rows in a step as there are rows of this age.

    Args:
        counts_by_age: [buffers, ages] number of rows of each age, the newest first. An age without rows in all buffers
            belongs to no step, and is left out.
        scales: [buffers] size of a hot buffer, in the mean of all layers, divided by its size in this buffer's layer.
            None: 1 for all.

    Returns:
        [buffers, len(SIZES)] share of a selection that is missed with each of `SIZES`; NaN for sizes beyond the known
        rows. None: there are too few ages.
    """
    by_step = counts_by_age[:, counts_by_age.sum(0) > 0].astype(np.float64)
    # NOTE: rows of the highest age are left out, because some of them may have been evicted.
    if by_step.shape[1] < 3 or (by_step[:, 0] == 0).any():
        return None
    shares = by_step[:, 1:-1] / by_step[:, :1]
    sizes = by_step[:, :-2].cumsum(1) / by_step[:, :1]
    if scales is not None:
        sizes *= np.asarray(scales)[:, None]
    found = [
        np.interp(SIZES, each_sizes, each_shares, right=np.nan)
        for each_sizes, each_shares in zip(sizes, shares, strict=True)
    ]
    return np.stack(found)


class MeanCurve:
    """Moving mean of curves of several requests.

    Attributes:
        shares: [len(SIZES)] float64 share of a selection that is missed; NaN for sizes that no curve has.
    """

    WEIGHT = 0.2  # weight of a new curve in the mean

    def __init__(self) -> None:
        self.shares = np.full(len(SIZES), np.nan)

    def add(self, curve: Sequence[float]) -> None:
        """Add a curve, as `Usage` has it."""
        new = np.asarray(curve)
        mixed = self.shares + self.WEIGHT * (new - self.shares)
        self.shares = np.where(np.isnan(self.shares), new, np.where(np.isnan(new), self.shares, mixed))

    @property
    def is_known(self) -> bool:
        return not np.isnan(self.shares[0])

    def missed(self, sizes: np.ndarray, wholes: np.ndarray) -> np.ndarray:
        """Estimate the share of a selection that is missed, in any shape.

        Beyond the largest known size, misses are assumed to fall linearly to 0 at the size that holds the whole
        sequence; real curves fall faster.

        Args:
            sizes: rows of hot buffers, in selections.
            wholes: rows of the sequences, in selections.
        """
        known = ~np.isnan(self.shares)
        last = int(np.flatnonzero(known)[-1])
        shares = np.minimum.accumulate(np.clip(self.shares[: last + 1], 0, 1))
        largest = SIZES[last]
        beyond = shares[-1] * (wholes - sizes) / np.maximum(wholes - largest, 1e-9)
        found = np.where(sizes <= largest, np.interp(sizes, SIZES[: last + 1], shares), np.clip(beyond, 0, shares[-1]))
        return np.where(sizes >= wholes, 0.0, found)
