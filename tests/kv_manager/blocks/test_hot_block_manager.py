from functools import partial

import pytest
from campaign.configuration import BLOCK_SIZE
from campaign.script import MAX_MODEL_LEN, ScriptedEngine

STATE_ENTRIES = ((1, 10), (3, 24))
MAX_STATE_BLOCKS = 4 + 4  # of a request: 8 and 9 tokens of the two fields
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_state_blocks_grow_with_a_request_and_come_back_with_the_others() -> None:
    engine = ScriptedEngine(num_device_blocks=60, state_entries=STATE_ENTRIES)
    layout = engine.half.groups.layout.state
    assert layout.tokens_per_block == (8, 9) and layout.num_blocks(MAX_MODEL_LEN) == MAX_STATE_BLOCKS
    request = engine.ask("a", PROMPT, max_tokens=20)
    given = []
    while not request.is_finished():
        engine.turn()
        if not request.is_finished():
            blocks = [block.block_id for block in engine.tracker.admitted["a"].state]
            assert blocks[: len(given)] == given, "a block has changed"
            assert len(blocks) == layout.num_blocks(request.num_computed_tokens)
            given = blocks
    assert len(given) == MAX_STATE_BLOCKS
    engine.check_idle()


def test_a_request_waits_until_there_are_blocks_for_its_state() -> None:
    """A request does not start while fewer blocks are free than it needs for hot rows and state together."""
    engine = ScriptedEngine(num_device_blocks=1 + 5 + 3, has_resident_group=False, state_entries=STATE_ENTRIES)
    engine.ask("a", PROMPT, max_tokens=2)
    engine.ask("b", PROMPT[:9], max_tokens=2)
    assert engine.half.groups.layout.state.tokens_per_block == (9, 12)
    metadata = engine.turn(budget=20)
    assert len(engine.running) == 1 and len(engine.waiting) == 1
    assert [len(block_ids) for _, block_ids in metadata.state_block_tables.values()] == [3]
    assert engine.block_pool.get_num_free_blocks() == 3, "two hot blocks, and one of two"
    engine.run_to_end()
    engine.check_idle()


def test_who_grows_past_its_state_blocks_has_another_preempted() -> None:
    """vLLM finds no block for the state: its hot blocks and resident blocks would suffice."""
    engine = ScriptedEngine(num_device_blocks=1 + 2 * (2 + 2), has_resident_group=False, state_entries=STATE_ENTRIES)
    requests = [engine.ask(name, PROMPT[:7], max_tokens=12) for name in "ab"]
    engine.run_to_end()
    assert [request.num_preemptions > 0 for request in requests] == [False, True]
    assert all(request.num_output_tokens == 12 for request in requests)
    engine.check_idle()


@pytest.mark.parametrize("hot_first", [False, True])
def test_hot_blocks_are_not_taken_from_the_prefix_hit(hot_first: bool) -> None:
    """The hit's blocks are the oldest in the free queue when the request asks for hot blocks."""
    engine = ScriptedEngine(num_device_blocks=12, hot_first=hot_first)
    engine.ask("old", PROMPT[:9], max_tokens=1)
    engine.run_to_end()
    engine.ask("newer", list(range(50, 66)), max_tokens=1)
    engine.run_to_end()
    engine.ask("running", list(range(80, 89)))
    engine.turn(budget=9)
    engine.ask("hit", PROMPT[:9])
    engine.turn(budget=9)
    assert [request.request_id for request in engine.running] == ["running", "hit"]


def test_host_blocks_follow_hot_blocks_that_another_request_takes_at_once() -> None:
    engine = ScriptedEngine()
    engine.ask("short", [50, 51])
    engine.ask("prefill", list(range(30)))
    engine.turn(budget=6)
    assert len(engine.running) == 2
    engine.abort(engine.running[0].request_id)
    engine.turn(budget=8)
    assert engine.host_pool.num_used == len(engine.host_pool.block_ids("prefill"))


def test_host_blocks_wait_for_the_step_in_flight_alone() -> None:
    """Host blocks do not wait for later steps, nor for blocks of requests that ended earlier."""
    engine = ScriptedEngine(is_async=True)
    for name, num_tokens in (("in_flight", 2), ("idle", 2)):
        engine.ask(name, list(range(num_tokens)))
    engine.turn()
    engine.abort("idle")
    engine.begin()
    assert engine.host_pool.num_used == 1, "no step that may write them is in flight"
    engine.abort("in_flight")
    engine.ask("prefill", list(range(30)))
    engine.begin()
    num_prefill = len(engine.host_pool.block_ids("prefill"))
    assert engine.host_pool.num_used == 1 + num_prefill
    engine.end()
    assert engine.host_pool.num_used == num_prefill
    engine.end()
    engine.run_to_end()
    engine.check_idle()


def test_host_blocks_follow_hot_blocks_that_are_lent_at_once() -> None:
    """To a running request, in a step for which vLLM asks for no block."""
    engine = ScriptedEngine(20, is_elastic=True)
    ended, other = (engine.ask(name, list(range(50, 62)), max_tokens=12) for name in ("ended", "other"))
    while not (ended.num_output_tokens and other.num_output_tokens):
        engine.turn()
    first_hot_block = engine.tracker.hot_blocks("ended")[0]
    engine.abort("ended")
    engine.begin(budget=0)
    assert first_hot_block in engine.tracker.admitted["other"].lent
    assert engine.host_pool.num_used == len(engine.host_pool.block_ids("other"))
    engine.end()
    engine.run_to_end()
    engine.check_idle()


