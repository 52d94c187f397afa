"""Prefixes leave the host pool and come back; the simulated device checks every row that a step reads."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_prefix_loads import answer_at_once
from tiered_engine import BLOCK_BYTES, IDENTITY, TIMEOUT_S, TieredEngine
from transformers import PretrainedConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, TransferJob
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.connector.scheduler import CALLS_PER_REPORT
from vllm_hisparse.kv_manager.blocks.request_tracker import MAX_STEPS_OF_REFUSAL
from vllm_hisparse.kv_manager.tiers import directory_quota, make_tiers, prefix_loads
from vllm_hisparse.kv_manager.tiers.block_stores import key_of
from vllm_hisparse.kv_manager.tiers.make_tiers import BlockIdentity, check_directory
from vllm_hisparse.kv_manager.tiers.transfer_buffer import chunk_bytes
from vllm_hisparse.layout import KVLayout

PROMPT = list(range(200, 221))  # five whole blocks and one token
NUM_BLOCKS = 5
CHUNK_BYTES = chunk_bytes(BLOCK_BYTES)


def fs(path: Path, quota_gib: float = 1.0) -> dict:
    return {"type": "fs", "path": str(path), "quota_gib": quota_gib, "num_threads": 2}


def block_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.bin"))


@pytest.fixture(params=[True, False], ids=["dsa", "dense"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredEngine]:
    with TieredEngine([fs(tmp_path)], has_resident_group=request.param) as engine:
        yield engine


def forget(engine: TieredEngine, prompt: list[int]) -> None:
    """Let the host pool lose a prompt, after its blocks were stored."""
    engine.settle()
    engine.fill()
    engine.settle()
    request = engine.ask("probe", prompt, 1)
    engine.abort(request.request_id)
    assert engine.host_pool.cached_prefix(request.block_hashes, 100).num_tokens == 0
    engine.scheduler.reset_prefix_cache()  # of the device


def test_a_prefix_comes_back(engine: TieredEngine) -> None:
    engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    request, counted = engine.answer("again", PROMPT)
    assert request.is_finished()
    assert counted["tier_loaded_blocks"] == NUM_BLOCKS
    assert counted["host_prefix_tokens"] == 4 * NUM_BLOCKS
    assert counted["tier_damaged_blocks"] == counted["tier_load_timeouts"] == 0
    engine.settle()
    engine.check_idle()


def test_tiers_outlast_a_wake_up(engine: TieredEngine) -> None:
    """vLLM 0.33 reports the host pools again after a wake-up."""
    tiers = engine.half.tiers
    engine.product.connect_host_pools()
    assert engine.half.tiers is tiers


def test_what_the_host_pool_has_is_not_loaded(engine: TieredEngine) -> None:
    engine.answer("first", PROMPT)
    engine.settle()
    _, counted = engine.answer("again", PROMPT)
    assert counted["tier_loaded_blocks"] == 0


def test_only_what_is_missing_is_loaded(engine: TieredEngine) -> None:
    engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    engine.answer("part", PROMPT[:9])
    engine.scheduler.reset_prefix_cache()
    _, counted = engine.answer("again", PROMPT)
    assert counted["tier_loaded_blocks"] == NUM_BLOCKS - 2


def test_a_block_is_stored_once(engine: TieredEngine, tmp_path: Path) -> None:
    dropped = 0
    for index in range(3):
        _, counted = engine.answer(f"turn-{index}", PROMPT)
        engine.settle()
        dropped += counted.get("tier_dropped_blocks", 0) + engine.take_counters().get("tier_dropped_blocks", 0)
    assert len(block_files(tmp_path)) == NUM_BLOCKS
    assert dropped == 0


def test_a_new_engine_finds_what_the_last_one_stored(tmp_path: Path) -> None:
    with TieredEngine([fs(tmp_path)]) as engine:
        engine.answer("first", PROMPT)
        engine.settle()
    with TieredEngine([fs(tmp_path)]) as engine:
        _, counted = engine.answer("again", PROMPT)
        assert counted["tier_loaded_blocks"] == NUM_BLOCKS


def damage_content(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    os.truncate(path, 100)


def exchange(path: Path) -> None:
    other = next(file for file in block_files(path.parents[2]) if file != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("damage", [damage_content, cut_off, exchange, Path.unlink])
def test_a_damaged_block_is_a_miss(
    engine: TieredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage
) -> None:
    """And the good one that is computed takes its place."""
    warnings: list[str] = []
    monkeypatch.setattr(prefix_loads.logger, "warning", lambda message, *args: warnings.append(message % args))
    request, _ = engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    engine.forget_buffer()  # the transfer buffer may still hold the blocks
    third = next(path for path in block_files(tmp_path) if path.stem == request.block_hashes[2].hex())
    damage(third)
    _, counted = engine.answer("again", PROMPT)
    assert counted["host_prefix_tokens"] == 4 * 2
    is_damaged = damage in (damage_content, exchange)
    assert counted["tier_damaged_blocks"] == is_damaged
    assert len(warnings) == is_damaged and all(f"A block from fs at {tmp_path}" in text for text in warnings)
    forget(engine, PROMPT)
    engine.forget_buffer()
    _, counted = engine.answer("repaired", PROMPT)
    assert counted["tier_loaded_blocks"] == NUM_BLOCKS


def test_a_block_that_cannot_be_read_is_replaced(
    engine: TieredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    engine.forget_buffer()
    third, last = (
        next(path for path in block_files(tmp_path) if path.stem == request.block_hashes[index].hex())
        for index in (2, 4)
    )
    load, bad = fs_manager.batch_load_block, bytes(third.stat().st_size)
    third.write_bytes(bad)
    os.utime(last, (1, 1))

    def fail(paths: list[str], view: memoryview, offsets: list[int], *rest: Any) -> None:
        if str(third) not in paths or third.read_bytes() != bad:
            return load(paths, view, offsets, *rest)
        num_good = paths.index(str(third))
        load(paths[:num_good], view, offsets[:num_good], *rest)
        error = OSError(errno.EIO, "Input/output error")
        error.num_succeeded = num_good  # type: ignore[attr-defined]
        raise error

    def fail_to_open(path: str, *rest: Any) -> Any:
        if path == str(third) and third.read_bytes() == bad:
            raise OSError(errno.EIO, "Input/output error")
        return open(path, *rest)

    monkeypatch.setattr(fs_manager, "batch_load_block", fail)
    monkeypatch.setattr(directory_quota, "open", fail_to_open, raising=False)
    _, counted = engine.answer("again", PROMPT)
    assert counted["tier_loaded_blocks"] == 2
    wait_for_quota(engine)
    assert last.stat().st_mtime == 1, "nobody has read it"
    engine.answer("once more", PROMPT)  # if the file was deleted after its block had been computed
    engine.settle()
    assert third.read_bytes() != bad
    forget(engine, PROMPT)
    engine.forget_buffer()
    _, counted = engine.answer("repaired", PROMPT)
    assert counted["tier_loaded_blocks"] == NUM_BLOCKS


@pytest.mark.parametrize(
    "method", ["lookup", "submit_store", "submit_load", "get_finished_jobs", "on_schedule_end", "on_request_finished"]
)
def test_a_tier_that_raises_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the tier is broken")

    with TieredEngine([fs(tmp_path)], timeout_s=0.5) as engine:
        engine.answer("first", PROMPT)
        forget(engine, PROMPT)
        engine.forget_buffer()
        monkeypatch.setattr(FileSystemTierManager, method, fail)
        for index in range(3):
            request, _ = engine.answer(f"again-{index}", PROMPT[index:])
            assert request.is_finished()
        engine.fill(7)
        assert engine.tiers.manager.secondary_tiers[0].has_failed
        engine.host_pool.check_integrity()


@pytest.mark.parametrize("method", ["serve_external_requests", "get_finished_jobs"])
def test_what_a_tier_sends_to_a_peer_ends_when_the_tier_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The tier makes a job of its own for a peer's request, which vLLM's tiering would wait for."""
    context = ReqContext("peer")

    def fail(*args: object) -> None:
        raise RuntimeError("the tier is broken")

    def serve(tier: FileSystemTierManager, parent: ParentManager) -> None:
        parent.on_new_request(context)
        parent.create_store_job([key_of(request.block_hashes[0])], context)
        monkeypatch.setattr(FileSystemTierManager, "serve_external_requests", lambda *args: None)
        monkeypatch.setattr(FileSystemTierManager, method, fail)

    with TieredEngine([fs(tmp_path)]) as engine:
        request, _ = engine.answer("first", PROMPT)
        engine.settle()
        monkeypatch.setattr(FileSystemTierManager, "serve_external_requests", serve)
        engine.turns(3)
        assert engine.tiers.manager.secondary_tiers[0].has_failed
        engine.check_idle()


