from functools import partial

import pytest
from fake_engine import (
    BLOCK_SIZE,
    MAX_BUDGET,
    MAX_MODEL_LEN,
    FakeEngine,
    FakeTransport,
    scheduler_output,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

MAX_HOT_BLOCKS = 3  # of a request, without lent ones
MAX_STATE_BLOCKS = 4 + 4  # of a request: 8 and 9 tokens of the two fields
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


class HotBlockManagerMachine(RuleBasedStateMachine):
    """Random schedules over vLLM's block pool and the host pool; the worker checks every row that a step reads."""

    @initialize(
        num_device_blocks=st.integers(1 + MAX_HOT_BLOCKS + MAX_STATE_BLOCKS + MAX_MODEL_LEN // BLOCK_SIZE, 60),
        num_host_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 20),
        hot_first=st.booleans(),
        enable_caching=st.sampled_from([True, True, False]),
        has_resident_kv=st.sampled_from([True, True, False]),
        zeroes_first=st.booleans(),
        device_buffer_size=st.sampled_from([5, 8]),
        elastic=st.booleans(),
        has_state=st.booleans(),
    )
    def start(self, **options) -> None:
        self.engine = FakeEngine(transport=FakeTransport(), **options)
        self.num_requests = 0

    @rule(
        stem=st.integers(0, 1),
        stem_tokens=st.integers(0, 16),
        own_tokens=st.integers(0, 6),
        max_tokens=st.integers(1, 12),
        skip=st.sampled_from([None, None, None, True]),
        name=st.sampled_from(["local", "local", "remote"]),
    )
    def add_request(
        self, stem: int, stem_tokens: int, own_tokens: int, max_tokens: int, skip: bool | None, name: str
    ) -> None:
        self.num_requests += 1
        skip = None if name == "remote" else skip
        prompt = [10 * stem + i for i in range(stem_tokens)] + [100 * self.num_requests + i for i in range(own_tokens)]
        self.engine.add(f"{name}{self.num_requests}", prompt or [0], max_tokens, skip_reading_prefix_cache=skip)

    @rule(budget=st.integers(1, MAX_BUDGET))
    def step(self, budget: int) -> None:
        engine = self.engine
        engine.step(budget)
        if not engine.deferred:
            engine.process_steps()
            assert not any(engine.host_pool._num_pins), "host blocks outlived their hot blocks"

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.defer_frees = False
        self.engine.preempt(data.draw(st.sampled_from(self.engine.running)))

    @precondition(lambda self: self.engine.running)
    @rule(defer=st.booleans())
    def preempt_all(self, defer: bool) -> None:
        self.engine.defer_frees = defer
        for request in reversed(self.engine.running):
            self.engine.preempt(request, forced=True)

    @precondition(lambda self: self.engine.loading)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.engine.receive(data.draw(st.sampled_from(self.engine.loading)))

    def alive(self) -> list:
        loading = [request for request in self.engine.loading if not request.is_finished()]
        return self.engine.running + self.engine.waiting + loading

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), defer=st.booleans())
    def abort(self, data: st.DataObject, defer: bool) -> None:
        self.engine.defer_frees = defer
        self.engine.abort(data.draw(st.sampled_from(self.alive())))

    @rule(defer=st.booleans())
    def finish_early_or_late(self, defer: bool) -> None:
        self.engine.defer_frees = defer

    @precondition(lambda self: self.engine.deferred)
    @rule()
    def drain(self) -> None:
        self.engine.drain()

    @rule()
    def reset_cache(self) -> None:
        if not self.engine.running and not self.engine.loading:
            self.engine.kv.reset_prefix_cache()
        self.engine.connector.reset_cache()

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.defer_frees = False
        self.engine.drain()
        self.engine.run_to_end()
        self.engine.check_idle()


TestHotBlockManager = HotBlockManagerMachine.TestCase


def test_state_blocks_grow_with_a_request_and_come_back_with_the_others() -> None:
    engine = FakeEngine(num_device_blocks=60, has_state=True)
    layout = engine.groups.layout.state
    assert layout.tokens_per_block == (8, 9) and layout.num_blocks(MAX_MODEL_LEN) == MAX_STATE_BLOCKS
    request = engine.add("a", PROMPT, max_tokens=20)
    given = []
    while not request.is_finished():
        engine.step()
        if not request.is_finished():
            blocks = [block.block_id for block in engine.tracker.admitted["a"].state]
            assert blocks[: len(given)] == given, "a block has changed"
            assert len(blocks) == layout.num_blocks(request.num_computed_tokens)
            given = blocks
    assert len(given) == MAX_STATE_BLOCKS
    engine.check_idle()


