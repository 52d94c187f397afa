"""Host time by method, and waits for the device by place in the code."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.host_profile import HostTimes, counting_waits, owner_of


class Base:
    def step(self, seconds: float) -> float:
        self.pause(seconds)
        return seconds

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class Engine(Base):
    pass


def test_calls_are_timed_and_methods_are_as_before() -> None:
    """Methods of one object, and of a class; a call within another counts in both."""
    engine, other = Engine(), Engine()
    before = dict(vars(Base))
    times = HostTimes([("step", engine, "step"), ("pause", owner_of(Engine, "pause"), "pause")])
    with times.running():
        assert engine.step(0.02) == 0.02
        other.step(0.01)
    assert (vars(engine), dict(vars(Base))) == ({}, before)
    engine.step(0.05)
    found = times.milliseconds()
    assert list(found) == ["pause", "step"]
    assert 20 <= found["step"] < found["pause"] and found["pause"] >= 30


def test_a_call_that_fails_is_timed_and_what_is_short_is_left_out() -> None:
    times = HostTimes([("fails", Engine, "pause"), ("never", Engine, "step")])
    with pytest.raises(TypeError), times.running():
        Engine().pause(time.sleep(0.01))
    assert set(times.seconds) == {"fails"}
    times.seconds |= {"fails": 0.002, "never": 0.000004}
    assert times.milliseconds() == {"fails": 2.0}
    assert "pause" not in vars(Engine)


def test_waits_are_counted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = Counter[str]()
    with counting_waits(waits):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as torch does
        warnings.warn("this mode does not detect all synchronizing operations", stacklevel=1)
    [(place, count)] = waits.items()
    assert place.startswith("benchmarks/test_host_profile.py:") and count == 3
    assert modes == ["warn", 0]
