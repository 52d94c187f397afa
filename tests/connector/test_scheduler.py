from types import SimpleNamespace

import pytest
from fake_engine import BLOCK_SIZE, MAX_MODEL_LEN, FakeEngine, FakeTransport, scheduler_output
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.connector import request_log
from vllm_hisparse.connector.metadata import HiSparseWorkerMetadata
from vllm_hisparse.connector.scheduler import CALLS_PER_REPORT
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata

PROMPT = list(range(10, 20))
COPIES = ("device_to_host_bytes", "host_to_device_bytes")


def output(**fields) -> SimpleNamespace:
    """A step's `KVConnectorOutput`."""
    return SimpleNamespace(
        **{"finished_recving": None, "failed_recving": None, "kv_connector_worker_meta": None, **fields}
    )


def host_ids(engine: FakeEngine, request: Request) -> list[int]:
    return list(engine.host_pool.block_ids(request.request_id))


def counters(engine: FakeEngine) -> dict[str, int]:
    """Counts since the last call, beside copies."""
    return {name: value for name, value in all_counters(engine).items() if name not in COPIES}


def copies(engine: FakeEngine) -> tuple[int, int]:
    """Bytes to the host and to the device since the last call."""
    counted = all_counters(engine)
    return tuple(counted[name] for name in COPIES)


def all_counters(engine: FakeEngine) -> dict[str, int]:
    engine.stats.aggregate(engine.connector.take_stats())
    counted = engine.stats.data["counters"]
    engine.stats.reset()
    return counted


def num_published(engine: FakeEngine, request: Request) -> int:
    return engine.host_pool.cached_prefix(request.block_hashes, 10**6).num_tokens


@pytest.fixture(params=[False, True], ids=["indexer_first", "hot_first"])
def engine(request: pytest.FixtureRequest) -> FakeEngine:
    return FakeEngine(hot_first=request.param)


def test_refused_transfers_are_counted() -> None:
    engine = FakeEngine(transport=FakeTransport())
    for request_id in ("refused-1", "remote-1", "refused-2"):
        engine.add(request_id, PROMPT)
    assert counters(engine)["transfers_refused"] == 2


# Tables


def test_tables_travel_as_deltas(engine: FakeEngine) -> None:
    request = engine.add("a", PROMPT[:5], max_tokens=8)
    metadata = engine.step()
    first_hot_block_id, _ = engine.tables_of(request)
    first = host_ids(engine, request)
    assert metadata.host_block_tables == {first_hot_block_id: (0, first)}
    assert len(first) == 2  # the whole prompt is reserved, in whole blocks
    assert [engine.step().host_block_tables for _ in range(3)] == [{}, {}, {}]
    assert engine.step().host_block_tables == {first_hot_block_id: (2, host_ids(engine, request)[2:])}
    assert len(host_ids(engine, request)) == 3
    assert engine.step().host_block_tables == {}


def test_nothing_changes_nothing_travels(engine: FakeEngine) -> None:
    engine.add("a", PROMPT[:5])
    engine.step()
    assert engine.step() == HiSparseMetadata()


def test_a_long_prompt_in_chunks_sends_its_table_once(engine: FakeEngine) -> None:
    request = engine.add("a", list(range(20)))
    tables = [engine.step(budget=3).host_block_tables for _ in range(6)]
    first_hot_block_id, _ = engine.tables_of(request)
    assert tables == [{first_hot_block_id: (0, host_ids(engine, request))}, {}, {}, {}, {}, {}]


def test_requests_that_do_not_run_this_step_wait_with_their_changes(engine: FakeEngine) -> None:
    request = engine.add("a", PROMPT)
    engine.schedule(budget=8)
    assert not engine.connector.build_connector_meta(scheduler_output({})).host_block_tables
    later = engine.connector.build_connector_meta(scheduler_output({"a": 8}))
    assert later.host_block_tables == {engine.tables_of(request)[0]: (0, host_ids(engine, request))}


# Without an indexer group


@pytest.mark.parametrize("enable_caching", [True, False])
def test_without_indexer_only_tables_travel(enable_caching: bool) -> None:
    engine = FakeEngine(has_resident_kv=False, enable_caching=enable_caching)
    engine.add("a", PROMPT, max_tokens=12)
    engine.run_to_end()
    assert not any(metadata.saves or metadata.preemption_saves or metadata.restores for metadata in engine.log)
    engine.check_idle()
    engine.add("b", PROMPT, max_tokens=2)
    metadata = engine.step(budget=30)
    assert engine.running[0].num_computed_tokens == len(PROMPT) and not metadata.restores
    assert counters(engine).get("host_prefix_tokens", 0) == (8 if enable_caching else 0)


