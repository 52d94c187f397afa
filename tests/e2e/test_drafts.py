"""Drafts are verified over hot buffers: tokens of full KV without drafts, and as many accepted as full KV accepts."""

from __future__ import annotations

import pytest
from conftest import (
    TOP_K,
    OfflineEngine,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = pytest.mark.e2e

NUM_DRAFTS = 3
SMALLEST_BUFFER = (1 + NUM_DRAFTS) * TOP_K
DRAFTS = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LENGTHS = [1, 5, 63, TOP_K + 1, SMALLEST_BUFFER - 5, SMALLEST_BUFFER]
MAX_TOKENS = 24
HOST_BLOCK_BYTES = 64 * 4 * (576 * 4 + 132)  # 64 tokens, 4 layers, fp32 rows and indexer keys


def repeating(num_tokens: int) -> list[int]:
    """A prompt in which drafts are found; the model's replies follow some of them."""
    pattern = make_prompt(17, seed=num_tokens)
    return (pattern * (num_tokens // len(pattern) + 1))[:num_tokens]


def phase(lengths: list[int]) -> dict:
    return {"prompts": list(map(repeating, lengths)), "max_tokens": MAX_TOKENS}


def hot(model: str = "dsv32", options: dict | None = None, **overrides) -> dict:
    options = {"device_buffer_size": SMALLEST_BUFFER, **(options or {})}
    return hot_args(model, options, speculative_config=DRAFTS, disable_log_stats=False, **overrides)


@pytest.fixture(scope="module")
def full(tmp_path_factory, full_kv, shared_result):
    """Full KV without drafts, and how many of how many drafts full KV accepts: by model, for some lengths."""

    def compute(model: str, lengths: list[int]) -> list:
        completions = full_kv(model).run(phase(lengths))["completions"]
        drafts = {"speculative_config": DRAFTS, "disable_log_stats": False}
        args = engine_args(model, enable_prefix_caching=False, **drafts)
        with OfflineEngine(tmp_path_factory.mktemp("drafts"), args) as engine:
            return [completions, engine.run(phase(lengths))["drafts"]]

    return lambda model, lengths: shared_result(f"drafts {model} {lengths}", lambda: compute(model, lengths))


@pytest.mark.parametrize(
    ("model", "lengths"), [("dsv32", LENGTHS), pytest.param("glm52", [SMALLEST_BUFFER - 5], marks=pytest.mark.slow)]
)
def test_full_kvs_tokens(run, full, model: str, lengths: list[int]):
    """While sequences grow out of their buffers, too. GLM-5.2's layers share indexers."""
    completions, drafts = full(model, lengths)
    record = run(hot(model, enable_prefix_caching=False), [phase(lengths)])[0]
    assert_same_but_rounding(record["completions"], completions)
    assert_pools_empty(record)
    assert record["drafts"]["accepted"] > 0 and record["drafts"]["drafted"] > record["drafts"]["accepted"]
    rates = [counts["accepted"] / counts["drafted"] for counts in (record["drafts"], drafts)]
    assert rates[0] == pytest.approx(rates[1], abs=0.05)
    assert record["counters"]["cache_hits"] > record["counters"]["cache_misses"] > 0


@pytest.mark.slow
def test_what_was_rejected_is_not_found_again(start, full, full_kv):
    """Conversations go on from their prefixes in the host pool, and other requests read the blocks that they share.

    Then requests are sampled beside nothing cached, from the model's best token alone, whatever the temperature.
    """
    engine, (completions, _) = start(hot()), full("dsv32", LENGTHS)
    first = engine.run(phase(LENGTHS))["completions"]
    assert_same_but_rounding(first, completions)
    replies = [repeating(n) + done["tokens"] for n, done in zip(LENGTHS, first, strict=True)]
    again = engine.run({"prompts": replies, "max_tokens": 8, "forgets": False})
    assert sum(done["num_cached_tokens"] for done in again["completions"]) > sum(LENGTHS) // 2
    expected = full_kv().run({"prompts": replies, "max_tokens": 8})["completions"]
    assert_same_but_rounding(again["completions"], expected)
    assert_pools_empty(again)
    sampled = engine.run({**phase(LENGTHS), "sampling": {"temperature": 0.8, "top_k": 1}, "forgets": True})
    assert_same_but_rounding(sampled["completions"], completions)
    assert sampled["drafts"]["accepted"] > again["drafts"]["accepted"]


@pytest.mark.slow
def test_preempted_requests_go_on_where_they_were(run, full):
    lengths = [SMALLEST_BUFFER - 5, SMALLEST_BUFFER]  # 16 blocks each at admission, 17 at the end
    completions, _ = full("dsv32", LENGTHS)
    pool = {"host_pool_gib": 33 * HOST_BLOCK_BYTES / 2**30}
    record = run(hot(options=pool, max_model_len=1100), [phase(lengths)])[0]
    expected = [completions[LENGTHS.index(length)] for length in lengths]
    assert_same_but_rounding(record["completions"], expected)
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1