def test_blocks_are_stored_while_peers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers read as many chunks of the transfer buffer as stores may take."""
    context, jobs = ReqContext("peer"), list[TransferJob]()
    finish, is_over = FileSystemTierManager.get_finished_jobs, False

    def serve(tier: FileSystemTierManager, parent: ParentManager) -> None:
        if not jobs:
            parent.on_new_request(context)
            jobs.append(parent.create_store_job(keys, context))
            parent.on_request_finished(context)

    def finish_all(tier: FileSystemTierManager) -> list[JobResult]:
        over = [JobResult(jobs[0].job_id, success=True)] if is_over else []
        return [*finish(tier), *over]

    with TieredEngine([fs(tmp_path)], num_host_blocks=64) as engine:
        manager = engine.tiers.manager
        prompts = [list(range(first, first + 24)) for first in range(1000, 1400, 100)]
        hashes = [h for index, prompt in enumerate(prompts) for h in engine.answer(f"{index}", prompt)[0].block_hashes]
        engine.settle()
        share = manager.num_stores_left
        keys = [key for key in map(key_of, hashes) if manager.is_in_buffer(key)][:share]
        assert len(keys) == share > 0
        with monkeypatch.context() as patch:
            patch.setattr(FileSystemTierManager, "serve_external_requests", serve)
            patch.setattr(FileSystemTierManager, "get_finished_jobs", finish_all)
            engine.turn()
            assert manager.buffer.num_reads == share == manager.num_stores_left
            request, _ = engine.answer("new", PROMPT)
            names = {block_hash.hex() for block_hash in request.block_hashes}
            engine.wait_until(lambda: names <= {path.stem for path in block_files(tmp_path)})
            engine.wait_until(lambda: manager.buffer.num_reads == share)
            is_over = True
            engine.turn()
        engine.settle()
        assert manager.num_stores_left == share
        engine.check_idle()
        assert not engine.tiers.leftovers()


def test_blocks_that_peers_ask_for_take_nothing_from_stores(engine: TieredEngine) -> None:
    request, _ = engine.answer("first", PROMPT)
    engine.settle()
    engine.forget_buffer()
    manager, context = engine.tiers.manager, ReqContext("peer")
    before = manager.num_stores_left
    manager.on_new_request(context, exclude_tier_idx=0)
    key = key_of(request.block_hashes[0])
    assert manager.lookup(key, context, exclude_tier_idx=0) is LookupResult.HIT_PENDING
    assert manager.num_stores_left == before
    engine.settle()
    assert manager.is_in_buffer(key)
    manager.on_request_finished(context, exclude_tier_idx=0)
    engine.check_idle()


def test_without_anybody_to_ask_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A p2p tier whose peers are not there yet."""
    with TieredEngine([fs(tmp_path)]) as engine:
        monkeypatch.setattr(engine.tiers.loads, "make_contexts", lambda request_id: [])
        for name in ("first", "again"):
            engine.answer(name, PROMPT)
            engine.settle()
            engine.fill()
            engine.settle()
        assert engine.take_counters().get("tier_loaded_blocks", 0) == 0
        engine.check_idle()
        assert not engine.tiers.leftovers()


