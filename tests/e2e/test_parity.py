"""Greedy tokens and logprobs equal to a full-KV engine's on the same weights."""

from __future__ import annotations

import pytest
from conftest import (
    SCHEDULERS,
    TOP_K,
    assert_pools_empty,
    assert_same,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)

from vllm_hisparse.kv_manager.blocks.rows_by_layer import FIRST_LOOKS

pytestmark = pytest.mark.e2e

BLOCK = 64
HOT_ROWS = 320
LENGTHS = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, TOP_K - 1, TOP_K, TOP_K + 1, HOT_ROWS - 2, HOT_ROWS, 777, 1201]
MAX_TOKENS = 12


def phase(lengths: list[int] = LENGTHS) -> dict:
    return {"prompts": [make_prompt(length) for length in lengths], "max_tokens": MAX_TOKENS}


@pytest.mark.parametrize(
    "async_scheduling", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.smoke)]
)
def test_fp32_chunked_prefill_and_eviction(run, reference, async_scheduling):
    record = run(hot_args(), [phase()], async_scheduling=async_scheduling)[0]
    assert record["scheduler"] == SCHEDULERS[async_scheduling]
    assert_same(record["completions"], reference(LENGTHS, MAX_TOKENS))
    assert_pools_empty(record)
    assert record["counters"]["cache_misses"] > 0
    assert record["counters"]["cache_hits"] > record["counters"]["cache_misses"]


def test_short_sequences_copy_nothing(run, reference):
    lengths = [5, BLOCK, TOP_K, HOT_ROWS - MAX_TOKENS]
    record = run(hot_args(), [phase(lengths)])[0]
    assert_same(record["completions"], reference(lengths, MAX_TOKENS))
    assert record["counters"]["cache_misses"] == 0
    assert record["counters"]["host_to_device_bytes"] == 0


@pytest.mark.parametrize(
    ("model", "rows_by_layer"), [("dsv32", [2, 1, 2, 2.5]), pytest.param("glm53", [2, 1], marks=pytest.mark.slow)]
)
def test_short_sequences_copy_nothing_with_rows_by_layer(run, reference, model, rows_by_layer):
    """The layer with the fewest rows in other requests' blocks has a slot for every token of these requests."""
    lengths = [5, BLOCK - 1, TOP_K - 1, HOT_ROWS - MAX_TOKENS]  # a prompt that ends with its hot blocks loses some rows
    options = {"rows_by_layer": rows_by_layer, "device_buffer_size": 600}
    record = run(hot_args(model, options), [phase(lengths)], row_check={"every": 2, "corrupt": False})[0]
    assert_same_but_rounding(record["completions"], reference(lengths, MAX_TOKENS, model=model))
    assert record["counters"]["cache_misses"] == 0
    assert record["wrong_rows"] == 0 < record["checked_rows"]


@pytest.mark.parametrize("length", [HOT_ROWS - MAX_TOKENS, 777])
def test_a_wrong_row_is_found(run, length):
    """A comparison of all hot rows with the host's finds the one row that is changed on purpose."""
    record = run(hot_args(), [phase([length])], row_check={"every": 8, "corrupt": True})[0]
    assert record["wrong_rows"] == 1


@pytest.mark.slow
def test_smallest_buffer(run, reference):
    record = run(hot_args(options={"device_buffer_size": TOP_K}), [phase()])[0]
    assert_same(record["completions"], reference(LENGTHS, MAX_TOKENS))
    assert_pools_empty(record)


@pytest.mark.parametrize("model", ["dsv32", pytest.param("glm53", marks=pytest.mark.slow)])
def test_layers_with_different_numbers_of_rows(run, reference, model):
    """With evictions in all layers, in layers with few rows only, and in none; then prefixes from the host pool."""
    options = {"rows_by_layer": [6, 1, 3, 2] if model == "dsv32" else [2, 1], "device_buffer_size": 960}
    engine, phases = hot_args(model, {**options, "elastic": False}), [phase(), {**phase(), "forgets": False}]
    first, second = run(engine, phases, row_check={"every": 4, "corrupt": False})
    for record in (first, second):
        assert_same_but_rounding(record["completions"], reference(LENGTHS, MAX_TOKENS, model=model))
        assert_pools_empty(record)
        assert record["wrong_rows"] == 0 < record["checked_rows"]
    assert first["counters"]["cache_misses"] > 0
    assert sum(done["num_cached_tokens"] for done in second["completions"]) > 0


def test_an_engine_logs_which_layers_need_more_rows(start, reference):
    options = {"log_rows_by_layer": True, "elastic": False, "device_buffer_size": 1024}
    lengths, max_tokens = [1201, 1500], 16 * FIRST_LOOKS + 20
    engine = start(hot_args(options=options))
    record = engine.run({**phase(lengths), "max_tokens": max_tokens})
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens))
    assert engine.log_has("HiSparse rows by layer: ")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm", "glm52", "glm53"])
def test_glm_architectures(run, reference, model):
    """Layers of GLM-5.2 and GLM-5.3 share indexers, by a frequency and by a pattern."""
    lengths = [65, 777, 1500]
    record = run(hot_args(model), [phase(lengths)])[0]
    assert_same(record["completions"], reference(lengths, MAX_TOKENS, model=model))
    assert_pools_empty(record)
    assert record["counters"]["cache_misses"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hyv4", "hyv4_mixed"])
def test_hyv4(run, reference, model):
    """Attention sinks, and layers that share indexers; `hyv4_mixed` has a layer that attends to everything."""
    lengths = [65, 777, 1500]
    record = run(hot_args(model), [phase(lengths)], row_check={"every": 8, "corrupt": False})[0]
    assert_same(record["completions"], reference(lengths, MAX_TOKENS, model=model))
    assert_pools_empty(record)
    assert record["counters"]["cache_misses"] > 0
    assert record["wrong_rows"] == 0 < record["checked_rows"]


@pytest.mark.slow
def test_bf16(run, reference):
    """bf16 rounds each layer's input to 8 bits, so the order of sums may show: 0.02 in logprobs."""
    lengths = [65, 577]  # the second one in two chunks, with more rows than are hot
    record = run(hot_args(dtype="bfloat16"), [phase(lengths)])[0]
    assert_same(record["completions"], reference(lengths, MAX_TOKENS, dtype="bfloat16"), tolerance=0.02)


@pytest.mark.slow
@pytest.mark.smoke
def test_engine_and_worker_in_separate_processes(run, reference):
    """Both import vLLM and load the plugin by themselves.

    One request: how several share the first step's token budget depends on when each crosses to the engine.
    """
    record = run(hot_args(), [phase([777])], in_process=False)[0]
    assert_same(record["completions"], reference([777], MAX_TOKENS))


def test_full_kv_alone_shows_the_batching_tolerance(run, reference):
    """The effect of another batching on full KV itself: same tokens, logprobs as far apart as elsewhere."""
    record = run(engine_args(enable_prefix_caching=False, max_num_batched_tokens=300), [phase()])[0]
    assert_same_but_rounding(record["completions"], reference(LENGTHS, MAX_TOKENS))
