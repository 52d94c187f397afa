"""Lending of blocks and their return, in a schedule over vLLM's real block pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from campaign.configuration import BLOCK_SIZE
from campaign.script import ScriptedEngine, make_request
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.request import RequestStatus

from vllm_hisparse.kv_manager.blocks import request_tracker
from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.blocks.lending import plan
from vllm_hisparse.kv_manager.blocks.request_tracker import (
    MAX_STEPS_OF_REFUSAL,
    STEPS_PER_BALANCE,
    AdmittedRequest,
    RequestTracker,
)
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout

ROWS_PER_BLOCK, BUFFER = 3, 5  # `HotBufferSpec` of the scripted engine: 2 blocks in any case
MAX_BUDGET = 24  # tokens of a step
BLOCKS_PER_BLOCK = 2 + 1  # hot and resident ones, of 4 tokens
CHUNK_BLOCKS = MAX_BUDGET // BLOCK_SIZE * BLOCKS_PER_BLOCK


def make_engine(num_device_blocks: int, device_buffer_size: int = BUFFER) -> ScriptedEngine:
    return ScriptedEngine(
        num_device_blocks, 64, device_buffer_size=device_buffer_size, is_elastic=True, token_budget=MAX_BUDGET
    )


def num_lent(engine: ScriptedEngine, request_id: str) -> int:
    admitted = engine.tracker.admitted.get(request_id)
    return len(admitted.lent) if admitted else 0


def num_rows(engine: ScriptedEngine, request_id: str) -> int:
    return ROWS_PER_BLOCK * len(engine.tracker.hot_blocks(request_id))


def decode(engine: ScriptedEngine, num_steps: int) -> None:
    """Steps that nobody prefills in; all tables of the worker are what the manager says."""
    for _ in range(num_steps):
        engine.turn()
        for request in engine.running:
            first_hot_block_id = engine.tracker.admitted[request.request_id].first_hot_block_id
            block_ids = [block.block_id for block in engine.tracker.hot_blocks(request.request_id)]
            assert list(engine.worker.hot_block_tables[first_hot_block_id]) == block_ids


def test_a_request_is_lent_blocks_when_its_kv_has_come() -> None:
    """Before, it computes nothing, and another request can use them."""
    engine = ScriptedEngine(44, 64, device_buffer_size=BUFFER, is_elastic=True, role="kv_consumer")
    imported = engine.ask_remote("imported", list(range(16)), max_tokens=4)
    engine.turn()
    assert engine.loading == [imported]
    running = engine.ask("running", list(range(100, 108)), max_tokens=24)
    engine.turns(STEPS_PER_BALANCE + 1)
    assert engine.running == [running] and num_lent(engine, "running") and not num_lent(engine, "imported")
    engine.receive()
    engine.turn()
    assert imported in engine.running and num_lent(engine, "imported")
    engine.run_to_end()
    engine.check_idle()


def test_a_sequence_is_hot_as_a_whole_while_there_is_room() -> None:
    engine = make_engine(80)
    request = engine.ask("a", list(range(12)), max_tokens=16)
    for _ in range(14):
        decode(engine, 1)
        assert request.num_computed_tokens < num_rows(engine, "a")
    decode(engine, 8)
    assert request.is_finished()
    engine.check_idle()


def test_whoever_takes_the_place_of_another_is_lent_blocks_at_once() -> None:
    engine = make_engine(80)
    first = engine.ask("a", list(range(20)), max_tokens=3)
    while not first.is_finished():
        decode(engine, 1)
    second = engine.ask("b", list(range(50, 70)), max_tokens=8)
    engine.turn()
    assert second in engine.running and num_rows(engine, "b") > second.num_tokens


def test_a_short_sequence_has_no_more_than_its_rows() -> None:
    engine = make_engine(80, device_buffer_size=14)
    engine.ask("a", [1, 2, 3], max_tokens=29)
    sizes = {}
    for num_tokens in range(3, 15):
        decode(engine, 1)
        sizes[num_tokens] = num_rows(engine, "a"), num_lent(engine, "a")
    assert sizes[3] == sizes[4] == (6, 0) and sizes[5] == sizes[8] == (9, 0) and sizes[9] == sizes[12] == (12, 0)
    assert sizes[13] == (15, 0), "complete: from now on it may be lent more"


def test_requests_share_what_is_free() -> None:
    """Beyond what stays free."""
    engine = make_engine(1 + 43)
    for name in "ab":
        engine.ask(name, [ord(name) + i for i in range(20)], max_tokens=12)
    decode(engine, 8)
    lent = num_lent(engine, "a"), num_lent(engine, "b")
    assert lent[0] > 0 and abs(lent[0] - lent[1]) <= 1, "not enough for one of them"
    free = engine.block_pool.get_num_free_blocks()
    assert free >= 2 * BLOCKS_PER_BLOCK, "a block that is needed next may be lent"
    gauges = engine.stats.data["gauges"]
    assert gauges["hot_rows_lent"] == sum(lent) * ROWS_PER_BLOCK < gauges["hot_rows_wanted"]


def test_blocks_come_back_before_a_request_waits() -> None:
    """No request waits for longer than a step, and none is preempted."""
    engine = make_engine(1 + 16)
    first = engine.ask("a", list(range(4)), max_tokens=28)
    decode(engine, STEPS_PER_BALANCE + 2)
    before = num_lent(engine, "a")
    assert before > 0
    engine.ask("b", list(range(50, 60)), max_tokens=2)
    engine.turn()
    assert num_lent(engine, "a") < before and engine.waiting
    decode(engine, 1)
    assert not engine.waiting and first in engine.running
    assert engine.stats.data["counters"]["hot_rows_taken_back"] > 0
    decode(engine, 20)
    engine.check_idle()


@pytest.mark.parametrize(("device_buffer_size", "num_blocks"), [(BUFFER, 34), (14, 37)])
def test_growing_requests_are_not_preempted_for_what_is_lent(device_buffer_size: int, num_blocks: int) -> None:
    """Neither those with a complete hot buffer nor those whose own hot blocks grow, too."""
    engine = make_engine(1 + num_blocks, device_buffer_size)
    engine.ask("z", list(range(70, 86)), max_tokens=14)
    names = "abc"
    for name in names:
        engine.ask(name, [ord(name) + i for i in range(6)], max_tokens=12)
    decode(engine, 14)
    assert not any(request.num_preemptions for request in engine.running)
    decode(engine, 6)
    engine.check_idle()


def test_a_prompt_that_pauses_is_not_preempted_for_what_is_lent() -> None:
    """vLLM lets prompts wait for some steps, so that data parallel engines compute theirs in the same steps."""
    engine = make_engine(36)
    engine.ask("a", list(range(8)), max_tokens=24)
    decode(engine, 3)
    prompt = engine.ask("b", list(range(100, 128)), max_tokens=2)
    engine.turn(budget=5)
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: schedule(throttle_prefills=True)
    num_computed = prompt.num_computed_tokens
    decode(engine, STEPS_PER_BALANCE + 1)
    assert prompt.num_computed_tokens == num_computed and num_lent(engine, "a") + num_lent(engine, "b") > 0
    engine.scheduler.schedule = schedule
    engine.turn(MAX_BUDGET)
    assert prompt.num_computed_tokens > num_computed and not prompt.num_preemptions
    engine.run_to_end()
    engine.check_idle()


def test_a_request_that_is_refused_again_and_again_gets_everything() -> None:
    """vLLM may want more blocks to be free than is known here, such as those that it reserves for other requests."""
    engine = make_engine(80)
    engine.ask("a", list(range(16)), max_tokens=14)
    decode(engine, 3)
    assert num_lent(engine, "a") > 0
    engine.kv.watermark_blocks = 66
    other = engine.ask("other", [1], max_tokens=1)
    decode(engine, MAX_STEPS_OF_REFUSAL)
    assert num_lent(engine, "a") > 0 and other in engine.waiting
    decode(engine, 1)
    assert num_lent(engine, "a") == 0
    decode(engine, 1)
    assert num_lent(engine, "a") > 0 and other.is_finished()


@pytest.mark.parametrize("num_waiting", [1, 2, 6])
def test_lent_while_waiting_for_host_memory(num_waiting: int) -> None:
    """Requests that the host pool cannot take need no device blocks, nor do those behind the first of them."""
    engine = ScriptedEngine(80, 8, device_buffer_size=BUFFER, is_elastic=True, token_budget=MAX_BUDGET)
    engine.ask("a", list(range(16)), max_tokens=16)
    decode(engine, 3)
    before = num_lent(engine, "a")
    for index in range(num_waiting):
        engine.ask(f"waits-{index}", [100 * (index + 1) + i for i in range(24)], max_tokens=2)
    decode(engine, MAX_STEPS_OF_REFUSAL + 3)
    assert len(engine.waiting) == num_waiting and num_lent(engine, "a") == before > 0


@pytest.mark.parametrize("num_waiting", [1, 4])
def test_lent_while_waiting_for_the_token_budget(num_waiting: int) -> None:
    engine = ScriptedEngine(120, 64, device_buffer_size=BUFFER, is_elastic=True, token_budget=MAX_BUDGET)
    engine.ask("a", list(range(12)), max_tokens=20)
    decode(engine, 3)
    before = num_lent(engine, "a")
    engine.ask("computed", list(range(100, 128)), max_tokens=2)
    for index in range(num_waiting):
        engine.ask(f"waits-{index}", list(range(300, 310)), max_tokens=2)
    for _ in range(MAX_STEPS_OF_REFUSAL + 3):
        engine.turn(budget=3)
        assert len(engine.waiting) == num_waiting and num_lent(engine, "a") >= before > 0


def test_lent_while_waiting_for_something_that_vllm_does_not_ask_here() -> None:
    """Such as a grammar that compiles, or a LoRA for which there is no room: vLLM skips the request."""
    engine = make_engine(80)
    engine.ask("a", list(range(16)), max_tokens=14)
    decode(engine, 3)
    before = num_lent(engine, "a")
    engine.half.on_new_request(make_request("skipped", [1], max_tokens=1))
    decode(engine, MAX_STEPS_OF_REFUSAL + 3)
    assert num_lent(engine, "a") == before > 0


def test_blocks_come_back_for_all_requests_behind_a_refused_one() -> None:
    """And not for one per step."""
    engine = make_engine(1 + 20)
    engine.ask("a", list(range(4)), max_tokens=28)
    decode(engine, STEPS_PER_BALANCE + 2)
    before = num_lent(engine, "a")
    for index in range(3):
        engine.ask(f"waits-{index}", [100 * (index + 1) + i for i in range(5)], max_tokens=6)
    engine.turn(MAX_BUDGET)
    assert len(engine.waiting) > 1 and num_lent(engine, "a") < before
    engine.turn(MAX_BUDGET)
    assert not engine.waiting


def test_blocks_come_back_for_no_more_requests_than_may_run() -> None:
    """vLLM's `--max-num-active-seqs` may be below `--max-num-seqs`."""
    lent = []
    for max_num_running in (8, 2):
        engine = make_engine(1 + 20)
        engine.tracker.max_num_running = max_num_running
        engine.ask("a", list(range(4)), max_tokens=28)
        decode(engine, STEPS_PER_BALANCE + 2)
        for index in range(3):
            engine.ask(f"waits-{index}", [100 * (index + 1) + i for i in range(5)], max_tokens=6)
        engine.turn(MAX_BUDGET)
        lent.append(num_lent(engine, "a"))
    assert lent[0] < lent[1]