def test_reports_are_few_while_a_tier_has_work(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A p2p tier always has: vLLM's loop then steps a thousand times per second."""
    monkeypatch.setattr(engine.tiers, "has_pending_work", lambda: True)
    reports = [engine.half.take_due_stats() for _ in range(2 * CALLS_PER_REPORT + 1)]
    assert sum(report is not None for report in reports) == 3


def test_temporary_files_of_a_killed_engine_are_in_nobodys_way(engine: TieredEngine) -> None:
    """vLLM names them by Python's generator, which it seeds alike in every engine."""

    def suffix() -> str:
        random.seed(0)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(io._get_tmp_suffix).result()

    assert suffix() != suffix()


def test_a_full_disk_costs_nothing_else(engine: TieredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm.v1.kv_offload.tiering.fs.manager.batch_store_block", fail)
    engine.answer("first", PROMPT)
    engine.settle()
    assert not block_files(tmp_path)
    engine.fill()
    engine.settle()
    failures = "vllm:kv_offload_tiering_cascade_job_failures"
    engine.check_idle()
    engine.stats.aggregate(engine.half.take_stats())
    assert engine.stats.data["tiers"]["data"][failures][("1:fs",)] == 1, "then nothing is stored for a while"


def test_a_full_disk_does_not_multiply_what_another_store_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, healthy = tmp_path / "full", tmp_path / "healthy"
    store, submit, given = fs_manager.batch_store_block, FileSystemTierManager.submit_store, []

    def fail(paths: list[str], *args: object) -> None:
        if paths[0].startswith(str(full)):
            raise OSError(28, "No space left on device")
        store(paths, *args)

    def count(self: FileSystemTierManager, job: TransferJob) -> None:
        given.extend((self.file_mapper.base_path.startswith(str(full)), key) for key in job.keys)
        submit(self, job)

    monkeypatch.setattr(fs_manager, "batch_store_block", fail)
    monkeypatch.setattr(FileSystemTierManager, "submit_store", count)
    with TieredEngine([fs(full), fs(healthy)], num_host_blocks=24) as engine:

        def turn(name: str) -> None:
            engine.answer(name, PROMPT)
            engine.settle()
            engine.tiers.manager.buffer.reset_cache()  # other blocks have passed through it since

        for index in range(6):
            turn(f"turn-{index}")
        assert sum(not is_full for is_full, _ in given) == NUM_BLOCKS == len(block_files(healthy))
        monkeypatch.setattr(fs_manager, "batch_store_block", store)
        turn("while it is left alone")
        assert not block_files(full)
        engine.tiers.manager.secondary_tiers[0].bp_detector.reset()
        turn("later")
        assert len(block_files(full)) == NUM_BLOCKS, "it gets what it lacks"
        assert sum(not is_full for is_full, _ in given) == NUM_BLOCKS


def test_a_block_whose_store_has_failed_is_stored_after_its_next_use(
    engine: TieredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it is still in the transfer buffer."""

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fs_manager, "batch_store_block", fail)
        engine.answer("first", PROMPT)
        engine.settle()
    assert not block_files(tmp_path)
    engine.tiers.manager.secondary_tiers[0].bp_detector.reset()
    engine.answer("again", PROMPT)
    engine.settle()
    assert len(block_files(tmp_path)) == NUM_BLOCKS
    engine.check_idle()


def test_a_block_that_host_pool_and_store_have_lost_is_stored_again(engine: TieredEngine, tmp_path: Path) -> None:
    engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    engine.tiers.manager.buffer.reset_cache()
    lost = [path for path in block_files(tmp_path) if os.remove(path) is None]
    engine.answer("again", PROMPT)
    engine.settle()
    assert len([path for path in lost if path.exists()]) == NUM_BLOCKS


def test_blocks_that_are_evicted_before_they_are_stored_are_counted(
    engine: TieredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.tiers.manager), "num_stores_left", property(lambda self: 0))
    engine.answer("first", PROMPT)
    engine.fill()
    monkeypatch.undo()
    engine.settle()
    assert engine.take_counters()["tier_dropped_blocks"] >= NUM_BLOCKS
    engine.check_idle()


def test_blocks_of_a_prefix_that_is_always_used_keep_no_others_from_the_store(tmp_path: Path) -> None:
    """The host pool has room for all, because requests start together if the store answers late."""
    with TieredEngine([fs(tmp_path)], num_host_blocks=128) as engine:
        for index in range(3):
            engine.ask(f"short-{index}", PROMPT, 1)
            engine.turn(100)
        other = engine.ask("other", [*range(500, 517)], 1)
        names = {block_hash.hex() for block_hash in other.block_hashes}
        deadline = time.monotonic() + TIMEOUT_S
        while not names <= {path.stem for path in block_files(tmp_path)}:
            assert time.monotonic() < deadline, "the blocks of the other request are not stored"
            index += 1
            engine.ask(f"short-{index}", PROMPT, 1)
            engine.turn(100)
        engine.settle()
        assert len(block_files(tmp_path)) == NUM_BLOCKS + 4
        engine.check_idle()


LONG_PROMPTS = [list(range(first, first + 41)) for first in (100, 200)]  # ten whole blocks and one token each


def make_engine_that_forgot(path: Path, prompts: list[list[int]], **sizes: int) -> TieredEngine:
    """An engine whose tier has the prompts, and whose host pool does not."""
    engine = TieredEngine([fs(path)], max_model_len=48, **sizes)
    for index, prompt in enumerate(prompts):
        engine.answer(f"first-{index}", prompt)
        engine.settle()
    engine.fill(num_requests=4)
    engine.settle()
    engine.scheduler.reset_prefix_cache()
    engine.forget_buffer()
    engine.take_counters()
    return engine


@pytest.mark.parametrize("num_host_blocks", [14, 18])
def test_prefixes_that_do_not_fit_together_are_loaded_one_after_the_other(tmp_path: Path, num_host_blocks: int) -> None:
    """Otherwise each would evict the other's beginning."""
    sizes = {"num_host_blocks": num_host_blocks, "num_device_blocks": 80}
    with make_engine_that_forgot(tmp_path, LONG_PROMPTS, **sizes) as engine:
        for index, prompt in enumerate(LONG_PROMPTS):
            engine.ask(f"again-{index}", prompt, 2)
        engine.turn()
        assert engine.tiers.loads.has("again-0") and not engine.tiers.loads.has("again-1")
        engine.run()
        counted = engine.take_counters()
        assert counted["tier_loaded_blocks"] == 2 * 10 and counted["host_prefix_tokens"] == 2 * 40
        assert counted["tier_skipped_loads"] == 0
        engine.settle()
        engine.check_idle()


def test_requests_load_the_prefix_that_they_share_at_once(tmp_path: Path) -> None:
    prompts = [[*LONG_PROMPTS[0][:40], index] for index in range(2)]
    with make_engine_that_forgot(tmp_path, prompts, num_host_blocks=14, num_device_blocks=80) as engine:
        for index, prompt in enumerate(prompts):
            engine.ask(f"again-{index}", prompt, 2)
        engine.turn()
        assert engine.tiers.loads.has("again-0") and engine.tiers.loads.has("again-1")
        engine.run()
        assert engine.take_counters()["tier_loaded_blocks"] == 10
        engine.settle()
        engine.check_idle()


def test_a_request_joins_a_load_of_its_prefix_that_is_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host pool has room for both, because they share what has been loaded and what will be."""
    prompts = [[*LONG_PROMPTS[0][:40], index] for index in range(2)]
    monkeypatch.setattr(prefix_loads, "MAX_WINDOW", 2)  # blocks at once, so that the load takes several steps
    with make_engine_that_forgot(tmp_path, prompts, num_host_blocks=16, num_device_blocks=80) as engine:
        loads = engine.tiers.loads
        loading = engine.ask("again-0", prompts[0], 2)
        sixth = loading.block_hashes[5]
        engine.wait_until(lambda: loads.has("again-0") and engine.host_pool.find(sixth) is not None)
        engine.ask("again-1", prompts[1], 2)
        engine.turn()
        assert loads.has("again-0") and loads.has("again-1")
        engine.run()
        assert engine.take_counters()["tier_loaded_blocks"] == 10
        engine.settle()
        engine.check_idle()


def test_a_load_leaves_the_cached_beginning_of_another_prefix(tmp_path: Path) -> None:
    """Together, the requests need more blocks than the host pool has."""
    sizes = {"num_host_blocks": 18, "num_device_blocks": 80}
    with make_engine_that_forgot(tmp_path, LONG_PROMPTS, **sizes) as engine:
        for index, prompt in enumerate(LONG_PROMPTS):
            engine.answer(f"begins-{index}", prompt[:17])
            engine.settle()
        assert engine.host_pool.num_cached >= 2 * 4
        engine.take_counters()
        for index, prompt in enumerate(LONG_PROMPTS):
            engine.ask(f"again-{index}", prompt, 2)
        engine.turn()
        assert engine.tiers.loads.has("again-0") and not engine.tiers.loads.has("again-1")
        engine.run()
        assert engine.take_counters()["tier_skipped_loads"] == 0
        engine.settle()
        engine.check_idle()


def test_a_loaded_prefix_loses_its_end_first_while_its_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for device memory, and another one takes host blocks meanwhile."""
    answer_at_once(monkeypatch)  # the load ends before the other request
    prompt = LONG_PROMPTS[0]
    with make_engine_that_forgot(tmp_path, [prompt], num_host_blocks=14, num_device_blocks=16) as engine:
        other = engine.ask("other", [1, 2, 3, 4], 20)
        engine.turn()
        engine.ask("again", prompt, 2)
        engine.wait_until(lambda: engine.tiers.loads.has_ended("again"))
        assert not other.is_finished()
        engine.run()
        counted = engine.take_counters()
        assert counted["tier_loaded_blocks"] == 10 and counted["host_prefix_tokens"] >= 4 * 7
        engine.settle()
        engine.check_idle()


def test_a_preempted_request_resumes_by_loading(engine: TieredEngine) -> None:
    request = engine.ask("long", PROMPT, 4)
    while request.num_computed_tokens < len(PROMPT):
        engine.turn()
    engine.reset(reset_running=True, reset_connector=False)
    engine.scheduler.waiting.remove_request(request)
    engine.settle()
    engine.fill()
    engine.settle()
    engine.scheduler.reset_prefix_cache()
    engine.take_counters()
    engine.scheduler.waiting.add_request(request)
    engine.run()
    counted = engine.take_counters()
    assert counted["tier_loaded_blocks"] == NUM_BLOCKS
    assert counted["resumed_requests"] == 1 and counted["recomputed_tokens"] < 4


def test_a_reset_of_the_prefix_cache_while_blocks_are_on_their_way(engine: TieredEngine) -> None:
    engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    engine.ask("again", PROMPT)
    for _ in range(3):
        engine.turn()
    engine.half.reset_cache()
    engine.run()
    engine.settle()
    engine.check_idle()


def test_an_aborted_request_leaves_nothing_of_its_load(engine: TieredEngine) -> None:
    engine.answer("first", PROMPT)
    forget(engine, PROMPT)
    request = engine.ask("again", PROMPT)
    engine.turn()
    engine.abort(request.request_id)
    engine.settle()
    engine.check_idle()
    assert not engine.tiers.leftovers()


def test_a_block_that_the_quota_deletes_is_stored_again_when_it_is_used(tmp_path: Path) -> None:
    """The host pool has it all the time, so nobody reads its file, which therefore counts as the least used one."""
    quota = (16 + 4 + NUM_BLOCKS) * CHUNK_BYTES  # 16 blocks may be on their way
    with TieredEngine([fs(tmp_path, quota / 2**30)], num_host_blocks=24) as engine:
        request, _ = engine.answer("first", PROMPT)
        engine.settle()
        names = {block_hash.hex() for block_hash in request.block_hashes}
        assert names <= {path.stem for path in block_files(tmp_path)}
        engine.fill(num_requests=2)
        wait_for_quota(engine)
        assert not names & {path.stem for path in block_files(tmp_path)}
        _, counted = engine.answer("again", PROMPT)
        assert counted["tier_loaded_blocks"] == 0
        wait_for_quota(engine)
        assert names <= {path.stem for path in block_files(tmp_path)}
        engine.check_idle()


def wait_for_quota(engine: TieredEngine) -> None:
    """Wait until everything is stored and the files beyond the quota are deleted."""
    engine.settle()
    engine.tiers.manager.secondary_tiers[0].tier.quota.used([]).result(TIMEOUT_S)


@pytest.mark.long
def test_a_quota_is_kept(tmp_path: Path) -> None:
    quota = 40 * CHUNK_BYTES
    with TieredEngine([fs(tmp_path, quota / 2**30)], num_host_blocks=24) as engine:
        for seed in range(6):
            engine.fill(seed)
            engine.settle()
        wait_for_quota(engine)
    files = block_files(tmp_path)
    assert 0 < sum(path.stat().st_size for path in files) <= quota


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    check_directory(tmp_path, IDENTITY, "tiers.0.path")
    check_directory(tmp_path, IDENTITY, "tiers.0.path")
    other = BlockIdentity("other", "float32", {"row_bytes": 24}, 1, "sha256")
    with pytest.raises(HiSparseConfigError, match=r"tiers.0.path: .*model 'other'; its blocks have 'model'"):
        check_directory(tmp_path, other, "tiers.0.path")
    (tmp_path / "hisparse.json").write_text("[]")
    with pytest.raises(HiSparseConfigError, match="Name another directory"):
        check_directory(tmp_path, IDENTITY, "tiers.0.path")


def engine_config(drafts: SimpleNamespace | None = None, load_format: str = "auto", **model: Any) -> SimpleNamespace:
    """The part of a `VllmConfig` that an identity reads."""
    options = {
        **{"model": "some/model", "revision": None, "dtype": "torch.float32", "max_model_len": 4096},
        **{"quantization": None, "quantization_config": None, "hf_overrides": {}, "multimodal_config": None},
        **{"hf_config_path": None, "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"})},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**options, **model}),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=drafts,
    )


