"""A host pool or device cache too small for all requests: they wait or are preempted, and nothing is lost."""

from __future__ import annotations

import pytest
from conftest import ASYNC_ALONE, SCHEDULERS, assert_pools_empty, assert_same_but_rounding, hot_args, make_prompt

pytestmark = pytest.mark.e2e

HOST_BLOCK_BYTES = 64 * 4 * (576 * 4 + 132)  # 64 tokens, 4 layers, fp32 rows and indexer keys
HOT_BLOCKS = 107  # 321 rows of 2304 B, 3 to a device block


def pool_of(num_blocks: int) -> dict:
    return {"host_pool_gib": num_blocks * HOST_BLOCK_BYTES / 2**30}


def prompts(lengths: list[int]) -> list[list[int]]:
    return [make_prompt(length) for length in lengths]


@pytest.mark.slow
@pytest.mark.smoke
def test_requests_wait_for_host_memory(run, reference):
    lengths, max_tokens = [700, 800, 900, 1000, 1100], 8
    engine = hot_args(options=pool_of(24), max_model_len=1500)  # one request takes 11 to 18 blocks
    record = run(engine, [{"prompts": prompts(lengths), "max_tokens": max_tokens}])[0]
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens))
    assert_pools_empty(record)
    assert record["peaks"]["requests_waiting_for_host_memory"] > 0
    assert record["peaks"]["host_blocks_used"] <= 24


@pytest.mark.parametrize("async_scheduling", ASYNC_ALONE)
def test_host_pool_exhausted_while_decoding(run, reference, async_scheduling):
    """Two requests grow past the pool: one is preempted and loses only the blocks the other needs."""
    lengths, max_tokens = [500, 510], 90  # 8 blocks each at admission, 10 at the end
    phase = {"prompts": prompts(lengths), "max_tokens": max_tokens}
    engine = hot_args(options=pool_of(18), max_model_len=1024)
    record = run(engine, [phase], async_scheduling=async_scheduling)[0]
    assert record["scheduler"] == SCHEDULERS[async_scheduling]
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens))
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1
    assert record["counters"]["recomputed_tokens"] < 512, "most of the preempted request's KV stays on the host"


@pytest.mark.slow
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_request_keeps_its_host_blocks(run, reference, enable_prefix_caching):
    """The device cache runs out of indexer blocks: the preempted request resumes without computing anything again."""
    lengths, max_tokens = [610, 620, 630], 60
    needed_at_start = 3 * (HOT_BLOCKS + 10)
    engine = hot_args(
        num_gpu_blocks_override=needed_at_start + 1, max_model_len=1024, enable_prefix_caching=enable_prefix_caching
    )
    record = run(engine, [{"prompts": prompts(lengths), "max_tokens": max_tokens}])[0]
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens))
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1
    assert record["counters"]["recomputed_tokens"] == 0
    if not enable_prefix_caching:  # else the device's prefix cache may still hold all of it
        assert record["counters"]["host_prefix_tokens"] > 0


@pytest.mark.slow
def test_many_long_requests_compete(run, reference):
    """Twice as many requests as fit on host and device: no deadlock, same tokens."""
    lengths, max_tokens = [400 + 37 * i for i in range(10)], 40
    engine = hot_args(options=pool_of(44), num_gpu_blocks_override=4 * (HOT_BLOCKS + 11) + 1, max_model_len=1024)
    record = run(engine, [{"prompts": prompts(lengths), "max_tokens": max_tokens}])[0]
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens))
    assert_pools_empty(record)


@pytest.mark.parametrize("async_scheduling", ASYNC_ALONE)
def test_aborted_requests_give_everything_back(run, reference, async_scheduling):
    lengths, max_tokens = [700, 65, 900, 1200, 333, 1500], 30
    abort_after = [0, 0, 1, 3, 12, 9]  # 0: never; the others in the queue, in prefill and in decode
    engine = hot_args(options=pool_of(40), max_model_len=2048)
    phase = {"prompts": prompts(lengths), "max_tokens": max_tokens, "abort_after": abort_after}
    records = run(engine, [phase], async_scheduling=async_scheduling)
    finished = [record for record in records[0]["completions"] if record["tokens"] is not None]
    assert_same_but_rounding(finished, reference([700, 65], max_tokens))
    assert_pools_empty(records[0])
