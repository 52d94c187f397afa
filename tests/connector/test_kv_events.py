"""KV cache events tell of prefixes on the device alone, which a router that follows them has to know."""

from types import SimpleNamespace

import pytest
from campaign.script import ScriptedEngine
from vllm.config import KVEventsConfig

from vllm_hisparse.connector import connector

PROMPT = list(range(10, 20))


@pytest.mark.parametrize(
    ("config", "is_warned"),
    [
        (None, False),
        (KVEventsConfig(), False),
        (KVEventsConfig(enable_kv_cache_events=True, publisher="null"), True),
    ],
)
def test_events_are_warned_of(config: KVEventsConfig | None, is_warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *args: warnings.append(text % args))
    connector.warn_of_kv_events(SimpleNamespace(kv_events_config=config))
    assert [text for text in warnings if "Prefixes in the host pool and in tiers are in no event" in text] == warnings
    assert bool(warnings) == is_warned


@pytest.mark.parametrize("has_resident_group", [True, False])
def test_prefixes_of_the_host_pool_are_in_no_event(has_resident_group: bool) -> None:
    """If vLLM or the connector begins to publish them, the warning is wrong."""
    engine = ScriptedEngine(has_resident_group=has_resident_group)
    engine.block_pool.enable_kv_cache_events, published = True, []
    engine.scheduler.kv_event_publisher.publish = published.append
    first = engine.ask("first", PROMPT, max_tokens=2)
    engine.run_to_end()
    assert engine.host_pool.cached_prefix(first.block_hashes, 100).num_tokens == 8
    assert bool(published) == has_resident_group