def test_host_blocks_of_a_forced_preemption_wait_for_the_step_in_flight() -> None:
    deferring = {"is_async": True, "role": "kv_consumer"}  # vLLM frees blocks when the step in flight is over
    engine = ScriptedEngine(num_device_blocks=60, num_host_blocks=MAX_MODEL_LEN // BLOCK_SIZE, **deferring)
    engine.ask("preempted", PROMPT, max_tokens=20)
    engine.begin(budget=10)
    engine.reset(reset_running=True, reset_connector=False)
    engine.abort("preempted")
    engine.ask("big", list(range(50, 50 + MAX_MODEL_LEN - 2)))
    engine.begin(budget=100)
    assert not engine.running, "its blocks would meet a late write"
    engine.end()
    engine.end()
    engine.begin(budget=100)
    assert [running.request_id for running in engine.running] == ["big"]
    engine.run_to_end()
    engine.check_idle()


def test_blocks_of_a_step_that_is_not_computed_are_not_found() -> None:
    """vLLM caches blocks when it schedules a request, and by priority may preempt it in the same step."""
    engine = ScriptedEngine()
    request = engine.ask("scheduled", PROMPT)
    engine.turn(budget=BLOCK_SIZE)
    engine.kv.new_step_starts()
    assert engine.kv.allocate_slots(request, len(PROMPT) - BLOCK_SIZE) is not None
    group_ids = [engine.half.groups.resident_group_id]
    cached = partial(engine.block_pool.get_cached_block, kv_cache_group_ids=group_ids)
    assert cached(request.block_hashes[1])
    engine.preempt(request)
    assert cached(request.block_hashes[0]), "this one was computed"
    assert not any(map(cached, request.block_hashes[1:]))
    engine.run_to_end()
    engine.check_idle()


@pytest.mark.parametrize(("num_host_blocks", "has_draft_layer"), [(8, False), (10, True)])
def test_two_transfers_do_not_fill_the_pool_so_that_neither_can_verify_its_first_drafts(
    num_host_blocks: int, has_draft_layer: bool
) -> None:
    """vLLM drafts placeholders for a request whose transfer has ended; it waits, and so cannot preempt the other.

    With a draft layer, it asks for room for the next drafts, too.
    """
    drafts = {"num_drafts": 3, "has_draft_layer": has_draft_layer, "role": "kv_consumer", "is_async": True}
    engine = ScriptedEngine(num_host_blocks=num_host_blocks, **drafts)
    for index, base in enumerate((100, 200)):
        engine.ask_remote(f"remote-{index}", range(base, base + 4 * BLOCK_SIZE))
    engine.turns(2)
    engine.receive()
    engine.begin(budget=100)
    assert len(engine.running) == 1
    engine.run_to_end()
    engine.check_idle()


def test_a_forced_preemption_resumes_while_its_step_is_in_flight() -> None:
    engine = ScriptedEngine(is_async=True)
    request = engine.ask("a", PROMPT, max_tokens=8)
    engine.begin(budget=10)
    engine.reset(reset_running=True, reset_connector=False)
    assert request.num_preemptions == 1
    engine.begin(budget=10)
    assert request in engine.running
    engine.run_to_end()
    assert request.num_output_tokens == 8
    engine.check_idle()


def test_a_forced_preemption_leaves_no_device_block_in_use() -> None:
    """vLLM resets its prefix cache right after it, which a block in use forbids."""
    engine = ScriptedEngine()
    engine.ask("a", PROMPT, max_tokens=8)
    engine.turn(budget=10)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run_to_end()
    engine.check_idle()


def test_a_tail_block_stays_out_of_the_pool_until_its_copy_is_done() -> None:
    engine = ScriptedEngine(num_device_blocks=60, is_async=True)
    request = engine.ask("a", PROMPT)
    engine.turn(budget=10)
    tail = engine.block_pool.blocks[engine.tables_of(request)[1][2]]
    engine.preempt(request)
    assert tail.ref_cnt == 1
    metadata = engine.begin(budget=0).metadata
    assert [device_id for device_id, _ in metadata.preemption_saves] == [tail.block_id]
    assert tail.ref_cnt == 1
    engine.end()
    assert tail.ref_cnt == 0


def test_a_tail_block_does_not_wait_for_later_steps_nor_leave_with_earlier_ones() -> None:
    engine = ScriptedEngine(num_device_blocks=60, is_async=True)
    request = engine.ask("a", PROMPT)
    engine.turn(budget=10)
    tail = engine.block_pool.blocks[engine.tables_of(request)[1][2]]
    engine.begin(budget=0)  # in flight
    engine.preempt(request)
    engine.begin(budget=0)  # copies
    engine.begin(budget=0)
    engine.end()
    assert tail.ref_cnt == 1
    engine.end()
    assert tail.ref_cnt == 0


def test_only_a_step_that_computes_nothing_waits_for_its_preemption_saves() -> None:
    engine = ScriptedEngine()
    request = engine.ask("a", PROMPT)
    engine.ask("b", PROMPT[3:])
    engine.turn(budget=30)
    assert not engine.turn().waits_for_preemption_saves
    engine.preempt(request)
    metadata = engine.turn()
    assert metadata.preemption_saves and not metadata.waits_for_preemption_saves
    engine.preempt(engine.running[0])
    metadata = engine.turn(budget=0)
    assert metadata.preemption_saves and metadata.waits_for_preemption_saves
