"""A reset that takes running requests' blocks waits for the steps in flight."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
from campaign.script import ScriptedEngine
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from vllm_hisparse.vllm_patches.resets_in_flight import reset_between_steps


class ScriptedProcess(EngineCoreProc):
    """vLLM's engine process, whose scheduler and steps are those of a script.

    Args:
        engine: the script.
        adds_empty_steps: each call also schedules a step, as vLLM does if the connector has work without requests.
    """

    def __init__(self, engine: ScriptedEngine, adds_empty_steps: bool = False):
        self.engine, self.scheduler, self.adds_empty_steps = engine, engine.scheduler, adds_empty_steps
        self.input_queue: SimpleQueue = SimpleQueue()

    @property
    def batch_queue(self) -> list:
        return self.engine.in_flight

    def _process_engine_step(self) -> bool:
        assert self.scheduler.pause_state == PauseState.PAUSED_ALL, "nothing new is scheduled"
        if self.adds_empty_steps:
            self.engine.begin()
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


@pytest.mark.parametrize("adds_empty_steps", [False, True])
@pytest.mark.parametrize("state", [PauseState.UNPAUSED, PauseState.PAUSED_NEW])
def test_running_requests_forget_their_kv(state: PauseState, adds_empty_steps: bool) -> None:
    engine = with_a_step_in_flight()
    engine.scheduler.set_pause_state(state)
    process = ScriptedProcess(engine, adds_empty_steps)
    assert process.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert len(engine.in_flight) == adds_empty_steps and engine.scheduler.pause_state == state
    assert not engine.host_pool.preempted(), "the KV of the preempted request is in the host pool"
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    while engine.in_flight:
        engine.end()
    engine.run_to_end()
    engine.check_idle()
    assert engine.take_counters()["recomputed_tokens"] > 0


def test_a_reset_that_leaves_running_requests_alone_waits_for_nothing() -> None:
    engine = with_a_step_in_flight()
    assert not ScriptedProcess(engine).reset_prefix_cache(reset_connector=True)
    assert len(engine.in_flight) == 1
    engine.end()
    engine.run_to_end()


def test_a_failed_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_a_step_in_flight()
    process = ScriptedProcess(engine)
    monkeypatch.setattr(process, "_process_engine_step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        process.reset_prefix_cache(reset_running_requests=True)
    message, content = process.input_queue.get_nowait()
    assert message == EngineCoreRequestType.EXECUTOR_FAILED and engine.scheduler.pause_state == PauseState.UNPAUSED
    with pytest.raises(RuntimeError, match="Executor failed"):
        process._handle_client_request(message, content)
