"""Damage to plant in the product: the campaign must find each, or it does not look where it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.connector import nixl_scheduler
from vllm_hisparse.connector.nixl_scheduler import NixlSchedulerTransport
from vllm_hisparse.kv_manager.blocks import request_tracker
from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.blocks.request_tracker import AdmittedRequest, RequestTracker
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.kv_manager.tiers.block_stores import BlockStores
from vllm_hisparse.kv_manager.tiers.tier_manager import HostTierManager
from vllm_hisparse.kv_manager.tiers.transfer_buffer import TransferBuffer
from vllm_hisparse.vllm_patches.drafting_sessions import DraftingSession

from . import rank


def no_deferral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host blocks are free as soon as their request has lost them, though a step in flight still writes them."""
    monkeypatch.setattr(Deferred, "after_step", lambda self, number, action: action())


def early_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a step's tokens is offered to others before its indexer keys are on the host."""
    diff = RequestTracker.diff

    def diff_and_publish(self: RequestTracker, num_scheduled) -> HiSparseMetadata:
        metadata = diff(self, num_scheduled)
        for name in num_scheduled:
            request, index = self.requests[name], self.admitted[name].num_saved_blocks
            if self.enable_caching and index < len(request.block_hashes):
                self.host_pool.register(name, index, request.block_hashes[index])
                self.events.stored(request, [index])
        return metadata

    monkeypatch.setattr(RequestTracker, "diff", diff_and_publish)


def no_news_of_taken_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does not hear which hot blocks a request has lost."""
    diff = RequestTracker.diff

    def diff_silently(self: RequestTracker, num_scheduled) -> HiSparseMetadata:
        before = {admitted.first_hot_block_id: len(admitted.sent_hot_ids) for admitted in self.admitted.values()}
        metadata = diff(self, num_scheduled)
        for name, (first, block_ids) in list(metadata.hot_block_tables.items()):
            if first + len(block_ids) < before.get(name, 0):
                del metadata.hot_block_tables[name]
        return metadata

    monkeypatch.setattr(RequestTracker, "diff", diff_silently)


def no_news_of_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does not hear that a request outgrows equal rows."""

    def forget(metadata: HiSparseMetadata) -> None:
        metadata.equal_rows = {name: is_equal for name, is_equal in metadata.equal_rows.items() if is_equal}

    change_metadata(monkeypatch, forget)


def no_preemption_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request's last, partial block of indexer keys is not copied to the host."""
    change_metadata(monkeypatch, lambda metadata: metadata.preemption_saves.clear())


def change_metadata(monkeypatch: pytest.MonkeyPatch, change: Callable[[HiSparseMetadata], None]) -> None:
    """Change what the worker is told."""
    diff = RequestTracker.diff

    def diff_and_change(self: RequestTracker, num_scheduled) -> HiSparseMetadata:
        metadata = diff(self, num_scheduled)
        change(metadata)
        return metadata

    monkeypatch.setattr(RequestTracker, "diff", diff_and_change)


def another_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request pulls the KV of the prompt of the same length before it."""
    accept, latest = NixlSchedulerTransport.accept, {}

    def accept_another(self: NixlSchedulerTransport, request: Request) -> bool:
        if (params := request.kv_transfer_params) and not request.abort_immediately:
            own = params["remote_block_ids"]
            params["remote_block_ids"] = latest.get(request.num_prompt_tokens, own)
            latest[request.num_prompt_tokens] = own
        return accept(self, request)

    monkeypatch.setattr(NixlSchedulerTransport, "accept", accept_another)


def unclaimed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt of an HTTP request may use the transfer that was made for one of them."""
    monkeypatch.setattr(nixl_scheduler, "owns_transfer", lambda *args: True)


def long_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A streaming session may outgrow the model."""
    monkeypatch.setattr(request_tracker, "cut_long_sessions", lambda *args: None)


def idle_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker keeps state of sessions that wait, beside as many requests as may run."""
    set_constant(monkeypatch, "max_num_seqs", 1000)


def set_constant(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Give an attribute of every tracker one value."""
    monkeypatch.setattr(RequestTracker, name, property(lambda self: value, lambda self, _: None), False)


def damaged_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from a tier are used without a check."""
    monkeypatch.setattr(TransferBuffer, "is_intact", lambda *args: True)


def early_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is stored while steps that may write it are in flight, before its request has given it up."""
    step = BlockStores.step

    def step_early(self: BlockStores, deferred: Deferred) -> None:
        all_over = Deferred()
        all_over.num_scheduled = all_over.num_processed = deferred.num_scheduled
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostTierManager, "is_unwritten", lambda *args: False)
            step(self, all_over)

    monkeypatch.setattr(BlockStores, "step", step_early)
    monkeypatch.setattr(HostBlockPool, "take_newly_cached", lambda self: list(range(self.num_blocks)))


def early_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer gets a block that is published before the step that fills it is over."""
    step = HostTierManager.step

    def step_early(self: HostTierManager) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostTierManager, "is_unwritten", lambda *args: False)
            step(self)

    monkeypatch.setattr(HostTierManager, "step", step_early)


def certain_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts count as computed before they are accepted, and for good."""
    monkeypatch.setattr(AdmittedRequest, "truncate_saved", lambda self, num_blocks: None)
    set_constant(monkeypatch, "has_drafts", False)


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

    diff = RequestTracker.diff

    def diff_optimistically(self: RequestTracker, num_scheduled) -> HiSparseMetadata:
        requests, self.requests = self.requests, {name: Optimistic(one) for name, one in self.requests.items()}
        metadata = diff(self, num_scheduled)
        self.requests = requests
        return metadata

    monkeypatch.setattr(RequestTracker, "diff", diff_optimistically)


def forgotten_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose turn is over counts no step in flight as computed, though vLLM takes it off itself."""

    def num_computed_tokens(session: DraftingSession) -> int:
        num_tokens = session.__dict__["num_computed_tokens"]
        return num_tokens if session.status == RequestStatus.RUNNING else min(num_tokens, session.num_tokens - 1)

    setter = DraftingSession.num_computed_tokens.fset
    monkeypatch.setattr(DraftingSession, "num_computed_tokens", property(num_computed_tokens, setter))


def undrafted_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is saved in the step that fills it, before the draft layer has written its part."""
    set_constant(monkeypatch, "has_draft_layers", False)


def one_unsaved_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last of the unsaved blocks of preempted requests is saved."""

    def lose(metadata: HiSparseMetadata) -> None:
        del metadata.preemption_saves[:-1]

    change_metadata(monkeypatch, lose)


def reused_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host block may be given to a request while it is copied to a tier."""
    unpin, held = HostBlockPool.unpin, Counter()

    def unpin_pinned(self: HostBlockPool, block_ids) -> None:
        pinned = [block_id for block_id in block_ids if not held[self, block_id]]
        held.subtract((self, block_id) for block_id in block_ids if held[self, block_id])
        unpin(self, pinned)

    monkeypatch.setattr(HostBlockPool, "hold", lambda self, block_id: held.update([(self, block_id)]))
    monkeypatch.setattr(HostBlockPool, "unpin", unpin_pinned)


def ranks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank enters a forward before the others have ended the one before, as if there were no all-reduce."""
    monkeypatch.setattr(rank, "finish_forwards", lambda ranks, num_forwards: None)
