"""Waiting times for tiers that are silent, slow or healthy, by a clock that the tests set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from campaign.configuration import BLOCK_SIZE
from tiered_engine import TieredEngine
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from vllm_hisparse.kv_manager.tiers.block_copier import BlockCopier
from vllm_hisparse.kv_manager.tiers.prefix_loads import MAX_TIMEOUTS, MAX_WAITING, RETRY_S

TIMEOUT_S = 5.0
PROMPT = list(range(200, 221))  # five whole blocks and one token
NUM_BLOCKS = 5
Lookup = Callable[[FileSystemTierManager, bytes, object], LookupResult]


@dataclass
class SetClock:
    """A clock that stands still.

    Attributes:
        now: its time in seconds.
    """

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a disk answer before the next step, because the clock does not wait for it."""
    submit_load, load = FileSystemTierManager.submit_load, BlockCopier.load

    def lookup(self: FileSystemTierManager, key: bytes, _: object) -> LookupResult:
        is_there = os.path.exists(self.file_mapper.get_file_name(key))
        return LookupResult.HIT if is_there else LookupResult.MISS

    def submit_and_wait(self: FileSystemTierManager, job: TransferJob) -> None:
        submit_load(self, job)
        self._pool.wait_idle()

    def load_and_wait(self: BlockCopier, chunk_id: int, block_id: int, key: bytes) -> Future[bool]:
        future = load(self, chunk_id, block_id, key)
        future.exception()
        return future

    monkeypatch.setattr(FileSystemTierManager, "lookup", lookup)
    monkeypatch.setattr(FileSystemTierManager, "submit_load", submit_and_wait)
    monkeypatch.setattr(BlockCopier, "load", load_and_wait)


@pytest.fixture
def engine(tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredEngine]:
    """An engine with a disk that has `PROMPT`, and a host pool that does not."""
    answer_at_once(monkeypatch)
    tier = {"type": "fs", "path": str(tmp_path), "quota_gib": 1.0, "num_threads": 2}
    with TieredEngine([tier], timeout_s=TIMEOUT_S, clock=clock, num_host_blocks=40) as engine:
        engine.answer("first", PROMPT)
        engine.settle()
        engine.half.reset_cache()
        engine.scheduler.reset_prefix_cache()
        engine.forget_buffer()
        engine.take_counters()
        yield engine


def answers_with(monkeypatch: pytest.MonkeyPatch, lookup: Lookup) -> None:
    monkeypatch.setattr(FileSystemTierManager, "lookup", lookup)


def is_silent(*_: object) -> LookupResult:
    return LookupResult.RETRY


def step_until_admitted(engine: TieredEngine, request: Request, clock: SetClock, step_s: float) -> float:
    """Step as long as a request waits; returns for how many seconds of the clock."""
    first = clock.now
    for _ in range(1000):
        engine.turn()
        if request not in engine.waiting:
            return clock.now - first
        clock.now += step_s
    raise AssertionError("the request waits for ever")


def test_a_late_tier_costs_a_recomputation_once(engine: TieredEngine, clock: SetClock) -> None:
    with pytest.MonkeyPatch.context() as silence:
        answers_with(silence, is_silent)
        waited_s = step_until_admitted(engine, engine.ask("again", PROMPT, 1), clock, 0.1)
    assert TIMEOUT_S < waited_s < TIMEOUT_S + 0.3
    assert engine.take_counters()["tier_load_timeouts"] == 1
    request = engine.ask("other", PROMPT[1:], 1)
    assert step_until_admitted(engine, request, clock, 0.1) < 0.3, "the source is left alone for a while"
    engine.run()
    engine.half.reset_cache()
    engine.scheduler.reset_prefix_cache()
    clock.now += RETRY_S
    _, counted = engine.answer("last", PROMPT, 1)
    assert counted["tier_load_timeouts"] == 0 and counted["tier_loaded_blocks"] == NUM_BLOCKS


def test_a_disk_is_no_late_tier_while_nobody_asks(engine: TieredEngine, clock: SetClock) -> None:
    """A disk is not late if vLLM did not ask for the request, or was paused."""
    engine.ask("again", PROMPT, 1)
    engine.turn()
    engine.admit_none()
    clock.now += 100 * TIMEOUT_S
    for _ in range(200):
        engine.turn()
        clock.now += TIMEOUT_S / 2
    engine.admit()
    engine.run()
    counted = engine.take_counters()
    assert counted["tier_load_timeouts"] == counted["tier_slow_loads"] == 0
    assert counted["host_prefix_tokens"] == BLOCK_SIZE * NUM_BLOCKS


def test_a_load_goes_on_while_nobody_asks(engine: TieredEngine) -> None:
    request = engine.ask("again", PROMPT, 1)
    engine.turn()
    engine.admit_none()
    engine.wait_until(lambda: engine.tiers.loads.has_ended("again"))
    assert engine.take_counters()["tier_loaded_blocks"] == NUM_BLOCKS
    engine.admit()
    engine.abort(request.request_id)


def test_a_disk_is_no_late_tier_because_steps_are_long(engine: TieredEngine, clock: SetClock) -> None:
    request = engine.ask("again", PROMPT, 1)
    step_until_admitted(engine, request, clock, 3 * TIMEOUT_S)
    counted = engine.take_counters()
    assert counted["tier_load_timeouts"] == 0 and counted["tier_loaded_blocks"] == NUM_BLOCKS


