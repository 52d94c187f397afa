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
        curves: number of a layer among the layers that select -> share of a selection that hot buffers of `SIZES` would
            miss, NaN for sizes that are not known. Each report has some of the layers, and one step of one request.
            None: no request was sampled.
    """

    step: int
    hits: int
    misses: int
    curves: dict[int, tuple[float, ...]] | None = None

    @property
    def curve(self) -> tuple[float, ...] | None:
        """The mean of all curves."""
        return tuple(np.mean([*self.curves.values()], axis=0).tolist()) if self.curves else None


def miss_curves(held: np.ndarray, used: np.ndarray, scales: Sequence[float] | None = None) -> np.ndarray | None:
    """Estimate the share of a selection that buffers of other sizes would miss, from one step of some buffers.

    Before a step, a buffer of any size holds the rows that the step before selected, which have age 0, and as many
    others as there is room for: those that are evicted last, which have the lowest ages. A smaller buffer would miss
    the selected rows of higher ages. NOTE: a smaller buffer evicts more rows between two uses and forgets the earlier
    one, so its order would differ a little from the order here.

    Args:
        held: [buffers, ages] number of rows of each age before the step, the lowest age first.
        used: [buffers, ages + 1] number of these rows that the step selects; the last column counts all other selected
            rows.
        scales: [buffers] size of a hot buffer, in the mean of all layers, divided by its size in this buffer's layer.
            None: 1 for all.

    Returns:
        [buffers, len(SIZES)] share of a selection that is missed with each of `SIZES`; NaN for sizes beyond the rows in
        `held`. None: a buffer selects nothing, or holds fewer rows than it selects.
    """
    selected = used.sum(1, keepdims=True)
    if ((selected == 0) | (held.sum(1, keepdims=True) < selected)).any():
        return None
    start = ((0, 0), (1, 0))
    sizes = np.pad(held.cumsum(1), start) / selected
    shares = np.pad(1 - used[:, :-1].cumsum(1) / selected, start, constant_values=1)
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
        """Return the estimated share of a selection that is missed, in the shape of the arguments.

        Beyond the largest known size, misses are assumed to fall linearly to 0 at the size that holds the whole
        sequence; real curves fall faster.

        Args:
            sizes: float64 of any shape, rows of hot buffers in multiples of a selection.
            wholes: float64 of the same shape, rows of the sequences in multiples of a selection.
        """
        known = ~np.isnan(self.shares)
        last = int(np.flatnonzero(known)[-1])
        shares = np.minimum.accumulate(np.clip(self.shares[: last + 1], 0, 1))
        largest = SIZES[last]
        beyond = shares[-1] * (wholes - sizes) / np.maximum(wholes - largest, 1e-9)
        found = np.where(sizes <= largest, np.interp(sizes, SIZES[: last + 1], shares), np.clip(beyond, 0, shares[-1]))
        return np.where(sizes >= wholes, 0.0, found)