DSA = HiSparseConfig(host_pool_gib=1.0, top_k=256)
DENSE_LAYOUT = KVLayout(24, 24, 6, 2, 16, 16, 2)


def dense(**options: Any) -> HiSparseConfig:
    return HiSparseConfig(host_pool_gib=1.0, **{"algorithm": "quest", "top_k": 64, **options})


def test_drafts_and_an_algorithms_state_do_not_change_what_a_block_holds() -> None:
    drafts = SimpleNamespace(method="eagle", draft_model_config=SimpleNamespace(model="one", revision=None))
    config = engine_config(drafts)
    layouts = KVLayout(24, 20, 2, 2, 4), KVLayout(24, 20, 2, 2, 4, max_query_len=4), KVLayout(28, 20, 2, 2, 4)
    plain, drafting, other = (BlockIdentity.of(config, layout, 1, DSA) for layout in layouts)
    assert plain == drafting != other
    assert BlockIdentity.of(config, replace(layouts[0], state_entries=((16, 8),)), 1, DSA) == plain
    assert "state_entries" not in plain.layout, "versions that kept state elsewhere have stored the same blocks"
    assert "draft_row_bytes" not in plain.layout, "versions without draft layers have stored the same blocks"
    with_drafts = KVLayout(24, 20, 2, 2, 4, draft_row_bytes=8)
    of_one = BlockIdentity.of(config, with_drafts, 1, DSA)
    assert of_one != plain
    drafts.draft_model_config.model = "another of the same size"
    assert BlockIdentity.of(config, with_drafts, 1, DSA) != of_one


