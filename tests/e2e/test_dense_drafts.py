"""Drafts are verified over hot units of dense models: full KV's tokens, and the algorithm's own where it selects."""

from __future__ import annotations

import pytest
from conftest import (
    OfflineEngine,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = pytest.mark.e2e

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
EVERYTHING = 2048
LENGTHS = [1, 5, 17, 130, 777, 1100]
MAX_TOKENS = 40  # more than two pages
HOST_BLOCK_BYTES = 128 * 4 * 2 * 2 * 32 * 4  # tokens, layers, key and value, KV heads, elements, fp32

# Small intervals, so that generated tokens are clustered, too; a budget that leaves most of a long prompt out.
ALGORITHMS = {
    "quest": (128, {}),
    "cluster_kv": (64, {"algorithm_options": {"update_interval": 8, "clusters_per_update": 2}}),
    "streaming_llm": (64, {}),
    "pq_cache": (96, {"full_kv_layers": [1]}),
    "oracle": (64, {}),
}


def repeating(num_tokens: int) -> list[int]:
    """A prompt in which drafts are found; the model's replies follow some of them."""
    pattern = make_prompt(17, seed=num_tokens)
    return (pattern * (num_tokens // len(pattern) + 1))[:num_tokens]


def phase(lengths: list[int] = LENGTHS, max_tokens: int = MAX_TOKENS) -> dict:
    return {"prompts": list(map(repeating, lengths)), "max_tokens": max_tokens}


def second_turn(completions: list[dict]) -> dict:
    """Prompt, reply and a new question; what earlier phases computed is found again."""
    pairs = zip(LENGTHS, completions, strict=True)
    prompts = [repeating(n) + done["tokens"] + make_prompt(41, 7) for n, done in pairs]
    return {"prompts": prompts, "max_tokens": 24, "forgets": False}


def dense_args(algorithm: str, budget: int, options: dict | None = None, num_drafts: int = 3, **overrides) -> dict:
    extra = {"algorithm": algorithm, "top_k": budget, "device_buffer_size": 4 * budget, **(options or {})}
    drafts = {"speculative_config": {**DRAFTS, "num_speculative_tokens": num_drafts}, "disable_log_stats": False}
    return hot_args("llama", extra, **(drafts if num_drafts else {}), **overrides)


def assert_some_are_rejected(record: dict) -> None:
    assert 0 < record["drafts"]["accepted"] < record["drafts"]["drafted"]


@pytest.fixture(scope="module")
def full(tmp_path_factory, shared_result) -> list[dict]:
    """Full KV without drafts."""

    def compute() -> list[dict]:
        args = engine_args("llama", enable_prefix_caching=False)
        with OfflineEngine(tmp_path_factory.mktemp("full"), args) as engine:
            return engine.run(phase())["completions"]

    return shared_result("dense drafts", compute)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_full_kvs_tokens(run, full, algorithm: str):
    engine = dense_args(algorithm, EVERYTHING, ALGORITHMS[algorithm][1])
    record = run(engine, [phase()])[0]
    assert_same_but_rounding(record["completions"], full)
    assert_pools_empty(record)
    assert_some_are_rejected(record)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_algorithms_tokens_where_it_selects(start, algorithm: str):
    """Those that it gives without drafts, and again in conversations that go on from their prefixes."""
    budget, options = ALGORITHMS[algorithm]
    plain, drafting = (start(dense_args(algorithm, budget, options, num)) for num in (0, 3))
    expected = plain.run(phase())["completions"]
    record = drafting.run(phase())
    assert_same_but_rounding(record["completions"], expected)
    assert_some_are_rejected(record)
    again = second_turn(expected)
    found = drafting.run(again)
    assert_same_but_rounding(found["completions"], plain.run(again)["completions"])
    assert sum(done["num_cached_tokens"] for done in found["completions"]) > sum(LENGTHS) // 2
    assert_pools_empty(found)
    if algorithm != "streaming_llm":
        assert record["counters"]["cache_misses"] > 0


@pytest.mark.parametrize("algorithm", ["quest", "cluster_kv"])
def test_preempted_requests_go_on_where_they_were(run, full, algorithm: str):
    """The host pool runs out while requests decode."""
    lengths = [1100, 777]
    pool = {**ALGORITHMS[algorithm][1], "host_pool_gib": 16 * HOST_BLOCK_BYTES / 2**30}
    engine = dense_args(algorithm, EVERYTHING, pool, max_model_len=1400)
    record = run(engine, [phase(lengths, 150)])[0]
    expected = [full[LENGTHS.index(length)] for length in lengths]
    for done, shorter in zip(record["completions"], expected, strict=True):
        assert done["tokens"][:MAX_TOKENS] == shorter["tokens"]
    assert_pools_empty(record)
    assert_some_are_rejected(record)
    assert record["counters"]["resumed_requests"] >= 1
