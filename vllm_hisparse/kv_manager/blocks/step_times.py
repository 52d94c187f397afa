"""Times of decode steps, measured on the scheduler's side."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_STEPS = 256  # steps that are kept until a report of the workers covers them
OUTLIER = 3.0  # a step that took more than so many medians is left out, because the engine did other work, too


@dataclass
class _Step:
    """A step.

    Attributes:
        number: number of the step, from 1 on.
        requests: number of its requests.
        decodes: True if all requests decode.
        start: time at which it was scheduled.
        seconds: its time; 0 before it has been processed.
    """

    number: int
    requests: int
    decodes: bool
    start: float
    seconds: float = 0.0


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps between two reports of the workers.

    Attributes:
        request_steps: sum of the steps' numbers of requests.
        num_decoding: steps in which every request decoded, without outliers.
        requests: mean number of requests in these steps; 0 if there are none.
        seconds: mean time of these steps; 0 if there are none.
    """

    request_steps: int
    num_decoding: int
    requests: float
    seconds: float


class StepTimes:
    """Records the time of decode steps, from the end of the step before or from their scheduling, whichever is later.

    Args:
        max_query_len: tokens that a decoding request computes in a step at most.
        clock: returns seconds.
    """

    def __init__(self, max_query_len: int, clock: Callable[[], float] = time.perf_counter):
        self._max_query_len, self._clock = max_query_len, clock
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._in_flight: deque[_Step] = deque()
        self._number, self._last_end = 0, clock()

    def scheduled(self, num_scheduled: Mapping[str, int]) -> None:
        """Record a scheduled step; called once for each step.

        Args:
            num_scheduled: request id -> tokens that the step computes.
        """
        self._number += 1
        decodes = bool(num_scheduled) and max(num_scheduled.values()) <= self._max_query_len
        self._in_flight.append(_Step(self._number, len(num_scheduled), decodes, self._clock()))

    def processed(self) -> None:
        """Record that vLLM has the output of a step; called once for each step, in the same order."""
        now, step = self._clock(), self._in_flight.popleft()
        step.seconds = now - max(step.start, self._last_end)
        self._steps.append(step)
        self._last_end = now

    def take(self, last: int) -> MeasuredSteps:
        """Return the steps since the last call, up to step `last`."""
        taken = []
        while self._steps and self._steps[0].number <= last:
            taken.append(self._steps.popleft())
        request_steps, decoding = sum(step.requests for step in taken), [step for step in taken if step.decodes]
        if not decoding:
            return MeasuredSteps(request_steps, 0, 0.0, 0.0)
        longest = OUTLIER * sorted(step.seconds for step in decoding)[len(decoding) // 2]
        kept = [step for step in decoding if step.seconds <= longest]
        requests, seconds = (sum(getattr(step, name) for step in kept) / len(kept) for name in ("requests", "seconds"))
        return MeasuredSteps(request_steps, len(kept), requests, seconds)