def one_block_at_a_time(clock: SetClock, interval_s: float) -> Lookup:
    """A tier that has one more block of each request now and then."""
    real, first, asked = FileSystemTierManager.lookup, clock.now, {}

    def lookup(self: FileSystemTierManager, key: bytes, context: object) -> LookupResult:
        keys = asked.setdefault(context.req_id, [])
        if key not in keys:
            keys.append(key)
        has_come = clock.now - first > interval_s * (keys.index(key) + 1)
        return real(self, key, context) if has_come else LookupResult.RETRY

    return lookup


def test_a_trickling_tier_holds_a_request_for_a_limited_time(
    engine: TieredEngine, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_prompt = list(range(300, 332))[:31]
    engine.answer("long", long_prompt, 1)
    engine.settle()
    engine.half.reset_cache()
    engine.scheduler.reset_prefix_cache()
    engine.forget_buffer()
    answers_with(monkeypatch, one_block_at_a_time(clock, 0.95 * TIMEOUT_S))
    waited_s = step_until_admitted(engine, engine.ask("again", long_prompt, 1), clock, TIMEOUT_S / 20)
    assert waited_s < MAX_TIMEOUTS * TIMEOUT_S + 1
    counted = engine.take_counters()
    assert counted["tier_slow_loads"] == 1 and counted["tier_load_timeouts"] == 0
    assert 0 < counted["tier_loaded_blocks"] < 7
    ((source, _),) = engine.tiers.loads.make_contexts("probe")
    assert source.retry_at == 0.0, "it has delivered"
    engine.run()
    engine.settle()
    assert not engine.tiers.leftovers()


def test_a_trickling_tier_holds_nobody_else_for_longer_than_the_timeout(
    engine: TieredEngine, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_with(monkeypatch, one_block_at_a_time(clock, 0.95 * TIMEOUT_S))
    monkeypatch.setattr(engine.tiers.loads, "max_loads", 1)
    engine.ask("slow", PROMPT, 1)
    engine.turn()
    request = engine.ask("new", list(range(700, 709)), 1)
    waited_s = step_until_admitted(engine, request, clock, 0.1)
    assert waited_s < TIMEOUT_S + 0.3
    assert engine.take_counters()["tier_skipped_loads"] == 1
    monkeypatch.undo()
    engine.run()
    assert not engine.tiers.loads.leftovers()


def test_few_requests_wait_for_a_trickling_tier(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for each of them in every step."""
    answers_with(monkeypatch, is_silent)
    loads = engine.tiers.loads
    loads.begin("slow", [], [], 0)
    monkeypatch.setattr(loads, "max_loads", 1)
    must_wait = [loads.must_wait(f"request-{index}", has_room=True) for index in range(100)]
    assert must_wait == [True] * MAX_WAITING + [False] * (100 - MAX_WAITING)
    assert loads.take_counters()["tier_skipped_loads"] == 100 - MAX_WAITING
    loads.forget("request-0")
    assert loads.must_wait("another", has_room=True)
    loads.forget("slow")
    assert not loads.must_wait("request-1", has_room=True) and not loads.has_ended("request-1"), "it may load now"


def test_small_prompts_that_load_overtake_a_large_one_for_a_limited_time(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host pool has no room for it beside those that load, and no memory for it beside those that run."""
    arrivals: dict[str, float] = {}

    def lookup(_tier: FileSystemTierManager, _key: bytes, context: object) -> LookupResult:
        arrived = arrivals.setdefault(context.req_id, clock.now)
        return LookupResult.RETRY if clock.now < arrived + 2 else LookupResult.MISS

    answers_with(monkeypatch, lookup)
    tier = {"type": "fs", "path": str(tmp_path), "quota_gib": 1.0}
    sizes = {"num_host_blocks": 14, "num_device_blocks": 80, "max_model_len": 48}
    with TieredEngine([tier], timeout_s=TIMEOUT_S, clock=clock, **sizes) as engine:
        for step in range(600):
            if step % 10 == 0:
                engine.ask(f"small-{step}", [1000 + 50 * step + token for token in range(17)], 4)
            if step == 10:
                large, first = engine.ask("large", list(range(100, 141)), 2), clock.now
            engine.turn(budget=40)
            engine.tiers.manager.wait_for_copies()  # blocks that are being copied cannot be evicted
            clock.now += 0.1
            if step > 10 and large not in engine.waiting:
                break
        assert clock.now - first < TIMEOUT_S + 2, "a small one runs for less than 2 s"
        answers_with(monkeypatch, lambda *_: LookupResult.MISS)
        engine.run()
        assert not engine.tiers.loads.leftovers()


def test_hits_are_called_after_where_they_come_from(engine: TieredEngine) -> None:
    sources = []
    admitted = engine.half.update_state_after_alloc

    def admit(request: Request, blocks: object, num_external_tokens: int) -> None:
        admitted(request, blocks, num_external_tokens)
        sources.append(engine.half.cache_hit_sources(num_external_tokens))

    engine.half.update_state_after_alloc = admit
    engine.answer("from disk", PROMPT, 1)
    engine.scheduler.reset_prefix_cache()
    engine.answer("from the host pool", PROMPT, 1)
    engine.answer("new", list(range(700, 709)), 1)
    num_tokens = BLOCK_SIZE * NUM_BLOCKS
    assert sources == [{CacheHitSource.DISK: num_tokens}, {CacheHitSource.HOST: num_tokens}, {}]
