"""Limits the requests that run at once to as many as raise the tokens per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.logger import init_logger

from vllm_hisparse.kv_manager.blocks.decode_model import DecodeModel
from vllm_hisparse.kv_manager.blocks.step_times import StepTimes
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.usage import MeanCurve, Usage

TOLERANCE = 0.01  # share of the tokens/s that may be lost before requests are held back
GROWTH, SHRINKAGE = 1.5, 0.75  # factors of the most and fewest measured requests, between which predictions are trusted
DECISIONS = 4  # predictions before the first limit; later, as many must agree before the limit rises
MIN_STEPS = 4  # decode steps that a measurement needs
MAX_STEPS_WITHOUT = 128  # steps for which requests wait for these predictions; then the latest limit, if any, holds
ROW_RATE = 40e9  # assumed bytes/s of copied rows, until a measurement; an H200 reaches 36 to 46 GB/s
EXCESS_WEIGHT = 0.25  # weight of the newest difference between counted and estimated misses
MAX_LENGTHS, MAX_NUMBERS = 16, 96  # largest numbers of lengths, and of numbers of requests, in a prediction
SECONDS_PER_LOG = 30.0

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


@dataclass(frozen=True)
class Demand:
    """Device memory that the running requests share, and the memory that they could use.

    Attributes:
        num_requests: running requests.
        tokens: [n] float64 lengths of these requests, or of a sample, ascending.
        least: [n] float64 blocks that each request always has.
        more: [n] float64 further blocks with which it is hot as a whole.
        rows: [n] float64 hot rows that it always has.
        num_blocks: blocks of the device.
        rows_per_block: hot rows of a mean layer in a block.
        whole_rows_per_block: hot rows in a block of the layer that has the fewest, for a request that is hot as a
            whole.
    """

    num_requests: int
    tokens: np.ndarray
    least: np.ndarray
    more: np.ndarray
    rows: np.ndarray
    num_blocks: int
    rows_per_block: float
    whole_rows_per_block: int

    @classmethod
    def of(cls, spec: HotBufferSpec, lengths: Sequence[int], num_blocks: int) -> Demand:
        """Make the description of requests.

        Args:
            spec: KV cache spec of the hot buffers.
            lengths: [num_requests] tokens of each request.
            num_blocks: blocks of the device.
        """
        ordered = sorted(lengths)
        size = min(len(ordered), MAX_LENGTHS)
        sample = [ordered[(2 * index + 1) * len(ordered) // (2 * size)] for index in range(size)]
        least = np.array([spec.num_request_blocks(length) for length in sample], np.float64)
        whole = np.array([spec.num_request_blocks(length, is_whole=True) for length in sample], np.float64)
        rows = np.array([spec.num_blocks(length) for length in sample], np.float64) * spec.layout.mean_rows
        sizes = np.array(sample, np.float64), least, whole - least, rows
        return cls(len(lengths), *sizes, num_blocks, spec.layout.mean_rows, spec.layout.whole_rows)

    @property
    def most(self) -> int:
        """Number of requests of such lengths for which there is room."""
        return int(self.num_blocks / self.least.mean())

    @property
    def most_whole(self) -> int:
        """Number of requests of such lengths that can all be hot as a whole."""
        return int(self.num_blocks / (self.least + self.more).mean())

    @property
    def whole_rows(self) -> np.ndarray:
        """Hot rows of a mean layer with which each request is hot as a whole: [n] float64."""
        return self.tokens * self.rows_per_block / self.whole_rows_per_block

    def rows_with(self, numbers: np.ndarray) -> np.ndarray:
        """Divide the memory like `lending.divide`, for other numbers of requests of the same lengths.

        Args:
            numbers: [m] numbers of requests.

        Returns:
            [m, n] float64 hot rows of each request; infinite where it is hot as a whole.
        """
        times = numbers[:, None] / len(self.tokens)  # requests that each length represents
        spare = np.maximum(self.num_blocks - times * self.least.sum(), 0)
        num_others = np.arange(len(self.tokens), 0, -1)  # a length and all longer ones
        taken = times * self.more.cumsum()
        whole = taken + times * self.more * (num_others - 1) <= spare
        left = spare - np.where(whole, taken, 0).max(1, keepdims=True)
        each = left / (times * np.maximum((~whole).sum(1, keepdims=True), 1))
        return np.where(whole, np.inf, self.rows + each * self.rows_per_block)


@dataclass(frozen=True)
class Prediction:
    """Tokens/s by the number of running requests.

    Attributes:
        numbers: [m] numbers of requests, ascending.
        rates: [m] decode steps of a request per second, summed over the requests.
        copy_shares: [m] share of a step in which it waits for copies.
        is_cut: True if larger numbers have room, but are too far from what has been measured.
    """

    numbers: np.ndarray
    rates: np.ndarray
    copy_shares: np.ndarray
    is_cut: bool

    @property
    def best(self) -> int:
        """Index of the highest rate."""
        return int(self.rates.argmax())

    @property
    def last(self) -> int:
        """Index of the largest number that costs no more than `TOLERANCE` of the best rate."""
        return int(np.flatnonzero(self.rates >= (1 - TOLERANCE) * self.rates[self.best])[-1])

    @property
    def largest(self) -> int:
        """The largest number of requests that pays."""
        return int(self.numbers[self.last])

    @property
    def limit(self) -> int | None:
        """The largest number of requests that pays; None if every number with room pays."""
        return self.largest if self.is_certain or self.is_cut else None

    @property
    def is_certain(self) -> bool:
        """True if larger numbers were predicted, and do not pay."""
        return self.largest < self.numbers[-1]

    def describe(self, index: int) -> tuple[int, float, float]:
        """Return the number of requests, their rate, and the percentage of a step in which it waits for copies."""
        return int(self.numbers[index]), float(self.rates[index]), 100 * float(self.copy_shares[index])


class AdmissionControl:
    """Limits the running requests to as many as raise the tokens per second.

    The time of a step grows with its requests and with the rows that it copies. Each request misses more rows if more
    requests share the device memory. Both relations are learned from measurements: times of decode steps, counts of
    misses, and ages of hot rows, from which the misses with fewer rows are estimated (`usage.miss_curves`). Before it
    has made some predictions, requests that would not be hot as a whole wait, at most for `MAX_STEPS_WITHOUT` steps.

    The limit holds for requests that have yet to start; no running request is stopped.

    Args:
        top_k: tokens of a selection.
        unit_bytes: bytes of a selected unit in one layer.
        max_num_running: largest number of running requests, whatever the prediction.
        max_query_len: tokens that a decoding request computes in a step at most.
        clock: returns seconds.

    Attributes:
        limit: number of requests that may run at once; None: as many as there is room for. It decides once
            `num_missing_predictions` is 0.
    """

    def __init__(
        self,
        top_k: int,
        unit_bytes: int,
        max_num_running: int,
        max_query_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.limit: int | None = None
        self._top_k, self._max_num_running, self._clock = top_k, max_num_running, clock
        self._times = StepTimes(max_query_len, clock)
        self._model, self._curve = DecodeModel(unit_bytes / ROW_RATE), MeanCurve()
        self._selected = 0.0  # units that a request selects in a step, in all layers
        self._excess = 0.0  # share of a selection that is missed in addition to the curve's estimate
        self._decisions: deque[Prediction] = deque(maxlen=DECISIONS)
        self._steps_without, self._has_held_back = 0, False
        self._last_log, self._logged_limit = -SECONDS_PER_LOG, self.limit

    @property
    def num_missing_predictions(self) -> int:
        """Number of predictions that are made before the limit decides, or before requests have waited for long enough.

        The first ones say little of later misses, because they include the first copies of all rows.
        """
        return 0 if self._steps_without >= MAX_STEPS_WITHOUT else DECISIONS - len(self._decisions)

    def step_scheduled(self, num_scheduled: Mapping[str, int]) -> None:
        """Record a scheduled step; called once for each step.

        Args:
            num_scheduled: request id -> tokens that the step computes.
        """
        self._times.scheduled(num_scheduled)
        self._steps_without += self._has_held_back and bool(num_scheduled)
        self._has_held_back = False

    def step_processed(self) -> None:
        """Record that vLLM has the output of a step; called once for each step, in the same order."""
        self._times.processed()

    def holds_back(self, num_running: int, is_hot_as_a_whole: Callable[[], bool]) -> bool:
        """Return True if one more request has to wait; called at most once in a step that starts no other request.

        Args:
            num_running: number of running requests.
            is_hot_as_a_whole: returns True if all requests, including this one, would be hot as a whole.
        """
        if num_running == 0:
            return False
        if self.num_missing_predictions:
            self._has_held_back = not is_hot_as_a_whole()
            return self._has_held_back
        return self.limit is not None and num_running >= self.limit and not is_hot_as_a_whole()

    def measured(self, usage: Usage, demand: Demand | None) -> None:
        """Learn from a report of the workers, and set the limit.

        Args:
            usage: the report.
            demand: description of the running requests; None: no request runs.
        """
        steps, selected = self._times.take(usage.step), usage.hits + usage.misses
        if usage.curve is not None:
            self._curve.add(usage.curve)
        if demand is None or steps.num_decoding < MIN_STEPS or not selected:
            return
        self._selected, share = selected / steps.request_steps, usage.misses / selected
        rows = share * self._selected * steps.requests
        self._model.add(steps.requests, rows, steps.seconds, float(demand.tokens.mean()))
        if self._curve.is_known:
            estimated = float(self._missed(demand, np.array([steps.requests]))[0])
            self._excess += EXCESS_WEIGHT * (share - estimated - self._excess)
            self._set_limit(self.predict(demand))

    def predict(self, demand: Demand) -> Prediction:
        """Predict tokens/s for all numbers of requests that have room, as far as predictions are trusted.

        Args:
            demand: description of the running requests.
        """
        most = max(min(demand.most, self._max_num_running), 1)
        known = max(int(GROWTH * self._model.most_requests) + 1, demand.most_whole)
        largest = min(most, known)
        smallest = min(max(int(SHRINKAGE * self._model.least_requests), 1), largest)
        numbers = np.unique(np.linspace(smallest, largest, MAX_NUMBERS).round().astype(np.int64))
        costs = self._model.fit()
        rows = numbers * self._selected * np.clip(self._missed(demand, numbers) + self._excess, 0, 1)
        seconds = costs.seconds(numbers, rows)
        return Prediction(numbers, numbers / seconds, costs.per_row * rows / seconds, largest < most)

    def _missed(self, demand: Demand, numbers: np.ndarray) -> np.ndarray:
        """Return the share of a selection that a mean request misses, [m] float64, for numbers of requests [m]."""
        wholes = demand.whole_rows / self._top_k
        sizes = np.minimum(demand.rows_with(numbers) / self._top_k, wholes)
        return self._curve.missed(sizes, np.broadcast_to(wholes, sizes.shape)).mean(1)

    def _set_limit(self, prediction: Prediction) -> None:
        """Set the limit.

        A limit rises only if several predictions agree, because a request that has started is not stopped.
        """
        self._decisions.append(prediction)
        if any(each.is_certain for each in self._decisions):
            self.limit = min(each.largest for each in self._decisions)
        else:
            self.limit = prediction.limit
        if not self.num_missing_predictions:
            self._log(prediction)

    def _log(self, prediction: Prediction) -> None:
        """Log the limit if it differs from the logged one, at most once in `SECONDS_PER_LOG`."""
        now = self._clock()
        if self.limit == self._logged_limit or now - self._last_log < SECONDS_PER_LOG:
            return
        self._last_log, self._logged_limit = now, self.limit
        if self.limit is None:
            logger.info("HiSparse admission: as many requests run as have room.")
            return
        at, end = np.searchsorted(prediction.numbers, self.limit), len(prediction.numbers) - 1
        logger.info(
            "HiSparse admission: at most %d requests run. Predicted: %d requests decode %.0f steps/s in sum and wait "
            "for copies in %.0f%% of a step, %d requests %.0f steps/s and %.0f%%%s.",
            self.limit,
            *prediction.describe(at),
            *prediction.describe(end),
            " (more has not been measured yet)" if prediction.is_cut else "",
        )
