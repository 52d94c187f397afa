"""How long decode steps took, with one or two steps in flight, beside steps that did something else."""

from __future__ import annotations

import pytest

from vllm_hisparse.kv_manager.blocks.step_times import MeasuredSteps, StepTimes


class Engine:
    def __init__(self, max_query_len: int = 1):
        self.now = 100.0
        self.times = StepTimes(max_query_len, lambda: self.now)

    def step(self, seconds: float, *num_tokens: int) -> None:
        """A step whose output is there before the next one is scheduled."""
        self.times.scheduled({str(index): num for index, num in enumerate(num_tokens)})
        self.now += seconds
        self.times.processed()


def test_steps_up_to_the_last_of_a_report() -> None:
    engine = Engine()
    for seconds in (0.02, 0.04, 0.01, 0.01):
        engine.step(seconds, 1, 1, 1)
    assert engine.times.take(2) == MeasuredSteps(6, 2, 3.0, pytest.approx(0.03))
    assert engine.times.take(4) == MeasuredSteps(6, 2, 3.0, pytest.approx(0.01))
    assert engine.times.take(9) == MeasuredSteps(0, 0, 0.0, 0.0)


def test_prefills_idle_time_and_outliers_do_not_count() -> None:
    engine = Engine(max_query_len=2)
    engine.step(0.5, 2, 700)
    engine.now += 60
    engine.step(0.1)
    for seconds in (0.02, 0.02, 0.02, 9.0):
        engine.step(seconds, 2, 1)
    assert engine.times.take(6) == MeasuredSteps(2 + 0 + 8, 3, 2.0, pytest.approx(0.02))


def test_a_step_that_was_in_flight_begins_where_the_one_before_ended() -> None:
    engine = Engine()
    engine.times.scheduled({"a": 1})
    for _ in range(5):
        engine.times.scheduled({"a": 1})
        engine.now += 0.03
        engine.times.processed()
    assert engine.times.take(5) == MeasuredSteps(5, 5, 1.0, pytest.approx(0.03))


def test_reports_that_never_come_cost_no_memory() -> None:
    engine = Engine()
    for _ in range(1000):
        engine.step(0.01, 1)
    assert engine.times.take(1000) == MeasuredSteps(256, 256, 1.0, pytest.approx(0.01)), "the last ones are known"