def test_blocks_of_other_full_kv_layers_are_others() -> None:
    first, again, last = (
        BlockIdentity.of(engine_config(), DENSE_LAYOUT, 1, dense(full_kv_layers=layers))
        for layers in ([0, 1], [1, 0], [0, 7])
    )
    assert first == again != last


def yarn(config: object) -> object:
    return config


def takes_images(**options: Any) -> SimpleNamespace:
    return engine_config(multimodal_config=MultiModalConfig(**options))


def with_config(path: str = "/configs/one", **values: Any) -> SimpleNamespace:
    """An engine with `--hf-config-path`."""
    return engine_config(hf_config_path=path, hf_config=PretrainedConfig(name_or_path=path, **values))


def with_long_rope(max_model_len: int, **others: Any) -> SimpleNamespace:
    parameters = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    text = SimpleNamespace(rope_parameters={"full_attention": parameters, **others} if others else parameters)
    return engine_config(max_model_len=max_model_len, hf_text_config=text)


IDENTITIES = {
    "quantization": (engine_config(quantization="fp8"), DSA),
    "overrides": (engine_config(hf_overrides={"rope_scaling": {"factor": 4.0}}), DSA),
    "a function that overrides": (engine_config(hf_overrides=yarn), DSA),
    "weights made up": (engine_config(load_format="dummy"), DSA),
    "quest": (engine_config(), dense()),
    "another algorithm": (engine_config(), dense(algorithm="streaming_llm")),
    "another top_k": (engine_config(), dense(top_k=128)),
    "other options": (engine_config(), dense(algorithm_options={"page_size": 32})),
    "images of another size": (takes_images(mm_processor_kwargs={"size": {"longest_edge": 64}}), DSA),
    "pruned videos": (takes_images(video_pruning_rate=0.5), DSA),
    "videos pruned in another way": (takes_images(video_pruning_rate=0.5, video_pruning_method="vidcom2"), DSA),
    "a vision model in fp8": (takes_images(mm_encoder_attn_dtype="fp8"), DSA),
    "a configuration of its own": (with_config(rope_theta=1e4), DSA),
    "another configuration": (with_config(rope_theta=1e6), DSA),
    "layers that are not quantized": (engine_config(quantization_config={"linear": "mxfp8", "ignore": ["a"]}), DSA),
    "other activations": (engine_config(quantization_config={"linear": {"activation": "fp8_per_token"}}), DSA),
    "long contexts": (with_long_rope(4097), DSA),
    "short contexts": (with_long_rope(4096), DSA),
}


