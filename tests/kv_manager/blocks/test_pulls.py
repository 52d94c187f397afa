"""Prefill instances that hang, told from slow ones."""

from __future__ import annotations

import pytest

from vllm_hisparse.kv_manager.blocks import pulls
from vllm_hisparse.kv_manager.blocks.pulls import HUNG_S, Pulls


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pulls, "time", clock)
    return clock


def test_an_instance_hangs_if_nothing_comes(clock: Clock) -> None:
    """All its pulls hang then, also those that began later, and no pull of another instance."""
    running = Pulls()
    running.begin("a", "one")
    clock.now += HUNG_S / 2
    running.begin("b", "one")
    running.begin("c", "other")
    assert running.num_hung() == 0
    clock.now += HUNG_S / 2
    assert running.num_hung() == 2
    running.begin("d", "one")
    assert running.num_hung() == 3
    clock.now += HUNG_S / 2
    assert running.num_hung() == 4 == len(running)


def test_slow_pulls_do_not_hang(clock: Clock) -> None:
    """KV of one of them has come lately."""
    running = Pulls()
    for name in "abc":
        running.begin(name, "one")
    for name in "ab":
        clock.now += 0.9 * HUNG_S
        assert running.num_hung() == 0 and running.came(name) and not running.came(name)
    clock.now += 0.9 * HUNG_S
    assert running.num_hung() == 0 and len(running) == 1


def test_an_idle_instance_has_a_new_start(clock: Clock) -> None:
    running = Pulls()
    running.begin("a", "one")
    assert running.came("a") and not running
    clock.now += 2 * HUNG_S
    running.begin("b", "one")
    assert running.num_hung() == 0


def test_an_end_is_no_arrival(clock: Clock) -> None:
    """A client that gives up says nothing of the instance."""
    running = Pulls()
    for name in "ab":
        running.begin(name, "one")
    clock.now += HUNG_S
    assert running.forget("a") == "one" and running.num_hung() == 1
    assert running.forget("a") is None and not running.came("a") and not running.came("unknown")
    assert running.num_hung() == 1
