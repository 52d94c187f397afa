"""Counts of the faults, on a cluster that does what it is told; `python -m tests.campaign` starts real engines."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

RIGHT, TIE = ([1, 2, 3], [1.0] * 3), ([1, 2, 3], [0.1] * 3)
WRONG = [1, 9, 9]


class FakeCluster:
    """Answers at once; `tokens` from the decode engine, blocks lost by the engine that `loses`."""

    def __init__(self, full: tuple[list[int], list[float]] = RIGHT, tokens: list[int] | None = None, loses: str = ""):
        self.full, self.tokens, self.loses = full, tokens or full[0], loses
        self.calls: list[tuple[str, Any]] = []
        self.num_looks = 0

    def full_kv(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        return {"tokens": self.full[0], "margins": self.full[1]}

    def transfer(self, prompt: list[int]) -> dict[str, Any]:
        return {}

    def ask(self, prompt: list[int], num_tokens: int, transfer: dict[str, Any] | None) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def leave(self, prompt: list[int], transfer: dict[str, Any] | None, num_chunks: int) -> None:
        self.calls.append(("leave", num_chunks))

    def kill(self, name: str) -> None:
        self.calls.append(("kill", name))

    def restart(self, name: str) -> None:
        self.calls.append(("restart", name))

    def host_pool(self) -> SimpleNamespace:
        """Requests wait from the third look on, but not at every other one."""
        self.num_looks += 1
        num_refused = self.num_looks % 2 if self.num_looks > 2 else 0
        return SimpleNamespace(num_refused=num_refused, num_queued=9, num_used=30, num_empty=0, num_blocks=32)

    def num_preemptions(self) -> int:
        return self.num_looks

    def lost_blocks(self, name: str) -> int:
        return 3 if name == self.loses else 0


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    return importlib.import_module("tests.campaign.faults")


def nothing() -> None:
    """No progress bar."""


@pytest.mark.parametrize(("victim", "survivor"), [("prefill", "decode"), ("decode", "prefill")])
def test_killed(faults: ModuleType, victim: str, survivor: str) -> None:
    cluster = FakeCluster()
    fault = faults.killed(victim, cluster, 2, nothing)
    assert fault == faults.Fault(f"{victim} killed during a transfer", times=2)
    assert cluster.calls == [("kill", victim), ("restart", victim)] * 2
    assert faults.killed(victim, FakeCluster(loses=survivor), 2, nothing).lost_blocks == 2 * 3
    wrong = faults.killed(victim, FakeCluster(tokens=WRONG), 2, nothing).wrong_tokens
    assert wrong == 2 * 2, "the disturbed request's and the later one's"
    assert faults.killed(victim, FakeCluster(TIE, WRONG), 2, nothing).wrong_tokens == 0, "ties are another text"


def test_host_pool_full(faults: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LOCAL_CLIENTS", 1)
    monkeypatch.setattr(faults, "REMOTE_CLIENTS", 1)
    monkeypatch.setattr(faults.time, "sleep", lambda _, sleep=faults.time.sleep: sleep(0.01))
    fault = faults.host_pool_full(FakeCluster(), 0.2, nothing)
    assert fault.times and not fault.wrong_tokens and not fault.lost_blocks
    assert fault.full_share == 1 and fault.unanswered == 0
    assert fault.refusing_share == pytest.approx(0.5, abs=0.2), "every other look after the one that found it full"
    assert fault.least_used_blocks == 30 and fault.num_blocks == 32
    assert fault.preemptions > 3
    fault = faults.host_pool_full(FakeCluster(tokens=WRONG, loses="decode"), 0.1, nothing)
    assert fault.wrong_tokens == fault.times and fault.lost_blocks == 3


def test_clients_disconnect(faults: ModuleType) -> None:
    cluster = FakeCluster()
    fault = faults.clients_disconnect(cluster, 20, nothing)
    assert fault == faults.Fault("clients disconnect", times=20)
    assert len({num_chunks for _, num_chunks in cluster.calls}) > 3
    fault = faults.clients_disconnect(FakeCluster(tokens=WRONG, loses="prefill"), 20, nothing)
    assert fault.wrong_tokens == 2 and fault.lost_blocks == 3