def test_without_indexer_a_preempted_request_loses_nothing() -> None:
    engine = FakeEngine(has_resident_kv=False)
    request = engine.add("a", PROMPT)
    engine.step(budget=30)
    engine.preempt(request)
    metadata = engine.step()
    assert not metadata.restores and not metadata.preemption_saves
    assert request.num_computed_tokens == len(PROMPT) + 1
    engine.run_to_end()
    engine.check_idle()


def test_without_indexer_a_remote_prompt_goes_to_the_host_alone() -> None:
    transport = FakeTransport()
    engine = FakeEngine(has_resident_kv=False, transport=transport)
    request = engine.add("remote", PROMPT)
    engine.step()
    assert transport.started == [("remote", host_ids(engine, request), 0, None, len(PROMPT))]
    engine.run_to_end()
    engine.check_idle()


# Saves


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 30])
def test_every_full_block_is_saved_once_when_it_is_full(budget: int) -> None:
    engine = FakeEngine()
    request = engine.add("a", PROMPT, max_tokens=12)
    saved: list[tuple[int, int]] = []
    while request in engine.running or request in engine.waiting:
        before = request.num_computed_tokens // BLOCK_SIZE
        metadata = engine.step(budget)
        after = request.num_computed_tokens // BLOCK_SIZE
        assert len(metadata.saves) == after - before
        saved += metadata.saves
    assert len(saved) == len({host_id for _, host_id in saved}) == (len(PROMPT) + 12 - 1) // BLOCK_SIZE


def test_saves_name_the_blocks_of_the_same_tokens(engine: FakeEngine) -> None:
    request = engine.add("a", PROMPT)
    metadata = engine.step(budget=9)
    _, device_ids = engine.tables_of(request)
    assert metadata.saves == list(zip(device_ids[:2], host_ids(engine, request)[:2], strict=True))


def test_published_with_the_save_and_not_before(engine: FakeEngine) -> None:
    request = engine.add("a", PROMPT)
    scheduled = engine.schedule(budget=9)
    assert num_published(engine, request) == 0
    metadata = engine.connector.build_connector_meta(scheduler_output(scheduled))
    assert len(metadata.saves) == 2
    assert num_published(engine, request) == 8


def test_two_requests_of_one_step_do_not_share_unsaved_blocks(engine: FakeEngine) -> None:
    first, second = engine.add("a", PROMPT), engine.add("b", PROMPT)
    metadata = engine.step(budget=20)
    assert len(metadata.host_block_tables) == 2 and not metadata.restores
    assert not set(host_ids(engine, first)) & set(host_ids(engine, second))
    engine.check_integrity()


def test_without_prefix_caching_blocks_are_saved_but_not_published() -> None:
    engine = FakeEngine(enable_caching=False)
    request = engine.add("a", PROMPT)
    assert len(engine.step(budget=10).saves) == 2
    assert num_published(engine, request) == 0
    assert engine.connector.get_num_new_matched_tokens(engine.add("b", PROMPT), 0) == (0, False)


# Matches