def test_sizes_are_looked_at_every_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(80)
    engine.ask("a", list(range(6)), max_tokens=26)
    engine.turn()
    calls = []
    monkeypatch.setattr(request_tracker, "plan", lambda *args: calls.append(1) or plan(*args))
    decode(engine, STEPS_PER_BALANCE)
    assert len(calls) == 1


def test_an_engine_with_fixed_buffers_lends_nothing() -> None:
    engine = ScriptedEngine(80)
    engine.ask("a", [1, 2, 3], max_tokens=1)
    engine.turn(2)
    assert num_lent(engine, "a") == 0 and "hot_rows_lent" not in engine.stats.data["gauges"]
    assert len(engine.tracker.hot_blocks("a")) == 2


class World:
    """A block pool of 24 GiB and requests that decode: 61 layers in fp8, blocks of 64 tokens."""

    LAYOUT = KVLayout(656, 132, 61, 61)

    def __init__(self, lengths: dict[str, int], num_blocks: int = 49_978):
        self.num_free = num_blocks
        pool = SimpleNamespace(
            get_num_free_blocks=lambda: self.num_free,
            get_new_blocks=self.take,
            free_blocks=lambda blocks: self.take(-len(blocks)),
            num_gpu_blocks=num_blocks,
            hash_block_size=64,
        )
        mla = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=656, dtype=torch.uint8)
        self.spec = HotBufferSpec.from_mla_spec(mla, self.LAYOUT, 4096, elastic=True)
        self.blocks: dict[str, range] = {}
        managers = [SimpleNamespace(req_to_blocks=self.blocks)] * 2
        kv_cache_manager = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=managers),
            block_pool=pool,
            max_model_len=65_536,
            watermark_blocks=0,
        )
        groups = SimpleNamespace(hot_group_id=0, resident_group_id=1, hot_spec=self.spec, layout=self.LAYOUT)
        limits = {"enable_caching": True, "max_num_seqs": 999, "max_num_running": 999, "max_num_batched_tokens": 1024}
        self.tracker = RequestTracker(HostBlockPool(1024, 64), Deferred(), kv_cache_manager, groups, **limits)
        for index, (name, length) in enumerate(lengths.items()):
            request = SimpleNamespace(num_tokens=length, num_computed_tokens=length - 1, status=RequestStatus.RUNNING)
            self.tracker.requests[name] = request
            self.tracker.admitted[name] = AdmittedRequest(index, 0, num_tokens=length)
            self.blocks[name] = range(self.spec.num_blocks(length))
        self.changes: list[str] = []
        self.num_tokens = dict.fromkeys(lengths, 0)

    def take(self, num_blocks: int) -> range:
        self.num_free -= num_blocks
        assert self.num_free >= 0, "more is lent than is free"
        return range(max(num_blocks, 0))

    def num_lent(self) -> dict[str, int]:
        return {name: len(admitted.lent) for name, admitted in self.tracker.admitted.items()}

    def balance(self, num_scheduled: dict[str, int]) -> None:
        before = self.num_lent()
        self.tracker.diff(num_scheduled)
        self.changes += [name for name, num in self.num_lent().items() if num != before[name]]

    def step(self) -> None:
        for name, request in self.tracker.requests.items():
            request.num_tokens += bool(self.num_tokens[name])
            request.num_computed_tokens = request.num_tokens - 1
            self.tracker.admitted[name].num_tokens = request.num_tokens
            last, self.num_tokens[name] = self.num_tokens[name], request.num_tokens
            num_resident = [-(-tokens // 64) for tokens in (last, request.num_tokens)]
            num_hot = [self.spec.num_blocks(tokens) * bool(tokens) for tokens in (last, request.num_tokens)]
            self.take(num_resident[1] - num_resident[0] + num_hot[1] - num_hot[0])
            self.blocks[name] = range(num_hot[1])
        self.balance(dict.fromkeys(self.num_tokens, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "num_blocks"),
    [([32_768 + 63 - i % 64 for i in range(24)], 49_978), ([4_000 + 30 * i for i in range(100)], 60_000)],
)
def test_requests_of_nearly_equal_lengths_do_not_take_turns(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], num_blocks: int
) -> None:
    """Names order them one way, lengths the other. Blocks that they need as they grow come from all."""
    world = World({f"{i:03}": length for i, length in enumerate(lengths)}, num_blocks)
    for _ in range(20):
        world.step()
    before, balances = sum(world.num_lent().values()), []
    monkeypatch.setattr(request_tracker, "plan", lambda *args: balances.append(1) or plan(*args))
    world.changes.clear()
    world.tracker.take_rows_taken_back()
    for _ in range(320):
        world.step()
        assert world.num_free >= len(lengths), "all may need their next block at once"
    num_taken_back = world.tracker.take_rows_taken_back() // World.LAYOUT.rows_per_hot_block
    num_grown = len(lengths) * 320 // 64 * 7
    assert num_taken_back <= num_grown + before // 10
    assert len(balances) <= 2 * 320 // STEPS_PER_BALANCE
    assert len(world.changes) <= 320 // STEPS_PER_BALANCE * len(lengths) * 3 // 5


def test_hot_buffers_that_grow_find_their_blocks_free() -> None:
    """All in the same steps, while another request is lent what is left."""
    world = World({"long": 60_000, **{f"{i:02}": 1_000 for i in range(40)}}, 9_000)
    for _ in range(200):
        world.step()
    assert world.num_lent()["long"] and world.num_free < 1_000


def test_all_are_whole_until_full_kv_would_just_hold_them() -> None:
    """But for the last 0.2% of the memory: a full KV cache of 24 GiB holds 16 sequences of 33,472 tokens. Lengths
    differ, so that requests need their next blocks in different steps."""
    world = World({f"{i:02}": 32_768 + 7 * i for i in range(16)}, 49_536)
    requests = world.tracker.requests.values()
    while sum(request.num_tokens for request in requests) / len(requests) < 33_410:
        world.step()
        for name, request in world.tracker.requests.items():
            num_blocks = len(world.blocks[name]) + world.num_lent()[name]
            assert num_blocks * World.LAYOUT.rows_per_hot_block >= request.num_tokens


@pytest.mark.parametrize("num_running", [0, 3])
def test_the_next_turn_of_a_session_gets_what_was_lent(num_running: int) -> None:
    """A session keeps its own blocks while it waits. Lent blocks come back when vLLM has refused its turn."""
    world = World({f"{i:02}": 36_000 for i in range(15)}, 49_536)
    for _ in range(3):
        world.step()
    session, num_before = "00", world.num_free
    world.tracker.sessions.add(session)
    for name, request in world.tracker.requests.items():
        request.status = (
            RequestStatus.RUNNING if name > f"{14 - num_running:02}" else RequestStatus.WAITING_FOR_STREAMING_REQ
        )
    world.balance({})
    assert world.num_free <= num_before, "nobody needs any"
    turn = world.tracker.requests[session]
    turn.status, turn.num_tokens = RequestStatus.WAITING, turn.num_tokens + 2_000
    world.tracker.host_pool.allocate(session, 65_536, HostMatch())
    world.tracker.step_starts()
    world.tracker.num_missing_blocks(session, turn.num_tokens)  # vLLM asks, and does not take them
    world.balance({})
    assert world.num_free >= -(-2_000 // 64)
