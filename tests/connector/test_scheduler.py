from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from campaign.configuration import BLOCK_SIZE
from campaign.script import MAX_MODEL_LEN, ScriptedEngine
from campaign.texts import STOP_TOKEN, Text
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.connector import request_log, scheduler
from vllm_hisparse.connector.metadata import HiSparseWorkerMetadata
from vllm_hisparse.connector.scheduler import CALLS_PER_REPORT
from vllm_hisparse.kv_manager.blocks import step_form
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.kv_manager.usage import Usage

PROMPT = list(range(10, 20))
COPIES = ("device_to_host_bytes", "host_to_device_bytes")


def counters(engine: ScriptedEngine) -> dict[str, int]:
    """Counts since the last call, beside copies; none that is 0."""
    return {name: value for name, value in engine.take_counters().items() if name not in COPIES}


def copies(engine: ScriptedEngine) -> tuple[int, int]:
    """Bytes to the host and to the device since the last call."""
    counted = engine.take_counters()
    return tuple(counted.get(name, 0) for name in COPIES)


def output(**fields) -> SimpleNamespace:
    """A step's `KVConnectorOutput`."""
    return SimpleNamespace(
        **{"finished_recving": None, "failed_recving": None, "kv_connector_worker_meta": None, **fields}
    )


def num_published(engine: ScriptedEngine, request: Request) -> int:
    return engine.host_pool.cached_prefix(request.block_hashes, 10**6).num_tokens


@pytest.fixture(params=[False, True], ids=["indexer_first", "hot_first"])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return ScriptedEngine(hot_first=request.param)


def test_refused_transfers_are_counted() -> None:
    engine = ScriptedEngine(role="kv_consumer")
    for index, changes in enumerate(({"remote_port": "none"}, {}, {"remote_num_tokens": -1})):
        engine.ask_remote(f"cmpl-{index}-0-00000000", PROMPT, **changes)
    assert counters(engine)["transfers_refused"] == 2


def test_a_single_instance_says_that_it_transfers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own NIXL connector transfers KV with the same role."""
    warnings: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *args: warnings.append(text % args))
    engine = ScriptedEngine()
    for index, changes in enumerate(({}, {"do_remote_prefill": False, "do_remote_decode": True})):
        assert not warnings[index:]
        engine.ask_remote(f"cmpl-{index}-0-00000000", PROMPT, max_tokens=2, **changes)
    for index, params in enumerate((None, {}, {"do_remote_prefill": False})):
        engine.ask(f"other-{index}", PROMPT, max_tokens=2, extra_args={"kv_transfer_params": params})
    engine.run_to_end()
    assert counters(engine)["transfers_refused"] == 2
    assert len(warnings) == 1 and "cmpl-0-0-00000000" in warnings[0] and "kv_role to kv_consumer" in warnings[0]


# Microbatches


def test_a_step_that_misses_few_rows_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' counts decide, not the requests that run."""
    monkeypatch.setattr(step_form, "MIN_COPIED_BYTES", 10)
    engine = ScriptedEngine(max_num_seqs=4)
    engine.ask("a", PROMPT[:5], max_tokens=8)
    assert [engine.turn().runs_whole for _ in range(2)] == [False, False], "nothing is known"
    for misses, runs_whole in ((0, True), (10**9, False), (1, True)):
        usage = Usage(1, 10**6, misses)
        engine.half.update_connector_output(output(kv_connector_worker_meta=HiSparseWorkerMetadata(usage=usage)))
        assert engine.turn().runs_whole == runs_whole


# Tables


def test_tables_travel_as_deltas(engine: ScriptedEngine) -> None:
    request = engine.ask("a", PROMPT[:5], max_tokens=8)
    metadata = engine.turn()
    first_hot_block_id, _ = engine.tables_of(request)
    first = engine.host_ids(request)
    assert metadata.host_block_tables == {first_hot_block_id: (0, first)}
    assert len(first) == 2  # the whole prompt is reserved, in whole blocks
    assert [engine.turn().host_block_tables for _ in range(3)] == [{}, {}, {}]
    assert engine.turn().host_block_tables == {first_hot_block_id: (2, engine.host_ids(request)[2:])}
    assert len(engine.host_ids(request)) == 3
    assert engine.turn().host_block_tables == {}


def test_nothing_changes_nothing_travels(engine: ScriptedEngine) -> None:
    engine.ask("a", PROMPT[:5])
    engine.turn()
    assert engine.turn() == HiSparseMetadata()


def test_a_long_prompt_in_chunks_sends_its_table_once(engine: ScriptedEngine) -> None:
    request = engine.ask("a", list(range(20)))
    tables = [engine.turn(budget=3).host_block_tables for _ in range(6)]
    first_hot_block_id, _ = engine.tables_of(request)
    assert tables == [{first_hot_block_id: (0, engine.host_ids(request))}, {}, {}, {}, {}, {}]


# Without an indexer group


@pytest.mark.parametrize("enable_caching", [True, False])
def test_without_indexer_only_tables_travel(enable_caching: bool) -> None:
    engine = ScriptedEngine(has_resident_group=False, enable_caching=enable_caching)
    engine.ask("a", PROMPT, max_tokens=12)
    engine.run_to_end()
    assert not any(metadata.saves or metadata.preemption_saves or metadata.restores for metadata in engine.log)
    engine.check_idle()
    engine.ask("b", PROMPT, max_tokens=2)
    metadata = engine.turn(budget=30)
    assert engine.running[0].num_computed_tokens == len(PROMPT) and not metadata.restores
    assert counters(engine).get("host_prefix_tokens", 0) == (8 if enable_caching else 0)


