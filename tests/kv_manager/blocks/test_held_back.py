"""Requests that are held back: in a schedule over vLLM's real block pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from campaign.script import ScriptedEngine

from vllm_hisparse.connector.metadata import HiSparseWorkerMetadata
from vllm_hisparse.kv_manager.blocks import admission, pulls, request_tracker
from vllm_hisparse.kv_manager.blocks.admission import AdmissionControl, Demand
from vllm_hisparse.kv_manager.blocks.request_tracker import Obstacle
from vllm_hisparse.kv_manager.usage import SIZES, Usage

PROMPT = list(range(20))


def make_engine(num_device_blocks: int = 33, **options) -> ScriptedEngine:
    """Two requests of 20 tokens are hot as a whole; three of 31 have room."""
    sizes = {"device_buffer_size": 5, "is_elastic": True}
    return ScriptedEngine(num_device_blocks, 64, options={"admission": "auto"}, **sizes, **options)


def prompt(name: str) -> list[int]:
    return [100 * ord(name) + token for token in PROMPT]


def predict(engine: ScriptedEngine) -> None:
    """Let the engine measure and predict once."""
    engine.ask(f"measured at {len(engine.log)}", [7])
    engine.run_to_end()
    usage = Usage(len(engine.log), 1, 1, {0: (0.5,) * len(SIZES)})
    engine.half.admission.measured(usage, Demand.of(engine.tracker.spec, [20], 32))


def limit(engine: ScriptedEngine, number: int | None) -> None:
    """Let the engine have measured what makes this the limit."""
    control = engine.half.admission
    while control.num_missing_predictions:
        predict(engine)
    control.limit = number


def gauge(engine: ScriptedEngine, name: str) -> int:
    return engine.half.take_stats().data["gauges"][name]


def run(engine: ScriptedEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.turn(budget=40)


def test_a_request_waits_for_predictions_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_STEPS_WITHOUT", 4)
    engine = make_engine()
    for name in "abc":
        engine.ask(name, prompt(name), max_tokens=12)
    run(engine, 2)
    running = len(engine.running)
    assert 1 <= running < 3 and engine.tracker.obstacles == {"abc"[running]: Obstacle.HELD_BACK}
    assert gauge(engine, "requests_held_back") == 3 - running and gauge(engine, "admission_limit") == 0
    run(engine, 4)
    assert len(engine.running) == 3 and not engine.tracker.obstacles
    run(engine, 40)
    engine.check_idle()


@pytest.mark.parametrize("number", [None, 2])
def test_imports_that_hang_hold_nobody_back_for_long(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    """Neither in a new engine, nor with as many imports as the limit. The prefill instance never sends anything."""
    engine = make_engine(role="kv_consumer", enable_caching=False)
    if number is not None:
        limit(engine, number)
    for name in "ab":
        engine.ask_remote(name, prompt(name), max_tokens=4)
        run(engine, 1)
    assert len(engine.loading) == 2
    engine.ask("local", prompt("x"), max_tokens=4)
    run(engine, 20)
    assert not engine.running and engine.tracker.obstacles == {"local": Obstacle.HELD_BACK}
    monkeypatch.setattr(pulls, "HUNG_S", 0.0)
    run(engine, 1)
    assert [request.request_id for request in engine.running] == ["local"]


def test_a_request_whose_pull_failed_holds_nobody_back() -> None:
    """vLLM asks for it before it asks for a request whose KV has come, so it does not wait for a limit that fell."""
    engine = make_engine(num_device_blocks=36, role="kv_consumer", enable_caching=False)
    limit(engine, 3)
    local = engine.ask("local", prompt("x"), max_tokens=10)
    run(engine, 1)
    engine.nixl.failure_share = 1.0
    engine.ask_remote("failed", prompt("a"), max_tokens=4)
    engine.begin(budget=40)
    engine.nixl.failure_share = 0.0
    came = engine.ask_remote("came", prompt("b"), max_tokens=4)
    engine.end()
    engine.begin(budget=40)
    engine.half.admission.limit = 1
    engine.end()
    engine.receive()
    run(engine, 2)
    assert local in engine.running and came in engine.running


def test_metrics_show_no_limit_that_does_not_decide() -> None:
    engine = make_engine()
    for missing in range(admission.DECISIONS, 0, -1):
        assert (gauge(engine, "admission_limit"), gauge(engine, "admission_missing_predictions")) == (0, missing)
        predict(engine)
        engine.half.admission.limit = 1
    assert (gauge(engine, "admission_limit"), gauge(engine, "admission_missing_predictions")) == (1, 0)


def test_metrics_show_the_limit_that_decides_after_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_STEPS_WITHOUT", 4)
    engine = make_engine()
    predict(engine)
    engine.half.admission.limit = 2
    for name in "abc":
        engine.ask(name, prompt(name), max_tokens=12)
    run(engine, 3)
    assert (gauge(engine, "admission_limit"), gauge(engine, "admission_missing_predictions")) == (0, 3)
    run(engine, 3)
    assert (gauge(engine, "admission_limit"), gauge(engine, "admission_missing_predictions")) == (2, 0)
    assert len(engine.running) == 2 and gauge(engine, "requests_held_back") == 1
    engine.run_to_end()
    engine.check_idle()


def test_a_request_starts_when_another_ends() -> None:
    engine = make_engine()
    limit(engine, 1)
    first = engine.ask("a", prompt("a"), max_tokens=6)
    run(engine, 2)
    others = [engine.ask(name, prompt(name), max_tokens=11) for name in "bc"]
    control = engine.half.admission
    while not first.is_finished():
        run(engine, 1)
        if len(engine.running) == 2:
            wholes = [engine.tracker.spec.num_request_blocks(each.num_tokens, is_whole=True) for each in engine.running]
            assert sum(wholes) <= 32, "it would not be hot as a whole"
    run(engine, 1)
    assert others[0] in engine.running
    control.limit = None
    run(engine, 1)
    assert others[1] in engine.running
    run(engine, 40)
    engine.check_idle()


def test_nobody_is_held_back_who_would_be_hot_as_a_whole() -> None:
    engine = make_engine(400)
    limit(engine, 1)
    for name in "abcd":
        engine.ask(name, prompt(name), max_tokens=10)
    run(engine, 2)
    assert len(engine.running) == 4 and gauge(engine, "requests_held_back") == 0
    assert gauge(engine, "admission_limit") == 1


def test_who_is_held_back_takes_no_lent_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracker, "STEPS_PER_BALANCE", 1)

    def num_lent(others: str) -> list[int]:
        engine = make_engine(36)
        limit(engine, 2)
        for name in "ab":
            engine.ask(name, prompt(name), max_tokens=11)
        run(engine, 2)
        run(engine, 1)  # no prompt is computed any more
        for name in others:
            engine.ask(name, prompt(name), max_tokens=4)
        found = []
        for _ in range(5):
            run(engine, 1)
            found.append(sum(len(engine.tracker.admitted[name].lent) for name in "ab"))
        assert gauge(engine, "requests_held_back") == len(others)
        engine.run_to_end()
        engine.check_idle()
        return found

    assert num_lent("cde") == num_lent("")
    assert num_lent("")[0] > 0


def test_a_preempted_request_returns_beyond_the_limit() -> None:
    engine = make_engine()
    limit(engine, None)
    for name in "abc":
        engine.ask(name, prompt(name), max_tokens=11)
    run(engine, 2)
    assert len(engine.running) == 3
    engine.preempt(engine.running[-1])
    limit(engine, 1)
    run(engine, 2)
    assert len(engine.running) == 3, "a request that had started waits"


def test_one_request_runs_whatever_the_limit() -> None:
    engine = make_engine()
    limit(engine, 0)
    engine.ask("a", prompt("a"))
    run(engine, 1)
    assert len(engine.running) == 1


def test_a_prompt_from_elsewhere_is_not_pulled_while_it_is_held_back() -> None:
    """Its lease is kept by heartbeats, as for any other reason to wait; blocks would lie idle."""
    engine = make_engine(role="kv_consumer")
    limit(engine, 1)
    engine.ask("a", prompt("a"), max_tokens=8)
    engine.ask("b", prompt("b"), max_tokens=8)
    run(engine, 2)
    request = engine.ask_remote("remote", prompt("r"), max_tokens=4)
    run(engine, 2)
    assert request in engine.waiting and not engine.loading and "remote" not in engine.tracker.admitted
    assert engine.half.transport.connector.connector_scheduler._heartbeat_by_engine, "its lease would end"
    limit(engine, None)
    run(engine, 1)
    assert engine.loading == [request]
    engine.run_to_end()
    engine.check_idle()


def test_a_held_back_request_may_leave() -> None:
    engine = make_engine()
    limit(engine, 1)
    for name in "abc":
        engine.ask(name, prompt(name), max_tokens=8)
    run(engine, 2)
    assert gauge(engine, "requests_held_back") > 0
    for request in list(engine.waiting):
        engine.abort(request.request_id)
    assert gauge(engine, "requests_held_back") == 0
    run(engine, 30)
    engine.check_idle()


def test_reports_of_workers_reach_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(AdmissionControl, "measured", lambda self, usage, demand: seen.append((usage, demand)))
    engine = make_engine()
    engine.ask("a", prompt("a"), max_tokens=8)
    run(engine, 3)
    assert [metadata.step for metadata in engine.log] == [1, 2, 3]
    usage = Usage(3, 8, 2)
    merged = HiSparseWorkerMetadata(expired={"x"}).aggregate(HiSparseWorkerMetadata(usage=usage))
    assert merged.usage is usage and merged.expired == {"x"}
    output = SimpleNamespace(failed_recving=None, finished_recving=None, kv_connector_worker_meta=merged)
    engine.half.update_connector_output(output)
    [(reported, demand)] = seen
    assert reported is usage and demand.num_requests == 1 and demand.num_blocks == 32


def test_off_is_off() -> None:
    engine = ScriptedEngine(33, 64, is_elastic=True)
    assert engine.half.admission is None
    assert "admission_limit" not in engine.half.take_stats().data["gauges"]
