"""vLLM's scheduler reserves nothing for a request whose load has failed."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_hisparse.vllm_patches.failed_loads import release_failed_loads


@pytest.mark.parametrize(("num_loaded", "num_failed_tokens", "reserves"), [(0, 8, False), (4, 4, True), (8, 0, True)])
def test_a_failed_load_without_blocks_reserves_none(
    monkeypatch: pytest.MonkeyPatch, num_loaded: int, num_failed_tokens: int, reserves: bool
) -> None:
    monkeypatch.setattr(Scheduler, "_update_waiting_for_remote_kv", Scheduler._update_waiting_for_remote_kv)
    release_failed_loads()
    release_failed_loads()  # of a second engine in the process
    request = MagicMock(request_id="a", num_computed_tokens=num_loaded, num_tokens=9)
    scheduler = MagicMock(failed_recving_kv_req_ids={"a"} if num_failed_tokens else set())
    scheduler.finished_recving_kv_req_ids = {"a"}
    scheduler._inflight_prefills, scheduler._mark_prefix_replay.return_value = {request}, 0
    Scheduler._update_waiting_for_remote_kv(scheduler, request)
    assert (request in scheduler._inflight_prefills) == reserves
    assert scheduler.kv_cache_manager.free.called == (num_loaded == 0)


def test_a_load_that_the_connector_took_back_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy; vLLM would keep the blocks for a request that has computed nothing."""
    monkeypatch.setattr(Scheduler, "_update_waiting_for_remote_kv", Scheduler._update_waiting_for_remote_kv)
    release_failed_loads()
    request = MagicMock(request_id="a", num_computed_tokens=0, num_tokens=9)
    scheduler = MagicMock(failed_recving_kv_req_ids=set(), finished_recving_kv_req_ids={"a"})
    scheduler._inflight_prefills, scheduler._mark_prefix_replay.return_value = {request}, 0
    Scheduler._update_waiting_for_remote_kv(scheduler, request)
    assert scheduler.kv_cache_manager.free.called and not scheduler.kv_cache_manager.cache_blocks.called
    assert not scheduler.failed_recving_kv_req_ids and not scheduler._inflight_prefills