def test_without_indexer_a_preempted_request_loses_nothing() -> None:
    engine = ScriptedEngine(has_resident_group=False)
    request = engine.ask("a", PROMPT)
    engine.turn(budget=30)
    engine.preempt(request)
    metadata = engine.turn()
    assert not metadata.restores and not metadata.preemption_saves
    assert request.num_computed_tokens == len(PROMPT) + 1
    engine.run_to_end()
    engine.check_idle()


def pulls(metadata: HiSparseMetadata) -> dict[str, list[list[int]]]:
    """Blocks that a step's pulls write, by request: a list of host blocks, then of device blocks."""
    return {name: [list(ids) for ids in meta.local_block_ids] for name, meta in metadata.transport.reqs_to_recv.items()}


def test_without_indexer_a_remote_prompt_goes_to_the_host_alone() -> None:
    engine = ScriptedEngine(role="kv_consumer", has_resident_group=False)
    request = engine.ask_remote("remote", PROMPT)
    assert pulls(engine.turn()) == {"remote": [engine.host_ids(request)]}
    engine.run_to_end()
    engine.check_idle()


# Saves


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 30])
def test_every_full_block_is_saved_once_when_it_is_full(budget: int) -> None:
    engine = ScriptedEngine()
    request = engine.ask("a", PROMPT, max_tokens=12)
    saved: list[tuple[int, int]] = []
    while request in engine.running or request in engine.waiting:
        before = request.num_computed_tokens // BLOCK_SIZE
        metadata = engine.turn(budget)
        after = request.num_computed_tokens // BLOCK_SIZE
        assert len(metadata.saves) == after - before
        saved += metadata.saves
    assert len(saved) == len({host_id for _, host_id in saved}) == (len(PROMPT) + 12 - 1) // BLOCK_SIZE


def test_saves_name_the_blocks_of_the_same_tokens(engine: ScriptedEngine) -> None:
    request = engine.ask("a", PROMPT)
    metadata = engine.turn(budget=9)
    _, device_ids = engine.tables_of(request)
    assert metadata.saves == list(zip(device_ids[:2], engine.host_ids(request)[:2], strict=True))


def test_published_with_the_save(engine: ScriptedEngine) -> None:
    request = engine.ask("a", PROMPT)
    assert len(engine.begin(budget=9).metadata.saves) == 2
    assert num_published(engine, request) == 8


def test_two_requests_of_one_step_do_not_share_unsaved_blocks(engine: ScriptedEngine) -> None:
    first, second = engine.ask("a", PROMPT), engine.ask("b", PROMPT)
    metadata = engine.turn(budget=20)
    assert len(metadata.host_block_tables) == 2 and not metadata.restores
    assert not set(engine.host_ids(first)) & set(engine.host_ids(second))


def test_without_prefix_caching_blocks_are_saved_but_not_published() -> None:
    engine = ScriptedEngine(enable_caching=False)
    request = engine.ask("a", PROMPT)
    assert len(engine.turn(budget=10).saves) == 2
    assert num_published(engine, request) == 0
    assert engine.half.get_num_new_matched_tokens(engine.ask("b", PROMPT), 0) == (0, False)


# Matches