@pytest.mark.parametrize("changed", IDENTITIES)
def test_what_changes_kv_changes_the_identity_of_a_block(changed: str, tmp_path: Path) -> None:
    """And the places where it is stored, in stores that have no file that names it, too."""
    plain = BlockIdentity.of(engine_config(), DENSE_LAYOUT, 1, DSA)
    identities = {
        name: BlockIdentity.of(config, DENSE_LAYOUT, 1, options) for name, (config, options) in IDENTITIES.items()
    }
    identity = identities.pop(changed)
    for other in (plain, *identities.values()):
        assert identity != other and identity.layer_name != other.layer_name
    check_directory(tmp_path, plain, "tiers.0.path")
    with pytest.raises(HiSparseConfigError, match="Name another directory"):
        check_directory(tmp_path, identity, "tiers.0.path")


def test_options_that_are_defaults_are_the_same_blocks() -> None:
    plain = BlockIdentity.of(engine_config(), DENSE_LAYOUT, 1, dense())
    assert BlockIdentity.of(engine_config(), DENSE_LAYOUT, 1, dense(algorithm_options={"page_size": 16})) == plain
    text = takes_images(mm_processor_kwargs={"size": {"longest_edge": 64}}, language_model_only=True)
    for config in (takes_images(), text, engine_config(max_model_len=8192)):
        assert BlockIdentity.of(config, DENSE_LAYOUT, 1, dense()) == plain
    short = engine_config(quantization="fp8_per_tensor")
    implied = engine_config(
        quantization="fp8_per_tensor", quantization_config=resolve_quantization_config("fp8_per_tensor", None)
    )
    assert BlockIdentity.of(short, DENSE_LAYOUT, 1, DSA) == BlockIdentity.of(implied, DENSE_LAYOUT, 1, DSA)