def test_a_request_waits_until_there_are_blocks_for_its_state() -> None:
    """Not as long as there are fewer than hot blocks and state blocks together."""
    engine = FakeEngine(num_device_blocks=1 + (2 + 3) + (2 + 1), has_resident_kv=False, has_state=True)
    engine.add("a", PROMPT, max_tokens=2)
    engine.add("b", PROMPT[:9], max_tokens=2)
    assert engine.groups.layout.state.tokens_per_block == (9, 12)
    metadata = engine.step(budget=20)
    assert len(engine.running) == 1 and len(engine.waiting) == 1
    assert [len(block_ids) for _, block_ids in metadata.state_block_tables.values()] == [3]
    assert engine.kv.block_pool.get_num_free_blocks() == 3, "two hot blocks, and one of two"
    engine.run_to_end()
    engine.check_idle()


def test_who_grows_past_its_state_blocks_has_another_preempted() -> None:
    """vLLM finds no block for the state: its hot blocks and resident blocks would suffice."""
    engine = FakeEngine(num_device_blocks=1 + 2 * (2 + 2), has_resident_kv=False, has_state=True)
    requests = [engine.add(name, PROMPT[:7], max_tokens=12) for name in "ab"]
    engine.run_to_end()
    assert [request.num_preemptions > 0 for request in requests] == [False, True]
    assert all(request.num_output_tokens == 12 for request in requests)
    engine.check_idle()


@pytest.mark.parametrize("hot_first", [False, True])
def test_hot_blocks_are_not_taken_from_the_prefix_hit(hot_first: bool) -> None:
    """The hit's blocks are the oldest in the free queue when the request asks for hot blocks."""
    engine = FakeEngine(num_device_blocks=12, hot_first=hot_first)
    engine.add("old", PROMPT[:9], max_tokens=1)
    engine.run_to_end()
    engine.add("newer", list(range(50, 66)), max_tokens=1)
    engine.run_to_end()
    engine.add("running", list(range(80, 89)))
    engine.step(budget=9)
    engine.add("hit", PROMPT[:9])
    engine.step(budget=9)
    assert [request.request_id for request in engine.running] == ["running", "hit"]
    engine.check_integrity()


def test_host_blocks_follow_hot_blocks_that_another_request_takes_at_once() -> None:
    engine = FakeEngine()
    engine.add("short", [50, 51])
    engine.add("prefill", list(range(30)))
    engine.step(budget=6)
    assert len(engine.running) == 2
    engine.abort(engine.running[0])
    engine.step(budget=8)
    assert engine.host_pool.num_used == len(engine.host_pool.block_ids("prefill"))


def test_host_blocks_need_not_wait_for_those_of_requests_that_ended_earlier() -> None:
    engine = FakeEngine()
    for name, num_tokens in (("in_flight", 2), ("idle", 2), ("prefill", 30)):
        engine.add(name, list(range(num_tokens)))
    engine.step(budget=6)
    in_flight, idle, _ = engine.running
    engine.defer_frees = True
    engine.abort(in_flight)
    engine.defer_frees = False
    engine.abort(idle)
    engine.step(budget=8)
    num_prefill = len(engine.host_pool.block_ids("prefill"))
    assert engine.host_pool.num_used == 1 + num_prefill
    engine.drain()
    engine.step(budget=8)
    assert engine.host_pool.num_used == num_prefill


def test_host_blocks_follow_hot_blocks_that_are_lent_at_once() -> None:
    """To a request that is being transferred, in a step for which vLLM asks for no block."""
    engine = FakeEngine(20, device_buffer_size=5, elastic=True, transport=FakeTransport())
    ended = engine.add("ended", list(range(50, 70)))
    while not ended.num_output_tokens:
        engine.step()
    engine.add("remote", list(range(20)))
    for _ in range(3):
        engine.step()
    assert [request.request_id for request in engine.loading] == ["remote"]
    first_hot_block = engine.tracker.hot_blocks("ended")[0]
    engine.abort(ended)
    engine.kv.new_step_starts()
    engine.worker.apply(engine.connector.build_connector_meta(scheduler_output({})))
    engine.num_in_flight += 1
    assert first_hot_block in engine.tracker.admitted["remote"].lent
    assert engine.host_pool.num_used == len(engine.host_pool.block_ids("remote"))
    engine.run_to_end()
    engine.check_idle()


