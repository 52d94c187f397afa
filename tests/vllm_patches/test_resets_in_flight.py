"""A reset that takes running requests' blocks waits for the steps in flight."""

from __future__ import annotations

import pytest
from campaign.script import ScriptedEngine
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc

from vllm_hisparse.vllm_patches.resets_in_flight import reset_between_steps


class ScriptedProcess(EngineCoreProc):
    """vLLM's engine process, whose scheduler and steps are those of a script."""

    def __init__(self, engine: ScriptedEngine):
        self.engine, self.scheduler = engine, engine.scheduler

    @property
    def batch_queue(self) -> list:
        return self.engine.in_flight

    def _process_engine_step(self) -> bool:
        assert self.scheduler.pause_state == PauseState.PAUSED_ALL, "nothing new is scheduled"
        self.engine.end()
        return True


@pytest.fixture(autouse=True)
def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCoreProc, "reset_prefix_cache", EngineCoreProc.reset_prefix_cache)
    reset_between_steps()
    reset_between_steps()  # of a second engine in the process


def with_a_step_in_flight() -> ScriptedEngine:
    engine = ScriptedEngine(is_async=True)
    engine.ask("a", range(10, 20), 12)
    engine.turn()
    engine.turn()
    engine.begin()
    return engine


def test_running_requests_forget_their_kv() -> None:
    engine = with_a_step_in_flight()
    process = ScriptedProcess(engine)
    assert process.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not engine.in_flight and engine.scheduler.pause_state == PauseState.UNPAUSED
    assert not engine.host_pool.preempted(), "the KV of the preempted request is in the host pool"
    engine.run_to_end()
    engine.check_idle()
    assert engine.take_counters()["recomputed_tokens"] > 0


def test_a_reset_that_leaves_running_requests_alone_waits_for_nothing() -> None:
    engine = with_a_step_in_flight()
    assert not ScriptedProcess(engine).reset_prefix_cache(reset_connector=True)
    assert len(engine.in_flight) == 1
    engine.end()
    engine.run_to_end()


def test_a_failed_step_leaves_the_engine_unpaused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_a_step_in_flight()
    process = ScriptedProcess(engine)
    monkeypatch.setattr(process, "_process_engine_step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        process.reset_prefix_cache(reset_running_requests=True)
    assert engine.scheduler.pause_state == PauseState.UNPAUSED
