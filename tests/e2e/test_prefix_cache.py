"""Prefixes found in the host pool are served from it: across turns, and after the device forgot them."""

from __future__ import annotations

import pytest
from conftest import (
    OfflineEngine,
    assert_pools_empty,
    assert_same,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = pytest.mark.e2e

MAX_TOKENS = 10


def turns(first: list[list[int]], replies: list[list[int]]) -> list[list[int]]:
    """The next turn's prompts: prompt, reply and a new question."""
    return [prompt + reply + make_prompt(41, seed=7) for prompt, reply in zip(first, replies, strict=True)]


def conversation(engine: OfflineEngine, num_filler: int) -> list[dict]:
    """Two turns of two conversations with other prompts in between; the second turn repeats the first's replies."""
    first = [make_prompt(650), make_prompt(1021)]
    filler = [make_prompt(900, seed=100 + i) for i in range(num_filler)]
    records = [run_all(engine, first), *([run_all(engine, filler)] if filler else [])]
    replies = [done["tokens"] for done in records[0]["completions"]]
    return [*records, run_all(engine, turns(first, replies)), run_all(engine, first)]


def run_all(engine: OfflineEngine, prompts: list[list[int]]) -> dict:
    return engine.run({"prompts": prompts, "max_tokens": MAX_TOKENS})


@pytest.fixture(scope="session")
def expected(tmp_path_factory, shared_result):
    """Full KV with vLLM's own prefix cache, which computes the same chunks."""

    def compute() -> list[dict]:
        with OfflineEngine(tmp_path_factory.mktemp("full"), engine_args()) as engine:
            return conversation(engine, num_filler=0)

    return shared_result("conversation with full KV", compute)


@pytest.mark.slow
def test_turns_hit_on_device(start, expected):
    records = conversation(start(hot_args()), num_filler=0)
    for record, full in zip(records, expected, strict=True):
        assert_same(record["completions"], full["completions"])
        assert_pools_empty(record)
    # 650 + 10 and 1021 + 10 tokens are 10 and 16 whole blocks; the newest token of a reply has no KV yet.
    assert [done["num_cached_tokens"] for done in records[1]["completions"]] == [640, 1024]
    assert records[2]["pools"]["host_blocks_cached"] > 0


@pytest.mark.smoke
def test_turns_restored_from_host(start, expected):
    """So few device blocks that the indexer keys of the first turn are gone: they come back by copy."""
    engine = hot_args(num_gpu_blocks_override=2 * (107 + 18) + 1, max_model_len=1100)
    records = conversation(start(engine), num_filler=6)
    for record, full in zip([records[0], *records[2:]], expected, strict=True):
        assert_same_but_rounding(record["completions"], full["completions"])
        assert_pools_empty(record)
    counters = [record["counters"].get("host_prefix_tokens", 0) for record in records]
    assert counters[2] - counters[1] >= 640 + 1024 - 64, "the second turn was served from the host"


@pytest.mark.slow
def test_caching_disabled(start, expected):
    records = conversation(start(hot_args(enable_prefix_caching=False)), num_filler=0)
    for record, full in zip(records, expected, strict=True):
        assert_same_but_rounding(record["completions"], full["completions"])
    assert records[-1]["counters"].get("host_prefix_tokens", 0) == 0
    assert records[-1]["pools"]["host_blocks_cached"] == 0