def test_host_blocks_of_a_forced_preemption_wait_for_the_step_in_flight() -> None:
    engine = FakeEngine(num_device_blocks=60, num_host_blocks=MAX_MODEL_LEN // BLOCK_SIZE)
    request = engine.add("preempted", PROMPT)
    engine.step(budget=10)
    engine.defer_frees = True
    engine.preempt(request, forced=True)
    engine.waiting.clear()
    engine.defer_frees = False
    engine.add("big", list(range(50, 50 + MAX_MODEL_LEN - 2)))
    engine.step(budget=100)
    assert not engine.running, "its blocks would meet a late write"
    engine.drain()
    engine.step(budget=100)
    assert [running.request_id for running in engine.running] == ["big"]
    engine.check_integrity()


def test_blocks_of_a_step_that_is_not_computed_are_not_found() -> None:
    """vLLM caches blocks when it schedules a request, and by priority may preempt it in the same step."""
    engine = FakeEngine()
    request = engine.add("scheduled", PROMPT)
    engine.step(budget=BLOCK_SIZE)
    engine.kv.new_step_starts()
    assert engine.kv.allocate_slots(request, len(PROMPT) - BLOCK_SIZE) is not None
    cached = partial(engine.kv.block_pool.get_cached_block, kv_cache_group_ids=[engine.groups.resident_group_id])
    assert cached(request.block_hashes[1])
    engine.preempt(request)
    assert cached(request.block_hashes[0]), "this one was computed"
    assert not any(map(cached, request.block_hashes[1:]))
    engine.run_to_end()
    engine.check_idle()


@pytest.mark.parametrize(("num_host_blocks", "has_draft_layer"), [(4, False), (6, True)])
def test_two_transfers_do_not_fill_the_pool_so_that_neither_can_verify_its_first_drafts(
    num_host_blocks: int, has_draft_layer: bool
) -> None:
    """vLLM drafts placeholders for a request whose transfer has ended; it waits, and so cannot preempt the other.

    With a draft layer, it asks for room for the next drafts, too.
    """
    drafts = {"max_query_len": 4, "draft_row_bytes": 8 * has_draft_layer}
    engine = FakeEngine(num_host_blocks=num_host_blocks, transport=FakeTransport(), **drafts)
    prompts = [[base + index for index in range(2 * BLOCK_SIZE)] for base in (100, 200)]
    for index, prompt in enumerate(prompts):
        engine.add(f"remote-{index}", prompt)
    for _ in prompts:
        engine.step(budget=100)
    for request in list(engine.loading):
        engine.receive(request)
    engine.kv.new_step_starts()
    num_lookahead = 3 * has_draft_layer
    assert engine.kv.allocate_slots(engine.waiting[0], 4, num_lookahead_tokens=num_lookahead) is not None


def test_a_forced_preemption_resumes_while_its_step_is_in_flight() -> None:
    engine = FakeEngine()
    request = engine.add("a", PROMPT, max_tokens=8)
    engine.step(budget=10)
    engine.defer_frees = True
    engine.preempt(request, forced=True)
    engine.defer_frees = False
    engine.step()
    assert request.num_computed_tokens == len(request.all_token_ids) - 1
    engine.drain()
    engine.run_to_end()
    engine.check_idle()


def test_a_forced_preemption_leaves_no_device_block_in_use() -> None:
    """vLLM resets its prefix cache right after it, which a block in use forbids."""
    engine = FakeEngine()
    request = engine.add("a", PROMPT, max_tokens=8)
    engine.step(budget=10)
    engine.preempt(request, forced=True)
    assert engine.kv.reset_prefix_cache()
    engine.run_to_end()
    engine.check_idle()


def test_a_tail_block_stays_out_of_the_pool_until_its_copy_is_done() -> None:
    engine = FakeEngine(num_device_blocks=60)
    request = engine.add("a", PROMPT)
    engine.step(budget=10)
    _, device_ids = engine.tables_of(request)
    tail = engine.kv.block_pool.blocks[device_ids[2]]
    engine.process_steps()
    engine.preempt(request)
    assert tail.ref_cnt == 1
    engine.kv.new_step_starts()
    metadata = engine.connector.build_connector_meta(scheduler_output({}))
    assert [device_id for device_id, _ in metadata.preemption_saves] == [tail.block_id]
    assert tail.ref_cnt == 1
    engine.connector.step_processed()
    assert tail.ref_cnt == 0


def test_a_tail_block_does_not_wait_for_later_steps_nor_leave_with_earlier_ones() -> None:
    engine = FakeEngine(num_device_blocks=60)
    request = engine.add("a", PROMPT)
    engine.step(budget=10)
    tail = engine.kv.block_pool.blocks[engine.tables_of(request)[1][2]]
    engine.process_steps()
    build = engine.connector.build_connector_meta
    build(scheduler_output({}))  # in flight
    engine.preempt(request)
    build(scheduler_output({}))  # copies
    build(scheduler_output({}))
    engine.connector.step_processed()
    assert tail.ref_cnt == 1
    engine.connector.step_processed()
    assert tail.ref_cnt == 0


def test_only_a_step_that_computes_nothing_waits_for_its_preemption_saves() -> None:
    engine = FakeEngine()
    request = engine.add("a", PROMPT)
    engine.add("b", PROMPT[3:])
    engine.step(budget=30)
    assert not engine.step().waits_for_preemption_saves
    engine.preempt(request)
    metadata = engine.step()
    assert metadata.preemption_saves and not metadata.waits_for_preemption_saves
    engine.preempt(engine.running[0])
    metadata = engine.connector.build_connector_meta(scheduler_output({}))
    assert metadata.preemption_saves and metadata.waits_for_preemption_saves
