"""Drafts are verified over hot units of dense models: full KV's tokens, and the algorithm's own where it selects. With
a draft model (EAGLE), as many are accepted as with full KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import (
    MODELS,
    SCHEDULERS,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)
from draft_models import make_draft_model

pytestmark = pytest.mark.e2e

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
EVERYTHING = 2048
LENGTHS = [1, 5, 17, 130, 777, 1100]
MAX_TOKENS = 40  # more than two pages
HOST_BLOCK_BYTES = 128 * 4 * 2 * 2 * 32 * 4  # tokens, layers, key and value, KV heads, elements, fp32
DRAFT_BLOCK_BYTES = 128 * 4 * 2 * 8 * 32 * 4  # of the draft model, which has more KV heads

# Small intervals, so that generated tokens are clustered, too; a budget that leaves most of a long prompt out.
ALGORITHMS = {
    "quest": (128, {}),
    "cluster_kv": (64, {"algorithm_options": {"update_interval": 8, "clusters_per_update": 2}}),
    "streaming_llm": (64, {}),
    "pq_cache": (96, {"full_kv_layers": [1]}),
    "oracle": (64, {}),
}
# Pages and clusters. State that the others keep of rejected tokens: tests/algorithms/test_base.py.
QUICK = ("quest",)
EVERY_ALGORITHM = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALGORITHMS]


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


def dense_args(algorithm: str, budget: int, options: dict | None = None, drafts: dict = DRAFTS, **overrides) -> dict:
    extra = {"algorithm": algorithm, "top_k": budget, "device_buffer_size": 4 * budget, **(options or {})}
    return hot_args("llama", extra, **(drafting_args(drafts) if drafts else {}), **overrides)


def drafting_args(drafts: dict) -> dict:
    return {"speculative_config": drafts, "disable_log_stats": False}


def assert_some_are_rejected(record: dict) -> None:
    assert 0 < record["drafts"]["accepted"] < record["drafts"]["drafted"]


def rate(record: dict, before: dict | None = None) -> float:
    """Accepted drafts of those since an earlier record."""
    accepted, drafted = (
        record["drafts"][name] - (before["drafts"][name] if before else 0) for name in ("accepted", "drafted")
    )
    return accepted / drafted


@pytest.fixture(scope="module")
def full(full_kv, shared_result) -> list[dict]:
    """Full KV without drafts."""
    return shared_result("dense drafts", lambda: full_kv("llama").run(phase())["completions"])


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_full_kvs_tokens(run, full, algorithm: str):
    engine = dense_args(algorithm, EVERYTHING, ALGORITHMS[algorithm][1])
    record = run(engine, [phase()])[0]
    assert_same_but_rounding(record["completions"], full)
    assert_pools_empty(record)
    assert_some_are_rejected(record)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_algorithms_tokens_where_it_selects(start, algorithm: str):
    """Tokens are those without drafts, and again in conversations that go on from their prefixes."""
    budget, options = ALGORITHMS[algorithm]
    plain, drafting = (start(dense_args(algorithm, budget, options, drafts)) for drafts in ({}, DRAFTS))
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory) -> Callable[[str], dict]:
    """`speculative_config` with a draft model of a method."""

    def make(method: str) -> dict:
        model = make_draft_model(method, MODELS / "llama", tmp_path_factory.mktemp(method) / "model")
        return {"method": method, "model": str(model), "num_speculative_tokens": 3}

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("method", "device_mib"), [("eagle", 56), ("eagle3", 19)])
def test_a_draft_models_drafts_are_as_good_as_with_full_kv(start, full, draft_model, method: str, device_mib: int):
    """And so they are in conversations that go on, whose KV other requests have driven from the device."""
    drafts = draft_model(method)
    reference = start(engine_args("llama", enable_prefix_caching=False, **drafting_args(drafts)))
    sizes = {"max_model_len": 2048, "kv_cache_memory_bytes": device_mib * 2**20}  # 48 blocks of 128 tokens
    engine = start(dense_args("quest", EVERYTHING, drafts=drafts, **sizes))
    expected, record = reference.run(phase()), engine.run(phase())
    assert_same_but_rounding(record["completions"], full)
    assert_some_are_rejected(record)
    assert rate(record) == pytest.approx(rate(expected), abs=0.02)
    others = engine.run({"prompts": [make_prompt(1500, seed) for seed in range(3)], "max_tokens": 1})
    again = second_turn(full)
    computed, found = reference.run(again), engine.run(again)
    assert_same_but_rounding(found["completions"], computed["completions"])
    assert sum(done["num_cached_tokens"] for done in found["completions"]) > sum(LENGTHS) // 2
    assert found["counters"]["host_prefix_tokens"] > sum(LENGTHS) // 2
    assert rate(found, others) == pytest.approx(rate(computed, expected), abs=0.02)
    assert_pools_empty(found)


@pytest.mark.slow
def test_a_draft_model_changes_no_token_where_the_algorithm_selects(start, draft_model):
    """Nothing but the draft model's KV stays on the device."""
    budget, options = ALGORITHMS["quest"][0], {"full_kv_layers": []}
    plain = start(dense_args("quest", budget, options, {}))
    drafting = start(dense_args("quest", budget, options, draft_model("eagle")), async_scheduling=True)
    expected, record = (engine.run(phase()) for engine in (plain, drafting))
    assert record["scheduler"] == SCHEDULERS[True]
    assert_same_but_rounding(record["completions"], expected["completions"])
    assert_some_are_rejected(record)
    assert record["counters"]["cache_misses"] > 0
    again = second_turn(expected["completions"])
    found = drafting.run(again)
    assert_same_but_rounding(found["completions"], plain.run(again)["completions"])
    assert sum(done["num_cached_tokens"] for done in found["completions"]) > sum(LENGTHS) // 2
    assert_pools_empty(found)


@pytest.mark.slow
def test_a_draft_models_kv_comes_back_after_a_preemption(start, draft_model):
    """Draft KV is restored from the host with other device-resident KV, so drafts are as good as before."""
    drafts, resumed = draft_model("eagle"), phase([1100, 777], 150)
    reference = start(engine_args("llama", enable_prefix_caching=False, **drafting_args(drafts)))
    pool = {"host_pool_gib": 16 * (HOST_BLOCK_BYTES + DRAFT_BLOCK_BYTES) / 2**30}
    engine = dense_args("quest", EVERYTHING, pool, drafts, max_model_len=1400, enable_prefix_caching=False)
    expected, record = reference.run(resumed), start(engine).run(resumed)
    assert_same_but_rounding(record["completions"], expected["completions"])
    assert record["counters"]["resumed_requests"] >= 1
    assert rate(record) == pytest.approx(rate(expected), abs=0.02)
    assert_pools_empty(record)