def test_matches_count_from_the_devices_hit_and_leave_the_last_token() -> None:
    engine = ScriptedEngine()
    engine.ask("a", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    match = engine.half.get_num_new_matched_tokens
    assert match(engine.ask("longer", PROMPT), 0) == (8, False)
    assert match(engine.ask("half", PROMPT), 4) == (4, False)
    assert match(engine.ask("all", PROMPT), 8) == (0, False)
    assert match(engine.ask("equal", PROMPT[:8]), 0) == (4, False)
    assert match(engine.ask("other", PROMPT[1:]), 0) == (0, False)
    assert match(engine.ask("skip", PROMPT, skip_reading_prefix_cache=True), 0) == (0, False)
    engine.half.reset_cache()
    assert match(engine.ask("reset", PROMPT), 0) == (0, False)


def test_the_device_hit_is_capped_by_the_host(engine: ScriptedEngine) -> None:
    engine.ask("a", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    request = engine.ask("b", PROMPT)
    assert engine.kv.get_computed_blocks(request)[1] == 8
    engine.half.reset_cache()
    assert engine.kv.get_computed_blocks(request)[1] == 0
    engine.run_to_end()


def stopped_session() -> tuple[ScriptedEngine, Request, list[tuple[int, int]]]:
    """A session's turn ends while the step after its last token is in flight, whose token the next turn drops.

    Returns the engine, the session, whose first block is one token short again, and what was saved of it.
    """
    first = next(first for first in count() if Text([first, 1, 2]).next_token(3) == STOP_TOKEN)
    engine = ScriptedEngine(is_async=True)
    session = engine.ask("a", [first, 1, 2], max_tokens=12, resumable=True, stop_token_ids=[STOP_TOKEN])
    engine.begin()
    saves = engine.begin().metadata.saves
    assert len(saves) == 1 and session.num_computed_tokens == BLOCK_SIZE
    engine.end()
    engine.end()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    return engine, session, saves


def test_a_block_is_saved_again_when_its_last_token_is_taken_back() -> None:
    engine, session, saves = stopped_session()
    engine.ask("a", [9], resumable=True)
    assert session.num_computed_tokens == BLOCK_SIZE - 1 and session.num_tokens == BLOCK_SIZE
    assert engine.turn().saves == saves
    engine.end_session("a")
    engine.run_to_end()
    engine.check_idle()


def test_a_block_whose_last_token_was_taken_back_is_not_published() -> None:
    engine, session, _ = stopped_session()
    engine.ask("a", [9], resumable=True)
    assert len(session.block_hashes) == 1
    engine.abort("a")
    assert num_published(engine, session) == 0


# Preemption, restores


def preempted(engine: ScriptedEngine, num_tokens: int) -> tuple[Request, list[int], list[int]]:
    """A request that lost its hot blocks with `num_tokens` computed, and the blocks it had."""
    request = engine.ask("a", list(range(10, 10 + num_tokens)), max_tokens=12)
    engine.turn(budget=num_tokens)
    hosts, (_, devices) = engine.host_ids(request), engine.tables_of(request)
    engine.preempt(request)
    return request, hosts, devices


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 11])
def test_preemption_saves_the_partial_block(num_tokens: int) -> None:
    engine = ScriptedEngine()
    request, hosts, devices = preempted(engine, num_tokens)
    num_full, tail = divmod(num_tokens, BLOCK_SIZE)
    metadata = engine.turn(budget=0)
    assert metadata.preemption_saves == ([(devices[num_full], hosts[num_full])] if tail else [])
    assert len(metadata.released) == 1 and not metadata.host_block_tables
    match = engine.host_pool.retained_prefix(request.request_id, request.num_tokens - 1)
    assert (match.num_tokens, list(match.block_ids)) == (num_tokens, hosts[: num_full + bool(tail)])


@pytest.mark.parametrize("num_decodes", [1, 2, 3, 4, 5])
def test_preemption_while_decoding_saves_the_block_of_the_newest_token(num_decodes: int) -> None:
    engine = ScriptedEngine()
    request = engine.ask("a", PROMPT[:6], max_tokens=12)
    for _ in range(1 + num_decodes):
        engine.turn()
    num_full, tail = divmod(6 + num_decodes, BLOCK_SIZE)
    hosts, (_, devices) = engine.host_ids(request), engine.tables_of(request)
    engine.preempt(request)
    assert engine.turn().preemption_saves == ([(devices[num_full], hosts[num_full])] if tail else [])
    engine.run_to_end()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_decodes", range(1, 10))