def test_matches_count_from_the_devices_hit_and_leave_the_last_token() -> None:
    engine = FakeEngine()
    engine.add("a", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    match = engine.connector.get_num_new_matched_tokens
    assert match(engine.add("longer", PROMPT), 0) == (8, False)
    assert match(engine.add("half", PROMPT), 4) == (4, False)
    assert match(engine.add("all", PROMPT), 8) == (0, False)
    assert match(engine.add("equal", PROMPT[:8]), 0) == (4, False)
    assert match(engine.add("other", PROMPT[1:]), 0) == (0, False)
    assert match(engine.add("skip", PROMPT, skip_reading_prefix_cache=True), 0) == (0, False)
    engine.connector.reset_cache()
    assert match(engine.add("reset", PROMPT), 0) == (0, False)


def test_the_device_hit_is_capped_by_the_host(engine: FakeEngine) -> None:
    engine.add("a", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    request = engine.add("b", PROMPT)
    assert engine.kv.get_computed_blocks(request)[1] == 8
    engine.connector.reset_cache()
    assert engine.kv.get_computed_blocks(request)[1] == 0
    engine.run_to_end()


def take_back(engine: FakeEngine) -> tuple[Request, list[tuple[int, int]]]:
    """A streaming session ends a turn while the step after its last token runs, and goes on with another token.

    Returns the request, whose first block is one token short again, and what was saved of it.
    """
    request = engine.add("a", PROMPT[: BLOCK_SIZE - 1], max_tokens=12)
    engine.step()
    saves = engine.step().saves
    assert len(saves) == 1 and request.num_computed_tokens == BLOCK_SIZE
    del request._all_token_ids[BLOCK_SIZE - 1 :], request._output_token_ids[:], request.block_hashes[:]
    request.append_output_token_ids(5)
    request.num_computed_tokens = BLOCK_SIZE - 1
    return request, saves


def test_a_block_is_saved_again_when_its_last_token_is_taken_back() -> None:
    engine = FakeEngine()
    _, saves = take_back(engine)
    assert engine.step().saves == saves
    engine.run_to_end()
    engine.check_idle()


def test_a_block_whose_last_token_was_taken_back_is_not_published() -> None:
    engine = FakeEngine()
    request, _ = take_back(engine)
    assert len(request.block_hashes) == 1
    engine.abort(request)
    assert num_published(engine, request) == 0


# Preemption, restores


def preempted(engine: FakeEngine, num_tokens: int) -> tuple[Request, list[int], list[int]]:
    """A request that lost its hot blocks with `num_tokens` computed, and the blocks it had."""
    request = engine.add("a", list(range(10, 10 + num_tokens)), max_tokens=12)
    engine.step(budget=num_tokens)
    hosts, (_, devices) = host_ids(engine, request), engine.tables_of(request)
    engine.preempt(request)
    return request, hosts, devices


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 11])
def test_preemption_saves_the_partial_block(num_tokens: int) -> None:
    engine = FakeEngine()
    request, hosts, devices = preempted(engine, num_tokens)
    num_full, tail = divmod(num_tokens, BLOCK_SIZE)
    engine.waiting.clear()
    metadata = engine.connector.build_connector_meta(scheduler_output({}))
    assert metadata.preemption_saves == ([(devices[num_full], hosts[num_full])] if tail else [])
    assert len(metadata.released) == 1 and not metadata.host_block_tables
    match = engine.host_pool.retained_prefix(request.request_id, request.num_tokens - 1)
    assert (match.num_tokens, list(match.block_ids)) == (num_tokens, hosts[: num_full + bool(tail)])


