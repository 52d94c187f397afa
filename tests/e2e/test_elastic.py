"""Hot buffers that grow with their sequences, are lent free device memory, and lose it again."""

from __future__ import annotations

import pytest
from conftest import SCHEDULERS, assert_pools_empty, assert_same_but_rounding, hot_args, make_prompt

pytestmark = pytest.mark.e2e

LENGTHS, MAX_TOKENS = [1400, 1300, 1310, 1320], 110
MIN_BLOCKS = 107 + 24  # of a request: 321 rows, 3 to a block, and the indexer keys of 1,500 tokens
ALL_BLOCKS = 900  # whole, a request has some 530
ROW_CHECK = {"every": 7, "corrupt": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("async_scheduling", "options", "num_blocks"),
    [
        (False, {}, ALL_BLOCKS),
        (True, {}, ALL_BLOCKS),
        (True, {"rows_by_layer": [3, 2, 3, 4], "device_buffer_size": 390}, 1200),
    ],
)
def test_a_buffer_grows_and_shrinks_in_one_requests_life(run, reference, async_scheduling, options, num_blocks):
    """The first request is hot as a whole; three others arrive, to which it gives blocks; they leave, and it grows."""
    engine = hot_args(options=options, num_gpu_blocks_override=num_blocks, max_model_len=2048)
    phase = {
        "prompts": [make_prompt(length) for length in LENGTHS],
        "max_tokens": MAX_TOKENS,
        "arrive_after": [0, 30, 30, 30],
        "abort_after": [None, 60, 60, 60],
    }
    alone = {**phase, "arrive_after": [0] * 4, "abort_after": [None, 1, 1, 1]}
    phases = run(engine, [alone, phase], async_scheduling=async_scheduling, row_check=ROW_CHECK)
    expected = reference(LENGTHS[:1], MAX_TOKENS)
    for record in phases:
        assert record["scheduler"] == SCHEDULERS[async_scheduling]
        assert_same_but_rounding(record["completions"][:1], expected)
        assert_pools_empty(record)
        assert record["checked_rows"] > 0 and record["wrong_rows"] == 0
    before, after = (record["counters"] for record in phases)
    assert phases[0]["peaks"]["hot_rows_lent"] > 1100, "the first request was not hot as a whole"
    assert not phases[1]["peaks"].keys() & {"requests_held_back", "admission_limit"}, "admission is off"
    assert after["hot_rows_taken_back"] - before["hot_rows_taken_back"] > 600
    assert after.get("resumed_requests", 0) == 0, "somebody was preempted"


def test_many_short_requests_take_no_more_than_their_rows(run, reference):
    """More of them run at a time than would have buffers of the full size."""
    lengths, num_blocks = [20 + index for index in range(14)], 14 * (43 + 2) + 60
    engine = hot_args(num_gpu_blocks_override=num_blocks, max_model_len=1024)
    assert num_blocks < 14 * MIN_BLOCKS / 2
    record = run(engine, [{"prompts": [make_prompt(length) for length in lengths], "max_tokens": 40}])[0]
    assert_same_but_rounding(record["completions"], reference(lengths, 40))
    assert_pools_empty(record)
    assert record["peaks"]["host_blocks_used"] >= len(lengths), "they did not run together"
    assert record["counters"]["cache_misses"] == 0
    assert record["counters"].get("resumed_requests", 0) == 0


@pytest.mark.slow
def test_fixed_buffers_have_their_size_from_the_start(run, reference):
    engine = hot_args(options={"elastic": False}, num_gpu_blocks_override=ALL_BLOCKS, max_model_len=2048)
    record = run(engine, [{"prompts": [make_prompt(length) for length in (60, 1400)], "max_tokens": 12}])[0]
    assert_same_but_rounding(record["completions"], reference([60, 1400], 12))
    assert_pools_empty(record)
    assert "hot_rows_lent" not in record["peaks"]


def dense_args(options: dict, **overrides) -> dict:
    return hot_args("llama", {"algorithm": "quest", "top_k": 256, "device_buffer_size": 256, **options}, **overrides)


def dense_life(lengths: list[int]) -> tuple[dict, dict]:
    """The first request alone; then with others, to which it gives blocks, and which leave before it ends."""
    phase = {
        "prompts": [make_prompt(length) for length in lengths],
        "max_tokens": MAX_TOKENS,
        "arrive_after": [0, 30, 30, 30],
        "abort_after": [None, 50, 50, 50],
    }
    return {**phase, "arrive_after": [0] * 4, "abort_after": [None, 1, 1, 1]}, phase


@pytest.mark.slow
@pytest.mark.smoke
def test_a_dense_models_buffer_grows_and_shrinks(run):
    """Newest pages are not whole when they move. The tokens are those of a buffer whose size never changes."""
    num_blocks = 60
    phases = dense_life(LENGTHS)
    engine = dense_args({}, num_gpu_blocks_override=num_blocks, max_model_len=2048)
    records = run(engine, phases, row_check=ROW_CHECK)
    fixed = run(dense_args({"elastic": False}, num_gpu_blocks_override=num_blocks, max_model_len=2048), phases[:1])[0]
    for record in records:
        assert_same_but_rounding(record["completions"][:1], fixed["completions"][:1])
        assert_pools_empty(record)
        assert record["checked_rows"] > 0 and record["wrong_rows"] == 0
    before, after = (record["counters"] for record in records)
    assert before["cache_misses"] < fixed["counters"]["cache_misses"] / 2
    assert after["hot_rows_taken_back"] > before["hot_rows_taken_back"]
    assert after.get("resumed_requests", 0) == 0, "somebody was preempted"


def test_short_prompts_of_a_dense_model_take_no_more_than_their_pages(run, reference):
    """More of them run at a time than would have buffers of the full size."""
    lengths = [20 + index for index in range(14)]
    engine = dense_args({"top_k": 1024, "device_buffer_size": 1024}, num_gpu_blocks_override=54, max_model_len=1024)
    record = run(engine, [{"prompts": [make_prompt(length) for length in lengths], "max_tokens": 40}])[0]
    assert_same_but_rounding(record["completions"], reference(lengths, 40, model="llama"))
    assert_pools_empty(record)
    assert record["peaks"]["host_blocks_used"] == len(lengths), "they did not run together"
    assert record["counters"].get("resumed_requests", 0) == 0