def test_preemption_leaves_no_gap_in_the_prefix_that_later_requests_find(is_async: bool, num_decodes: int) -> None:
    """With two batches in flight, the hash of a block is known one step after the block was filled: too late, if the
    request was preempted in between."""
    engine = ScriptedEngine(is_async=is_async)
    request = engine.ask("a", PROMPT[:6], max_tokens=20)
    for _ in range(1 + num_decodes):
        engine.begin()
        while len(engine.in_flight) > int(is_async):
            engine.end()
    engine.preempt(request)
    engine.run_to_end()
    num_blocks = (request.num_tokens - 1) // BLOCK_SIZE
    assert engine.host_pool.cached_prefix(request.block_hashes, 100).num_tokens == num_blocks * BLOCK_SIZE


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 11])
@pytest.mark.parametrize("device_cache", ["kept", "lost"])
def test_restores_are_the_blocks_between_device_hit_and_host_match(num_tokens: int, device_cache: str) -> None:
    engine = ScriptedEngine()
    request, hosts, _ = preempted(engine, num_tokens)
    if device_cache == "lost":
        engine.turn(budget=0)  # copies its last block, which is in use until then
        assert engine.scheduler.reset_prefix_cache()
    metadata = engine.turn()
    _, devices = engine.tables_of(request)
    first = num_tokens // BLOCK_SIZE if device_cache == "kept" else 0
    last = -(-num_tokens // BLOCK_SIZE)
    assert metadata.restores == list(zip(hosts[first:last], devices[first:last], strict=True))
    assert request.num_computed_tokens == num_tokens + 1, "a resumed request computes one token"
    engine.run_to_end()
    engine.check_idle()


def test_a_prefix_that_only_the_host_holds_is_restored() -> None:
    engine = ScriptedEngine()
    engine.ask("a", PROMPT, max_tokens=1)
    engine.run_to_end()
    assert engine.scheduler.reset_prefix_cache()
    request = engine.ask("b", PROMPT)
    metadata = engine.turn()
    _, devices = engine.tables_of(request)
    assert metadata.restores == list(zip(engine.host_ids(request)[:2], devices[:2], strict=True))
    assert not metadata.saves
    engine.run_to_end()


@pytest.mark.parametrize("device_cache", ["kept", "lost"])
def test_a_turn_that_the_host_knows_costs_no_step_more(device_cache: str) -> None:
    """It starts in the first step after its arrival, and that step samples its first token; another request decodes."""
    engine = ScriptedEngine(num_device_blocks=64, is_async=True)
    engine.ask("a", PROMPT, max_tokens=3)
    engine.run_to_end()
    if device_cache == "lost":
        assert engine.scheduler.reset_prefix_cache()
    engine.ask("other", PROMPT[::-1], max_tokens=15)
    engine.turns(3)
    engine.begin()  # a step is in flight when the turn arrives
    request = engine.ask("b", [*PROMPT, 7, 8, 9, 7], max_tokens=3)
    step = engine.begin(budget=100)
    num_hit = len(PROMPT) // BLOCK_SIZE
    assert len(step.metadata.restores) == (num_hit if device_cache == "lost" else 0)
    assert [(entry.request_id, entry.first) for entry in step.batch] == [("other", 12), ("b", num_hit * BLOCK_SIZE)]
    engine.end()
    assert not request.output_token_ids
    engine.end()
    assert len(request.output_token_ids) == 1
    engine.run_to_end()
    engine.check_idle()


def test_resumption_counts_what_is_computed_again() -> None:
    engine = ScriptedEngine()
    request, _, _ = preempted(engine, 11)
    counters(engine)
    engine.turn()
    assert counters(engine) == {"host_prefix_tokens": 3, "resumed_requests": 1, "recomputed_tokens": 0}
    engine.preempt(request)
    engine.half.reset_cache()
    engine.turn()
    assert counters(engine) == {"resumed_requests": 1, "recomputed_tokens": 12}


def test_restored_tokens_of_other_requests_are_no_resumption() -> None:
    engine = ScriptedEngine()
    engine.ask("a", PROMPT, max_tokens=1)
    engine.run_to_end()
    engine.scheduler.reset_prefix_cache()
    engine.ask("b", PROMPT)
    engine.begin(budget=8)
    assert counters(engine) == {"host_prefix_tokens": 8}


def test_copies_of_every_rank_are_counted() -> None:
    engine = ScriptedEngine()
    engine.half.counts.num_ranks, layout = 2, engine.half.groups.layout
    token, block = 2 * layout.num_layers * layout.row_bytes, 2 * layout.resident_block_bytes
    engine.ask("a", PROMPT, max_tokens=3)
    seen = []
    for _ in range(4):
        engine.turn(budget=BLOCK_SIZE)
        seen.append(copies(engine))
    assert len(PROMPT) == 2 * BLOCK_SIZE + 2
    assert seen == [(4 * token + block, 0), (4 * token + block, 0), (2 * token, 0), (token, 0)]
    engine.run_to_end()
    engine.scheduler.reset_prefix_cache()
    copies(engine)
    engine.ask("b", PROMPT)
    engine.turn(budget=1)
    assert copies(engine) == (token, 2 * block)


# Release


def test_first_hot_blocks_are_released_once_before_they_are_reused(engine: ScriptedEngine) -> None:
    first = engine.ask("a", PROMPT)
    engine.turn(budget=10)
    first_hot_block_id, _ = engine.tables_of(first)
    engine.abort(first.request_id)
    second = engine.ask("b", PROMPT[:3])
    metadata = engine.turn(budget=3)
    assert metadata.released == [first_hot_block_id]
    assert list(metadata.host_block_tables) == [engine.tables_of(second)[0]]
    assert engine.turn().released == []


def test_a_request_that_the_worker_never_saw_is_not_released() -> None:
    engine = ScriptedEngine(role="kv_consumer")
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    engine.abort("remote")
    assert not engine.turn().released
    engine.receive()
    engine.ask("b", PROMPT)
    engine.abort("b")
    assert not engine.turn().released
    engine.check_idle()


# More states than the worker has room for


def resumed_late() -> tuple[ScriptedEngine, Request, list[int]]:
    """A session whose second turn waits, because a request whose transfer has ended took the last place before it.

    Returns the engine, the session, and the first hot blocks that the worker was told to forget.
    """
    engine = ScriptedEngine(role="kv_consumer", max_num_seqs=2)
    engine.ask_remote("remote", list(range(50, 57)), max_tokens=12)
    engine.turn()
    session = engine.ask("session", PROMPT[:6], max_tokens=1, resumable=True)
    engine.turn()
    engine.ask("other", PROMPT[2:5], max_tokens=20)
    engine.turn()
    engine.receive()
    engine.ask("session", [8], max_tokens=12, resumable=True)
    released = engine.turn().released
    assert [request.request_id for request in engine.running] == ["other", "remote"]
    return engine, session, released


def test_a_waiting_session_gives_its_place_on_the_worker_to_a_request_that_runs() -> None:
    engine, session, released = resumed_late()
    first_hot_block_id, _ = engine.tables_of(session)
    assert released == [first_hot_block_id] and len(engine.worker.tables) == 2
    engine.abort("other")
    assert engine.turn().host_block_tables == {first_hot_block_id: (0, engine.host_ids(session))}
    engine.end_session("session")
    engine.run_to_end()
    assert session.num_output_tokens == 12
    engine.check_idle()


def test_a_session_that_ends_without_a_place_on_the_worker_is_not_released_twice() -> None:
    engine, _, _ = resumed_late()
    engine.abort("session")
    assert engine.turn().released == []
    engine.run_to_end()
    engine.check_idle()


def test_requests_that_wait_for_their_turn_to_be_scheduled_keep_their_place() -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    engine.ask("a", PROMPT[:6], max_tokens=12)
    engine.ask("b", PROMPT[2:], max_tokens=12)
    engine.turn(budget=30)
    released = [engine.turn(budget=1).released for _ in range(4)]
    assert released == [[]] * 4
    engine.run_to_end()


# Sessions that outgrow the model


def test_a_session_is_cut_to_leave_room_for_one_token() -> None:
    engine = ScriptedEngine()
    session = engine.ask("session", PROMPT, max_tokens=1, resumable=True)
    engine.turn(budget=30)
    engine.ask("session", range(100, 100 + MAX_MODEL_LEN), resumable=True)
    prompt = session.all_token_ids[: MAX_MODEL_LEN - 1]
    engine.turn(budget=100)
    assert session.all_token_ids[: MAX_MODEL_LEN - 1] == prompt and session.num_output_tokens == 1
    assert len(session.block_hashes) == MAX_MODEL_LEN // BLOCK_SIZE
    engine.end_session("session")
    assert session.is_finished()
    engine.check_idle()


# Pool pressure


def test_a_request_that_the_host_cannot_take_waits() -> None:
    engine = ScriptedEngine(num_device_blocks=60, num_host_blocks=8)
    engine.ask("a", list(range(24)), max_tokens=2)
    engine.ask("b", list(range(50, 74)), max_tokens=2)
    engine.turn(budget=60)
    assert [request.request_id for request in engine.running] == ["a"]
    gauges = engine.half.take_stats().data["gauges"]
    assert gauges == {
        "host_blocks_used": 6,
        "host_blocks_free": 2,
        "host_blocks_cached": 0,
        "requests_waiting_for_host_memory": 1,
    }
    engine.run_to_end()
    assert engine.half.take_stats().data["gauges"]["requests_waiting_for_host_memory"] == 0
    engine.check_idle()


def num_waiting_for_host(engine: ScriptedEngine) -> int:
    return engine.half.take_stats().data["gauges"]["requests_waiting_for_host_memory"]


def test_all_requests_behind_one_that_the_host_cannot_take_wait_for_host_memory() -> None:
    """vLLM asks for the first of them alone, and one of the others would fit."""
    engine = ScriptedEngine(num_device_blocks=60, num_host_blocks=8)
    engine.ask("a", list(range(24)), max_tokens=2)
    for index in range(5):
        engine.ask(f"waits-{index}", [100 * (index + 1) + i for i in range(24)], max_tokens=2)
    engine.ask("short", [1], max_tokens=2)
    engine.turn(budget=60)
    assert len(engine.waiting) == 6 and num_waiting_for_host(engine) == 6
    engine.abort("waits-2")
    assert num_waiting_for_host(engine) == 5
    engine.abort("a")
    assert num_waiting_for_host(engine) == 0, "there is room: they wait for their turn alone"
    engine.turn(budget=60)
    assert len(engine.running) == 1 and num_waiting_for_host(engine) == 4
    engine.run_to_end()
    assert num_waiting_for_host(engine) == 0
    engine.check_idle()


def test_a_preempted_request_waits_for_host_memory() -> None:
    engine = ScriptedEngine(num_device_blocks=60, num_host_blocks=8)
    for name, first in (("a", 0), ("b", 50)):
        engine.ask(name, list(range(first, first + 14)), max_tokens=8)
    while engine.waiting:
        engine.turn(budget=60)
    while not engine.waiting:
        engine.turn(budget=60)
    engine.turn(budget=60)
    assert [request.num_preemptions for request in engine.waiting] == [1]
    assert num_waiting_for_host(engine) == 1
    engine.run_to_end()
    engine.check_idle()


def published(engine: ScriptedEngine, request: Request) -> list[bool]:
    return [engine.host_pool.find(block_hash) is not None for block_hash in request.block_hashes]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_requests_that_run_during_a_reset_publish_nothing_more(engine: ScriptedEngine, is_preempted: bool) -> None:
    """A later turn would use their blocks behind newly computed ones, if weights were replaced, for example."""
    request = engine.ask("a", list(range(9)), max_tokens=12)
    while request.num_computed_tokens < 13:
        engine.turn()
    assert published(engine, request) == [True] * 3
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "vLLM empties no cache that is in use"
    if is_preempted:
        engine.preempt(request)
    engine.run_to_end()
    assert request.num_preemptions == is_preempted
    assert published(engine, request) == [False] * 5
    engine.ask("b", request.prompt_token_ids, max_tokens=1)
    engine.run_to_end()
    assert published(engine, request) == [True] * 2 + [False] * 3
    engine.check_idle()


def test_a_request_that_is_computed_again_after_a_reset_publishes_its_blocks(engine: ScriptedEngine) -> None:
    request = engine.ask("a", list(range(9)), max_tokens=12)
    engine.turns(3)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run_to_end()
    assert published(engine, request) == [True] * 5
    engine.check_idle()


def test_a_request_that_waits_for_host_memory_keeps_its_prefix_longer_than_others_do() -> None:
    """It was used before the other cached prefix."""
    engine = ScriptedEngine(num_device_blocks=80, num_host_blocks=12, max_model_len=48)
    prefix = list(range(100, 121))  # five whole blocks and one token
    for name, prompt in (("first", prefix), ("second", list(range(200, 209)))):
        engine.ask(name, prompt, max_tokens=1)
        engine.run_to_end()
    assert engine.host_pool.num_cached == 5 + 2
    running = engine.ask("running", [1, 2, 3, 4], max_tokens=30)
    engine.turn()
    request = engine.ask("waits", [*prefix, *range(300, 321)], max_tokens=4)
    while len(engine.host_ids(running)) < 7:
        engine.turn()
    assert engine.waiting == [request] and engine.host_pool.num_cached == 5
    engine.abort("running")
    engine.turn(budget=60)
    assert engine.tracker.admitted["waits"].num_matched_tokens == 5 * 4
    engine.run_to_end()
    engine.check_idle()


def test_reports_come_every_few_calls_and_when_no_request_is_left() -> None:
    engine = ScriptedEngine()
    engine.ask("a", PROMPT[:5], max_tokens=2)
    reports = []
    for _ in range(2 * CALLS_PER_REPORT + 1):
        engine.half.counts.add(resumed_requests=1)
        reports.append(engine.half.take_due_stats())
    due = [index for index, stats in enumerate(reports) if stats]
    assert due == [0, CALLS_PER_REPORT, 2 * CALLS_PER_REPORT]
    assert sum(reports[index].data["counters"]["resumed_requests"] for index in due) == len(reports)
    engine.run_to_end()
    assert engine.half.take_due_stats().data["gauges"]["host_blocks_used"] == 0
    assert engine.half.take_due_stats()


def test_an_aborted_request_waits_no_longer() -> None:
    engine = ScriptedEngine(num_device_blocks=60, num_host_blocks=8)
    engine.ask("a", list(range(24)))
    waiting = engine.ask("b", list(range(50, 74)))
    engine.turn(budget=60)
    engine.abort(waiting.request_id)
    assert engine.half.take_stats().data["gauges"]["requests_waiting_for_host_memory"] == 0


def test_an_aborted_preempted_request_keeps_nothing_on_the_host() -> None:
    engine = ScriptedEngine()
    request, _, _ = preempted(engine, 11)
    engine.abort(request.request_id)
    engine.turn()  # copies its last keys
    gauges = engine.half.take_stats().data["gauges"]
    assert (gauges["host_blocks_used"], gauges["host_blocks_cached"]) == (0, 2)  # the full blocks serve others
    engine.check_idle()


def test_growth_beyond_the_host_pool_preempts_and_both_finish() -> None:
    engine = ScriptedEngine(num_device_blocks=60, num_host_blocks=MAX_MODEL_LEN // BLOCK_SIZE)
    requests = [engine.ask(name, [ord(name)] * 14, max_tokens=16) for name in "ab"]
    engine.run_to_end()
    assert all(request.num_output_tokens == 16 for request in requests)
    assert sum(request.num_preemptions for request in requests) > 0
    engine.check_idle()


# Transfers


def test_a_remote_prompt_is_pulled_into_host_and_device_blocks() -> None:
    engine = ScriptedEngine(role="kv_consumer", num_host_blocks=10)
    request = engine.ask_remote("remote", PROMPT, max_tokens=4)
    metadata = engine.turn()
    assert replace(metadata, transport=None, leases={}) == HiSparseMetadata()
    hosts, (_, devices) = engine.host_ids(request), engine.tables_of(request)
    assert len(hosts) == len(devices) == 3
    assert pulls(metadata) == {"remote": [hosts, devices]}
    engine.receive()
    metadata = engine.turn()
    assert metadata.saves == list(zip(devices[:2], hosts[:2], strict=True))
    assert metadata.host_block_tables == {engine.tables_of(request)[0]: (0, hosts)}
    assert not metadata.restores
    engine.run_to_end()
    engine.check_idle()


@pytest.mark.parametrize("device_cache", ["kept", "lost"])
def test_shared_host_blocks_are_not_pulled_again(device_cache: str) -> None:
    engine = ScriptedEngine(role="kv_consumer")
    engine.ask("local", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    if device_cache == "lost":
        assert engine.scheduler.reset_prefix_cache()
    num_device = 1 if device_cache == "kept" else 3
    engine.take_counters()
    request = engine.ask_remote("remote", PROMPT)
    assert engine.host_pool.cached_prefix(request.block_hashes, 8).num_tokens == 8
    metadata = engine.turn()
    hosts, (_, devices) = engine.host_ids(request), engine.tables_of(request)
    assert pulls(metadata) == {"remote": [hosts[2:], devices[-num_device:]]}
    engine.receive()
    layout = engine.half.layout
    assert counters(engine) == {
        "transfers": 1,
        "transfer_failures": 0,
        "transfer_bytes_to_host": layout.main_block_bytes,
        "transfer_bytes_to_device": layout.resident_block_bytes * num_device,
    }
    engine.run_to_end()
    engine.check_idle()


@pytest.mark.parametrize(("device_cache", "num_device"), [("kept", 1), ("lost", 3)])
def test_narrow_keys_are_pulled_to_the_host_and_restored(device_cache: str, num_device: int) -> None:
    """Blocks that the device has stay as they are; those that only the host has are restored, too."""
    engine = ScriptedEngine(role="kv_consumer", has_narrow_keys=True)
    engine.ask("local", PROMPT[:8], max_tokens=1)
    engine.run_to_end()
    if device_cache == "lost":
        assert engine.scheduler.reset_prefix_cache()
    engine.take_counters()
    request = engine.ask_remote("remote", PROMPT)
    metadata = engine.turn()
    hosts, (_, devices) = engine.host_ids(request), engine.tables_of(request)
    assert pulls(metadata) == {"remote": [hosts[2:], hosts[2:]]} and not metadata.restores
    engine.receive()
    assert counters(engine) == {
        "transfers": 1,
        "transfer_failures": 0,
        "transfer_bytes_to_host": engine.half.layout.host_block_bytes,
        "transfer_bytes_to_device": 0,
    }
    metadata = engine.turn()
    assert metadata.restores == list(zip(hosts, devices, strict=True))[-num_device:]
    assert not metadata.saves, "the host has the keys of the full blocks"
    engine.run_to_end()
    engine.check_idle()


def test_narrow_keys_of_an_aborted_request_are_not_restored() -> None:
    """Its device blocks may be another request's by then."""
    engine = ScriptedEngine(role="kv_consumer", has_narrow_keys=True)
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    engine.receive()
    engine.abort("remote")
    assert not engine.turn().restores
    engine.check_idle()


def test_host_blocks_stay_while_a_step_restores_narrow_keys_from_them() -> None:
    """The request does not run in that step, so vLLM frees its blocks at once; a pull would overwrite what is read."""
    engine = ScriptedEngine(role="kv_consumer", has_narrow_keys=True)
    request = engine.ask_remote("remote", PROMPT)
    engine.turn()
    num_used = len(engine.host_ids(request))
    engine.receive()
    assert engine.begin(budget=0).metadata.restores and not engine.running
    engine.abort("remote")
    assert engine.host_pool.num_used == num_used
    engine.end()
    assert not engine.host_pool.num_used
    engine.check_idle()


@pytest.mark.parametrize("fate", ["failed", "expired"])
def test_narrow_keys_that_did_not_arrive_are_not_restored(fate: str) -> None:
    engine = ScriptedEngine(role="kv_consumer", has_narrow_keys=True)
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    if fate == "expired":
        meta = HiSparseWorkerMetadata([], {"remote"})
        engine.half.update_connector_output(output(kv_connector_worker_meta=meta, finished_recving={"remote"}))
    else:
        engine.half.update_connector_output(output(finished_recving={"remote"}, failed_recving={"remote"}))
    assert not engine.half.tracker.diff({}).restores


def test_failed_transfers_count_no_bytes() -> None:
    engine = ScriptedEngine(role="kv_consumer")
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    done = output(finished_recving={"remote", "unknown"}, failed_recving={"remote"})
    engine.half.update_connector_output(done)
    assert counters(engine) == {"transfers": 1, "transfer_failures": 1}
    engine.half.update_connector_output(done)
    assert counters(engine) == {}


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_transfer_of_an_aborted_request_counts_only_if_it_failed(has_failed: bool) -> None:
    engine = ScriptedEngine(role="kv_consumer")
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    engine.abort("remote")
    failed = {"remote"} if has_failed else set()
    engine.half.update_connector_output(output(finished_recving={"remote"}, failed_recving=failed))
    assert counters(engine) == ({"transfers": 1, "transfer_failures": 1} if has_failed else {})


@pytest.mark.parametrize("fate", ["received", "failed", "expired"])
def test_a_transfer_takes_as_long_as_on_its_slowest_rank(fate: str) -> None:
    """Ranks report in different steps; one that fails, or whose lease was over, reports no time."""
    engine = ScriptedEngine(role="kv_consumer")
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    expired = {"remote"} if fate == "expired" else set()
    first = HiSparseWorkerMetadata([], set(), {"remote": 2.5, "unknown": 9.0})
    engine.half.update_connector_output(output(kv_connector_worker_meta=first))
    assert not engine.half.take_stats().data["histograms"], "it has not ended on all ranks"
    last = HiSparseWorkerMetadata([], expired, {} if fate == "failed" else {"remote": 1.5})
    failed = {"remote"} if fate == "failed" else set()
    engine.half.update_connector_output(
        output(kv_connector_worker_meta=last, finished_recving={"remote"}, failed_recving=failed)
    )
    expected = {"transfer_time_seconds": [2.5]} if fate == "received" else {}
    assert engine.half.take_stats().data["histograms"] == expected


def test_the_gauge_of_the_import_buffer_is_that_of_the_rank_on_which_most_wait() -> None:
    """A rank on which the number has not changed reports nothing."""
    engine = ScriptedEngine(role="kv_consumer")
    assert "transfers_waiting_for_buffer" not in engine.half.take_stats().data["gauges"]
    found = []
    for reports in ({0: 7, 1: 0, 2: 3, 3: 1}, {0: 2}, {}, {2: 0}, {0: 0, 3: 0}):
        metadata = HiSparseWorkerMetadata()
        for rank, number in reports.items():
            metadata = metadata.aggregate(HiSparseWorkerMetadata(waiting={rank: number}))
        engine.half.update_connector_output(output(kv_connector_worker_meta=metadata))
        found.append(engine.half.take_stats().data["gauges"]["transfers_waiting_for_buffer"])
    assert found == [7, 3, 3, 2, 0]


def test_kv_whose_lease_ended_is_computed_and_counts_no_bytes() -> None:
    """Two ranks say so, before the last one has ended its pull."""
    engine = ScriptedEngine(role="kv_consumer")
    request = engine.ask_remote("remote", PROMPT)
    engine.turn()
    assert request.num_computed_tokens == len(PROMPT)
    for expired in ({"remote"}, {"remote", "gone"}):
        meta = HiSparseWorkerMetadata([], expired)
        engine.half.update_connector_output(output(kv_connector_worker_meta=meta))
        assert request.num_computed_tokens == 0
    engine.receive()
    assert counters(engine) == {"transfers_expired": 1}
    engine.run_to_end()
    engine.check_idle()


def test_reports_of_ranks_are_added_up() -> None:
    first = HiSparseWorkerMetadata([(1, 2, 3)], {"a"}, {"c": 2.0, "d": 1.0, "e": 3.0})
    second = HiSparseWorkerMetadata([], {"b"}, {"c": 1.0, "d": 2.0, "f": 4.0})
    slowest = {"c": 2.0, "d": 2.0, "e": 3.0, "f": 4.0}
    assert first.aggregate(second) == HiSparseWorkerMetadata([(1, 2, 3)], {"a", "b"}, slowest)


def test_a_whole_remote_prompt_is_reserved_on_the_host_before_the_pull() -> None:
    engine = ScriptedEngine(role="kv_consumer", num_device_blocks=60, num_host_blocks=8)
    engine.ask("a", list(range(20)))
    engine.ask_remote("remote", PROMPT * 2)
    assert pulls(engine.turn(budget=30)) == {}
    assert engine.half.take_stats().data["gauges"]["requests_waiting_for_host_memory"] == 1


@pytest.mark.parametrize(
    ("is_elastic", "option", "is_limited", "warns"),
    [
        (True, "auto", True, False),
        (False, "auto", False, True),
        (True, "off", False, False),
        (False, "off", False, False),
    ],
)
def test_admission_that_has_no_effect_is_logged(
    monkeypatch: pytest.MonkeyPatch, is_elastic: bool, option: str, is_limited: bool, warns: bool
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda message, *args: warnings.append(message % args))
    engine = ScriptedEngine(options={"admission": option, "elastic": is_elastic}, is_elastic=is_elastic)
    assert (engine.half.admission is not None) == is_limited
    assert [message.startswith("HiSparse: admission is 'auto', which has no effect") for message in warnings] == [
        True
    ] * warns


# Request log


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(request_log.logger, "info", lambda message, *args: logged.append(message % args))
    return logged


def report(engine: ScriptedEngine, metadata: HiSparseMetadata, *counts: tuple[int, int]) -> None:
    """The worker's answer to `released`, one step later."""
    requests = [
        (first_hot_block_id, *count) for first_hot_block_id, count in zip(metadata.released, counts, strict=True)
    ]
    engine.half.update_connector_output(output(kv_connector_worker_meta=HiSparseWorkerMetadata(requests)))


def test_log_follows_requests_over_reused_first_hot_blocks(lines: list[str]) -> None:
    engine = ScriptedEngine(options={"log_request_stats": True}, num_device_blocks=14)
    first = engine.ask("a", PROMPT)
    engine.turn(budget=10)
    engine.preempt(first)
    second = engine.ask("b", PROMPT[5:])
    engine.scheduler.waiting.remove_request(first)
    engine.scheduler.waiting.add_request(first)  # behind the second
    preemption = engine.turn(budget=5)
    report(engine, preemption, (1, 2))
    assert lines == []
    engine.abort(second.request_id)
    abort = engine.turn(budget=1)  # resumes the first
    assert len(abort.released) == 1
    report(engine, abort, (10, 20))
    assert lines == [
        "HiSparse request b: prompt_tokens=5, hits=10, misses=20, transfer_bytes_to_host=0, transfer_bytes_to_device=0"
    ]
    engine.abort(first.request_id)
    report(engine, engine.turn(), (100, 200))
    assert lines[1:] == [
        "HiSparse request a: prompt_tokens=10, hits=101, misses=202, transfer_bytes_to_host=0, "
        "transfer_bytes_to_device=0"
    ]
    engine.check_idle()


def test_log_names_transferred_bytes(lines: list[str]) -> None:
    engine = ScriptedEngine(role="kv_consumer", options={"log_request_stats": True})
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    engine.receive()
    engine.turn()
    engine.abort("remote")
    report(engine, engine.turn(), (3, 4))
    layout = engine.half.layout
    assert lines == [
        f"HiSparse request remote: prompt_tokens=10, hits=3, misses=4, "
        f"transfer_bytes_to_host={3 * layout.main_block_bytes}, "
        f"transfer_bytes_to_device={3 * layout.resident_block_bytes}"
    ]


def test_no_log_unless_asked(lines: list[str]) -> None:
    engine = ScriptedEngine()
    request = engine.ask("a", PROMPT)
    engine.turn()
    engine.abort(request.request_id)
    report(engine, engine.turn(), (3, 4))
    assert lines == [] and engine.half.request_log is None


def test_log_forgets_a_request_aborted_during_its_transfer() -> None:
    engine = ScriptedEngine(role="kv_consumer", options={"log_request_stats": True})
    engine.ask_remote("remote", PROMPT)
    engine.turn()
    engine.abort("remote")
    engine.receive()
    engine.check_idle()
