"""KV cache events tell routers of the prefixes in the host pool."""

from types import SimpleNamespace
from typing import Any

import pytest
from campaign.adapter import HASHER
from campaign.script import ScriptedEngine, make_request
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from vllm_hisparse.connector import connector
from vllm_hisparse.kv_manager.blocks.kv_events import HostPoolEvents

PROMPT = list(range(10, 20))  # two blocks and a half


class Publisher:
    """Records the events of a scripted engine."""

    def __init__(self, engine: ScriptedEngine):
        self.events: list[KVCacheEvent] = []
        self.router = engine.product.router
        engine.scheduler.kv_event_publisher.publish = self.publish

    def publish(self, batch) -> None:
        self.router.publish(batch)
        self.events += batch.events

    def take(self) -> list[KVCacheEvent]:
        events, self.events = self.events, []
        return events


@pytest.mark.parametrize(
    ("config", "publishes"),
    [
        (None, False),
        (KVEventsConfig(), False),
        (KVEventsConfig(enable_kv_cache_events=True, publisher="null"), True),
    ],
)
def test_events_are_published_if_vllm_publishes_its_own(config: KVEventsConfig | None, publishes: bool) -> None:
    assert connector.publishes_events(SimpleNamespace(kv_events_config=config)) == publishes


def test_events_are_those_that_vllm_publishes_for_the_device() -> None:
    """Model and tokens being equal, a router would see the same blocks in both memories."""
    engine = ScriptedEngine()
    publisher, device_pool = Publisher(engine), engine.scheduler.kv_cache_manager.block_pool
    device_pool.enable_kv_cache_events, device_pool.take_events = True, list
    request = engine.ask("first", PROMPT, max_tokens=8)
    engine.run_to_end()
    on_device, on_host = device_pool.kv_event_queue, publisher.take()
    blocks = [
        [fields(event, index) for event in events for index in range(len(event.block_hashes))]
        for events in (on_device, on_host)
    ]
    assert blocks[0] == blocks[1] and len(blocks[1]) == len(request.block_hashes) == 4
    assert engine.half.groups.hot_group_id != 0, "which a router would not look at"
    assert {event.group_idx for event in on_host} == {event.group_idx for event in on_device} == {0}
    assert {event.kv_cache_spec_kind for event in on_host} == {"mla_attention"}


def names(request: Request) -> list[Any]:
    """Hashes of a request's blocks, as events name them."""
    return list(map(maybe_convert_block_hash, request.block_hashes))


def fields(event: BlockStored, index: int) -> tuple:
    """The part of an event that tells of one of its blocks."""
    size = event.block_size
    parent = event.block_hashes[index - 1] if index else event.parent_block_hash
    tokens = event.token_ids[index * size : (index + 1) * size]
    return (event.block_hashes[index], parent, tokens, size, event.extra_keys[index], event.lora_id, event.session_id)


def test_evicted_blocks_are_told_of_once() -> None:
    engine = ScriptedEngine(num_host_blocks=8)
    publisher = Publisher(engine)
    first = engine.ask("first", PROMPT, max_tokens=2)
    engine.run_to_end()
    publisher.take()
    engine.ask("second", range(100, 128), max_tokens=2)
    engine.run_to_end()
    removed = [event for event in publisher.take() if isinstance(event, BlockRemoved)]
    assert [block_hash for event in removed for block_hash in event.block_hashes] == names(first)[1::-1]
    engine.ask("again", PROMPT, max_tokens=2)
    engine.run_to_end()
    stored = [event for event in publisher.take() if isinstance(event, BlockStored)]
    assert [block_hash for event in stored for block_hash in event.block_hashes][:2] == names(first)[:2]


def test_a_known_prefix_is_told_again_to_those_who_ask_for_all() -> None:
    engine = ScriptedEngine()
    publisher = Publisher(engine)
    engine.ask("first", PROMPT, max_tokens=2)
    engine.run_to_end()
    publisher.take()
    engine.ask("second", PROMPT, max_tokens=2)
    engine.run_to_end()
    assert publisher.take() == []
    publisher.router.may_repeat = True
    full = engine.ask("third", PROMPT, max_tokens=2, extra_args={"kv_cache_report_mode": "full"})
    engine.run_to_end()
    [event] = publisher.take()
    assert (event.block_hashes, event.parent_block_hash) == (names(full)[:2], None)


