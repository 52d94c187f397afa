"""Actions that have to wait until a step is over on the device."""

from __future__ import annotations

from collections.abc import Callable


class Deferred:
    """Runs actions when a step has been processed, because its copies and computations are over on the device by then.

    Steps are numbered from 1. `step_scheduled` is called once for each step, when its metadata is complete.
    `step_processed` is called once for each step, in the same order, when vLLM has its output.

    Attributes:
        num_scheduled, num_processed: number of steps that have been scheduled and processed so far.
    """

    def __init__(self) -> None:
        self.num_scheduled = self.num_processed = 0
        self._actions: dict[int, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        """Number of actions that wait."""
        return sum(map(len, self._actions.values()))

    def is_over(self, number: int) -> bool:
        """Return True if step `number` has been processed."""
        return number <= self.num_processed

    def after_step(self, number: int, action: Callable[[], None]) -> None:
        """Run an action when step `number` has been processed; at once if it already has."""
        if self.is_over(number):
            action()
        else:
            self._actions.setdefault(number, []).append(action)

    def step_scheduled(self) -> None:
        self.num_scheduled += 1

    def step_processed(self) -> None:
        self.num_processed += 1
        for action in self._actions.pop(self.num_processed, ()):
            action()