def test_the_place_of_a_configuration_and_the_exact_length_are_not_compared() -> None:
    for one, other in (
        (with_config("/configs/one", transformers_version="5.0"), with_config("/configs/two")),
        (with_long_rope(8192), with_long_rope(16384, sliding_attention={"rope_type": "default"})),
    ):
        assert BlockIdentity.of(one, DENSE_LAYOUT, 1, DSA) == BlockIdentity.of(other, DENSE_LAYOUT, 1, DSA)


def test_a_directory_of_an_earlier_version_is_compared_by_what_it_names(tmp_path: Path) -> None:
    """And its blocks are found where that version has put them."""
    config = engine_config(quantization="fp8", hf_config_path="/config", hf_config=PretrainedConfig())
    identity = BlockIdentity.of(config, DENSE_LAYOUT, 1, dense())
    earlier = asdict(identity)
    for name in make_tiers.LATER_PARTS:
        del earlier[name]
    (tmp_path / "hisparse.json").write_text(json.dumps(earlier))
    known = check_directory(tmp_path, identity, "tiers.0.path")
    assert known.layer_name == json.dumps(identity.layout, sort_keys=True) != identity.layer_name
    (tmp_path / "hisparse.json").write_text(json.dumps(earlier | {"model": "another"}))
    with pytest.raises(HiSparseConfigError, match="model"):
        check_directory(tmp_path, identity, "tiers.0.path")


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    weights = tmp_path / "llama" / "pytorch_model.bin"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    os.utime(weights, (1, 1))
    with pytest.raises(HiSparseConfigError, match=r"tiers\.0\.path: .*an empty directory.*'llama'"):
        TieredEngine([fs(tmp_path, 1e-6)])
    assert weights.read_bytes() == b"weights" and not (tmp_path / "hisparse.json").exists()