def test_a_reset_of_the_device_cache_changes_nothing() -> None:
    engine = ScriptedEngine()
    publisher = Publisher(engine)
    engine.ask("first", PROMPT, max_tokens=2)
    engine.run_to_end()
    known = set(publisher.router.blocks)
    publisher.take()
    engine.reset(reset_running=False, reset_connector=False)
    engine.ask("again", PROMPT, max_tokens=2)
    engine.run_to_end()
    assert publisher.router.blocks == known and publisher.take() == []


@pytest.mark.parametrize("is_running", [False, True])
def test_a_reset_of_the_host_prefix_cache_removes_all_blocks(is_running: bool) -> None:
    """vLLM refuses the reset of the device cache while requests run."""
    engine = ScriptedEngine()
    publisher = Publisher(engine)
    request = engine.ask("first", PROMPT, max_tokens=12)
    engine.turn() if is_running else engine.run_to_end()
    known = set(publisher.router.blocks)
    publisher.take()
    engine.reset(reset_running=False, reset_connector=True)
    engine.ask("second", [1], max_tokens=1)
    engine.run_to_end()
    [event] = publisher.take()
    assert isinstance(event, BlockRemoved) and set(event.block_hashes) == known >= set(names(request)[:2])
    assert not publisher.router.blocks


def test_images_adapters_and_salts_are_in_the_extra_keys_as_in_vllms_own_events() -> None:
    places = ((1, 9), (12, 2), (20, 20))  # over several blocks, within one, up to the end
    images = [
        MultiModalFeatureSpec(None, "image", f"image {offset}", PlaceholderRange(offset, length))
        for offset, length in places
    ]
    adapter = LoRARequest("adapter", 3, "somewhere")
    about = {"lora_request": adapter, "cache_salt": "salt", "mm_features": images, "block_hasher": HASHER}
    request = Request("some", [7] * 42, SamplingParams(max_tokens=1), None, **about)
    vllms, ours = BlockPool(2, True, 4, enable_kv_cache_events=True), HostPoolEvents(4, True, BlockPool(2, True, 4))
    vllms.emit_cached_block_events(request, len(request.block_hashes), 4, 1)
    ours.stored(request, range(4))
    ours.stored(request, range(10))
    first, second = ours.take()
    [expected] = vllms.take_events()
    assert first.extra_keys + second.extra_keys == expected.extra_keys and len(set(expected.extra_keys)) > 5
    assert first.block_hashes + second.block_hashes == expected.block_hashes
    assert (first.lora_name, first.lora_id) == (expected.lora_name, expected.lora_id) == ("adapter", 3)


def test_runs_of_blocks_share_an_event() -> None:
    """Blocks in between that are known already are left out."""
    request = make_request("some", range(24))
    request.block_hashes[:] = [bytes([index]) for index in range(6)]
    events = HostPoolEvents(4, is_mla=False, block_pool=BlockPool(2, True, 4))
    events.stored(request, [2])
    events.stored(request, [0, 1, 2, 3, 5])
    shown = [(event.block_hashes, event.parent_block_hash, event.token_ids) for event in events.take()]
    assert shown == [
        ([2], 1, [8, 9, 10, 11]),
        ([0, 1], None, list(range(8))),
        ([3], 2, [12, 13, 14, 15]),
        ([5], 4, [20, 21, 22, 23]),
    ]
    assert events.take() == []
    events.removed(b"\4")  # which nobody was told of
    events.removed(b"\5")
    events.removed(b"\3")
    [event] = events.take()
    assert (event.block_hashes, event.medium, event.group_idx) == ([5, 3], "CPU", 0)


def test_the_events_of_a_reset_are_published_without_requests() -> None:
    engine = ScriptedEngine()
    publisher = Publisher(engine)
    engine.ask("first", PROMPT, max_tokens=8)
    engine.run_to_end()
    engine.flush()
    stored = {block_hash for event in publisher.take() for block_hash in event.block_hashes}
    assert stored and not engine.scheduler.has_requests(), "the engine is idle"
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.scheduler.has_requests(), "a step is needed"
    engine.flush()
    (removed,) = publisher.take()
    assert isinstance(removed, BlockRemoved) and set(removed.block_hashes) == stored
    assert not engine.scheduler.has_requests()
