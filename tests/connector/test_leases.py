"""Leases as a decode instance sees them, against vLLM's own code of the prefill side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

from vllm_hisparse.connector import leases
from vllm_hisparse.connector.leases import MARGIN_S, Leases
from vllm_hisparse.kv_manager.metadata import LeaseTerms

KEY = ("prefill", "p")


class Clock:
    """Stands for the module `time` where a test sets the time."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def perf_counter(self) -> float:
        return self.now


class PrefillWorker:
    """vLLM's lease code of a prefill instance with one prompt, which it computed at `finished_at`."""

    _handle_heartbeat = NixlBaseConnectorWorker._handle_heartbeat
    _reap_expired_send_leases = NixlBaseConnectorWorker._reap_expired_send_leases

    def __init__(self, lease_s: int, finished_at: float):
        self.end, self._lease_extension = finished_at + lease_s, lease_s * 2 // 3
        self._reqs_to_send, self._reqs_to_process = {"p": self.end}, {"p"}
        self.consumer_notification_counts_by_req: dict[str, int] = {}
        self.expected_consumer_notifications_by_req: dict[str, int] = {}
        self.xfer_stats = SimpleNamespace(record_kv_expired_req=lambda: None)

    def heartbeat(self) -> None:
        self._reap_expired_send_leases(set())
        self._handle_heartbeat("other,p")

    @property
    def holds(self) -> bool:
        self._reap_expired_send_leases(set())
        return bool(self._reqs_to_send)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (leases, base_worker):
        monkeypatch.setattr(module, "time", clock)
    return clock


@given(
    lease_s=st.integers(6, 300),
    age_s=st.floats(0, 60),
    gaps_s=st.lists(st.floats(0, 80), max_size=8),
    delay=st.floats(0, 0.99),
    wait_s=st.floats(0, 80),
    is_stated=st.booleans(),
)
@example(lease_s=30, age_s=0.0, gaps_s=[5.0] * 8, delay=0.0, wait_s=19.0, is_stated=False)
def test_a_lease_that_is_not_over_is_held(lease_s, age_s, gaps_s, delay, wait_s, is_stated) -> None:
    """However late heartbeats are: the prefill instance holds whatever a decode instance may pull."""
    clock, margin = Clock(), min(MARGIN_S, lease_s / 10)
    with pytest.MonkeyPatch.context() as patch:
        for module in (leases, base_worker):
            patch.setattr(module, "time", clock)
        prefill, table, arrived = PrefillWorker(lease_s, clock.now), Leases(), clock.now + age_s * is_stated
        end, heartbeats = prefill.end, [arrived + sum(gaps_s[: index + 1]) for index in range(len(gaps_s))]
        for sent_at in heartbeats:
            table.heartbeats_sent("prefill", {"p", "q"}, sent_at)
            clock.now = sent_at + delay * margin
            prefill.heartbeat()
        clock.now = max([arrived, *heartbeats, clock.now]) + wait_s
        table.begin("d", *KEY, LeaseTerms(clock.now - arrived, lease_s))
        if is_stated:
            table.state_end("d", end)
        assert table.is_over("d") or prefill.holds
        if not heartbeats and wait_s + age_s * is_stated < lease_s - margin - 0.1:
            assert not table.is_over("d"), "it was only asked late"


def test_regular_heartbeats_keep_a_lease(clock: Clock) -> None:
    table, prefill, arrived = Leases(), PrefillWorker(30, clock.now), clock.now
    for _ in range(100):
        clock.now += 5
        table.heartbeats_sent("prefill", {"p"}, clock.now)
        table.keep({"prefill": {"p"}})
        prefill.heartbeat()
    table.begin("d", *KEY, LeaseTerms(clock.now - arrived, 30))
    assert not table.is_over("d") and prefill.holds
    clock.now += 18.9
    assert not table.is_over("d") and prefill.holds
    clock.now += 0.2
    assert table.is_over("d"), "within a second of its end"


def test_a_heartbeat_after_the_end_of_a_lease_renews_nothing(clock: Clock) -> None:
    table, prefill, arrived = Leases(), PrefillWorker(30, clock.now), clock.now
    clock.now += 31
    table.heartbeats_sent("prefill", {"p"}, clock.now)
    prefill.heartbeat()
    table.begin("d", *KEY, LeaseTerms(clock.now - arrived, 30))
    assert table.is_over("d") and not prefill.holds


def test_nothing_is_remembered_of_leases_that_ended(clock: Clock) -> None:
    table = Leases()
    table.heartbeats_sent("prefill", {"p", "q"}, clock.now)
    table.begin("d", *KEY, LeaseTerms(50, 30))
    assert table.is_over("d")
    table.end("d")
    assert not table.is_over("d") and not table.is_over("never seen")
    table.keep({"prefill": {"q"}, "other": {"p"}})
    only_renewed = Leases()
    only_renewed.heartbeats_sent("prefill", {"q"}, clock.now)
    assert vars(table) == vars(only_renewed)