def test_a_directory_without_hard_links_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    for _ in range(2):
        check_directory(tmp_path, IDENTITY, "tiers.0.path")
    assert os.listdir(tmp_path) == ["hisparse.json"]


def test_a_failed_write_of_an_identity_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(HiSparseConfigError, match=r"can be written and read .*Input/output error"):
        check_directory(tmp_path, IDENTITY, "tiers.0.path")
    assert not os.listdir(tmp_path)


def test_the_identity_of_a_directory_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could be empty after a power loss, and the directory would be refused."""
    calls: list[object] = []
    sync, link = os.fsync, os.link

    def note_sync(file: int) -> None:
        calls.append(Path(f"/proc/self/fd/{file}").resolve())
        sync(file)

    def note_link(source: Path, target: Path) -> None:
        calls.append(target)
        link(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)
    check_directory(tmp_path, IDENTITY, "tiers.0.path")
    first, *others = calls
    assert first.name.endswith(".tmp") and others == [tmp_path / "hisparse.json", tmp_path]


def test_a_directory_whose_identity_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hisparse.json").write_text("")
    with pytest.raises(HiSparseConfigError, match=r"hisparse\.json says which.*Delete all files"):
        check_directory(tmp_path, IDENTITY, "tiers.0.path")


def test_the_root_of_a_file_system_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    check_directory(tmp_path, IDENTITY, "tiers.0.path")


def test_only_blocks_count_against_the_quota(tmp_path: Path) -> None:
    """Whatever somebody puts beside them is neither counted nor deleted."""
    with TieredEngine([fs(tmp_path)]) as engine:
        engine.answer("first", PROMPT)
        engine.settle()
    stored, others = block_files(tmp_path), [tmp_path / "weights.bin", tmp_path / "more" / "notes.tmp.txt"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100_000)
        os.utime(path, (1, 1))
    with TieredEngine([fs(tmp_path, 1e-6)]) as engine:
        engine.tiers.manager.secondary_tiers[0].tier.quota.added([]).result()
    assert all(path.exists() for path in others)
    assert len([path for path in stored if path.exists()]) < NUM_BLOCKS, "the quota of blocks is kept"


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o705])
def test_a_directory_that_others_may_use_is_warned_about(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(make_tiers.logger, "warning", lambda message, *args: warnings.append(message % args))
    tmp_path.chmod(mode)
    check_directory(tmp_path, IDENTITY, "tiers.0.path")
    assert [f"mode {mode:o}" in warning for warning in warnings] == [True] * (mode != 0o700)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HiSparseConfigError, match="can be written"):
        check_directory(tmp_path / "file" / "below", IDENTITY, "tiers.0.path")


def test_lent_while_waiting_for_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose prefix is being loaded takes nothing away from those that run."""
    options = {"num_device_blocks": 80, "num_host_blocks": 24, "is_elastic": True, "token_budget": 24}
    with TieredEngine([fs(tmp_path)], **options) as engine:
        engine.ask("running", list(range(12)), max_tokens=20)
        while not engine.tracker.admitted or not engine.tracker.admitted["running"].lent:
            engine.turn()
        before = len(engine.tracker.admitted["running"].lent)
        monkeypatch.setattr(FileSystemTierManager, "lookup", lambda *_: LookupResult.RETRY)
        engine.ask("waits", PROMPT, max_tokens=1)
        for _ in range(MAX_STEPS_OF_REFUSAL + 3):
            engine.turn()
            assert len(engine.waiting) == 1
            assert len(engine.tracker.admitted["running"].lent) == before


def test_tiers_are_polled_in_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of vLLM 0.33 may say that a thread may poll it, which would do so beside our steps."""
    monkeypatch.setattr(FileSystemTierManager, "tolerates_off_thread_polling", True, raising=False)
    with TieredEngine([fs(tmp_path)]) as engine:
        assert engine.tiers.manager.secondary_tiers
        assert "vllm_offload_tier_poll" not in [thread.name for thread in threading.enumerate()]