@pytest.mark.parametrize("num_decodes", [1, 2, 3, 4, 5])
def test_preemption_while_decoding_saves_the_block_of_the_newest_token(num_decodes: int) -> None:
    engine = FakeEngine()
    request = engine.add("a", PROMPT[:6], max_tokens=12)
    for _ in range(1 + num_decodes):
        engine.step()
    num_full, tail = divmod(6 + num_decodes, BLOCK_SIZE)
    hosts, (_, devices) = host_ids(engine, request), engine.tables_of(request)
    engine.preempt(request)
    assert engine.step().preemption_saves == ([(devices[num_full], hosts[num_full])] if tail else [])
    engine.run_to_end()


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 11])
@pytest.mark.parametrize("device_cache", ["kept", "lost"])
def test_restores_are_the_blocks_between_device_hit_and_host_match(num_tokens: int, device_cache: str) -> None:
    engine = FakeEngine()
    request, hosts, _ = preempted(engine, num_tokens)
    if device_cache == "lost":
        engine.waiting.remove(request)
        engine.step()  # copies its last block, which is in use until then
        engine.waiting.append(request)
        engine.process_steps()
        assert engine.kv.reset_prefix_cache()
    metadata = engine.step()
    _, devices = engine.tables_of(request)
    first = num_tokens // BLOCK_SIZE if device_cache == "kept" else 0
    last = -(-num_tokens // BLOCK_SIZE)
    assert metadata.restores == list(zip(hosts[first:last], devices[first:last], strict=True))
    assert request.num_computed_tokens == num_tokens + 1, "a resumed request computes one token"
    engine.run_to_end()
    engine.check_idle()


def test_a_prefix_that_only_the_host_holds_is_restored() -> None:
    engine = FakeEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run_to_end()
    assert engine.kv.reset_prefix_cache()
    request = engine.add("b", PROMPT)
    metadata = engine.step()
    _, devices = engine.tables_of(request)
    assert metadata.restores == list(zip(host_ids(engine, request)[:2], devices[:2], strict=True))
    assert not metadata.saves
    engine.run_to_end()


def test_resumption_counts_what_is_computed_again() -> None:
    engine = FakeEngine()
    request, _, _ = preempted(engine, 11)
    counters(engine)
    engine.step()
    assert counters(engine) == {"host_prefix_tokens": 3, "resumed_requests": 1, "recomputed_tokens": 0}
    engine.preempt(request)
    engine.connector.reset_cache()
    engine.step()
    assert counters(engine) == {"resumed_requests": 1, "recomputed_tokens": 12}


def test_restored_tokens_of_other_requests_are_no_resumption() -> None:
    engine = FakeEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run_to_end()
    engine.kv.reset_prefix_cache()
    engine.add("b", PROMPT)
    engine.schedule(budget=8)
    assert counters(engine) == {"host_prefix_tokens": 8}


def test_copies_of_every_rank_are_counted() -> None:
    engine = FakeEngine()
    engine.connector.counts.num_ranks, layout = 2, engine.groups.layout
    token, block = 2 * layout.num_layers * layout.row_bytes, 2 * layout.resident_block_bytes
    engine.add("a", PROMPT, max_tokens=3)
    seen = []
    for _ in range(4):
        engine.step(budget=BLOCK_SIZE)
        seen.append(copies(engine))
    assert len(PROMPT) == 2 * BLOCK_SIZE + 2
    assert seen == [(4 * token + block, 0), (4 * token + block, 0), (2 * token, 0), (token, 0)]
    engine.run_to_end()
    engine.kv.reset_prefix_cache()
    copies(engine)
    engine.add("b", PROMPT)
    engine.step(budget=1)
    assert copies(engine) == (token, 2 * block)


# Release


def test_handles_are_released_once_before_they_are_reused(engine: FakeEngine) -> None:
    first = engine.add("a", PROMPT)
    engine.step(budget=10)
    first_hot_block_id, _ = engine.tables_of(first)
    engine.abort(first)
    second = engine.add("b", PROMPT[:3])
    metadata = engine.step(budget=3)
    assert metadata.released == [first_hot_block_id]
    assert list(metadata.host_block_tables) == [engine.tables_of(second)[0]]
    assert engine.step().released == []


def test_a_request_that_the_worker_never_saw_is_not_released(engine: FakeEngine) -> None:
    request = engine.add("a", PROMPT)
    engine.schedule(budget=8)
    engine.abort(request)
    assert engine.step() == HiSparseMetadata()
    engine.abort(engine.add("b", PROMPT))
    assert engine.step() == HiSparseMetadata()
    engine.check_idle()


# More states than the worker has room for


def resumed_late(**options) -> tuple[FakeEngine, Request]:
    """A streaming session of two turns, whose second turn waits while another request has taken its place to run."""
    engine = FakeEngine(max_num_running=1, **options)
    session = engine.add("session", PROMPT[:6], max_tokens=12)
    engine.step()
    engine.running.remove(session)
    engine.add("other", list(range(50, 57)), max_tokens=12)
    return engine, session


def test_a_waiting_session_gives_its_place_on_the_worker_to_a_request_that_runs() -> None:
    engine, session = resumed_late()
    first_hot_block_id, _ = engine.tables_of(session)
    metadata = engine.step()
    assert metadata.released == [first_hot_block_id] and len(engine.worker.tables) == 1
    engine.abort(engine.running[0])
    engine.running.append(session)
    metadata = engine.step()
    assert metadata.host_block_tables == {first_hot_block_id: (0, host_ids(engine, session))}
    engine.run_to_end()
    assert session.num_output_tokens == 12
    engine.check_idle()


def test_a_session_that_ends_without_a_place_on_the_worker_is_not_released_twice() -> None:
    engine, session = resumed_late()
    engine.step()
    engine.running.append(session)
    engine.abort(session)
    assert engine.step().released == []
    engine.run_to_end()
    engine.check_idle()


def test_requests_that_wait_for_their_turn_to_be_scheduled_keep_their_place() -> None:
    engine = FakeEngine(max_num_running=2)
    engine.add("a", PROMPT[:6], max_tokens=12)
    engine.add("b", PROMPT[2:], max_tokens=12)
    engine.step(budget=30)
    released = [engine.step(budget=1).released for _ in range(4)]
    assert released == [[]] * 4
    engine.run_to_end()


# Sessions that outgrow the model


def test_a_session_is_cut_to_leave_room_for_one_token() -> None:
    engine = FakeEngine()
    session = engine.add("session", PROMPT, resumable=True)
    engine.step(budget=30)
    engine.running.remove(session)
    turn = list(range(100, 100 + MAX_MODEL_LEN))
    session._all_token_ids.extend(turn)
    session.prompt_token_ids[:] = session.all_token_ids[:]
    session._output_token_ids.clear()
    session.update_block_hashes()
    session.num_prompt_tokens, session.status = session.num_tokens, RequestStatus.WAITING
    engine.running.append(session)
    prompt = session.all_token_ids[: MAX_MODEL_LEN - 1]
    engine.step(budget=100)
    assert session.all_token_ids[: MAX_MODEL_LEN - 1] == prompt and session.num_output_tokens == 1
    assert len(session.block_hashes) == MAX_MODEL_LEN // BLOCK_SIZE
    assert session.status == RequestStatus.FINISHED_LENGTH_CAPPED
    engine.check_idle()


# Pool pressure


def test_a_request_that_the_host_cannot_take_waits() -> None:
    engine = FakeEngine(num_device_blocks=60, num_host_blocks=8)
    engine.add("a", list(range(24)), max_tokens=2)
    engine.add("b", list(range(50, 74)), max_tokens=2)
    engine.step(budget=60)
    assert [request.request_id for request in engine.running] == ["a"]
    gauges = engine.connector.take_stats().data["gauges"]
    assert gauges == {
        "host_blocks_used": 6,
        "host_blocks_free": 2,
        "host_blocks_cached": 0,
        "requests_waiting_for_host_memory": 1,
    }
    engine.run_to_end()
    assert engine.connector.take_stats().data["gauges"]["requests_waiting_for_host_memory"] == 0
    engine.check_idle()


def num_waiting_for_host(engine: FakeEngine) -> int:
    return engine.connector.take_stats().data["gauges"]["requests_waiting_for_host_memory"]


def test_all_requests_behind_one_that_the_host_cannot_take_wait_for_host_memory() -> None:
    """vLLM asks for the first of them alone, and one of the others would fit."""
    engine = FakeEngine(num_device_blocks=60, num_host_blocks=8)
    running = engine.add("a", list(range(24)), max_tokens=2)
    for index in range(5):
        engine.add(f"waits-{index}", [100 * (index + 1) + i for i in range(24)], max_tokens=2)
    engine.add("short", [1], max_tokens=2)
    engine.step(budget=60)
    assert len(engine.waiting) == 6 and num_waiting_for_host(engine) == 6
    engine.abort(engine.waiting[2])
    assert num_waiting_for_host(engine) == 5
    engine.abort(running)
    assert num_waiting_for_host(engine) == 0, "there is room: they wait for their turn alone"
    engine.step(budget=60)
    assert len(engine.running) == 1 and num_waiting_for_host(engine) == 4
    engine.run_to_end()
    assert num_waiting_for_host(engine) == 0
    engine.check_idle()


def test_a_preempted_request_waits_for_host_memory() -> None:
    engine = FakeEngine(num_device_blocks=60, num_host_blocks=8)
    for name, first in (("a", 0), ("b", 50)):
        engine.add(name, list(range(first, first + 14)), max_tokens=8)
    while engine.waiting:
        engine.step(budget=60)
    while not engine.waiting:
        engine.step(budget=60)
    engine.step(budget=60)
    assert [request.num_preemptions for request in engine.waiting] == [1]
    assert num_waiting_for_host(engine) == 1
    engine.run_to_end()
    engine.check_idle()


def test_reports_come_every_few_calls_and_when_no_request_is_left() -> None:
    engine = FakeEngine()
    engine.add("a", PROMPT[:5], max_tokens=2)
    reports = []
    for _ in range(2 * CALLS_PER_REPORT + 1):
        engine.connector.counts.add(resumed_requests=1)
        reports.append(engine.connector.take_due_stats())
    due = [index for index, stats in enumerate(reports) if stats]
    assert due == [0, CALLS_PER_REPORT, 2 * CALLS_PER_REPORT]
    assert sum(reports[index].data["counters"]["resumed_requests"] for index in due) == len(reports)
    engine.run_to_end()
    assert engine.connector.take_due_stats().data["gauges"]["host_blocks_used"] == 0
    assert engine.connector.take_due_stats()


def test_an_aborted_request_waits_no_longer() -> None:
    engine = FakeEngine(num_device_blocks=60, num_host_blocks=8)
    engine.add("a", list(range(24)))
    waiting = engine.add("b", list(range(50, 74)))
    engine.step(budget=60)
    engine.abort(waiting)
    assert engine.connector.take_stats().data["gauges"]["requests_waiting_for_host_memory"] == 0


def test_an_aborted_preempted_request_keeps_nothing_on_the_host() -> None:
    engine = FakeEngine()
    request, _, _ = preempted(engine, 11)
    engine.abort(request)
    engine.step()  # copies its last keys
    engine.process_steps()
    gauges = engine.connector.take_stats().data["gauges"]
    assert (gauges["host_blocks_used"], gauges["host_blocks_cached"]) == (0, 2)  # the full blocks serve others
    engine.check_idle()


def test_growth_beyond_the_host_pool_preempts_and_both_finish() -> None:
    engine = FakeEngine(num_device_blocks=60, num_host_blocks=MAX_MODEL_LEN // BLOCK_SIZE)
    requests = [engine.add(name, [ord(name)] * 14, max_tokens=16) for name in "ab"]
    engine.run_to_end()
    assert all(request.num_output_tokens == 16 for request in requests)
    assert sum(request.num_preemptions for request in requests) > 0
    engine.check_idle()


# Transfers


def test_a_remote_prompt_is_pulled_into_host_and_device_blocks() -> None:
    transport = FakeTransport()
    engine = FakeEngine(transport=transport, num_host_blocks=10)
    request = engine.add("remote", PROMPT, max_tokens=4)
    metadata = engine.step()
    assert metadata == HiSparseMetadata(transport="transport metadata")
    hosts, (_, devices) = host_ids(engine, request), engine.tables_of(request)
    assert len(hosts) == len(devices) == 3
    assert transport.started == [("remote", hosts, 0, devices, 10)]
    engine.check_integrity()
    engine.receive(request)
    metadata = engine.step()
    assert metadata.saves == list(zip(devices[:2], hosts[:2], strict=True))
    assert metadata.host_block_tables == {engine.tables_of(request)[0]: (0, hosts)}
    assert not metadata.restores
    engine.run_to_end()
    assert transport.finished == ["remote"]
    engine.check_idle()


@pytest.mark.parametrize("device_cache", ["kept", "lost"])
def test_shared_host_blocks_are_not_pulled_again(device_cache: str) -> None:
    transport = FakeTransport()
    engine = FakeEngine(transport=transport)
    engine.add("local", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    if device_cache == "lost":
        assert engine.kv.reset_prefix_cache()
    shared = list(engine.host_pool.cached_prefix(engine.add("local2", PROMPT[:9]).block_hashes, 8).block_ids)
    engine.waiting.clear()
    request = engine.add("remote", PROMPT)
    engine.step()
    name, hosts, num_shared, _, num_external = transport.started[0]
    assert (name, num_shared, hosts[:2]) == ("remote", 2, shared)
    assert num_external == (2 if device_cache == "kept" else 10)
    engine.connector.update_connector_output(output(finished_recving={"remote"}))
    layout = engine.connector.layout
    assert counters(engine) == {
        "transfers": 1,
        "transfer_failures": 0,
        "transfer_bytes_to_host": layout.main_block_bytes,
        "transfer_bytes_to_device": layout.resident_block_bytes * (1 if device_cache == "kept" else 3),
    }
    engine.receive(request)
    engine.run_to_end()


def test_failed_transfers_count_no_bytes() -> None:
    engine = FakeEngine(transport=FakeTransport())
    engine.add("remote", PROMPT)
    engine.step()
    done = output(finished_recving={"remote", "unknown"}, failed_recving={"remote"})
    engine.connector.update_connector_output(done)
    assert counters(engine) == {"transfers": 1, "transfer_failures": 1}
    assert engine.connector.transport.last_output is done
    engine.connector.update_connector_output(done)
    assert counters(engine) == {}


def test_kv_whose_lease_ended_is_computed_and_counts_no_bytes() -> None:
    """Two ranks say so, before the last one has ended its pull."""
    engine = FakeEngine(transport=FakeTransport())
    request = engine.add("remote", PROMPT)
    engine.step()
    request.num_computed_tokens = len(PROMPT)  # as vLLM sets it when a pull begins
    for expired in ({"remote"}, {"remote", "gone"}):
        meta = HiSparseWorkerMetadata([], expired)
        engine.connector.update_connector_output(output(kv_connector_worker_meta=meta))
        assert request.num_computed_tokens == 0
    engine.connector.update_connector_output(output(finished_recving={"remote"}))
    assert counters(engine) == {"transfers_expired": 1}


def test_reports_of_ranks_are_added_up() -> None:
    first, second = HiSparseWorkerMetadata([(1, 2, 3)], {"a"}), HiSparseWorkerMetadata([], {"b"})
    assert first.aggregate(second) == HiSparseWorkerMetadata([(1, 2, 3)], {"a", "b"})


def test_a_whole_remote_prompt_is_reserved_on_the_host_before_the_pull() -> None:
    transport = FakeTransport()
    engine = FakeEngine(transport=transport, num_device_blocks=60, num_host_blocks=8)
    engine.add("a", list(range(20)))
    engine.add("remote", PROMPT * 2)
    engine.step(budget=30)
    assert transport.started == []
    assert engine.connector.take_stats().data["gauges"]["requests_waiting_for_host_memory"] == 1
    engine.check_integrity()


# Request log


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(request_log.logger, "info", lambda message, *args: logged.append(message % args))
    return logged


def report(engine: FakeEngine, metadata: HiSparseMetadata, *counts: tuple[int, int]) -> None:
    """The worker's answer to `released`, one step later."""
    requests = [
        (first_hot_block_id, *count) for first_hot_block_id, count in zip(metadata.released, counts, strict=True)
    ]
    engine.connector.update_connector_output(output(kv_connector_worker_meta=HiSparseWorkerMetadata(requests)))


def test_log_follows_requests_over_reused_handles(lines: list[str]) -> None:
    engine = FakeEngine(log_request_stats=True, num_device_blocks=14)
    first = engine.add("a", PROMPT)
    engine.step(budget=10)
    engine.preempt(first)
    second = engine.add("b", PROMPT[5:])
    engine.waiting.reverse()
    preemption = engine.step(budget=5)
    report(engine, preemption, (1, 2))
    assert lines == []
    engine.abort(second)
    abort = engine.step(budget=1)  # resumes the first
    assert len(abort.released) == 1
    report(engine, abort, (10, 20))
    assert lines == [
        "HiSparse request b: prompt_tokens=5, hits=10, misses=20, transfer_bytes_to_host=0, transfer_bytes_to_device=0"
    ]
    engine.abort(first)
    report(engine, engine.step(), (100, 200))
    assert lines[1:] == [
        "HiSparse request a: prompt_tokens=10, hits=101, misses=202, transfer_bytes_to_host=0, "
        "transfer_bytes_to_device=0"
    ]
    assert not engine.connector.request_log._stats and not engine.connector.request_log._runs


def test_log_names_transferred_bytes(lines: list[str]) -> None:
    engine = FakeEngine(log_request_stats=True, transport=FakeTransport())
    request = engine.add("remote", PROMPT)
    engine.step()
    engine.connector.update_connector_output(output(finished_recving={"remote"}))
    engine.receive(request)
    engine.step()
    engine.abort(request)
    report(engine, engine.step(), (3, 4))
    layout = engine.connector.layout
    assert lines == [
        f"HiSparse request remote: prompt_tokens=10, hits=3, misses=4, "
        f"transfer_bytes_to_host={3 * layout.main_block_bytes}, "
        f"transfer_bytes_to_device={3 * layout.resident_block_bytes}"
    ]


def test_no_log_unless_asked(lines: list[str]) -> None:
    engine = FakeEngine()
    request = engine.add("a", PROMPT)
    engine.step()
    engine.abort(request)
    report(engine, engine.step(), (3, 4))
    assert lines == [] and engine.connector.request_log is None


def test_log_forgets_a_request_aborted_during_its_transfer():
    engine = FakeEngine(log_request_stats=True, transport=FakeTransport())
    request = engine.add("remote", list(range(10)))
    engine.step()
    engine.abort(request)
    engine.connector.update_connector_output(
        SimpleNamespace(finished_recving={"remote"}, failed_recving=None, kv_connector_worker_meta=None)
    )
    assert not engine.connector.request_log._stats
