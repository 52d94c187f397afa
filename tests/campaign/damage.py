"""Damage to plant in the product: the campaign must find each, or it does not look where it should."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.connector.nixl_scheduler import NixlSchedulerTransport
from vllm_hisparse.kv_manager.blocks import hot_block_manager
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.blocks.hot_block_manager import HotBlockManager
from vllm_hisparse.kv_manager.blocks.request_ledger import AdmittedRequest, RequestLedger
from vllm_hisparse.kv_manager.blocks.spare_blocks import SpareBlocks
from vllm_hisparse.kv_manager.tiers.block_stores import BlockStores
from vllm_hisparse.kv_manager.tiers.tier_manager import HostTierManager
from vllm_hisparse.kv_manager.tiers.transfer_buffer import TransferBuffer
from vllm_hisparse.vllm_patches.drafting_sessions import DraftingSession


def no_parking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host blocks are free as soon as their request has lost them, though a step in flight still writes them."""

    def release(self: HotBlockManager) -> None:
        parked, self._parked = self._parked, []
        for _, host_ids in parked:
            self.host_pool.unpin(host_ids)

    monkeypatch.setattr(HotBlockManager, "release_parked", release)


def early_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is offered to others before its indexer keys are on the host."""
    publish = RequestLedger._publish

    def publish_early(self: RequestLedger, request, admitted) -> None:
        admitted.num_saved_blocks += 1
        publish(self, request, admitted)
        admitted.num_saved_blocks -= 1

    monkeypatch.setattr(RequestLedger, "_publish", publish_early)


def no_news_of_taken_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does not hear at once which hot blocks a request has lost."""
    take_back = SpareBlocks._take_back

    def take_silently(self: SpareBlocks, ledger: RequestLedger, request_id: str, *args) -> None:
        take_back(self, ledger, request_id, *args)
        ledger.hot_tables.changed.pop(request_id)

    monkeypatch.setattr(SpareBlocks, "_take_back", take_silently)


def no_tail_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request's last, partial block of indexer keys is not copied to the host."""
    monkeypatch.setattr(HotBlockManager, "_save_tail", lambda *args: None)


def another_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request pulls the KV of the prompt of the same length before it."""
    start, latest = NixlSchedulerTransport.start, {}

    def start_another(self: NixlSchedulerTransport, request, *args) -> None:
        params, num_tokens = self._accepted[request.request_id], request.num_prompt_tokens
        own = params["remote_block_ids"]
        params["remote_block_ids"] = latest.get(num_tokens, own)
        latest[num_tokens] = own
        start(self, request, *args)

    monkeypatch.setattr(NixlSchedulerTransport, "start", start_another)


def unclaimed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt of an HTTP request may use the transfer that was made for one of them."""

    def claim(self: NixlSchedulerTransport, request, params) -> None:
        self._accepted[request.request_id] = params.model_dump()

    monkeypatch.setattr(NixlSchedulerTransport, "_claim", claim)


def long_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A streaming session may outgrow the model."""
    monkeypatch.setattr(hot_block_manager, "cut_long_sessions", lambda *args: None)


def idle_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker keeps state of sessions that wait, beside as many requests as may run."""
    monkeypatch.setattr(RequestLedger, "_idle", lambda *args: [])


def damaged_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from a tier are used without a check."""
    monkeypatch.setattr(TransferBuffer, "is_intact", lambda *args: True)


def early_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is stored while steps that may write it are in flight, before its request has given it up."""
    step = BlockStores.step

    def step_early(self: BlockStores, num_scheduled: int, num_processed: int) -> None:
        published = range(self.host_pool.num_blocks)
        self.host_pool._newly_cached.update(dict.fromkeys(published))
        unwritten, self.manager.unwritten = self.manager.unwritten, Counter()
        step(self, num_scheduled, num_scheduled)
        self.manager.unwritten = unwritten

    monkeypatch.setattr(BlockStores, "step", step_early)


def early_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer gets a block that is published before the step that fills it is over."""
    step = HostTierManager.step

    def step_early(self: HostTierManager) -> None:
        unwritten, self.unwritten = self.unwritten, Counter()
        step(self)
        self.unwritten = unwritten

    monkeypatch.setattr(HostTierManager, "step", step_early)


def certain_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts count as computed before they are accepted, and for good."""
    monkeypatch.setattr(AdmittedRequest, "keep_saved", lambda self, num_blocks: None)
    monkeypatch.setattr(RequestLedger, "has_drafts", property(lambda self: False, lambda self, has_drafts: None), False)


def accepted_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a step in flight count as accepted: their blocks are saved, and published when their tokens come."""

    class Optimistic:
        def __init__(self, request: Request):
            self.request = request

        def __getattr__(self, name: str) -> Any:
            return getattr(self.request, name)

        @property
        def num_tokens(self) -> int:
            return self.request.num_tokens + self.request.num_output_placeholders

    add_changes = RequestLedger._add_changes
    monkeypatch.setattr(
        RequestLedger,
        "_add_changes",
        lambda self, changes, request, *args: add_changes(self, changes, Optimistic(request), *args),
    )


def forgotten_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose turn is over counts no step in flight as computed, though vLLM takes it off itself."""

    def num_computed_tokens(session: DraftingSession) -> int:
        num_tokens = session.__dict__["num_computed_tokens"]
        return num_tokens if session.status == RequestStatus.RUNNING else min(num_tokens, session.num_tokens - 1)

    setter = DraftingSession.num_computed_tokens.fset
    monkeypatch.setattr(DraftingSession, "num_computed_tokens", property(num_computed_tokens, setter))


def undrafted_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is saved in the step that fills it, before the draft layer has written its part."""
    has_none = property(lambda self: False, lambda self, has_draft_layers: None)
    monkeypatch.setattr(RequestLedger, "has_draft_layers", has_none, False)


def one_unsaved_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last of a preempted request's unsaved blocks is saved."""
    preempt = HotBlockManager._preempt

    def preempt_losing(self: HotBlockManager, request, admitted) -> None:
        num_blocks = -(-min(request.num_computed_tokens, request.num_tokens) // self.block_size)
        unsaved = [item for item in admitted.unsaved_blocks.items() if item[0] < num_blocks]
        admitted.unsaved_blocks = dict(unsaved[-1:])
        preempt(self, request, admitted)

    monkeypatch.setattr(HotBlockManager, "_preempt", preempt_losing)


def reused_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host block may be given to a request while it is copied to a tier."""
    pool = HostBlockPool
    monkeypatch.setattr(pool, "hold", lambda *args: None)
    unpin = pool.unpin

    def unpin_pinned(self: HostBlockPool, block_ids) -> None:
        unpin(self, [block_id for block_id in block_ids if self._num_pins[block_id]])

    monkeypatch.setattr(pool, "unpin", unpin_pinned)
