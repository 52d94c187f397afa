"""Hits and misses of requests and of all, as counters grow; a device's values arrive when it gets there."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.kv_manager.rows import hit_counts
from vllm_hisparse.kv_manager.rows.hit_counts import HitCounts
from vllm_hisparse.ops.kv_heads import KVHeads

HEADS = KVHeads(num_heads=2, head_stride=2)


@pytest.fixture
def counts() -> HitCounts:
    return HitCounts(3, HEADS, torch.device("cpu"))


def add(counts: HitCounts, state: int, hits: int, misses: int) -> None:
    counts.by_seq[state] += torch.tensor([hits, misses])


def test_all_since_the_last_call(counts: HitCounts) -> None:
    assert counts.take() == (0, 0)
    add(counts, 0, 3, 1)
    add(counts, 5, 2, 2)
    assert counts.take() == (5, 3)
    add(counts, 5, 1, 0)
    assert counts.take() == (1, 0)
    assert counts.take() == (0, 0)


def test_a_request_adds_its_heads_and_not_its_predecessor(counts: HitCounts) -> None:
    add(counts, 2, 3, 1)
    add(counts, 3, 10, 20)
    add(counts, 4, 99, 99)  # another request's
    counts.release(40, 1)
    add(counts, 2, 1, 0)
    counts.release(41, 1)
    assert counts.take_released() == [(40, 13, 21), (41, 1, 0)]
    assert counts.take_released() == []


def test_a_request_is_reported_in_order_when_its_counts_have_arrived(
    counts: HitCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: set[int] = set()

    class Snapshot(hit_counts.CountSnapshot):
        def __init__(self, values: torch.Tensor):
            super().__init__(values)
            self.number = len(snapshots)
            snapshots.append(self)

        @property
        def ready(self) -> bool:
            return self.number in arrived

    snapshots: list[Snapshot] = []
    monkeypatch.setattr(hit_counts, "CountSnapshot", Snapshot)
    add(counts, 0, 1, 2)
    add(counts, 4, 3, 4)
    counts.release(7, 0)
    counts.release(9, 2)
    arrived.add(1)
    assert counts.take_released() == []
    arrived.add(0)
    assert counts.take_released() == [(7, 1, 2), (9, 3, 4)]
    assert counts.take() == (0, 0)  # its snapshot, the third, has not arrived
    add(counts, 0, 100, 0)
    arrived.add(2)
    assert counts.take() == (4, 6), "not what the counters were when the snapshot was taken"


def test_a_device_is_asked_now_and_then() -> None:
    counts = HitCounts(3, HEADS, torch.device("cpu"), takes_per_snapshot=16)
    add(counts, 0, 1, 1)
    taken = [counts.take() for _ in range(2 * 16)]
    assert taken[:15] == [(0, 0)] * 15
    assert sum(hits for hits, _ in taken) == 1
