"""Model of the time of a decode step, fitted to steps that have been measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import log2

import numpy as np

STEP_NOISE = 0.02  # relative error of a measured step, and of the model
NOISE_PER_REPORT = 0.001  # additional error of an older measurement, for each report since then
NOISE_PER_OCTAVE = 0.1  # additional error of a measurement with requests of twice or half the length
WEIGHT = 0.25  # weight of a new measurement in the mean with older ones of the same kind
MAX_CELLS = 64
# Share of a step, without copies, that grows with the number of requests, and its error: a first guess, until several
# numbers of requests have been measured.
GROWING_SHARE, GROWING_ERROR = 0.4, 0.4
ROW_TIME_ERROR = 1.0  # relative error of the time of a copied row, before it has been measured


@dataclass
class _Cell:
    """Mean of measurements with similar numbers of requests and copied rows.

    Attributes:
        requests: decoding requests.
        rows: rows copied in a step.
        seconds: time of a step.
        tokens: mean length of the requests.
        report: number of the last measurement.
    """

    requests: float
    rows: float
    seconds: float
    tokens: float
    report: int


@dataclass(frozen=True)
class StepCosts:
    """A step takes `fixed + per_request * requests + per_row * rows` seconds, where `rows` are copied."""

    fixed: float
    per_request: float
    per_row: float

    def seconds(self, requests: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of steps."""
        return self.fixed + self.per_request * requests + self.per_row * rows


class DecodeModel:
    """Learns the costs of a step from measurements.

    Measurements of the same kind are averaged. Older measurements, and measurements with requests of other lengths,
    count less. Costs that the measurements do not determine stay near a first guess.

    Args:
        row_seconds: first guess of the seconds in which a row is copied.
    """

    def __init__(self, row_seconds: float):
        self.row_seconds = row_seconds
        self._num_reports = 0
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._latest: _Cell | None = None

    @property
    def most_requests(self) -> float:
        """Most requests that have been measured; 0 before the first measurement."""
        return max((cell.requests for cell in self._cells.values()), default=0.0)

    @property
    def least_requests(self) -> float:
        """Fewest requests that have been measured; 0 before the first measurement."""
        return min((cell.requests for cell in self._cells.values()), default=0.0)

    def add(self, requests: float, rows: float, seconds: float, tokens: float) -> None:
        """Add a measurement: means of some steps, as in `_Cell`."""
        self._num_reports += 1
        self._latest = _Cell(requests, rows, seconds, tokens, self._num_reports)
        kind = round(8 * log2(max(requests, 1))), round(8 * min(rows * self.row_seconds / seconds, 4))
        if (cell := self._cells.get(kind)) is None:
            self._cells[kind] = _Cell(requests, rows, seconds, tokens, self._num_reports)
            if len(self._cells) > MAX_CELLS:
                del self._cells[min(self._cells, key=lambda each: self._cells[each].report)]
            return
        for name in ("requests", "rows", "seconds", "tokens"):
            old = getattr(cell, name)
            setattr(cell, name, old + WEIGHT * (getattr(self._latest, name) - old))
        cell.report = self._num_reports

    def fit(self) -> StepCosts:
        """Fit the costs, all at least 0, by least squares of relative errors. Needs at least one measurement."""
        assert self._latest is not None
        now = self._latest
        equations = []
        for cell in self._cells.values():
            noise = STEP_NOISE + NOISE_PER_REPORT * (self._num_reports - cell.report)
            noise += NOISE_PER_OCTAVE * abs(log2(cell.tokens / now.tokens))
            equations.append(np.array((1.0, cell.requests, cell.rows, cell.seconds)) / (noise * cell.seconds))
        copying = min(self.row_seconds * now.rows, now.seconds / 2)
        per_request = (now.seconds - copying) / now.requests
        guess = 0.0, 1.0, 0.0, GROWING_SHARE * per_request
        equations.append(np.array(guess) / (GROWING_ERROR * per_request))
        equations.append(np.array((0.0, 0.0, 1.0, self.row_seconds)) / (ROW_TIME_ERROR * self.row_seconds))
        matrix = np.stack(equations)
        return StepCosts(*bounded_least_squares(matrix[:, :3], matrix[:, 3]).tolist())


def bounded_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimise |a x - b| over x >= 0, by trying every choice of columns that are 0; for few columns.

    Args:
        a: [rows, columns] float64.
        b: [rows] float64.

    Returns:
        [columns] float64.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    scaled, num_columns = a / scale, a.shape[1]
    best, least = np.zeros(num_columns), np.inf
    for size in range(num_columns, 0, -1):
        for columns in combinations(range(num_columns), size):
            part = scaled[:, columns]
            solution = np.linalg.lstsq(part, b, rcond=None)[0]
            error = float(np.square(part @ solution - b).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(num_columns), error
                best[list(columns)] = solution
        if size == num_columns and np.isfinite(least):
            break  # if no bound is active, no other solution is better
    return best / scale
