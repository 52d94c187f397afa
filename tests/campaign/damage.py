"""Damage to plant in the product: the campaign must find each, or it does not look where it should."""

from __future__ import annotations

import pytest

from vllm_hisparse.connector.nixl_scheduler import NixlSchedulerTransport
from vllm_hisparse.connector.scheduler import HiSparseSchedulerConnector
from vllm_hisparse.kv_manager.scheduler.hot_block_manager import HotBlockManager


def no_parking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host blocks of an ended request are free at once, though a step in flight still writes them."""

    def release(self: HotBlockManager) -> None:
        parked, self._parked = self._parked, []
        for _, request_id in parked:
            self.host_pool.free(request_id)

    monkeypatch.setattr(HotBlockManager, "release_parked", release)


def early_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is offered to others before its indexer keys are on the host."""
    publish = HiSparseSchedulerConnector._publish

    def publish_early(self: HiSparseSchedulerConnector, request, state) -> None:
        state.num_saved_blocks += 1
        publish(self, request, state)
        state.num_saved_blocks -= 1

    monkeypatch.setattr(HiSparseSchedulerConnector, "_publish", publish_early)


def no_tail_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request's last, partial block of indexer keys is not copied to the host."""
    preempt = HotBlockManager._preempt

    def preempt_without(self: HotBlockManager, request, state) -> None:
        state.tail_block_id = None
        preempt(self, request, state)

    monkeypatch.setattr(HotBlockManager, "_preempt", preempt_without)


def another_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request pulls the KV of the prompt of the same length before it."""
    start, latest = NixlSchedulerTransport.start, {}

    def start_another(self: NixlSchedulerTransport, request, *args) -> None:
        params, num_tokens = request.kv_transfer_params, request.num_prompt_tokens
        own = params["remote_block_ids"]
        params["remote_block_ids"] = latest.get(num_tokens, own)
        latest[num_tokens] = own
        start(self, request, *args)

    monkeypatch.setattr(NixlSchedulerTransport, "start", start_another)
