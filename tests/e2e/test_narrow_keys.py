"""Indexer keys in 4 bits: tokens and logprobs of a full-KV engine that selects with keys in 4 bits.

A key in 8 bits can be an exact copy of one in 4 bits. So that engine is stock vLLM over full KV, whose indexer rounds
keys to 4 bits before it stores them in 8.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import (
    TOP_K,
    OfflineEngine,
    assert_pools_empty,
    assert_same,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = pytest.mark.e2e

LENGTHS = [1, 65, TOP_K, TOP_K + 1, 330, 777, 1201]
MAX_TOKENS = 12


def narrow_args(model: str = "dsv32", options: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    return hot_args(model, {"indexer_key_dtype": "fp4", **(options or {})}, **overrides)


def phase(lengths: list[int], max_tokens: int = MAX_TOKENS) -> dict:
    return {"prompts": [make_prompt(length) for length in lengths], "max_tokens": max_tokens}


@pytest.fixture
def narrow_reference(tmp_path_factory, shared_result):
    """Completions of the full-KV engine that selects with keys in 4 bits."""

    def completions(lengths: list[int], model: str = "dsv32", max_tokens: int = MAX_TOKENS) -> list[dict[str, Any]]:
        args = engine_args(model, enable_prefix_caching=False)

        def compute() -> list[dict[str, Any]]:
            with OfflineEngine(tmp_path_factory.mktemp("reference"), args, narrow_keys=True) as engine:
                return engine.run(phase(lengths, max_tokens))["completions"]

        return shared_result(f"narrow reference {model} {max_tokens} {lengths}", compute)

    return completions


@pytest.mark.parametrize("model", ["dsv32", pytest.param("glm52", marks=pytest.mark.slow)])
def test_tokens_are_those_of_full_kv_with_such_keys(run, reference, narrow_reference, model):
    record = run(narrow_args(model), [phase(LENGTHS)])[0]
    expected = narrow_reference(LENGTHS, model)
    assert_same(record["completions"], expected)
    assert_pools_empty(record)
    assert record["counters"]["cache_misses"] > 0
    wide = [each["logprobs"] for each in reference(LENGTHS, MAX_TOKENS, model=model)]
    assert wide != [each["logprobs"] for each in expected], "keys in 4 bits select what keys in 8 bits do"


@pytest.mark.slow
def test_prefixes_come_back_from_the_host(start, tmp_path_factory, shared_result):
    """So few device blocks that keys of the first turn are gone: they are converted on the way back."""

    def turns(engine: OfflineEngine, num_filler: int) -> list[dict[str, Any]]:
        prompts = [make_prompt(650), make_prompt(1021)]
        records = [engine.run({"prompts": prompts, "max_tokens": 10})]
        if num_filler:
            filler = [make_prompt(900, seed=100 + index) for index in range(num_filler)]
            engine.run({"prompts": filler, "max_tokens": 10})
        replies = [done["tokens"] for done in records[0]["completions"]]
        again = [prompt + reply + make_prompt(41, 7) for prompt, reply in zip(prompts, replies, strict=True)]
        return [*records, engine.run({"prompts": again, "max_tokens": 10})]

    def compute() -> list[dict[str, Any]]:
        args = engine_args(enable_prefix_caching=False)
        with OfflineEngine(tmp_path_factory.mktemp("full"), args, narrow_keys=True) as engine:
            return turns(engine, 0)

    expected = shared_result("turns with keys in 4 bits", compute)
    records = turns(start(narrow_args(num_gpu_blocks_override=2 * (160 + 18) + 1, max_model_len=1100)), num_filler=6)
    for record, full in zip(records, expected, strict=True):
        assert_same_but_rounding(record["completions"], full["completions"])
        assert_pools_empty(record)
    assert records[1]["counters"]["host_prefix_tokens"] >= 640 + 1024 - 64


@pytest.mark.slow
def test_a_request_continues_after_preemption(run, narrow_reference):
    """Room for what four requests need when they start: 161 hot blocks each, and 48 blocks of keys."""
    lengths = [700, 638, 830, 894]
    record = run(narrow_args(num_gpu_blocks_override=4 * 161 + 48 + 2), [phase(lengths, 80)])[0]
    assert_same_but_rounding(record["completions"], narrow_reference(lengths, max_tokens=80))
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1


@pytest.mark.slow
def test_drafts(run, narrow_reference):
    lengths = [65, 400, 1201]
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"device_buffer_size": 3 * TOP_K, "elastic": False}
    record = run(narrow_args(options=options, speculative_config=ngram, disable_log_stats=False), [phase(lengths)])[0]
    assert_same_but_rounding(record["completions"], narrow_reference(lengths))
    assert record["drafts"]["drafted"] > 0
    assert_pools_empty(record)


@pytest.mark.slow
def test_tensor_parallel(run, narrow_reference):
    lengths = [65, 901, 1201]
    record = run(narrow_args(tensor_parallel_size=2), [phase(lengths)])[0]
    assert_same_but_rounding(record["completions"], narrow_reference(lengths))
    assert_pools_empty(record)
